"""This package decodes windows: row groups in the order of an epoch.

::

    lanes that are read, positions → [positions] → views of decoded windows, in the order asked for
                                         |  ^
                                         v  |
              [lanes]: what next? --> [cache]: which windows are in memory, and decoded ahead; [room]: how many may be
                                         |
                  in [threads]:       [window]: fragments → columns → gathered in the order of positions
                                         |
                                      [decode]: one row group → Arrow table, in the types of the table
"""

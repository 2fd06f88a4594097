"""This package decodes windows: row groups in the order of an epoch.

::

    the rest of each lane → [lanes]: the windows of a lane, one after another
                                         |
    positions that are taken → [positions] → views of decoded windows, in the order asked for
                                         |  ^
                                         v  |
                                      [cache]: which windows are in memory; [room] says how many may be
                                         |
                  in [threads]:       [window]: fragments → columns → gathered in the order of positions
                                         |
                                      [decode]: one row group → Arrow table, in the types of the table
"""

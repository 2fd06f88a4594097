"""This package reads the rows that a filter keeps: it counts them once, gives them an identity, and decodes them.

::

    expression or tuples → [row_filter]: checked against the schema
                                |
            before an epoch: [count] → [prune]: row groups that statistics settle; the others are decoded
                                |
                           [selection]: rows that stay of each row group, and a digest → the order, the run
                                |
            row by row:     [decoder] → the rows that stay, which must be those that were counted
"""

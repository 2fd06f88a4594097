"""This package reads rows by position: it decodes, gathers and converts row groups to numpy. It imports no torch.

::

    positions of an epoch → [windows/] → columns of numpy, in the order of positions
                                |
            row groups of the table, decoded:   all rows
                                                the rows that a filter keeps: [filters/]
                                                sequences of tokens: [packed/]
                                |
            Arrow columns → [columns/] → numpy columns, gathered

    [memory]: how much memory the process may take. [shared]: what all readers of a process use together.
"""

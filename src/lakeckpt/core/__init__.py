"""This package computes the order of rows: lanes, segments, plans, receipts. It imports only numpy, and does no I/O.

::

    seed, rows of each row group          a state that was saved        parts of several ranks
                |                                   |                             |
            [hashing]                               |                         [merge]
                |                                   v                             |
             [order] -----> [identity] --------> [state] <-----------------------+
                |  positions → rows                 |  <--- [changes]: a start, another topology, moves of lanes
                |                                   v
          [intervals] → [lanes], [streams/] ----> [plan] → assignments of each rank, with [receipts]
                           micro-batches            |
                                              [consumption] → the positions that were consumed between two states

    what a training loop was given between its steps → [read_ahead] → whether something reads ahead of the loop
"""

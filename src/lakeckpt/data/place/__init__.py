"""This package keeps the place of a reader in its rows, and chooses which rows those are.

::

    table, columns, filter, seed → [identity] <--- [selecting]: rows of a filter, or tokens, are counted by one rank
            |                          |
       [begun]: rows that another      v
       system has read            [progress], of a mixture [mixed] → assignments → (reading) → the loop received
                                       |  ^                                                        |
                                       |  +---- [runs]: what was delivered between two states <----+
                                       v                                                           |
                                   [reader] → checkpoint manager <------- [deliveries]: since the last step

    another table version: [versions] ← [following]: the next tranche; [broadcast]: what rank 0 found, to all
    a table with fewer row groups in mid-epoch: [excluding]
"""

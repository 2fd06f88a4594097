"""This package keeps the place of a reader in its rows.

::

    an identity; [already_read]: rows that another system has read
                |
            [orders] → [progress] → assignments → (reading) → the loop received
                |  ^                                                   |
                |  +---- [runs]: what was delivered between two states <----+
                v                                                      |
            [reader] → checkpoint manager <------- [deliveries]: since the last step

    another table version: [versions] ← [following]: the next tranche; [broadcast]: what rank 0 found, to all
    a table with fewer row groups in mid-epoch: [excluding]
"""

"""This package defines `LakeLoader`, which delivers batches to the training loop and counts them.

::

    dataset → assignments → (this process, workers or a flow) → [loader] → [device_prefetch], if asked for → the loop
                                                                   |
                                                               [counting]: what was delivered → metrics
"""

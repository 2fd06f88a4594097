"""This package holds the torch side of reading: `LakeDataset`, `LakeLoader` and the batches that they yield.

::

    arguments → [options], [topology] → [dataset] or a mixture of [streams/]; both are a [base_dataset]
                                            |
                [loader] <--- [place/]: the state of the job, and the next assignments of this rank
                    |
                    | assignments: in this process by [ahead], in others by [workers/], in turns of lanes by [flows/]
                    v
                [source]: reads rows, within [memory] → [transform] → [batch] with a receipt
                    |
                [loader] → [device_prefetch], if asked for → training loop; [counting] tells metrics what was delivered

    [foreign/]: loaders and wrappers of other libraries. [base/]: what all of this stands on.
"""

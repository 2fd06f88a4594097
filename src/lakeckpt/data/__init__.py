"""This package holds the torch side of reading: `LakeDataset`, `LakeLoader` and the batches that they yield.

Each folder is a stage, and imports from the stages before it alone.

::

    [base/]: checked arguments → a pinned table → the source of batches, which reads rows
                |
    [position/]: the state of the job, and the next assignments of this rank
                |          [flows/]: sources of which only reading tells how many items a row gives
                v
    [workers/]: assignments are read in other processes
                |
    [dataset/]: `LakeDataset`, and what iterates it → [streams/]: documents packed, datasets mixed
                |
    [loader/]: `LakeLoader` → training loop; what the loop got is counted in the position
"""

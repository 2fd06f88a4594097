"""This package defines `LakeDataset`, and fits it to loaders and wrappers of other libraries.

::

    table, options → [dataset], a [base_dataset] → this process, or a `LakeLoader`
                          |
                     [source_kinds]: the source that reads its rows, or what a transform yields of each

    who iterates? (the stack) → [frameworks] → refused, or prepared for accelerate and Lightning
    worker w of n of another DataLoader → [foreign_workers] → every n-th micro-batch, and its part of the state
"""

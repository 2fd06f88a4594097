"""This package defines `LakeDataset`, and fits it to loaders and wrappers of other libraries.

::

    table, options → [dataset], a [base_dataset] → this process, or a `LakeLoader`
                          |
    rows="many", a tokenizer, whole documents: [flow_arguments] refuses what does not fit, and makes source and feed

    who iterates? (the stack) → [frameworks] → refused, or prepared for accelerate and Lightning
    worker w of n of another DataLoader → [foreign_workers] → every n-th micro-batch, and its part of the state
"""

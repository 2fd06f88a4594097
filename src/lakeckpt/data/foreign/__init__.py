"""This package fits datasets and loaders to loaders and wrappers of other libraries.

::

    who iterates? (the stack) → [frameworks] → refused, or prepared for accelerate and Lightning
    worker w of n of another DataLoader → [workers] → every n-th micro-batch of its rank, and its part of the state
"""

"""This package starts the ranks of a job on a node, as ``lakeckpt run``.

::

    torchrun's options → [run]: torch's own agent; ranks are forked from [warm], which has imported what scripts import
                           |
    a rank that failed → [attempts]: its exit status beside its page; does a restart help?
"""

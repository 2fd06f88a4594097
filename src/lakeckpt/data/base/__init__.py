"""This package holds what all of `lakeckpt.data` stands on.

::

    private names of torch → [torch_private] → batch, place, flows, workers; tracking
"""

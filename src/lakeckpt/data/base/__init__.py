"""This package holds what all stages of `lakeckpt.data` stand on: arguments, a pinned table, and what reads it.

::

    arguments → [options], [topology]: checked values
                    |
    table, columns, filter, seed → [identity] <--- [selecting]: rows of a filter, or tokens, are counted by one rank
                                       |
          assignments by [ahead] → [source]: reads rows, within [memory] → [transform] → [batch] with a receipt

    private names of torch → [torch_private] → batch, selecting; flows, workers; tracking
"""

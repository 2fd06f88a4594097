"""This package decides what a job goes on from after a fault: values and pure functions, without torch or I/O.

::

    each node's [facts]: which cuts its memory holds → [decide]: the cut, where each rank reads it, why not a newer one
    [shares]: which ranks captured the same. [placement]: which nodes keep copies or parity of each other's shares
    each rank's note of its death, in [faults] → [progress]: the same again, an older cut, or no more
                                               → [account]: what all faults of a run cost

`lakeckpt.checkpoint.restore` collects the facts of all nodes and restores what was decided; the agents of a job decide
in the same way which cut their final save persists.
"""

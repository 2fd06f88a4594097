"""This package brings a cut from host memory into objects, and commits it.

::

    staged cut → [publish], by rounds of the trainers' store, or by [records] of agents in storage
                    |
         announce   [attempt]: the next slot of the [log]
         agree      [agreement]: who writes what
         write      [persist] → files and a part; not what is [unchanged] since an earlier save
         collect    [commit]: rank 0 verifies all parts
         commit     [log] ← manifest                       [failures]: an agent tells the others why a save fails
         prune      [retention]: data that no rule keeps

    log → [history]: the chain of commits.       [indexes]: tables and row selections, once for a run
"""

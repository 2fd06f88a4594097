"""This package persists captured cuts in a process beside each trainer, which outlives its trainer.

::

    trainer                                     agent ([__main__])
    -------                                     --------------------------------------------------
    saves → [link] ------ [orders] -----------> [process] → [persister] → persist/: write, commit
       ^                                            |           |   |
       +----------------- outcomes ([orders]) <-----+           |   +-- storage by [retrying]
                                                                |
                                                [generations]: cuts in the arena, locked, hashed

    The trainer dies: [final_save] → the newest cut that all ranks have. [logs]: where an agent writes;
    [leftovers]: what ended jobs left in memory. [lost_nodes]: asks whether the next node is there.
    [frozen]: tensors that changed, though torch counted no change.
"""

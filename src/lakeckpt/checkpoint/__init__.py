"""This package captures, stages, persists, verifies and commits checkpoints of one cut, and keeps their record.

::

    training loop → [manager] ([arguments], [ranks], [closing]): restore, step, save, wait, close
                        |
           restore      |  [restore/] ← newest checkpoint, or a cut in memory: of this node, or by [peers/] of others
                        |  then [opening] makes what saves
                        v
           a step       [consumed/]: which rows were used → [schedule]: does a save fall here? [preemption/]: a signal?
                        |
           a save       [sync_save] → [state/] -----------------------------> [persist/] → commit in the log
                        [async_save] → [capture/] in [bubbles/] → [arena/] → [agent/] → [persist/]
                        |
                        [report] → handle, `on_save`; [outage]: a failed save is tried again

    a run → is it there? [presence/]; [load]: objects; [ledger/]: the proof; [interop/]: formats of others;
            [rollback]: an order in the log; [copying/]: the run at another place
    a death → [faults/]: notes, and what the next restore does otherwise. [format/]: values of all of these
"""

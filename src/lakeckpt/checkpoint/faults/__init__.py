"""This package notes the faults of a job on its nodes, and lets the next attempt learn from them.

::

    a rank → its page (`lakeckpt.watch.beat`, [marks]) → a death: [causes], [notes]: a file beside the arenas
                                                  its agent: [deaths]: the same, and a copy in the run
                                                             [mates]: ends a rank that is stuck after it: [ending]
    all ranks stand still → [node_watch]: the ground of `lakeckpt.watch.watcher`, in one agent of each node
                                                              |  [joining]: looks of all nodes, through the run
                                                              |  [tracing]: what the kernel sees meanwhile
    the next attempt: [aftermath]: all nodes state their notes → `lakeckpt.recovery.progress` → the level
                      [batch_rows]: the rows of the micro-batch that ends the job
                      [records]: what the log, ``faults/`` and ``watch/`` say of all faults and stalls of a run
"""

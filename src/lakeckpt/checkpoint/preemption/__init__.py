"""This package saves the current cut when a signal says that the job has to end.

::

    signal → [signals] (a pipe) → [preemption]: two threads
                                      |
                 with other ranks: [agreement] on the cut at which all stop
                                      |
    training thread, at that cut → save → [requeue]: the scheduler starts the job again → Preempted
"""

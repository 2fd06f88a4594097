"""This package runs the worker processes of a `LakeLoader`.

::

    main process                                                 worker process, started by [start_method]
    ------------                                                 ------------------------------------------
    state → [pool] ------------- task (torch's queue) ---------> [reader] → source → micro-batch
               ^                                                    |
               |                                                [pickling]: bytes and a pickle
               |                                                    v
            [pickling] <---- [slots]: shared memory, leased <---- [slots]
               ^                                                    |
               +------ [groups]: numbers of slots (torch's queue) <-+

    signals to the job → [signals] → the main process alone handles them
"""

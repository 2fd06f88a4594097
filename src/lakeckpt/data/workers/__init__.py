"""This package runs the worker processes of a `LakeLoader`.

::

    main process                                                 worker process, started by [start_method]
    ------------                                                 ------------------------------------------
    state → [pool] ------------- task (torch's queue) ---------> [reader] → source → micro-batch
               ^                                                    |
               |                                                [packing]: bytes and a pickle
               |                                                    v
            [packing] <---- [slots]: shared memory, leased <---- [slots]
               ^                                                    |
               +------ [groups]: numbers of slots (torch's queue) <-+

    signals to the job → [signals] → the main process alone handles them
"""

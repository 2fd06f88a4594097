"""This package defines what lies on disk and in memory: values only.

::

    tensor → [dtypes] → [slabs] of 16 MiB → [digests] → [units]: compared between ranks
                |                                          |
           [sharing]: parts of ranks                   [tensor_file]: safetensors, byte by byte
                |                                          |
                +-----------------> [parts] <--------------+      what one rank wrote for a checkpoint
                                       |
                                  [register] of all parts, and what [keep] keeps
                                       |
                                  [manifest]: an entry of the log: begun, restored, committed
                                       |
    bytes of all of these ← [verified_reads]: every byte is checked.      [fields]: cuts, ranks, digests
"""

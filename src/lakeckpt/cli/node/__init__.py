"""This package checks a node: ``lakeckpt doctor --node``.

::

    [measures]: rates and tests by torch    [tools]: dcgmi, ncclras, nccl-tests    [facts]: limits, versions, NVML
                         \\                        |                               /
                          +----------------> [report] <----------------------------+
                                                |
        other ranks by [group], or other nodes and earlier checks by [history] → [verdict] → [command]: exit status

    ``lakeckpt doctor --trace`` → [trace]: what the kernel sees, by `lakeckpt.watch.system.kernel`

Only [measures] and [group] import torch, and [command] loads them when a check runs.
"""

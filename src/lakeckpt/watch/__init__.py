"""This package keeps the page of each rank, which says from outside where the rank is, and explains faults: values,
without torch.

::

    the training thread → [beat]: the page of a rank, a file in memory → other processes of the node
    a code, a signal, a text → [explicit]: rows of faults.toml → cause, remedy; [kernel_log]: lines about a death
    bpf/*.bt, run by [kernel] as root → events of processes;  [avoid]: the mark of a node, in the run
"""

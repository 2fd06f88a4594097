"""This package reads what the system says of faults: codes, texts, the kernel's log and the kernel's events.

::

    a code, a signal, a text → [explicit]: rows of faults.toml → cause, remedy
    /dev/kmsg → [kernel_log]: lines about a death that a row knows
    bpf/*.bt, run by [kernel] as root → events of processes

No module imports torch or looks at a job.
"""

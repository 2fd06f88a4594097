"""This package reads what the system says of faults: codes, texts, the kernel's log and events, and GPUs.

::

    a code, a signal, a text → [explicit]: rows of faults.toml → cause, remedy
    /dev/kmsg → [kernel_log]: lines about a death that a row knows
    bpf/*.bt, run by [kernel] as root → events of processes
    nvidia-smi → [gpus]: how busy the GPUs of this node are

No module imports torch.
"""

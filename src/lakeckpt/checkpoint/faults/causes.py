"""This module finds out why a process of this machine ended: by its exit status, and by the memory of its group.

A process that is not the parent learns the exit status of another one from a pidfd, once the parent has collected it
(Linux 6.15 and later). The kernel counts how many processes of a control group it has killed for want of memory. The
module imports without torch, and starts no threads.
"""

from __future__ import annotations

import fcntl
import re
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

from lakeckpt.recovery.faults import Cause

__all__ = ["cause_of_error", "cause_of_status", "exit_status", "killed_for_memory"]

_EXIT = 8  # in the mask, the first word of pidfd_info (64 bytes); the status is the last one
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PAUSE_S = 0.05
_OUT_OF_MEMORY = frozenset(("MemoryError", "OutOfMemoryError"))


def exit_status(pidfd: int, *, timeout_s: float) -> int | None:
    """Return the status of the process that a pidfd names, negative if a signal ended it; None if the system does not
    say it, or its parent does not collect it in time."""
    until_s = time.monotonic() + timeout_s
    while True:
        data = bytearray(64)
        struct.pack_into("<Q", data, 0, _EXIT)
        try:
            fcntl.ioctl(pidfd, _GET_INFO, data)
        except OSError:
            return None
        mask = int.from_bytes(data[:8], "little")
        code = int.from_bytes(data[60:64], "little", signed=True)
        if mask & _EXIT:
            return -(code & 0x7F) if code & 0x7F else code >> 8 & 0xFF
        if time.monotonic() >= until_s:
            return None
        time.sleep(_PAUSE_S)


def cause_of_status(status: int | None, *, killed: int = 0) -> tuple[Cause, str]:
    """Return the cause of a death by its status, and what it names. ``killed``: how many processes of the group were
    killed for want of memory since the process began.

    >>> cause_of_status(-9), cause_of_status(-9, killed=1), cause_of_status(3), cause_of_status(None)
    (('signal', 'SIGKILL'), ('out of memory', 'SIGKILL'), ('exit', 'status 3'), ('unknown', ''))
    """
    if status is None:
        return "unknown", ""
    if status >= 0:
        return "exit", f"status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return ("out of memory" if name == "SIGKILL" and killed > 0 else "signal"), name


def cause_of_error(error: BaseException) -> tuple[Cause, str]:
    """Return the cause of a death by an exception, and the name of its type.

    >>> cause_of_error(MemoryError()), cause_of_error(KeyError("loss"))
    (('out of memory', 'MemoryError'), ('exception', 'KeyError'))
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ("out of memory" if kind.__name__ in _OUT_OF_MEMORY else "exception"), name


def killed_for_memory(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Return how many processes of this process's control group were killed for want of memory; 0 if nothing says."""
    with suppress(OSError):
        for line in Path(proc).read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                file = f"{root}/{controllers}{path}/memory.{'oom_control' if controllers else 'events'}"
                with suppress(OSError):
                    if found := re.search(r"^oom_kill (\d+)$", Path(file).read_text("utf-8"), re.MULTILINE):
                        return int(found.group(1))
    return 0

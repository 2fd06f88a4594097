"""This module reads what the kernel's log says of a fault: lines about a process, or about devices of the node.

``/dev/kmsg`` can be read by root on most systems, and in few containers. The module imports without torch, and starts
no threads.
"""

from __future__ import annotations

import os
import re
import time

from lakeckpt.watch.system.explicit import fault_table

__all__ = ["UNREADABLE", "fault_lines"]

UNREADABLE = "the kernel's log cannot be read here"
_LAST_S = 30.0
_MOST = 3
_RECORD_BYTES = 8192
_PROCESS = re.compile(
    r"\b(?:pid|process|task)[ =:']+(\d+)|\[(\d+)\]: segfault|\S+\[(\d+)\] (?:general|trap)", re.IGNORECASE
)


def fault_lines(pid: int, path: str = "/dev/kmsg", *, now_s: float | None = None) -> tuple[str, ...] | None:
    """Return the newest lines of the last 30 seconds that a row of the table of explicit faults knows, and that name
    the process ``pid`` or none; None if this user cannot read the log. ``now_s``: by the kernel's clock."""
    since_s = (time.monotonic() if now_s is None else now_s) - _LAST_S
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found: list[str] = []
    try:
        while record := _next(descriptor):
            head, _, text = record.partition(";")
            priority, _, at = head.split(",")[:3]
            line = text.partition("\n")[0]
            if int(priority) >> 3 == 0 and int(at) >= 1e6 * since_s and _is_about(line, pid):
                found.append(line)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return tuple(found[-_MOST:])


def _next(descriptor: int) -> str:
    """Return the next record of the log, or lines of a file with one; empty at the end."""
    while True:
        try:
            return os.read(descriptor, _RECORD_BYTES).decode("utf-8", "replace")
        except BlockingIOError:
            return ""
        except BrokenPipeError:
            continue  # newer records have overwritten it


def _is_about(line: str, pid: int) -> bool:
    named = {int(number) for match in _PROCESS.finditer(line) for number in match.groups() if number}
    return (not named or pid in named) and fault_table().knows_kernel_line(line)

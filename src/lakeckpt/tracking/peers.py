"""This module finds out whether the processes of other ranks on this node have ended.

The kernel reports the end of a process through a pidfd at once, even if its parent has not collected it yet. If ranks
run in process namespaces of their own, or the system has no pidfds (before Linux 5.3), nothing is known of them, and
`Peers.ended` finds nobody. The module starts no threads.
"""

from __future__ import annotations

import os
import select
import weakref
from pathlib import Path

from lakeckpt.tracking.tally import Tally

__all__ = ["PROCESS", "Peers", "own_process"]

PROCESS = "process"
"""The fact of a rank that names its process."""


class Peers:
    """The other ranks whose processes this process can watch; ``stated`` has the `own_process` of all ranks."""

    def __init__(self, stated: Tally, *, rank: int) -> None:
        self._watched: dict[int, int] = {}  # pidfd → rank
        self._close = weakref.finalize(self, _close_all, self._watched)
        node = _node()
        for text, ranks in stated.facts[PROCESS].items():
            where, _, pid = text.rpartition(" ")
            (other, _), *_ = ranks.pairs()
            if where == node and node and other != rank:
                self._watch(other, int(pid))

    def _watch(self, rank: int, pid: int) -> None:
        try:
            self._watched[os.pidfd_open(pid)] = rank
        except (AttributeError, OSError):
            return  # the system has no pidfds, or has no more descriptors for this process

    def ended(self) -> int | None:
        """Return a rank whose process has ended, or None. It never waits. Any thread may call it."""
        waits, watched = select.poll(), dict(self._watched)
        for descriptor in watched:
            waits.register(descriptor, select.POLLIN)
        return next((watched[one] for one, event in waits.poll(0) if event & select.POLLIN), None)

    def close(self) -> None:
        """Close the pidfds."""
        self._close()


def own_process() -> str:
    """Return the fact that names this process to the `Peers` of the other ranks."""
    return f"{_node()} {os.getpid()}"


def _close_all(watched: dict[int, int]) -> None:
    while watched:
        os.close(watched.popitem()[0])


def _node() -> str:
    """Return an identity of this boot of this machine and of the process namespace; empty where it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""

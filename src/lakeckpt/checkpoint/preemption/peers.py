"""This module finds out whether the processes of other ranks on this node have ended.

Ranks exchange their process ids once. The kernel reports the end of a process through a pidfd at once, also where its
parent has not collected it yet. Where ranks run in process namespaces of their own, or the system has no pidfds (before
Linux 5.3), nothing is known of them, and `Peers.ended` finds nobody. The module starts no threads.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakeckpt.tracking.exchange import Exchange

__all__ = ["Peers"]


class Peers:
    """The other ranks whose processes this process can watch. Collective: all ranks of ``exchange`` make one."""

    def __init__(self, exchange: Exchange) -> None:
        self._watched: dict[int, int] = {}  # pidfd → rank
        node = _node()
        stated = exchange.everyone({"process": f"{node} {os.getpid()}"}).facts["process"]
        for text, ranks in stated.items():
            where, _, pid = text.rpartition(" ")
            (rank, _), *_ = ranks.pairs()
            if where == node and node and rank != exchange.rank:
                self._watch(rank, int(pid))

    def _watch(self, rank: int, pid: int) -> None:
        try:
            self._watched[os.pidfd_open(pid)] = rank
        except (AttributeError, OSError):
            return  # the system has no pidfds, or has no more descriptors for this process

    def ended(self) -> int | None:
        """Return a rank whose process has ended, or None. It never waits."""
        waits = select.poll()
        for descriptor in self._watched:
            waits.register(descriptor, select.POLLIN)
        return next((self._watched[descriptor] for descriptor, _ in waits.poll(0)), None)

    def close(self) -> None:
        """Close the pidfds."""
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()


def _node() -> str:
    """Return an identity of this boot of this machine and of the process namespace; empty where it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""

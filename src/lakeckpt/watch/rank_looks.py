"""This module looks at the ranks of a node: at their pages, processes and stacks.

`look_at` gives what is seen of one rank now; its stacks take 0.1 to 0.2 s by py-spy, all else half a millisecond.
`Deaths` holds a pidfd of each rank, and tells in which order they died. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lakeckpt.watch.beat import Page
from lakeckpt.watch.facts import children_of, look_at_process
from lakeckpt.watch.looks import Leaf, RankLook
from lakeckpt.watch.stacks import stacks_of

__all__ = ["Death", "Deaths", "look_at", "look_at_page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank of this node has died as number ``order`` of them, from 1. ``status``: its exit status, negative if a
    signal ended it; None: not known. ``error``: the exception that ended it."""

    order: int
    status: int | None = None
    error: str = ""


def look_at_page(page: Page) -> RankLook:
    """Return what the page of a rank says."""
    return RankLook(
        rank=page.rank,
        node=socket.gethostname(),
        pid=page.pid,
        phase=page.phase,
        still_s=max(0.0, time.monotonic() - page.since_s),
        beats=page.beats,
        step=page.step,
        collectives=page.collectives,
        batches=page.batches,
        history=tuple(Leaf(step=one.step, collectives=one.collectives, batches=one.batches) for one in page.ends),
        reads=page.reader if page.phase == "data" else "",
        announced="pause" if page.phase == "pause" else "",
    )


def look_at(path: str, page: Page, death: Death | None = None) -> RankLook:
    """Return what is seen of the rank whose ``page`` lies at ``path``: its process, children and stacks, too, if it
    lives."""
    look = look_at_page(page)
    if death is not None:
        return replace(look, ended=death.order, status=death.status, error=death.error)
    if not page.lives:
        return look
    return replace(
        look,
        process=look_at_process(page.pid),
        children=children_of(page.pid),
        threads=stacks_of(page.pid, path, page.stacks),
    )


class Deaths:
    """The order of deaths of the ranks of a node. One thread calls it."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        """Rank → its pidfd."""
        self._order: list[int] = []

    def follow(self, pages: Mapping[int, Page]) -> None:
        """Follow the processes of these ranks: rank → page."""
        for rank, page in pages.items():
            if rank not in self._open and rank not in self._order and page.lives:
                with contextlib.suppress(OSError):
                    self._open[rank] = os.pidfd_open(page.pid)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for a death, at most ``timeout_s``. Returns (rank, its pidfd) of each that died since the last call."""
        poll = select.poll()
        ranks = {pidfd: rank for rank, pidfd in self._open.items()}
        for pidfd in ranks:
            poll.register(pidfd, select.POLLIN)
        found = [(ranks[pidfd], pidfd) for pidfd, _ in poll.poll(1000 * timeout_s)]
        for rank, _ in found:
            del self._open[rank]
            self._order.append(rank)
        return found

    def order(self, rank: int) -> int:
        """Return the place of a rank in the order of deaths, from 1; 0: it lives."""
        return self._order.index(rank) + 1 if rank in self._order else 0

    def close(self) -> None:
        """Close the pidfds."""
        for pidfd in self._open.values():
            os.close(pidfd)
        self._open.clear()

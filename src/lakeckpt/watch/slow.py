"""This module finds the ranks of a node that are slow: that hold up the others a little in each step.

Ranks that train together finish a step at the same time; those that are ahead wait in the backward pass. The own time
of a rank is therefore the time of a step less the phases in which it may wait: backward, and compute if the state has
no model. A rank is slow if its own time was more than 1.2 times the median of its peers, and longer by a twentieth of
the step, in five windows running. A window lasts twenty seconds, or until each rank has finished a step. With fewer
than three ranks on a node it cannot be told which of them is unusual, and nobody is named.

Nothing is ever done about a slow rank. The module is pure, and starts no threads.
"""

from __future__ import annotations

import socket
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lakeckpt.watch.beat import Page, Phase
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["WINDOWS", "WINDOW_S", "SlowRank", "SlowRanks"]

WINDOW_S, WINDOWS = 20.0, 5
_SLOW, _OF_STEP, _FEWEST = 1.2, 0.05, 3
_MAY_WAIT: frozenset[Phase] = frozenset(("backward", "compute"))
_TREND = 1.1
_KIND, _VERSION = "slow rank", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that is slow in an ``attempt``: seconds of its own time in a step, and those of its peers."""

    attempt: Count
    rank: Count
    node: str
    step: Count
    phase: str
    """The phase that is longer than that of its peers by most."""
    own_s: float
    peers_s: float
    trend: Literal["grows", "falls", "steady"]
    at_s: float
    """When this was written, in seconds since 1970."""
    is_over: bool = False

    def __str__(self) -> str:
        now = "was slow" if self.is_over else "is slow"
        text = f"rank {self.rank} on {self.node} {now}, most in {self.phase}: {self.own_s:.3f} s of its own in a step, "
        return f"{text}its peers {self.peers_s:.3f} s ({self.trend}; step {self.step})"

    def to_bytes(self) -> bytes:
        """Return the document."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> SlowRank:
        """Return what is in a document of `to_bytes`. Raises `WireError`."""
        found: SlowRank = from_plain(cls, loads(data, kind=_KIND, supported=_VERSION), "a slow rank")
        return found


class SlowRanks:
    """The windows of the ranks of this node, in an ``attempt``."""

    def __init__(self, *, attempt: int) -> None:
        self._attempt = attempt
        self._begin: dict[int, Page] = {}
        self._ratios: dict[int, deque[float]] = {}
        self._named: dict[int, SlowRank] = {}
        self._since = 0

    def begin(self, pages: Mapping[int, Page]) -> None:
        """Begin a window, and the count of windows running, with these ``pages``."""
        self._begin, self._ratios = dict(pages), {}

    def window(self, pages: Mapping[int, Page], *, at_s: float) -> list[SlowRank]:
        """End a window; return what is to be written: the ranks that became slow, those that are not slow any more,
        and every five windows those that still are. ``pages``: with their histories. ``at_s``: since 1970."""
        begin = self._begin
        if begin.keys() == pages.keys() and any(page.step <= begin[rank].step for rank, page in pages.items()):
            return []  # the window goes on
        if begin.keys() != pages.keys() or len(pages) < _FEWEST:
            self.begin(pages)
            return []
        self._begin = dict(pages)
        parts = {rank: _of_step(begin[rank], page) for rank, page in pages.items()}
        own = {rank: _own(its) for rank, its in parts.items()}
        for rank, seconds in own.items():
            peers = _of_peers(own, rank)
            ratios = self._ratios.setdefault(rank, deque(maxlen=WINDOWS))
            if seconds > _SLOW * peers and seconds - peers > _OF_STEP * sum(parts[rank].values()):
                ratios.append(seconds / max(peers, 1e-9))
            else:
                ratios.clear()
        return self._written(pages, parts, own, at_s)

    def _written(
        self,
        pages: Mapping[int, Page],
        parts: Mapping[int, Mapping[Phase, float]],
        own: Mapping[int, float],
        at_s: float,
    ) -> list[SlowRank]:
        self._since += 1
        slow = [rank for rank, ratios in self._ratios.items() if len(ratios) == WINDOWS]
        found = []
        for rank in sorted({*slow, *self._named} & self._ratios.keys()):
            if rank in slow and rank in self._named and self._since % WINDOWS:
                continue
            ratios, is_over = self._ratios[rank], rank not in slow
            change = 1.0 if is_over else ratios[-1] / ratios[0]
            one = SlowRank(
                attempt=self._attempt,
                rank=rank,
                node=socket.gethostname(),
                step=pages[rank].step,
                phase=self._named[rank].phase if is_over else _longest(parts, rank, pages[rank].name),
                own_s=own[rank],
                peers_s=_of_peers(own, rank),
                trend="grows" if change > _TREND else "falls" if change < 1 / _TREND else "steady",
                at_s=at_s,
                is_over=is_over,
            )
            found.append(one)
            self._named[rank] = one
        self._named = {rank: one for rank, one in self._named.items() if not one.is_over}
        return found


def _of_step(begin: Page, end: Page) -> dict[Phase, float]:
    """Return the seconds of each phase in a step of the window, on average."""
    steps = end.step - begin.step
    return {phase: (seconds - begin.spent_s.get(phase, 0.0)) / steps for phase, seconds in end.spent_s.items()}


def _own(parts: Mapping[Phase, float]) -> float:
    return sum(seconds for phase, seconds in parts.items() if phase not in _MAY_WAIT)


def _of_peers(own: Mapping[int, float], rank: int) -> float:
    return statistics.median_high(seconds for peer, seconds in own.items() if peer != rank)


def _longest(parts: Mapping[int, Mapping[Phase, float]], rank: int, name: str) -> str:
    """Return the phase in which a rank is longer than its peers by most; ``name``: that of its own phase."""

    def more(phase: Phase) -> float:
        return parts[rank][phase] - _of_peers({peer: its.get(phase, 0.0) for peer, its in parts.items()}, rank)

    phase = max((phase for phase in parts[rank] if phase not in _MAY_WAIT), key=more)
    return name if phase == "own" and name else phase

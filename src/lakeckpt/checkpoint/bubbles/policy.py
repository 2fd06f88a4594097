"""This module decides when the next slice of a capture may move.

There are two kinds of idle windows. In a *bubble* the rank waits: for data, for a collective, for a neighbour in the
pipeline. In *free* time the rank computes, but the copy engine is idle (on a GPU, the link to the host during the
forward pass). The policy admits a slice into a bubble if the slice will probably end before the bubble does.

Two rules decide, each from measurements of the last iterations:

* Length. `WindowHistory` keeps the lengths of the windows at each *site* (a place in the iteration that has a name).
  The remaining time of an open bubble is a quantile of the remaining times of earlier bubbles at the same site. There
  are three quantiles (a tenth, the lower quartile, the median). The policy uses the lowest quantile by which the
  bubbles ahead hold the remaining bytes.
* Free time. Bytes that the bubbles ahead of the fence will not hold move in free time. The fence copies the rest.

On a GPU the host does not see the device wait. There the windows of an iteration are foreseen as a whole
(`BubblePolicy.foresee`), and a slice must lie within one of them.

If a slice is moving when its bubble closes, or has ended just before, the policy records only that the bubble lasted
until the slice began: the slice itself may have delayed the rank. Otherwise bubbles that slices have stretched would
admit more slices.

The module is pure: the clock is an argument, and nothing waits or takes a lock. It never imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

__all__ = [
    "BOLD",
    "CAUTIOUS",
    "MOST_OF_A_SITE",
    "USUAL",
    "BubblePolicy",
    "IdleWindow",
    "Kind",
    "SliceRate",
    "WindowHistory",
]

Kind = Literal["bubble", "free"]

CAUTIOUS, USUAL, BOLD = 0.1, 0.25, 0.5
"""Quantiles of the remaining time: how far a length is trusted."""
MOST_OF_A_SITE = 1024
"""Windows of one site in one iteration that have a number of their own; a pipeline has several hundred waits."""
_LENGTHS = 16
_RATES = 32
_RATE_QUANTILE = 0.75
_GUESS_BYTES_PER_S = 1e9
"""The copy rate before anything was measured: slower than any memory or link that is worth scheduling on."""
_JUST = 0.25
"""A window that closes within this part of a slice's time after the slice may have waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleWindow:
    """An idle window [begin_s, end_s) at ``site``."""

    site: str
    kind: Kind
    begin_s: float
    end_s: float


class SliceRate:
    """The rate at which slices are copied: the upper quartile of the last slices' seconds per byte.

    A slice that takes longer than its window delays training; a slice that takes less time wastes a little of it.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_RATES)
        self._seconds_per_byte = 1 / _GUESS_BYTES_PER_S

    def record(self, size_bytes: int, seconds: float) -> None:
        """Note that a slice of ``size_bytes`` took ``seconds``."""
        if size_bytes > 0 and seconds >= 0:
            self._last.append(seconds / size_bytes)
            ordered = sorted(self._last)
            self._seconds_per_byte = ordered[min(int(len(ordered) * _RATE_QUANTILE), len(ordered) - 1)]

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds that a slice of ``size_bytes`` will not exceed, most of the time."""
        return size_bytes * self._seconds_per_byte


class WindowHistory:
    """The last lengths of the windows at each site.

    For an open window, only the lengths that exceed its elapsed time count (the empirical residual life). So a site
    whose waits are either very short or long is judged correctly once the short waits would be over. A window that is
    longer than every known length is trusted for as long again as it has exceeded them.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, deque[float]] = {}
        self._ordered: dict[str, list[float]] = {}  # sorted copies of the lengths that were asked for

    def record(self, site: str, length_s: float) -> None:
        """Note that a window at ``site`` took ``length_s``."""
        self._lengths.setdefault(site, deque(maxlen=_LENGTHS)).append(length_s)
        self._ordered.pop(site, None)

    def expected_s(self, site: str, quantile: float = USUAL) -> float:
        """Return the quantile of the lengths at ``site``; 0 if none is known."""
        known = self._known(site)
        return self._left(known, 0.0, quantile) if known else 0.0

    def remaining_s(self, site: str, elapsed_s: float, quantile: float = USUAL) -> float:
        """Return for how much longer a window at ``site`` will be open, after it was open for ``elapsed_s``."""
        return self._left(self._known(site), elapsed_s, quantile)

    def longest_s(self, site: str) -> float:
        """Return the longest known length at ``site``; infinite if none is known."""
        known = self._known(site)
        return known[-1] if known else inf

    def ready_s(self, site: str, elapsed_s: float, need_s: float, quantile: float = USUAL) -> float:
        """Return the age, ``elapsed_s`` or more, at which a window at ``site`` is trusted for ``need_s`` more.

        Between two known lengths the remaining time only falls, so only the known lengths are candidates.
        """
        known = self._known(site)
        for instant in (elapsed_s, *known[bisect_right(known, elapsed_s) :]):
            if self._left(known, instant, quantile) >= need_s:
                return instant
        return (known[-1] if known else 0.0) + need_s

    def _known(self, site: str) -> Sequence[float]:
        """Return the lengths at ``site``, the shortest first."""
        found = self._ordered.get(site)
        if found is None:
            found = self._ordered[site] = sorted(self._lengths.get(site, ()))
        return found

    @staticmethod
    def _left(known: Sequence[float], elapsed_s: float, quantile: float) -> float:
        longer = bisect_right(known, elapsed_s)
        if longer < len(known):
            return known[longer + int((len(known) - longer) * quantile)] - elapsed_s
        return elapsed_s - (known[-1] if known else 0.0)


class BubblePolicy:
    """Admits slices on one rank. Windows of one kind follow each other; a bubble may lie in free time.

    The n-th window at one site of an iteration is a site of its own, because the first micro-batch's wait is not like
    the last one's. All windows from the `MOST_OF_A_SITE`-th on share one site.
    """

    def __init__(self) -> None:
        self.history = WindowHistory()
        self.rate = SliceRate()
        self._open: dict[Kind, tuple[str, float]] = {}
        self._seen: dict[str, int] = {}
        self._passed: dict[str, Kind] = {}  # sites of this iteration, in order
        self._previous: dict[str, Kind] = {}
        self._ahead: dict[float, dict[str, float]] = {}  # cached lengths of the bubbles yet to come, by quantile
        self._foreseen: tuple[IdleWindow, ...] = ()
        self._left_bytes = 0
        self._moving_since_s: float | None = None
        self._last_slice = (-inf, -inf)

    # --- events

    def begin_iteration(self) -> None:
        """End an iteration at its cut, and begin the next one. An open window still belongs to the old iteration."""
        self._previous, self._passed = self._passed, {}
        self._foreseen = ()
        self._ahead.clear()
        self._seen.clear()

    def begin_capture(self, size_bytes: int) -> None:
        """Begin a capture that moves ``size_bytes`` before its fence."""
        self._left_bytes = size_bytes
        self._moving_since_s = None  # an aborted capture reports no end of its last slice

    def foresee(self, windows: Iterable[IdleWindow]) -> None:
        """Use ``windows`` as all windows of this iteration, for a device whose waits the host does not see."""
        self._foreseen = tuple(windows)

    @property
    def foresees(self) -> bool:
        """True if windows of this iteration were foreseen."""
        return bool(self._foreseen)

    def open(self, site: str, kind: Kind, at_s: float) -> str:
        """Open a window, and close an open window of the same kind. Returns the site with its number."""
        self.close(kind, at_s)
        number = self._seen[site] = min(self._seen.get(site, -1) + 1, MOST_OF_A_SITE - 1)
        name = f"{site} {number}"
        self._passed[name] = kind
        for lengths in self._ahead.values():
            lengths.pop(name, None)
        self._open[kind] = (name, at_s)
        return name

    def close(self, kind: Kind, at_s: float) -> IdleWindow | None:
        """Close the window of ``kind`` and return it; None if none is open."""
        if kind not in self._open:
            return None
        site, begin_s = self._open.pop(kind)
        window = IdleWindow(site=site, kind=kind, begin_s=begin_s, end_s=max(begin_s, at_s))
        self.history.record(site, self._sure_until_s(window) - begin_s)
        if site not in self._passed:  # the window was open across the cut: its site will come again
            self._ahead.clear()
        return window

    def _sure_until_s(self, window: IdleWindow) -> float:
        """Return the time until which the window would surely have been open if nothing had moved in it."""
        begin_s, end_s = self._last_slice
        if self._moving_since_s is not None:
            begin_s = self._moving_since_s
        elif end_s == -inf or window.end_s - end_s > _JUST * (end_s - begin_s):
            return window.end_s
        return min(window.end_s, max(window.begin_s, begin_s))

    def admitted(self, at_s: float) -> None:
        """Record that an admitted slice begins to move; `moved` follows."""
        self._moving_since_s = at_s

    def moved(self, size_bytes: int, begin_s: float, end_s: float) -> None:
        """Record that a slice was copied. With no bytes, the admission was used for other work."""
        self._moving_since_s = None
        self._last_slice = (begin_s, end_s)
        if size_bytes:
            self.rate.record(size_bytes, end_s - begin_s)
            self.fenced(size_bytes)

    def fenced(self, size_bytes: int) -> None:
        """Record that the fence copied a slice. Its time does not count for the rate of copies beside training."""
        self._left_bytes = max(0, self._left_bytes - size_bytes)

    # --- decisions

    def admits_at(self, size_bytes: int, at_s: float) -> float | None:
        """Return the instant, ``at_s`` or later, from which a slice may move if no window opens or closes before.

        None means that no slice may move before another window opens.
        """
        need_s, trust = self.rate.seconds(size_bytes), self._trust(size_bytes, at_s)
        found = [
            begin_s
            for window in self._foreseen
            if (begin_s := max(at_s, window.begin_s)) + need_s <= window.end_s
            and (window.kind == "bubble" or trust == BOLD)
        ]
        for kind, (site, begin_s) in self._open.items():
            if kind == "bubble" or trust == BOLD:
                ready_s = self.history.ready_s(site, max(0.0, at_s - begin_s), need_s, trust)
                found.append(max(at_s, begin_s + ready_s))
        return min(found, default=None)

    def may_hold(self, name: str, size_bytes: int) -> bool:
        """Return whether a slice may fit into the window ``name``. If not, the copier need not be woken for it."""
        return self.history.longest_s(name) >= self.rate.seconds(size_bytes)

    def capacity_bytes(self, slice_bytes: int, at_s: float, trust: float = USUAL) -> int:
        """Return how many bytes, in whole slices, the open bubble and the following ones hold before the next cut."""
        need_s = self.rate.seconds(slice_bytes)
        if need_s <= 0:
            return self._left_bytes
        ahead = [one.end_s - one.begin_s for one in self._foreseen if one.kind == "bubble" and one.begin_s > at_s]
        ahead += [self._remaining_s(at_s, trust), *self._sites_ahead(trust).values()]
        return sum(int(length_s / need_s) for length_s in ahead) * slice_bytes

    def _remaining_s(self, at_s: float, trust: float) -> float:
        """Return for how much longer the open bubble will be open; 0 if none is open."""
        found = [one.end_s - at_s for one in self._foreseen if one.kind == "bubble" and one.begin_s <= at_s < one.end_s]
        if "bubble" in self._open:
            site, begin_s = self._open["bubble"]
            found.append(self.history.remaining_s(site, max(0.0, at_s - begin_s), trust))
        return max(found, default=0.0)

    def _sites_ahead(self, trust: float) -> dict[str, float]:
        """Return site → length for the bubbles that follow in this iteration, if it has those of the last one."""
        lengths = self._ahead.get(trust)
        if lengths is None:
            lengths = self._ahead[trust] = {
                site: self.history.expected_s(site, trust)
                for site, kind in self._previous.items()
                if kind == "bubble" and site not in self._passed
            }
        return lengths

    def _trust(self, slice_bytes: int, at_s: float) -> float:
        """Return the lowest quantile by which the bubbles hold the remaining bytes; `BOLD` if neither `CAUTIOUS` nor
        `USUAL` does."""
        if not self._open and not self._foreseen:
            return USUAL
        for trust in (CAUTIOUS, USUAL):
            if self._left_bytes <= self.capacity_bytes(slice_bytes, at_s, trust):
                return trust
        return BOLD

"""When is a device idle, whose host runs ahead of it?  `DeviceGate`: windows by marks on the device's own line of time.

On a GPU a stage's call returns when its kernels are queued, and a wait for a receive holds up the stream, not the host.
So what the training thread says (`begin`, `end`, `cut`) is marked on the device; marks are read when the device has
passed them, one or two iterations later. Of each site, the last iterations give where in an iteration its window lies:
from the upper quartile of its begins to the lower quartile of its ends, counted from the cut. When the device reaches a
cut, those windows are foreseen from that instant on, and slices are admitted into them.

Only the copier's thread ever waits for the device (and the training thread once, at the first cut, to tie the device's
time to the host's). Imports without torch; `CudaMarks` is in ``cuda_marks``.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.core.bubble_policy import MOST_OF_A_SITE, IdleWindow, Kind
from lakeckpt.core.bubble_record import IterationRecord, MovedSlice

__all__ = ["DeviceGate", "Marks"]

_KEEP = 8
_MOST_PENDING = 16
"""Iterations whose marks were not passed yet: more means that the device hangs, or that marks are lost."""


class Marks(Protocol):
    """Instants on a device's line of time. `mark` is called by the training thread, the others by any."""

    def mark(self) -> Any:
        """Mark the place in the device's work up to which it is queued now; None where it cannot. Returns at once."""
        ...

    def seconds(self, earlier: Any, later: Any) -> float | None:
        """The time between two marks; None while the device has not passed both."""
        ...

    def wait(self, mark: Any) -> None:
        """Return when the device has passed ``mark``."""
        ...


@dataclass(slots=True, kw_only=True)
class _Marked:
    site: str
    kind: Kind
    begin: Any
    end: Any = None


@dataclass(slots=True, kw_only=True)
class _Iteration:
    """``slices`` come from the copier, the rest from the training thread."""

    step: int
    begin: Any
    end: Any = None
    marked: list[_Marked] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    slices: list[MovedSlice] = field(default_factory=list)
    begin_s: float | None = None
    """When the device was at ``begin``, by the host's clock."""


class DeviceGate(BubbleGate):
    """A `BubbleGate` for a device that the host does not see wait. Its windows are those of the device."""

    def __init__(self, marks: Marks, *, clock: Callable[[], float] = time.perf_counter, **how: Any) -> None:
        super().__init__(clock=clock, **how)
        self._border_s = inf  # where windows begin and end is known later: slices are kept one by one
        self._marks = marks
        self._now: _Iteration | None = None
        self._over: deque[_Iteration] = deque()
        self._places: dict[tuple[str, Kind], deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_KEEP))
        self._open: dict[Kind, _Marked] = {}

    # --- what the training thread says

    def cut(self, step: int) -> None:
        """The cut of ``step``: one iteration is over, the next begins."""
        if (mark := self._marks.mark()) is None:
            return
        begin_s = None
        if self._now is None:
            self._marks.wait(mark)
            begin_s = self.clock()
        with self._changed:
            if self._now is not None:
                self._now.end = mark
                self._over.append(self._now)
            self._now = _Iteration(step=step, begin=mark, begin_s=begin_s)
            self._policy.begin_iteration()
            self._look_back()

    def begin(self, site: str, kind: Kind = "bubble") -> None:
        """From here on in its work, the device waits at ``site``, or its link is free."""
        if (mark := self._marks.mark()) is None:
            return
        with self._changed:
            self._shut(kind, mark)
            if self._now is not None:
                number = self._now.seen[site] = self._now.seen.get(site, -1) + 1
                if number < MOST_OF_A_SITE:
                    self._open[kind] = _Marked(site=f"{site} {number}", kind=kind, begin=mark)
                    self._now.marked.append(self._open[kind])

    def end(self, kind: Kind = "bubble") -> None:
        """From here on in its work, it does not."""
        if kind not in self._open or (mark := self._marks.mark()) is None:
            return
        with self._changed:
            self._shut(kind, mark)

    def _shut(self, kind: Kind, mark: Any) -> None:
        if kind in self._open:
            self._open.pop(kind).end = mark

    # --- what the copier asks

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> bool:
        """See `BubbleGate`."""
        now = self._now
        if now is not None and not self._policy.foresees and not urgent.is_set():
            was_there = self._marks.seconds(now.begin, now.begin) is not None
            self._marks.wait(now.begin)
            with self._changed:
                if self._now is now:
                    if was_there:  # since when? The iteration before says it, to which it is the end
                        self._look_back()
                    if not was_there or now.begin_s is None:
                        now.begin_s = self.clock()
                    self._look_back()
                    self._policy.foresee(self._windows_from(now.begin_s))
        return super().admit(size_bytes, urgent)

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /, *, gently: bool = False) -> None:
        """The slice that was admitted last was copied in [begin_s, end_s); no bytes: it was not."""
        super().moved(size_bytes, begin_s, end_s, gently=gently)
        self._take_slices()

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """The fence queued the copy of a slice in [begin_s, end_s), which was not admitted in time."""
        super().fenced(size_bytes, begin_s, end_s)
        self._take_slices()

    def _take_slices(self) -> None:
        with self._changed:
            if self._now is not None:
                self._now.slices += self._slices
            self._slices.clear()

    # --- the device's line of time

    def _windows_from(self, begin_s: float) -> list[IdleWindow]:
        """Where the windows of an iteration will be that begins at ``begin_s``."""
        found = []
        for (site, kind), places in self._places.items():
            begins, ends = sorted(begin for begin, _ in places), sorted(end for _, end in places)
            begin, end = begins[(3 * len(begins)) // 4], ends[len(ends) // 4]
            if begin < end:
                found.append(IdleWindow(site=site, kind=kind, begin_s=begin_s + begin, end_s=begin_s + end))
        return sorted(found, key=lambda window: window.begin_s)

    def _look_back(self) -> None:
        """Read the marks of the iterations that the device is done with."""
        while len(self._over) > _MOST_PENDING:
            self._over.popleft()
        while self._over and self._resolved(self._over[0]):
            self._over.popleft()

    def _resolved(self, over: _Iteration) -> bool:
        length_s = self._marks.seconds(over.begin, over.end)
        if length_s is None:
            return False
        following = self._over[1] if len(self._over) > 1 else self._now
        begin_s = over.begin_s
        if begin_s is None:
            return True  # its place on the host's clock is lost with the one before it
        if following is not None and following.begin_s is None:
            following.begin_s = begin_s + length_s
        places = self._places_of(over, length_s)
        self._remember(places)
        windows = tuple(
            IdleWindow(site=site, kind=kind, begin_s=begin_s + begin, end_s=begin_s + end)
            for site, kind, begin, end in places
        )
        end_s, slices = begin_s + length_s, tuple(over.slices)
        self._records.append(
            IterationRecord(step=over.step, begin_s=begin_s, end_s=end_s, windows=windows, slices=slices)
        )
        return True

    def _places_of(self, over: _Iteration, length_s: float) -> list[tuple[str, Kind, float, float]]:
        """Site, kind, begin and end of each window, in seconds from the cut."""
        found: list[tuple[str, Kind, float, float]] = []
        for one in over.marked:
            begin = self._marks.seconds(over.begin, one.begin)
            end = length_s if one.end is None else self._marks.seconds(over.begin, one.end)
            if begin is not None and end is not None:
                found.append((one.site, one.kind, begin, max(begin, end)))
        return found

    def _remember(self, places: Iterable[tuple[str, Kind, float, float]]) -> None:
        for site, kind, begin, end in places:
            self._places[site, kind].append((begin, end))

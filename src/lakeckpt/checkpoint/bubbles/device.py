"""This module finds the idle windows of a GPU, whose host runs ahead of it: `DeviceGate`.

On a GPU the call of a stage returns when its kernels are queued, and a wait for a receive blocks the stream, not the
host. So the reports of the training thread (`begin`, `end`, `cut`) become marks on the device's own timeline
(`CudaMarks`: events). The marks are read when the device has passed them, one or two iterations later. The place of
each site's window in an iteration follows from the last iterations: from the upper quartile of its begins to the lower
quartile of its ends, counted from the cut. When the device reaches a cut, these windows are foreseen from that instant
on, and slices are admitted into them.

Only the copier's thread waits for the device. The training thread waits once, at the first cut, to relate the device's
time to the host's clock. The module starts no threads.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.bubbles.policy import MOST_OF_A_SITE, IdleWindow, Kind
from lakeckpt.checkpoint.bubbles.record import IterationRecord, MovedSlice

__all__ = ["CudaMarks", "DeviceGate"]

_KEEP = 8
_MOST_PENDING = 16
"""Iterations whose marks were not passed yet. More means that the device hangs, or that marks are lost."""


class CudaMarks:
    """Instants on the timeline of ``device``: events, on the stream that is current when they are recorded.

    The training thread calls `mark`. Any thread calls the other methods.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Mark the end of the work that is queued now. Returns at once; None while a graph is captured: the event would
        become a part of the graph."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, earlier: Any, later: Any) -> float | None:
        """Return the time between two marks, to half a microsecond; None while the GPU has not passed both."""
        with torch.cuda.device(self._device):  # a thread without a device would make a context on the first one
            if not (earlier.query() and later.query()):
                return None
            return float(earlier.elapsed_time(later)) / 1000

    def wait(self, mark: Any) -> None:
        """Block this thread until the GPU has passed ``mark``."""
        with torch.cuda.device(self._device):
            mark.synchronize()


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
    """The time at which the device passed ``begin``, by the host's clock."""


class DeviceGate(BubbleGate):
    """A `BubbleGate` for a device whose waits the host does not see. Its windows lie on the device's timeline."""

    def __init__(self, marks: CudaMarks, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock=clock)
        self._marks = marks
        self._now: _Iteration | None = None
        self._over: deque[_Iteration] = deque()
        self._places: dict[tuple[str, Kind], deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_KEEP))
        self._open: dict[Kind, _Marked] = {}

    # --- called by the training thread

    def cut(self, step: int) -> None:
        """End an iteration at the cut of ``step``, and begin the next one."""
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
            self._slices = self._now.slices
            self._policy.begin_iteration()
            self._look_back()

    def begin(self, site: str, kind: Kind = "bubble") -> None:
        """Report that from here on in its work the device waits at ``site``, or its link is free."""
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
        """Report that from here on in its work the device goes on, or its link is used."""
        if kind not in self._open or (mark := self._marks.mark()) is None:
            return
        with self._changed:
            self._shut(kind, mark)

    def _shut(self, kind: Kind, mark: Any) -> None:
        if kind in self._open:
            self._open.pop(kind).end = mark

    # --- called by the copier

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """See `BubbleGate`."""
        now = self._now
        if now is not None and not self._policy.foresees and not urgent.is_set():
            was_there = self._marks.seconds(now.begin, now.begin) is not None
            self._marks.wait(now.begin)
            with self._changed:
                if self._now is now:
                    self._foresee(now, was_there)
        super().admit(size_bytes, urgent)

    def _foresee(self, now: _Iteration, was_there: bool) -> None:
        """Foresee the windows of an iteration that the device has begun; ``was_there``: earlier than it was asked."""
        if was_there:
            self._look_back()  # the begin follows from the iteration before
        if not was_there or now.begin_s is None:
            now.begin_s = self.clock()
        self._look_back()
        self._policy.foresee(self._windows_from(now.begin_s))

    # --- the device's timeline

    def _windows_from(self, begin_s: float) -> list[IdleWindow]:
        """Return the windows to expect in an iteration that begins at ``begin_s``."""
        found = []
        for (site, kind), places in self._places.items():
            begins, ends = sorted(begin for begin, _ in places), sorted(end for _, end in places)
            begin, end = begins[(3 * len(begins)) // 4], ends[len(ends) // 4]
            if begin < end:
                found.append(IdleWindow(site=site, kind=kind, begin_s=begin_s + begin, end_s=begin_s + end))
        return sorted(found, key=lambda window: window.begin_s)

    def _look_back(self) -> None:
        """Read the marks of the iterations that the device has finished."""
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
            return True  # the iteration before was dropped, so the host's time of this begin is unknown
        end_s = begin_s + length_s
        if following is not None and following.begin_s is None:
            following.begin_s = end_s
        windows = self._windows_of(over, begin_s, end_s)
        for one in windows:
            self._places[one.site, one.kind].append((one.begin_s - begin_s, one.end_s - begin_s))
        self._records.append(
            IterationRecord(step=over.step, begin_s=begin_s, end_s=end_s, windows=windows, slices=tuple(over.slices))
        )
        return True

    def _windows_of(self, over: _Iteration, begin_s: float, end_s: float) -> tuple[IdleWindow, ...]:
        """Return the windows of an iteration over [begin_s, end_s), by the host's clock."""
        found = []
        for one in over.marked:
            begin = self._marks.seconds(over.begin, one.begin)
            end = end_s - begin_s if one.end is None else self._marks.seconds(over.begin, one.end)
            if begin is not None and end is not None:
                found.append(
                    IdleWindow(site=one.site, kind=one.kind, begin_s=begin_s + begin, end_s=begin_s + max(begin, end))
                )
        return tuple(found)

"""This module admits slices of a capture: `Gate` at once, `BubbleGate` into the idle windows of a rank.

The copier asks its gate before each slice, and reports to it afterwards. For a `BubbleGate`, the training thread, or a
hook that watches it, reports when it begins to wait and when it goes on. The copier is blocked until the policy admits
the slice or the fence has come. The gate keeps a record of the last iterations, for `Gate.waits`.

Gates start no threads, copy nothing, and never decide which bytes are copied. The methods that the training thread
calls take a few microseconds, and never wait for the copier. The module never imports torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lakeckpt.checkpoint.bubbles.policy import BubblePolicy, IdleWindow, Kind
from lakeckpt.checkpoint.bubbles.record import IterationRecord, MovedSlice, waits_of
from lakeckpt.checkpoint.format.parts import SiteWaits

__all__ = ["BubbleGate", "Gate"]

_KEEP_ITERATIONS = 8
_MOST = 4096
"""Limit on the windows and slices kept of one iteration: a loop without cuts must not fill the memory."""
_LOOK_AGAIN_S = 0.1


class Gate:
    """Admits every slice at once, and records nothing. The training thread calls `start`, `hurry` and `fenced`, which
    return at once.

    One copier at a time calls `admit` and `moved`, from its own thread. `moved` follows each `admit`, unless the
    capture is aborted: then `start` follows.
    """

    paces = False
    """True if slices may have to wait. If they never wait, slices from a device may move together."""

    def start(self, size_bytes: int, /) -> None:
        """Begin a capture, which moves ``size_bytes`` before its fence."""

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """Wait until a slice of ``size_bytes`` may move, or until ``urgent`` is set because the state will change.

        Must return soon after ``urgent`` is set, and must not raise.
        """

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Record that the slice admitted last was copied between two times of ``time.perf_counter``.

        With no bytes, it was not copied: other work took the time, or the fence took the slice.
        """

    def hurry(self) -> None:
        """Wake the copier that waits in `admit`. The fence calls it after ``urgent`` is set."""

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Record that the fence copied a slice itself, or queued its copy, because it was not admitted in time."""

    def waits(self) -> tuple[SiteWaits, ...]:
        """Return the last waits of this rank by site; none if the gate records nothing. Any thread may call it."""
        return ()


class BubbleGate(Gate):
    """A `Gate` that admits slices into idle windows of this rank.

    ``clock`` gives the times of windows and slices; default: `time.perf_counter`. `records` keeps the last
    ``iterations``. A fence that only sets ``urgent``, without calling `hurry`, is noticed after ``look_again_s``.
    """

    paces = True

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        policy: BubblePolicy | None = None,
        iterations: int = _KEEP_ITERATIONS,
        look_again_s: float = _LOOK_AGAIN_S,
    ) -> None:
        self.clock = clock
        self._policy = BubblePolicy() if policy is None else policy
        self._look_again_s = look_again_s
        self._changed = threading.Condition(threading.Lock())
        self._records: deque[IterationRecord] = deque(maxlen=iterations)
        self._step: int | None = None
        self._begin_s = 0.0
        self._windows: list[IdleWindow] = []
        self._slices: list[MovedSlice] = []
        self._urgent = False
        self._asked: int | None = None  # the size of the slice that waits in `admit`

    # --- called by the training thread

    def cut(self, step: int) -> None:
        """End an iteration at the cut of ``step``, and begin the next one."""
        with self._changed:
            now = self.clock()
            if self._step is not None:
                self._records.append(self._record(now))
            self._policy.begin_iteration()
            self._step, self._begin_s, self._windows, self._slices = step, now, [], []

    def begin(self, site: str, kind: Kind = "bubble") -> None:
        """Report that the rank begins to wait at ``site``, or that free time begins. This closes an open window of the
        same kind."""
        with self._changed:
            now = self.clock()
            self._keep(self._policy.close(kind, now))
            opened = self._policy.open(site, kind, now)
            if self._asked is not None and self._policy.may_hold(opened, self._asked):
                self._changed.notify()

    def end(self, kind: Kind = "bubble") -> None:
        """Report that the rank goes on. Does nothing if the rank did not wait."""
        with self._changed:
            self._keep(self._policy.close(kind, self.clock()))

    @contextmanager
    def idle(self, site: str) -> Iterator[None]:
        """Report that the rank waits at ``site`` while the block runs."""
        self.begin(site)
        try:
            yield
        finally:
            self.end()

    # --- called by the capture

    def start(self, size_bytes: int, /) -> None:
        """See `Gate`."""
        with self._changed:
            self._policy.begin_capture(size_bytes)

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """See `Gate`."""
        with self._changed:
            self._asked = size_bytes
            while not urgent.is_set():
                now = self.clock()
                at = self._policy.admits_at(size_bytes, now)
                if at is not None and at <= now:
                    self._policy.admitted(now)
                    break
                self._changed.wait(self._look_again_s if at is None else min(at - now, self._look_again_s))
            self._asked = None
            self._urgent = urgent.is_set()

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """See `Gate`."""
        with self._changed:
            self._policy.moved(size_bytes, begin_s, end_s)
            if size_bytes:
                self._keep_slice(size_bytes, begin_s, end_s, urgent=self._urgent)

    def hurry(self) -> None:
        """See `Gate`."""
        with self._changed:
            self._changed.notify_all()

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """See `Gate`."""
        with self._changed:
            self._policy.fenced(size_bytes)
            self._keep_slice(size_bytes, begin_s, end_s, urgent=True)

    # --- the record

    def records(self) -> tuple[IterationRecord, ...]:
        """Return the last iterations that are over, the oldest first."""
        with self._changed:
            return tuple(self._records)

    def waits(self) -> tuple[SiteWaits, ...]:
        """See `Gate`."""
        return waits_of(self.records())

    def _keep(self, window: IdleWindow | None) -> None:
        if window is not None and len(self._windows) < _MOST:
            self._windows.append(window)

    def _keep_slice(self, size_bytes: int, begin_s: float, end_s: float, *, urgent: bool) -> None:
        if len(self._slices) < _MOST:
            end_s = max(begin_s, end_s)
            self._slices.append(MovedSlice(size_bytes=size_bytes, begin_s=begin_s, end_s=end_s, urgent=urgent))

    def _record(self, now: float) -> IterationRecord:
        assert self._step is not None
        return IterationRecord(
            step=self._step,
            begin_s=self._begin_s,
            end_s=max(now, self._begin_s),
            windows=tuple(self._windows),
            slices=tuple(self._slices),
        )

"""May the next slice move now?  `BubbleGate`: the policy of bubbles, fed by the training thread, asked by the copier.

The training thread (or whoever watches it: `lakeckpt.checkpoint.bubbles.pipeline`, ``ddp``, ``fsdp``, ``data``) says
when it begins to wait and when it goes on. The copier asks before each slice and is kept until the policy admits it, or
until the fence has come. All that happened is kept for the last iterations, to be shown.

It starts no threads, copies nothing, and asks nobody but the policy. Imports without torch. What the training thread
calls takes a few microseconds: it never waits for the copier.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lakeckpt.core.bubble_policy import BubblePolicy, IdleWindow, Kind
from lakeckpt.core.bubble_record import IterationRecord, MovedSlice

__all__ = ["BubbleGate"]

_KEEP_ITERATIONS = 64
_MOST = 4096
"""Windows and slices of one iteration: a loop that never cuts must not fill the memory."""
_CLOSE = 0.5
"""Of a slice's time: what comes so soon after the one before it follows it closely."""
_LOOK_AGAIN_S = 0.1


class BubbleGate:
    """A `Gate` that admits slices into idle windows of this rank.

    ``clock`` is that of the windows and of the slices: `time.perf_counter`. ``iterations`` are kept in `records`. A
    fence that only sets ``urgent``, and does not `hurry`, is noticed after ``look_again_s``.
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
        self._border_s = 0.0  # when a window last began or ended
        self._urgent = False
        self._asked: int | None = None  # the size of the slice that waits in `admit`

    # --- what the training thread says

    def cut(self, step: int) -> None:
        """The cut of ``step``: one iteration is over, the next begins."""
        with self._changed:
            now = self.clock()
            if self._step is not None:
                self._records.append(self._record(now))
            self._policy.begin_iteration()
            self._step, self._begin_s, self._windows, self._slices = step, now, [], []

    def begin(self, site: str, kind: Kind = "bubble") -> None:
        """The rank begins to wait at ``site`` (or free time begins); what of this kind it waited for before is over."""
        with self._changed:
            now = self.clock()
            self._keep(self._policy.close(kind, now))
            opened = self._policy.open(site, kind, now)
            self._border_s = now
            if self._asked is not None and self._policy.may_hold(opened, self._asked):
                self._changed.notify()

    def end(self, kind: Kind = "bubble") -> None:
        """The rank goes on. Nothing where it did not wait."""
        with self._changed:
            self._border_s = self.clock()
            self._keep(self._policy.close(kind, self._border_s))

    @contextmanager
    def idle(self, site: str, kind: Kind = "bubble") -> Iterator[None]:
        """The rank waits at ``site`` while the block runs."""
        self.begin(site, kind)
        try:
            yield
        finally:
            self.end(kind)

    def predict(self, site: str, length_s: float) -> None:
        """The n-th window of an iteration at a site has the name ``"site n"``, from 0: how long it will probably be."""
        with self._changed:
            self._policy.predict(site, length_s)

    # --- what the capture says and asks

    def start(self, size_bytes: int, /) -> None:
        """A capture begins: so many bytes will be asked for before the fence."""
        with self._changed:
            self._policy.begin_capture(size_bytes)

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> bool:
        """Wait until a slice of ``size_bytes`` may move, or ``urgent`` is set. Returns whether to copy it gently."""
        with self._changed:
            self._asked = size_bytes
            gently = False
            while not urgent.is_set():
                now = self.clock()
                has_time = self._policy.has_time(size_bytes, now)
                at = self._policy.admits_at(size_bytes, now, gently=has_time)
                if at is not None and at <= now:
                    gently = has_time
                    self._policy.admitted(now)
                    break
                self._changed.wait(self._look_again_s if at is None else min(at - now, self._look_again_s))
            self._asked = None
            self._urgent = urgent.is_set()
            return gently

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /, *, gently: bool = False) -> None:
        """The slice that was admitted last was copied in [begin_s, end_s); no bytes: it was not."""
        with self._changed:
            self._policy.moved(size_bytes, begin_s, end_s, gently=gently)
            if size_bytes:
                self._keep_slice(size_bytes, begin_s, end_s, urgent=self._urgent)

    def hurry(self) -> None:
        """The fence has come and ``urgent`` is set: whoever waits in `admit` is to look."""
        with self._changed:
            self._changed.notify_all()

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """The fence copied a slice in [begin_s, end_s), which was not admitted in time."""
        with self._changed:
            self._policy.fenced(size_bytes)
            self._keep_slice(size_bytes, begin_s, end_s, urgent=True)

    # --- what is asked afterwards

    def records(self) -> tuple[IterationRecord, ...]:
        """The last iterations that are over, the oldest first."""
        with self._changed:
            return tuple(self._records)

    def _keep(self, window: IdleWindow | None) -> None:
        if window is not None and len(self._windows) < _MOST:
            self._windows.append(window)

    def _keep_slice(self, size_bytes: int, begin_s: float, end_s: float, *, urgent: bool) -> None:
        """Slices that follow each other closely, with no begin or end of a window since the first, are kept as one:
        what lay within a window is the same."""
        end_s = max(begin_s, end_s)
        last = self._slices[-1] if self._slices else None
        if (
            last is not None
            and last.urgent == urgent
            and last.begin_s >= self._border_s
            and 0 <= begin_s - last.end_s <= _CLOSE * (end_s - begin_s)
        ):
            size_bytes, begin_s = size_bytes + last.size_bytes, last.begin_s
            self._slices.pop()
        if len(self._slices) < _MOST:
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

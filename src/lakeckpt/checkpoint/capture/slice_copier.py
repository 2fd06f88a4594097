"""This module copies the slices of one cut: the copier claims them one by one, and the fence claims the remaining ones.

The copier claims a slice when its gate admits the slice. When the state is about to change, the training thread calls
`fence`. It claims all remaining slices, and returns when no live tensor will be read any more. It copies slices in host
memory itself, beside the copier. It queues the copies of slices of a device: the device waits for them, not the host.

A copy counts only if no tensor changed in place meanwhile, as torch counts changes. The counts are compared when the
last live slice has been read, or at the fence. A capture is dropped, never completed, if a tensor changed, or if an
exception interrupted a thread inside a slice.

Nothing is hashed here: a checksum takes the interpreter's lock a thousand times for each gigabyte, and the training
thread may wait for the lock each time. The module starts no threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture.fence import versions_of
from lakeckpt.checkpoint.capture.moves import Issued, Moves, wait_all

__all__ = ["SliceCopier"]


class SliceCopier:
    """The copies of one cut. ``slices[n]`` are the copies of slice n that are still to be made, from ``live``.

    ``early`` are copies that were queued already. The training thread calls `fence`, the copier calls `run` and
    `abort`.
    """

    def __init__(
        self,
        slices: Sequence[Moves],
        gate: Gate,
        *,
        live: Sequence[torch.Tensor],
        early: Sequence[Issued] = (),
    ) -> None:
        self.changed: frozenset[int] = frozenset()
        """The numbers in ``live`` of the tensors that changed between the cut and the fence, as far as torch counts
        changes."""
        self.moved_bytes = self.late_bytes = self.fenced_bytes = 0
        """The bytes that the copier has copied beside training, that it has copied while a fence waited, and that the
        fence has copied itself."""
        self.was_interrupted = False
        """True if an exception left a thread in the middle of a slice."""
        self._slices, self._early, self._gate = slices, early, gate
        self._live, self._versions = live, versions_of(live)
        self._urgent = threading.Event()
        self._changed = threading.Condition()
        self._open = deque(number for number, moves in enumerate(slices) if moves.size_bytes)
        self._claimed: dict[int, int] = {}  # slice → the thread that copies it, and has not issued it yet
        self._issued: dict[int, list[Issued]] = {}  # slice → its queued copies that are not known to be done
        self._sealed = False
        self.size_bytes = sum(moves.size_bytes for moves in slices)
        """All bytes that are copied."""

    # --- the training thread

    def fence(self) -> None:
        """Return when nothing live will be read any more, except by work of a device for which the device waits."""
        if self._sealed:
            return
        self._urgent.set()
        self._gate.hurry()
        with self._claims():
            while (number := self._claim()) is not None:
                moves, begin_s = self._slices[number], time.perf_counter()
                self._now_issued(number, moves.make())
                self.fenced_bytes += moves.size_bytes
                self._gate.fenced(moves.size_bytes, begin_s, time.perf_counter())
        with self._changed:
            while self._claimed:
                self._changed.wait()
            for issued in self._issued.values():
                for one in issued:
                    one.link.hold(one.ticket)
            self._seal()
            self._changed.notify_all()

    def _seal(self) -> None:
        if not self._sealed:
            now = versions_of(self._live)
            if now != self._versions:
                pairs = zip(now, self._versions, strict=True)
                self.changed = frozenset(number for number, (one, other) in enumerate(pairs) if one != other)
            self._sealed = True

    # --- both

    def _claim(self) -> int | None:
        with self._changed:
            if not self._open:
                return None
            number = self._open[0]
            self._claimed[number] = threading.get_ident()
            self._open.popleft()
            return number

    @contextmanager
    def _claims(self) -> Iterator[None]:
        """Release the slices that the block has claimed if an exception leaves it, so that no thread waits for them."""
        try:
            yield
        except BaseException:
            with self._changed:
                me = threading.get_ident()
                self._claimed = {number: thread for number, thread in self._claimed.items() if thread != me}
                self.was_interrupted = True
                self._changed.notify_all()
            raise

    def _now_issued(self, number: int, issued: list[Issued]) -> None:
        with self._changed:
            del self._claimed[number]
            if issued:
                self._issued[number] = issued
            self._changed.notify_all()

    # --- the copier

    def run(self) -> bool:
        """Copy all remaining slices. Returns False if the state changed: drop the capture."""
        wait_all(self._early)
        self._early = ()
        with self._claims():
            while (size_bytes := self._next_bytes()) is not None:
                self._gate.admit(size_bytes, self._urgent)
                is_late = self._urgent.is_set()
                begin = time.perf_counter()
                number = self._claim()
                if number is None:
                    self._gate.moved(0, begin, begin)
                    break  # the fence has taken it
                issued = self._slices[number].make()
                self._now_issued(number, issued)
                wait_all(issued)
                self._count(self._slices[number].size_bytes, is_late=is_late)
                self._gate.moved(self._slices[number].size_bytes, begin, time.perf_counter())
                with self._changed:
                    self._issued.pop(number, None)
                os.sched_yield()  # the thread that ends this bubble may wait for this core
        return self._finish()

    def _count(self, size_bytes: int, *, is_late: bool) -> None:
        if is_late:
            self.late_bytes += size_bytes
        else:
            self.moved_bytes += size_bytes

    def abort(self) -> None:
        """Abort the capture. Return when no thread reads or writes for it any more."""
        self._urgent.set()
        self._gate.hurry()
        with self._changed:
            self._open.clear()
            while self._claimed:
                self._changed.wait()
            issued, self._issued = self._issued, {}
            self._sealed = True
        for one in issued.values():
            wait_all(one)

    def _next_bytes(self) -> int | None:
        with self._changed:
            return self._slices[self._open[0]].size_bytes if self._open else None

    def _finish(self) -> bool:
        with self._changed:
            while self._claimed:  # by the fence
                self._changed.wait()
            issued = list(self._issued.values())
        for one in issued:
            wait_all(one)
        with self._changed:
            self._issued.clear()
            self._seal()
        return not self.changed and not self.was_interrupted

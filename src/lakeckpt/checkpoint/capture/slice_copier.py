"""This module copies the slices of one cut: the copier claims them one by one, and the fence claims the remaining ones.

The copier claims a slice when its gate admits the slice. When the state is about to change, the training thread calls
`fence`. It claims all remaining slices, and returns when no live tensor will be read any more. It copies slices in host
memory itself, beside the copier. It queues the copies of slices of a device: the device waits for them, not the host.

A copy counts only if no tensor changed in place meanwhile, as torch counts changes. The counts are compared when the
last live slice has been read, or at the fence. A capture is dropped, never completed, if a tensor changed, or if an
exception interrupted a thread inside a slice.

The copier takes the checksum of each slice itself. Where many bytes come from a device, the agent takes the checksums
(`lakeckpt.checkpoint.arena.checksummer`): a checksum takes the interpreter's lock a thousand times for each gigabyte,
and the training thread may wait for the lock each time. If the agent ends meanwhile, the capture is dropped. The module
starts no threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture.fence import versions_of
from lakeckpt.checkpoint.capture.moves import Issued, Moves, wait_all
from lakeckpt.errors import AgentError

__all__ = ["Checksums", "SliceCopier"]


class Checksums:
    """The checksums of one capture. Only the copier calls it.

    ``agent`` takes the checksums of bytes from a device; None: the copier does. `take` and `wait` raise `AgentError` if
    the agent does not answer any more.
    """

    def __init__(self, filling: Filling, agent: Checksummer | None) -> None:
        self._filling, self._agent = filling, agent
        self._asked: deque[int] = deque()

    def take(self, numbers: Sequence[int], *, from_device: bool) -> None:
        """Take the checksums of slices that will not change any more. `wait` returns when all of them are there."""
        if self._agent is None or not from_device:
            for number in numbers:
                self._filling.filled(number)
            return
        self._agent.ask([self._filling.bounds(number) for number in numbers])
        self._asked += numbers

    def wait(self) -> None:
        """Return when all checksums are there."""
        while self._asked and self._agent is not None:
            self._filling.summed(self._asked[0], self._agent.take())
            self._asked.popleft()

    def abort(self) -> None:
        """Return when the agent does not read the slices any more. Its answers for the next capture follow these."""
        with contextlib.suppress(AgentError):
            while self._asked and self._agent is not None and not self._agent.is_lost:
                self._agent.take()
                self._asked.popleft()


class SliceCopier:
    """The copies of one cut. ``slices[n]`` are the copies of slice n that are still to be made, from ``live``.

    ``early`` are copies that were queued already. The training thread calls `fence`, the copier calls `run` and
    `abort`.
    """

    def __init__(
        self,
        checksums: Checksums,
        slices: Sequence[Moves],
        gate: Gate,
        *,
        live: Sequence[torch.Tensor],
        early: Sequence[Issued] = (),
    ) -> None:
        self.changed: frozenset[int] = frozenset()
        """Which of ``live`` changed between the cut and the fence, as far as torch counts changes."""
        self.moved_bytes = self.late_bytes = self.fenced_bytes = 0
        """The bytes that the copier has copied beside training, that it has copied while a fence waited, and that the
        fence has copied itself."""
        self.was_interrupted = False
        """Whether an exception left a thread in the middle of a slice."""
        self._checksums, self._slices, self._early, self._gate = checksums, slices, early, gate
        self._live, self._versions = live, versions_of(live)
        self._urgent = threading.Event()
        self._changed = threading.Condition()
        self._open = deque(number for number, moves in enumerate(slices) if moves.size_bytes)
        self._copied = deque(number for number, moves in enumerate(slices) if not moves.size_bytes)
        self._pending = Counter(touched for moves in slices for touched in moves.touches)
        self._claimed: dict[int, int] = {}  # slice → the thread that copies it, and has not issued it yet
        self._issued: dict[int, list[Issued]] = {}  # slice → its queued copies that are not known to be done
        self._sealed = False

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
            else:
                self._copied.append(number)
            self._changed.notify_all()

    # --- the copier

    def run(self) -> bool:
        """Copy all remaining slices, and take their checksums. Returns False if the state changed: drop the capture."""
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
                # The processor takes the checksum and makes copies in host memory: such a slice ends with both. Slices
                # of a link get their checksums while the next slice is on its way.
                self._sum_copied()
                wait_all(issued)
                self._count(self._slices[number].size_bytes, is_late=is_late)
                self._gate.moved(self._slices[number].size_bytes, begin, time.perf_counter())
                self._came(number)
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
        try:
            self._checksums.abort()
        finally:
            for one in issued.values():
                wait_all(one)

    def _next_bytes(self) -> int | None:
        with self._changed:
            return self._slices[self._open[0]].size_bytes if self._open else None

    def _sum_copied(self) -> None:
        """Take the checksums of the slices that are known to be in host memory."""
        while True:
            with self._changed:
                if not self._copied:
                    return
                number = self._copied.popleft()
            self._arrived(number)

    def _sum_all(self) -> None:
        """Take the checksums of all slices that were copied or issued."""
        self._sum_copied()
        while True:
            with self._changed:
                if not self._issued:
                    break
                number, issued = next(iter(self._issued.items()))
            wait_all(issued)
            self._came(number)
            self._sum_copied()

    def _came(self, number: int) -> None:
        """Record that the copies that were issued for a slice are done."""
        with self._changed:
            if self._issued.pop(number, None) is not None:
                self._copied.append(number)

    def _arrived(self, number: int) -> None:
        """Take the checksums of the slices that are whole, now that the copies of slice ``number`` are made."""
        whole = []
        for touched in self._slices[number].touches:
            self._pending[touched] -= 1
            if not self._pending[touched]:
                whole.append(touched)
        self._checksums.take(whole, from_device=self._slices[number].is_linked)

    def _finish(self) -> bool:
        with self._changed:
            while self._claimed:  # by the fence
                self._changed.wait()
        self._sum_all()
        with self._changed:
            self._seal()
        self._checksums.wait()
        return not self.changed and not self.was_interrupted

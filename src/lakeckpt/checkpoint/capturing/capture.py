"""Who copies which slice of one cut, and when is that over?  One `Capture` from its cut to its complete generation.

The copier claims slices one at a time, as its gate admits them. When the state is about to change, the training thread
calls `fence`: it claims all that is left, and returns when nothing live is left to be read. In host memory it copies
what is left itself, beside the copier. What lies on a device is first copied on the device, up to ``scratch_bytes``,
and moved from there at leisure; the rest is queued, and the device, not the host, waits for it.

What was copied counts only if no tensor was changed in place meanwhile, as torch counts changes; this is looked at when
the last live slice has been read, or at the fence. A capture that was changed under way is given up, never completed.
So is one that a thread leaves in the midst of a slice, by an exception that comes from anywhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from lakeckpt.checkpoint.arena.filling import Run
from lakeckpt.checkpoint.capturing.hooks import versions_of
from lakeckpt.checkpoint.capturing.moves import Issued, Moves, wait_all
from lakeckpt.checkpoint.gate import Gate

__all__ = ["Capture", "Fills"]


class Fills(Protocol):
    """Sees slices filled, of which all bytes have come. Called by the copier."""

    def fill(self, number: int, /) -> None:
        """Fill a slice of which the last bytes came from host memory."""
        ...

    def fill_beside(self, numbers: Sequence[int], /) -> None:
        """Have slices filled of which the last bytes came from a device: it is faster than one thread's checksums."""
        ...

    def wait(self) -> None:
        """Return when all are filled."""
        ...

    def give_up(self) -> None:
        """Return when nobody fills any more."""
        ...


class Capture:
    """The capture of one cut. ``slices[n]`` are the copies of slice n that are still to be made, from ``live``.

    ``fills`` is told when slice n is as it shall be. ``early`` are copies that were queued already.
    ``gently(n, runs)`` copies the runs of slice n, after all else that is in it, where there is time for it.
    `fence` is called by the training thread, `run` and `give_up` by the copier.
    """

    def __init__(
        self,
        fills: Fills,
        slices: Sequence[Moves],
        gate: Gate,
        *,
        live: Sequence[torch.Tensor],
        early: Sequence[Issued] = (),
        gently: Callable[[int, Sequence[Run]], None] | None = None,
        scratch_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.fenced_bytes = 0
        """How many bytes were read, or queued, since the fence had come."""
        self.fence_s = 0.0
        self.changed: frozenset[int] = frozenset()
        """Which of ``live`` were changed before they were sealed, as far as torch counts changes."""
        self._fills, self._slices, self._early, self._gate = fills, slices, early, gate
        self._live, self._versions = live, versions_of(live)
        self._gently = gently
        self._scratch_bytes, self._clock = scratch_bytes, clock
        self._urgent = threading.Event()
        self._changed = threading.Condition()
        self._open = deque(number for number, moves in enumerate(slices) if moves.size_bytes)
        self._copied = deque(number for number, moves in enumerate(slices) if not moves.size_bytes)
        self._pending = Counter(touched for moves in slices for touched in moves.touches)
        self._kept: deque[tuple[int, Moves]] = deque()  # to be moved from scratch
        self._claimed: dict[int, int] = {}  # slice → the thread that is at it, and has not issued it yet
        self._issued: dict[int, list[Issued]] = {}  # slice → what was queued for it and is not known to be done
        self._sealed = False
        self._intact = True

    # --- the training thread

    def fence(self) -> None:
        """Return when nothing live will be read any more by work that is not ordered before what follows."""
        if self._sealed:
            return
        begin = self._clock()
        self._urgent.set()
        self._gate.hurry()
        scratch_bytes = self._scratch_bytes
        with self._claims():
            while (number := self._claim()) is not None:
                moves, begin_s = self._slices[number], self._clock()
                if (kept := self._kept_of(moves, scratch_bytes)) is not None:
                    scratch_bytes -= moves.size_bytes
                    with self._changed:
                        self._kept.append((number, kept))
                        del self._claimed[number]
                else:
                    scratch_bytes = 0
                    self._now_issued(number, moves.make())
                self._gate.fenced(moves.size_bytes, begin_s, self._clock())
        with self._changed:
            while self._claimed:
                self._changed.wait()
            for issued in self._issued.values():
                for one in issued:
                    one.link.hold(one.ticket)
            self._seal()
            self._changed.notify_all()
        self.fence_s += self._clock() - begin

    def void(self) -> None:
        """The state may change without a fence: what is not sealed by now does not count."""
        with self._changed:
            self._intact &= self._sealed

    @staticmethod
    def _kept_of(moves: Moves, scratch_bytes: int) -> Moves | None:
        """A copy on the device of what ``moves`` copies; None where there is no memory for it, or it is in none's."""
        if not moves.is_linked or moves.size_bytes > scratch_bytes:
            return None
        try:
            return moves.kept()
        except torch.OutOfMemoryError:  # training needs it: what is queued from where it lies needs none
            return None

    def _seal(self) -> None:
        if not self._sealed:
            now = versions_of(self._live)
            if now != self._versions:
                pairs = zip(now, self._versions, strict=True)
                self.changed = frozenset(number for number, (one, other) in enumerate(pairs) if one != other)
                self._intact = False
            self._sealed = True

    # --- both

    def _claim(self) -> int | None:
        with self._changed:
            if not self._open:
                return None
            number = self._open[0]
            self._claimed[number] = threading.get_ident()
            self._open.popleft()
            if self._urgent.is_set():
                self.fenced_bytes += self._slices[number].size_bytes
            return number

    @contextmanager
    def _claims(self) -> Iterator[None]:
        """In the block this thread claims slices. Left by an exception, it keeps nobody waiting for them."""
        try:
            yield
        except BaseException:
            with self._changed:
                me = threading.get_ident()
                self._claimed = {number: thread for number, thread in self._claimed.items() if thread != me}
                self._intact = False
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

    def run(self, first: Callable[[], None] | None = None) -> bool:
        """Copy what is left, and see all slices filled. False where the state was changed meanwhile: give it up.

        ``first`` is called once, when the first slice was admitted: what takes time, too. Then the gate is asked again,
        since it may have taken the time of that slice. Once the fence has come it is left until all slices were copied.
        """
        wait_all(self._early)
        self._early = ()
        with self._claims():
            while (size_bytes := self._next_bytes()) is not None:
                gently = self._gate.admit(size_bytes, self._urgent)
                begin = self._clock()
                if first is not None and not self._urgent.is_set():
                    first()
                    first = None
                    self._gate.moved(0, begin, self._clock(), gently=False)
                    continue
                number = self._claim()
                if number is None:
                    self._gate.moved(0, begin, begin, gently=False)
                    break  # the fence has come, and taken it
                gently = gently and self._may_be_gentle(number)
                issued = self._made(number, gently=gently)
                self._now_issued(number, issued)
                # In host memory a slice is over with its checksum, the processor's work as the copy was. What a link
                # brings has its own while the next one is on its way.
                self._fill_copied()
                wait_all(issued)
                self._gate.moved(self._slices[number].size_bytes, begin, self._clock(), gently=gently)
                self._came(number)
                os.sched_yield()  # what brings the end of this bubble may wait for this core, behind us
        if first is not None:
            first()
        return self._finish()

    def _may_be_gentle(self, number: int) -> bool:
        """Whether nothing of a slice comes any other way, or later: what is copied gently is digested at once."""
        moves = self._slices[number]  # its own slice comes first in what it touches
        return self._gently is not None and not moves.is_linked and self._pending[moves.touches[0]] == 1

    def _made(self, number: int, *, gently: bool) -> list[Issued]:
        """Make the copies of a slice."""
        moves = self._slices[number]
        if not gently or self._gently is None:
            return moves.make()
        issued = moves.make(runs=False)
        self._gently(moves.touches[0], moves.runs)
        return issued

    def give_up(self) -> None:
        """Leave the rest as it is: return when nobody reads or writes for this capture any more."""
        self._urgent.set()
        self._gate.hurry()
        with self._changed:
            self._open.clear()
            self._kept.clear()
            while self._claimed:
                self._changed.wait()
            issued, self._issued = self._issued, {}
            self._intact, self._sealed = False, True
        try:
            self._fills.give_up()
        finally:
            for one in issued.values():
                wait_all(one)

    def _next_bytes(self) -> int | None:
        with self._changed:
            return self._slices[self._open[0]].size_bytes if self._open else None

    def _fill_copied(self) -> None:
        """Take the checksums of what is known to be in host memory."""
        while True:
            with self._changed:
                if not self._copied:
                    return
                number = self._copied.popleft()
            self._arrived(number)

    def _fill(self) -> None:
        """Take the checksums of all that was copied or issued."""
        self._fill_copied()
        while True:
            with self._changed:
                if not self._issued:
                    break
                number, issued = next(iter(self._issued.items()))
            wait_all(issued)
            self._came(number)
            self._fill_copied()

    def _came(self, number: int) -> None:
        """The copies that were issued for a slice are done."""
        with self._changed:
            if self._issued.pop(number, None) is not None:
                self._copied.append(number)

    def _arrived(self, number: int) -> None:
        """The copies of slice ``number`` are made: those slices are filled of which nothing is missing."""
        whole = []
        for touched in self._slices[number].touches:
            self._pending[touched] -= 1
            if not self._pending[touched]:
                whole.append(touched)
        if self._slices[number].is_linked:
            self._fills.fill_beside(whole)
        else:
            for one in whole:
                self._fills.fill(one)

    def _finish(self) -> bool:
        with self._changed:
            while self._claimed:  # by the fence
                self._changed.wait()
        self._fill()
        with self._changed:
            self._seal()
        while self._kept:
            number, moves = self._kept.popleft()
            wait_all(moves.make())
            self._arrived(number)
        self._fills.wait()
        return self._intact

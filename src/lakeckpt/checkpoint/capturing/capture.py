"""Who copies which slice of one cut, and when is that over?  One `Capture` from its cut to its complete generation.

The copier claims slices one at a time, as its gate admits them. When the state is about to change, the training thread
calls `fence`: it claims all that is left, and returns when nothing live is left to be read. In host memory it copies
what is left itself, beside the copier. What lies on a device is first copied on the device, up to ``scratch_bytes``,
and moved from there at leisure; the rest is queued, and the device, not the host, waits for it.

What was copied counts only if no tensor was changed in place meanwhile, as torch counts changes; this is looked at when
the last live slice has been read, or at the fence. A capture that was changed under way is given up, never completed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lakeckpt.checkpoint.capturing.hooks import versions_of
from lakeckpt.checkpoint.capturing.moves import Issued, Moves, wait_all
from lakeckpt.checkpoint.gate import Gate

__all__ = ["Capture"]

_T = TypeVar("_T")


class Capture:
    """The capture of one cut. ``slices[n]`` are the copies of slice n that are still to be made, from ``live``.

    ``filled(n)`` is called by the copier when slice n is as it shall be. ``early`` are copies that were queued already.
    `fence` is called by the training thread, `run` and `give_up` by the copier.
    """

    def __init__(
        self,
        filled: Callable[[int], None],
        slices: Sequence[Moves],
        gate: Gate,
        *,
        live: Sequence[torch.Tensor],
        early: Sequence[Issued] = (),
        scratch_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.fenced_bytes = 0
        """How many bytes were read, or queued, since the fence had come."""
        self.fence_s = 0.0
        self._filled, self._slices, self._early, self._gate = filled, slices, early, gate
        self._live, self._versions = live, versions_of(live)
        self._scratch_bytes, self._clock = scratch_bytes, clock
        self._urgent = threading.Event()
        self._changed = threading.Condition()
        self._open = deque(number for number, moves in enumerate(slices) if moves.size_bytes)
        self._copied = deque(number for number, moves in enumerate(slices) if not moves.size_bytes)
        self._pending = Counter(touched for moves in slices for touched in moves.touches)
        self._kept: deque[tuple[int, Moves]] = deque()  # to be moved from scratch
        self._claimed = 0  # by the copier, and not issued yet
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
        while (number := self._claim()) is not None:
            moves, begin_s = self._slices[number], self._clock()
            if moves.is_linked and moves.size_bytes <= scratch_bytes:
                scratch_bytes -= moves.size_bytes
                kept = self._guarded(moves.kept)
                with self._changed:
                    self._kept.append((number, kept))
                    self._claimed -= 1
            else:
                self._now_issued(number, self._guarded(moves.make))
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

    def _seal(self) -> None:
        if not self._sealed:
            self._intact &= versions_of(self._live) == self._versions
            self._sealed = True

    # --- both

    def _claim(self) -> int | None:
        with self._changed:
            if not self._open:
                return None
            self._claimed += 1
            number = self._open.popleft()
            if self._urgent.is_set():
                self.fenced_bytes += self._slices[number].size_bytes
            return number

    def _guarded(self, make: Callable[[], _T]) -> _T:
        """``make()`` for a slice that was claimed; where it fails, nobody waits for the claim."""
        try:
            return make()
        except BaseException:
            with self._changed:
                self._claimed -= 1
                self._intact = False
                self._changed.notify_all()
            raise

    def _now_issued(self, number: int, issued: list[Issued]) -> None:
        with self._changed:
            self._claimed -= 1
            if issued:
                self._issued[number] = issued
            else:
                self._copied.append(number)
            self._changed.notify_all()

    # --- the copier

    def run(self) -> bool:
        """Copy what is left, and see all slices filled. False where the state was changed meanwhile: give it up."""
        wait_all(self._early)
        while (size_bytes := self._next_bytes()) is not None:
            self._gate.admit(size_bytes, self._urgent)
            number = self._claim()
            if number is None:
                break  # the fence has come, and taken it
            begin = self._clock()
            issued = self._guarded(self._slices[number].make)
            self._now_issued(number, issued)
            if not issued:
                self._fill()  # the processor's work, as the copy was: a slice is over with its checksum
            wait_all(issued)
            self._gate.moved(self._slices[number].size_bytes, begin, self._clock())
            self._fill()
        return self._finish()

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
        for one in issued.values():
            wait_all(one)

    def _next_bytes(self) -> int | None:
        with self._changed:
            return self._slices[self._open[0]].size_bytes if self._open else None

    def _fill(self) -> None:
        """Take the checksums of what is known to be in host memory."""
        while True:
            with self._changed:
                if self._copied:
                    number, issued = self._copied.popleft(), list[Issued]()
                elif self._issued:
                    number, issued = next(iter(self._issued.items()))
                else:
                    return
            wait_all(issued)
            with self._changed:
                self._issued.pop(number, None)
            self._arrived(number)

    def _arrived(self, number: int) -> None:
        """The copies of slice ``number`` are made: those slices are filled of which nothing is missing."""
        for touched in self._slices[number].touches:
            self._pending[touched] -= 1
            if not self._pending[touched]:
                self._filled(touched)

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
        return self._intact

"""Is a slice as it shall be, now that its bytes have come?  Checksums, here or beside, and a look at what is still.

Of what the processor copied the copier takes the checksums itself: that is work of the processor, as the copy was. A
device brings bytes faster than one thread sums them, so those are summed beside: by helpers of the copier, and where
they are many by a process of its own (`lakeckpt.checkpoint.arena.checksummer`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

import xxhash

from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.capturing.copier import Copier
from lakeckpt.checkpoint.capturing.doubts import Doubts
from lakeckpt.checkpoint.capturing.plan import CapturePlan
from lakeckpt.errors import ArenaError

__all__ = ["Filler", "StillDigests"]

StillDigests = dict[tuple[str, int], bytes]
"""(key, where it begins) → the digest of a piece of what does not change."""


class Filler:
    """Of one capture: fills its slices. Called by the copier alone.

    ``digests`` are those of the pieces that are still, as they were found first; ``lost`` is called with a process for
    checksums that cannot be used any more, and why.
    """

    def __init__(
        self,
        plan: CapturePlan,
        filling: Filling,
        *,
        digests: StillDigests,
        doubts: Doubts,
        copier: Copier,
        checksummer: Checksummer | None,
        lost: Callable[[Checksummer, str], None],
    ) -> None:
        self._plan, self._filling = plan, filling
        self._digests, self._doubts = digests, doubts
        self._copier, self._checksummer, self._lost = copier, checksummer, lost
        self._futures: list[Future[None]] = []
        self._asked: deque[int] = deque()

    def fill(self, number: int) -> None:
        """Fill slice ``number``, on this thread."""
        self._look(number)
        self._filling.filled(number)

    def fill_beside(self, numbers: Sequence[int]) -> None:
        """Have slices filled by somebody else. They are when `wait` has returned."""
        if self._checksummer is None:
            self._futures += [self._copier.beside(lambda number=number: self.fill(number)) for number in numbers]  # type: ignore[misc]
            return
        for number in numbers:
            if any(piece.key in self._plan.parted.still for piece in self._plan.slices.slices[number]):
                self._futures.append(self._copier.beside(lambda number=number: self._look(number)))  # type: ignore[misc]
        self._asked += numbers
        with self._or_here():
            self._checksummer.ask([self._filling.bounds(number) for number in numbers])

    def wait(self) -> None:
        """Return when all is filled that was to be beside."""
        if self._checksummer is not None:
            with self._or_here():
                while self._asked:
                    self._filling.summed(self._asked[0], self._checksummer.take())
                    self._asked.popleft()
        for one in self._futures:
            one.result()

    def give_up(self) -> None:
        """Return when nobody is at it any more."""
        wait(self._futures)
        if self._checksummer is not None:
            with self._or_here():
                while self._asked:  # the next capture's answers come behind these
                    self._checksummer.take()
                    self._asked.popleft()

    @contextlib.contextmanager
    def _or_here(self) -> Iterator[None]:
        """Where the process has ended in the block, what it was asked for is filled by this thread."""
        try:
            yield
        except ArenaError as error:
            assert self._checksummer is not None
            self._lost(self._checksummer, str(error))
            self._checksummer = None
            while self._asked:
                self._filling.filled(self._asked.popleft())

    def _look(self, number: int) -> None:
        """Compare what should be still."""
        for piece in self._plan.slices.slices[number]:
            if piece.key not in self._plan.parted.still:
                continue
            found = xxhash.xxh3_128_digest(self._filling.data[piece.at : piece.at + piece.stop - piece.start])
            if self._digests.setdefault((piece.key, piece.start), found) != found:
                self._doubts.moved(piece.key)

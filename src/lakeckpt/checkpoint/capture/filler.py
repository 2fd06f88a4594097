"""This module takes the checksums of slices whose bytes have arrived.

The copier itself takes the checksums of slices that it copied in host memory. Bytes arrive from a device faster than
one thread takes checksums. So helpers of the copier take the checksums of such slices, or a process does so
(`lakeckpt.checkpoint.arena.checksummer`) if the state is large. The module starts no threads.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.capture.job import Copier
from lakeckpt.errors import ArenaError

__all__ = ["Filler"]


class Filler:
    """Fills the slices of one capture. Only the copier calls it.

    If the process for checksums cannot be used any more, ``lost`` is called with it and the reason.
    """

    def __init__(
        self,
        filling: Filling,
        *,
        copier: Copier,
        checksummer: Checksummer | None,
        lost: Callable[[Checksummer, str], None],
    ) -> None:
        self._filling = filling
        self._copier, self._checksummer, self._lost = copier, checksummer, lost
        self._futures: list[Future[None]] = []
        self._asked: deque[int] = deque()

    def fill(self, number: int) -> None:
        """Fill slice ``number``, on this thread."""
        self._filling.filled(number)

    def fill_beside(self, numbers: Sequence[int]) -> None:
        """Let helpers or the process fill the slices. They are filled when `wait` has returned."""
        if self._checksummer is None:
            self._futures += [self._copier.beside(lambda number=number: self.fill(number)) for number in numbers]  # type: ignore[misc]
            return
        self._asked += numbers
        with self._or_here():
            self._checksummer.ask([self._filling.bounds(number) for number in numbers])

    def wait(self) -> None:
        """Return when all slices of `fill_beside` are filled."""
        if self._checksummer is not None:
            with self._or_here():
                while self._asked:
                    self._filling.summed(self._asked[0], self._checksummer.take())
                    self._asked.popleft()
        for one in self._futures:
            one.result()

    def give_up(self) -> None:
        """Abort. Return when no helper or process works on the slices any more."""
        wait(self._futures)
        if self._checksummer is not None:
            with self._or_here():
                while self._asked:  # the answers for the next capture follow these
                    self._checksummer.take()
                    self._asked.popleft()

    @contextlib.contextmanager
    def _or_here(self) -> Iterator[None]:
        """If the process ends inside the block, fill the slices that it was asked for on this thread."""
        try:
            yield
        except ArenaError as error:
            assert self._checksummer is not None
            self._lost(self._checksummer, str(error))
            self._checksummer = None
            while self._asked:
                self._filling.filled(self._asked.popleft())

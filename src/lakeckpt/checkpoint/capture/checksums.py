"""This module takes the checksums of slices whose bytes have arrived.

The copier takes the checksum of each slice itself. Where many bytes come from a device, the agent takes the checksums
(`lakeckpt.checkpoint.arena.checksummer`): a checksum takes the interpreter's lock a thousand times for each gigabyte,
and the thread that trains may wait for the lock each time. If the agent ends, the copier takes the rest. The module
starts no threads.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.errors import ArenaError

__all__ = ["Checksums"]


class Checksums:
    """The checksums of one capture. Only the copier calls it.

    ``agent`` takes the checksums of bytes from a device; None: the copier does. ``lost`` is called with the reason
    when the agent does not answer any more.
    """

    def __init__(self, filling: Filling, agent: Checksummer | None, lost: Callable[[str], None]) -> None:
        self._filling, self._agent, self._lost = filling, agent, lost
        self._asked: deque[int] = deque()

    def take(self, numbers: Sequence[int], *, from_device: bool) -> None:
        """Take the checksums of slices that will not change any more. `wait` returns when all of them are there."""
        if self._agent is None or not from_device:
            for number in numbers:
                self._filling.filled(number)
            return
        self._asked += numbers
        with self._or_here():
            self._agent.ask([self._filling.bounds(number) for number in numbers])

    def wait(self) -> None:
        """Return when all checksums are there."""
        with self._or_here():
            while self._asked and self._agent is not None:
                self._filling.summed(self._asked[0], self._agent.take())
                self._asked.popleft()

    def abort(self) -> None:
        """Return when the agent does not read the slices any more. Its answers for the next capture follow these."""
        with self._or_here():
            while self._asked and self._agent is not None:
                self._agent.take()
                self._asked.popleft()

    @contextlib.contextmanager
    def _or_here(self) -> Iterator[None]:
        """If the agent ends inside the block, take the checksums that it was asked for on this thread."""
        try:
            yield
        except ArenaError as error:
            self._agent = None
            self._lost(str(error))
            while self._asked:
                self._filling.filled(self._asked.popleft())

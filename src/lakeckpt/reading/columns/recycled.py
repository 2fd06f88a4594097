"""This module makes arrays in memory that served earlier windows.

New pages from the system cost as much as gathering into them. So the memory of a window's columns comes back when the
last view of a column has died, and is used for a later column of about the same size. `Recycled.limit_bytes` bounds
the memory that waits to be used again; the memory that has waited longest is released first. All readers of a process
share one `Recycled` (`recycled_memory`). After `Recycled.rest`, memory that comes back is released at once, until an
array is made again.

The memory is Arrow's. Threads may share a `Recycled`. A view may die in any thread, also in the garbage collector: that
takes no lock.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.reading.columns.forms import view
from lakeckpt.reading.shared import Shared

__all__ = ["Recycled", "recycled_memory"]

Array: TypeAlias = npt.NDArray[Any]
_LEAST = 64
"""Bytes below which an array is allocated each time."""


class _Use:
    """The use of a block, until the last view of the block dies."""

    __slots__ = ("_block", "_owner")

    def __init__(self, block: pa.Buffer, owner: Recycled) -> None:
        self._block, self._owner = block, weakref.ref(owner)

    def __del__(self) -> None:
        if (owner := self._owner()) is not None and not owner.is_resting:
            owner.returned.put(self._block)


class Recycled:
    """Makes arrays; up to ``limit_bytes`` of the memory of earlier arrays wait to be used again."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.largest_bytes = 0
        """The largest window that was decoded since the last `rest`, as its decoder says."""
        self.is_resting = False
        self.returned: queue.SimpleQueue[pa.Buffer] = queue.SimpleQueue()
        self._waiting: list[pa.Buffer] = []  # the oldest first
        self._lock = threading.Lock()

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a writable array of unspecified values. Its memory is the caller's as long as a view of it lives."""
        self.is_resting = False
        count = int(np.prod(shape))
        size = count * dtype.itemsize
        if size < _LEAST:
            return np.empty(shape, dtype)
        rounded = -(-size // (step := 1 << (size.bit_length() - 4))) * step
        block = self._take(rounded) or pa.allocate_buffer(rounded)
        mine = pa.foreign_buffer(block.address, size, base=_Use(block, self))
        return view(mine, dtype, 0, count).reshape(shape)

    def rest(self) -> None:
        """Release the memory beyond the limit, and the memory that comes back from now on: nobody reads at present.

        The garbage collector may call it in a thread that has the lock; then `new` releases the memory.
        """
        self.is_resting = True
        if self._lock.acquire(blocking=False):
            try:
                self._trim()
            finally:
                self._lock.release()
        self.largest_bytes = 0

    def _take(self, size: int) -> pa.Buffer | None:
        """Return the block of ``size`` bytes that came back last, if any. Release the oldest beyond the limit."""
        with self._lock:
            self._gather()
            fitting = [place for place, block in enumerate(self._waiting) if block.size == size]
            found = self._waiting.pop(fitting[-1]) if fitting else None
            self._trim()
            return found

    def _gather(self) -> None:
        while not self.returned.empty():
            self._waiting.append(self.returned.get())

    def _trim(self) -> None:
        """Release the memory that has waited longest beyond the limit. The caller has the lock."""
        self._gather()
        excess = sum(block.size for block in self._waiting) - self.limit_bytes
        while excess > 0:
            excess -= self._waiting.pop(0).size


_shared: Shared[None, Recycled] = Shared(lambda _: Recycled())


def recycled_memory() -> Recycled:
    """Return the memory that the readers of this process share; each refers to it as long as it reads."""
    return _shared.get(None)

"""Where do gathered columns lie?  In memory that served an earlier window, once the loop has let go of that.

New pages from the system cost as much as gathering into them, and in a virtual machine whose host took them back ten
times that. So what a window's columns lay in comes back when the last view of a column has died, and is used for the
next column that it is not much too large for. What waits to be used is bounded: what has waited longest goes first.

Memory is Arrow's. Threads may share it: coming back is a single step of the interpreter, wherever a view dies.
"""

from __future__ import annotations

import queue
import weakref
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.lake.deferring import DeferringLock
from lakeckpt.reading.arrays import view

__all__ = ["Recycled"]

Array: TypeAlias = npt.NDArray[Any]
_LEAST = 64
"""Bytes below which an array is allocated each time."""


class _Returned:
    """What came back and was not looked at yet."""

    def __init__(self) -> None:
        self.blocks: queue.SimpleQueue[pa.Buffer] = queue.SimpleQueue()


class _Use:
    """The use of a block, until the last view of it dies."""

    __slots__ = ("_block", "_returned")

    def __init__(self, block: pa.Buffer, returned: _Returned) -> None:
        self._block = block
        self._returned = weakref.ref(returned)

    def __del__(self) -> None:
        returned = self._returned()
        if returned is not None:
            returned.blocks.put(self._block)


class Recycled:
    """Makes arrays; ``limit_bytes`` of what they lay in may wait to be used again."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._lock = DeferringLock()
        self._returned = _Returned()
        self._waiting: list[pa.Buffer] = []

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of anything, writable, whose memory is the caller's as long as a view of it lives."""
        count = int(np.prod(shape))
        size = count * dtype.itemsize
        if size < _LEAST:
            return np.empty(shape, dtype)
        rounded = -(-size // (step := 1 << (size.bit_length() - 4))) * step
        with self._lock:
            returned, block = self._returned, self._taken(rounded)
        if block is None:
            block = pa.allocate_buffer(rounded)
        mine = pa.foreign_buffer(block.address, size, base=_Use(block, returned))
        return view(mine, dtype, 0, count).reshape(shape)

    def forget(self) -> None:
        """Let go of what waits, and of what is in use as soon as that dies."""
        self._lock.when_free(self._forget)

    def _forget(self) -> None:
        self._returned, self._waiting = _Returned(), []

    def _taken(self, size: int) -> pa.Buffer | None:
        """The block of ``size`` bytes that came back last."""
        waiting = self._waiting
        while True:
            try:
                waiting.append(self._returned.blocks.get_nowait())
            except queue.Empty:
                break
        places = (place for place in range(len(waiting) - 1, -1, -1) if waiting[place].size == size)
        found = None if (place := next(places, None)) is None else waiting.pop(place)
        total = sum(block.size for block in waiting)
        while total > self.limit_bytes:
            total -= waiting.pop(0).size
        return found

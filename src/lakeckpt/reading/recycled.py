"""Where do gathered columns lie?  In memory that served an earlier window, once the loop has let go of that.

New pages from the system cost as much as gathering into them, and in a virtual machine whose host took them back ten
times that. So what a window's columns lay in comes back when the last view of a column has died, and is used for the
next column that it is not much too large for. What waits to be used is bounded: what has waited longest goes first.

Memory is Arrow's. Threads may share it: coming back is a single step of the interpreter, wherever a view dies.
"""

from __future__ import annotations

import contextlib
import queue
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.lake.deferring import Deferring
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
        self._state = Deferring()
        self._forget()

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of anything, writable, whose memory is the caller's as long as a view of it lives."""
        count = int(np.prod(shape))
        size = count * dtype.itemsize
        if size < _LEAST:
            return np.empty(shape, dtype)
        rounded = -(-size // (step := 1 << (size.bit_length() - 4))) * step
        with self._state.lock:
            self._state.catch_up()
            returned, block = self._returned, self._taken(rounded)
        if block is None:
            block = pa.allocate_buffer(rounded)
        mine = pa.foreign_buffer(block.address, size, base=_Use(block, returned))
        return view(mine, dtype, 0, count).reshape(shape)

    def forget(self) -> None:
        """Let go of what waits, and of what is in use as soon as that dies."""
        self._state.when_free(self._forget)

    def _forget(self) -> None:
        self._returned = _Returned()
        self._waiting: OrderedDict[int, pa.Buffer] = OrderedDict()  # by the number of their return
        self._by_size: defaultdict[int, deque[int]] = defaultdict(deque)
        self._returns = self._waiting_bytes = 0

    def _taken(self, size: int) -> pa.Buffer | None:
        """The block of ``size`` bytes that came back last."""
        with contextlib.suppress(queue.Empty):
            while True:
                block = self._returned.blocks.get_nowait()
                self._waiting[self._returns] = block
                self._by_size[block.size].append(self._returns)
                self._returns += 1
                self._waiting_bytes += block.size
        numbers = self._by_size.get(size)
        found = self._waiting.pop(numbers.pop()) if numbers else None
        self._waiting_bytes -= 0 if found is None else size
        while self._waiting_bytes > self.limit_bytes:
            _, oldest = self._waiting.popitem(last=False)
            self._by_size[oldest.size].popleft()
            self._waiting_bytes -= oldest.size
        return found

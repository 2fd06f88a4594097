"""This module makes arrays in memory that served earlier windows.

New pages from the system cost as much as gathering into them. So the memory of a window's columns comes back when the
last view of a column has died, and is used for a later column of about the same size. `Recycled.limit_bytes` bounds
what waits to be used again; the memory that has waited longest is released first.

The memory is Arrow's. Threads may share a `Recycled`. A view may die in any thread, also in the garbage collector: that
takes no lock.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.reading.columns.forms import view

__all__ = ["Recycled"]

Array: TypeAlias = npt.NDArray[Any]
_LEAST = 64
"""Bytes below which an array is allocated each time."""


class _Pool:
    """Blocks of memory that wait to be used again."""

    def __init__(self) -> None:
        self.returned: queue.SimpleQueue[pa.Buffer] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, pa.Buffer] = OrderedDict()  # by the number of their return
        self._by_size: defaultdict[int, deque[int]] = defaultdict(deque)
        self._returns = self._waiting_bytes = 0

    def take(self, size: int, limit_bytes: int) -> pa.Buffer | None:
        """Return the block of ``size`` bytes that came back last; release the oldest beyond ``limit_bytes``."""
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._add(self.returned.get_nowait())
            numbers = self._by_size.get(size)
            found = self._waiting.pop(numbers.pop()) if numbers else None
            self._waiting_bytes -= 0 if found is None else size
            while self._waiting_bytes > limit_bytes:
                _, oldest = self._waiting.popitem(last=False)
                self._by_size[oldest.size].popleft()
                self._waiting_bytes -= oldest.size
            return found

    def _add(self, block: pa.Buffer) -> None:
        self._waiting[self._returns] = block
        self._by_size[block.size].append(self._returns)
        self._returns += 1
        self._waiting_bytes += block.size


class _Use:
    """The use of a block, until the last view of it dies."""

    __slots__ = ("_block", "_pool")

    def __init__(self, block: pa.Buffer, pool: _Pool) -> None:
        self._block, self._pool = block, weakref.ref(pool)

    def __del__(self) -> None:
        if (pool := self._pool()) is not None:
            pool.returned.put(self._block)


class Recycled:
    """Makes arrays; up to ``limit_bytes`` of the memory of earlier ones waits to be used again."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._pool = _Pool()

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a writable array of unspecified values. Its memory is the caller's as long as a view of it lives."""
        count = int(np.prod(shape))
        size = count * dtype.itemsize
        if size < _LEAST:
            return np.empty(shape, dtype)
        rounded = -(-size // (step := 1 << (size.bit_length() - 4))) * step
        pool = self._pool
        block = pool.take(rounded, self.limit_bytes) or pa.allocate_buffer(rounded)
        mine = pa.foreign_buffer(block.address, size, base=_Use(block, pool))
        return view(mine, dtype, 0, count).reshape(shape)

    def forget(self) -> None:
        """Release the memory that waits, and the memory in use as soon as its last view dies."""
        self._pool = _Pool()

"""Whose memory do bytes of local files take while they are decoded?  Blocks that are used again.

New pages from the system cost more than copying a file's bytes into them. So blocks of up to 64 MiB, by powers of two,
come back when the last buffer over them is let go of, and a few of each size wait for the next read. Larger ones are
allocated each time. Threads may use it: taking and giving back are single steps of the interpreter.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["read_block"]

_SMALLEST, _LARGEST = 1 << 16, 64 << 20
_KEPT = 4
"""Blocks of each size that wait."""
_waiting: defaultdict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)


class _Block:
    """The use of a block, until it is let go of."""

    __slots__ = ("memory",)

    def __init__(self, size_bytes: int) -> None:
        size = max(_SMALLEST, 1 << (size_bytes - 1).bit_length()) if size_bytes <= _LARGEST else size_bytes
        try:
            self.memory = _waiting[size].pop()
        except IndexError:
            self.memory = np.empty(size, np.uint8)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # modules may have been emptied, and no block waits for the next read
            return
        waiting = _waiting[len(self.memory)] if len(self.memory) <= _LARGEST else None
        if waiting is not None and len(waiting) < _KEPT:
            waiting.append(self.memory)


def read_block(descriptor: int, start: int, stop: int) -> pa.Buffer:
    """Read bytes [start, stop) of an open file; shorter where it ends before. `OSError` as reading raises it."""
    if start >= stop:
        return pa.py_buffer(b"")
    block = _Block(stop - start)
    view, done = memoryview(block.memory.data)[: stop - start], 0
    while done < len(view) and (count := os.preadv(descriptor, [view[done:]], start + done)):
        done += count
    return pa.foreign_buffer(block.memory.ctypes.data, done, base=block)

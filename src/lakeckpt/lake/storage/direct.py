"""How do large files get to a disk without the page cache?  From aligned memory, past the cache, in large writes.

What goes through the page cache is copied there, and written back by the kernel later or at ``fsync``: that costs a
core and, for a checkpoint that nobody reads back soon, memory. Long runs of bytes whose pages are pages of the file,
too, are written from where they lie, without any copy (`PAGE_BYTES`); `Blocks` gathers all else in blocks of 8 MiB.
Only where a block is full, or such a run comes, is the file switched to direct writes, so that small objects are
written as they always were. Where a file system knows no direct writes, or refuses one, all goes through the cache.

Blocks are kept for the next file, at most as many as were in use at once. It decides nothing about durability: whoever
writes syncs afterwards, as without it. Starts no threads.
"""

from __future__ import annotations

import errno
import mmap
import threading

import numpy as np

from lakeckpt.lake.storage.oscalls import OsCalls

__all__ = ["BLOCK_BYTES", "PAGE_BYTES", "STRAIGHT_BYTES", "Blocks"]

BLOCK_BYTES = 8 * 2**20
PAGE_BYTES = 4096
"""What is to be written from where it lies begins at multiples of this in memory and in the file."""
STRAIGHT_BYTES = 2**20
"""Shorter runs are gathered in blocks, wherever they lie."""
_REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class Blocks:
    """Writes to the new file ``descriptor`` in large runs; `finish` writes the rest."""

    __slots__ = ("_array", "_block", "_calls", "_descriptor", "_direct", "_filled", "_first", "_view")

    def __init__(self, descriptor: int, calls: OsCalls) -> None:
        self._descriptor, self._calls = descriptor, calls
        self._first: list[bytes] = []  # until they make a block
        self._filled = 0
        self._block: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._direct: bool | None = None  # None: not tried yet

    def write(self, data: memoryview) -> int:
        """Take the next bytes; copies of them may still lie here until `finish`. Returns how many they are."""
        size = len(data)
        start, stop = self._straight(data)
        if self._block is None:
            if start == stop and self._filled + size < BLOCK_BYTES:
                self._first.append(bytes(data))
                self._filled += size
                return size
            self._begin()
        if start < stop:
            self._gather(data[:start])
            self._flush()
            self._past_cache(data[start:stop])
        self._gather(data[stop:])
        return size

    def _straight(self, data: memoryview) -> tuple[int, int]:
        """Which of the next bytes are written from where they lie; an empty run at 0 where none are."""
        if len(data) < STRAIGHT_BYTES or self._direct is False:
            return 0, 0
        start = -np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES
        if (self._filled + start) % PAGE_BYTES:  # all that was written before is whole pages
            return 0, 0
        return start, start + (len(data) - start) // PAGE_BYTES * PAGE_BYTES

    def _gather(self, data: memoryview) -> None:
        while len(data):
            taken = data[: BLOCK_BYTES - self._filled]
            # numpy lets go of the interpreter's lock while it copies.
            np.copyto(self._array[self._filled : self._filled + len(taken)], np.frombuffer(taken, np.uint8))
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write what is left, which is no whole block, through the cache."""
        if self._block is None:
            for data in self._first:
                self._write_all(memoryview(data))
            return
        if self._direct:
            self._calls.set_direct(self._descriptor, False)
        self._write_all(self._view[: self._filled])

    def close(self) -> None:
        """Give the block back, whatever became of the file."""
        if self._block is not None:
            self._view.release()
            del self._array
            _spare.give(self._block)
            self._block = None

    def _begin(self) -> None:
        self._block = _spare.take()
        self._view = memoryview(self._block)
        self._array = np.frombuffer(self._block, np.uint8)
        at = 0
        for data in self._first:
            self._view[at : at + len(data)] = data
            at += len(data)
        self._first.clear()

    def _flush(self) -> None:
        self._past_cache(self._view[: self._filled])
        self._filled = 0

    def _past_cache(self, data: memoryview) -> None:
        """Write whole pages, past the cache if that can be."""
        if self._direct is None:
            self._direct = self._calls.set_direct(self._descriptor, True)
        done = 0
        while done < len(data):
            try:
                done += self._calls.write(self._descriptor, data[done:])
            except OSError as error:
                if not self._direct or error.errno not in _REFUSED:
                    raise
                self._calls.set_direct(self._descriptor, False)
                self._direct = False
            if self._direct and done % PAGE_BYTES:  # cut short in the midst of a page: the rest is not aligned
                self._calls.set_direct(self._descriptor, False)
                self._direct = False

    def _write_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._calls.write(self._descriptor, data[done:])


class _Spare:
    """Blocks that nobody uses now. Memory that was touched once costs nothing to use again."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self) -> mmap.mmap:
        with self._lock:
            return self._blocks.pop() if self._blocks else mmap.mmap(-1, BLOCK_BYTES)

    def give(self, block: mmap.mmap) -> None:
        with self._lock:
            self._blocks.append(block)


_spare = _Spare()

"""This module writes large files past the page cache, from aligned memory and in large writes.

A write through the page cache copies every byte, and the kernel writes the copy back later or at ``fsync``. That costs
a core and, for a checkpoint that is not read back soon, memory. `Blocks` writes long runs of bytes from where they lie,
if their pages are pages of the file, too (`PAGE_BYTES`). It gathers all other bytes in a block of 8 MiB. The file is
switched to direct writes when the first block is full or the first such run comes, so small objects go through the
cache. If a file system has no direct writes, or refuses one, all bytes go through the cache.

The module decides nothing about durability: its caller syncs the file afterwards. It starts no threads.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

__all__ = ["BLOCK_BYTES", "PAGE_BYTES", "STRAIGHT_BYTES", "Blocks"]

BLOCK_BYTES = 8 * 2**20
PAGE_BYTES = 4096
"""Bytes that are written from where they lie begin at multiples of this in memory and in the file."""
STRAIGHT_BYTES = 2**20
"""Shorter runs are gathered in the block, wherever they lie."""
_REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class Blocks:
    """Writes to the new file ``descriptor`` in large runs. The caller calls `finish` at the end."""

    __slots__ = ("_block", "_descriptor", "_filled", "_is_direct")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Anonymous memory begins at a page, and takes none before it is written.
        self._block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
        self._filled = 0
        self._is_direct: bool | None = None  # None: direct writes were not tried yet

    def write(self, data: memoryview) -> int:
        """Write the next bytes, and return how many they are. A copy of some may stay in the block until `finish`."""
        start, stop = self._straight(data)
        self._gather(data[:start])
        if start < stop:
            self._flush()
            self._write_pages(data[start:stop])
        self._gather(data[stop:])
        return len(data)

    def finish(self) -> None:
        """Write the rest, which is no whole block, through the cache."""
        if self._is_direct:
            self._set_direct(False)
        rest = self._block.data[: self._filled]
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def _straight(self, data: memoryview) -> tuple[int, int]:
        """Return which of the next bytes are written from where they lie; an empty range at 0 if none are."""
        if len(data) < STRAIGHT_BYTES or self._is_direct is False:
            return 0, 0
        start = -np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES
        if (self._filled + start) % PAGE_BYTES:  # all bytes that were written before are whole pages
            return 0, 0
        return start, start + (len(data) - start) // PAGE_BYTES * PAGE_BYTES

    def _gather(self, data: memoryview) -> None:
        while len(data):
            taken = data[: BLOCK_BYTES - self._filled]
            # numpy releases the interpreter's lock while it copies.
            np.copyto(self._block[self._filled : self._filled + len(taken)], np.frombuffer(taken, np.uint8))
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def _flush(self) -> None:
        self._write_pages(self._block.data[: self._filled])
        self._filled = 0

    def _write_pages(self, data: memoryview) -> None:
        """Write whole pages, past the cache if the file system can.

        It refuses, too, what is not aligned because the write before it ended inside a page.
        """
        if self._is_direct is None:
            self._set_direct(True)
        while len(data):
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                if not self._is_direct or error.errno not in _REFUSED:
                    raise
                self._set_direct(False)

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, wanted)
        except OSError:
            is_direct = False
        self._is_direct = is_direct

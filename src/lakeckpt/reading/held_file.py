"""How does pyarrow read from parts of a file that are in memory already?  As from a file, without copies.

Where the whole file is mapped pyarrow reads from that, and asks nobody. Else `HeldFile` has the methods that
``pyarrow.PythonFile`` calls. Where a part that is not held is asked for it gives nothing, which pyarrow takes for a
file that ends too early.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa

__all__ = ["HeldFile"]

_NOTHING = pa.py_buffer(b"")


class HeldFile:
    """A file of ``size_bytes`` of which the bytes of ``parts`` are held: (where they begin, the bytes).

    ``whole``: all of it, where they are parts of that.
    """

    def __init__(
        self, size_bytes: int, parts: Sequence[tuple[int, pa.Buffer]], *, whole: pa.Buffer | None = None
    ) -> None:
        self.closed = False
        self._whole = whole
        self._size = size_bytes
        self._parts = parts
        self._position = 0

    def held(self, start: int, stop: int) -> pa.Buffer:
        """Bytes [start, stop), without a copy; empty where not all of them are held."""
        for first, part in self._parts:
            if first <= start <= stop <= first + part.size:
                return part.slice(start - first, stop - start)
        return _NOTHING

    def opened(self) -> pa.NativeFile:
        """What pyarrow reads from."""
        return pa.PythonFile(self, mode="r") if self._whole is None else pa.BufferReader(self._whole)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence] + offset
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def read_buffer(self, size: int) -> pa.Buffer:
        """What pyarrow calls instead of ``read``."""
        found = self.held(self._position, min(self._size, self._position + size))
        self._position += found.size
        return found

    def read(self, size: int = -1) -> bytes:
        """As of any file."""
        return bytes(self.read_buffer(self._size - self._position if size < 0 else size))

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def close(self) -> None:
        """Let go of what is held."""
        self.closed, self._parts, self._whole = True, (), None

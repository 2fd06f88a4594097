"""This module lets pyarrow read, without a copy, from parts of a file that are in memory already.

Where the whole file is in one buffer, pyarrow reads from that buffer. Else `HeldFile` has the methods that
``pyarrow.PythonFile`` calls. A read outside of the parts returns nothing, which pyarrow reports as a file that ends too
early.

pyarrow's own threads release a buffer shortly after they have decoded it, and they need the interpreter for that. Where
the interpreter is ending at that moment, the process aborts (SIGABRT, "terminate called without an active exception").
Therefore a handler at exit waits, for a second at most, until pyarrow has released every buffer. The module starts no
threads.
"""

from __future__ import annotations

import atexit
import io
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence

import pyarrow as pa

__all__ = ["HeldFile"]

_NOTHING = pa.py_buffer(b"")
_FEW = 64
_WAIT_S, _LOOK_S = 1.0, 0.001
_lent: deque[weakref.ref[pa.Buffer]] = deque()
"""The buffers that pyarrow was given: every live buffer, and a few that are dead already."""


def _lend(buffer: pa.Buffer) -> pa.Buffer:
    _lent.append(weakref.ref(buffer))
    if len(_lent) > _FEW and (oldest := _lent.popleft())() is not None:
        _lent.append(oldest)
    return buffer


def _await_lent() -> None:
    until_s = time.monotonic() + _WAIT_S
    while any(one() is not None for one in list(_lent)) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    if _lent:
        time.sleep(_LOOK_S)  # the thread that released the last buffer needs a moment to return


atexit.register(_await_lent)  # it runs after the decoding threads have been joined
os.register_at_fork(after_in_child=_lent.clear)  # a forked child has none of the threads that would release them


class HeldFile(io.RawIOBase):
    """A file of ``size_bytes`` of which ``parts`` are in memory: pairs of an offset and the bytes from there.

    ``whole`` is a buffer with the whole file, if there is one; ``parts`` are not used then.
    """

    def __init__(
        self, size_bytes: int, parts: Sequence[tuple[int, pa.Buffer]], *, whole: pa.Buffer | None = None
    ) -> None:
        super().__init__()
        self._size, self._parts, self._whole = size_bytes, parts, whole
        self._position = 0

    def opened(self) -> pa.NativeFile:
        """Return the file that pyarrow reads."""
        if self._whole is None:
            return pa.PythonFile(self, mode="r")
        return pa.BufferReader(pa.py_buffer(_lend(self._whole.slice(0))))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read_buffer(self, size: int) -> pa.Buffer:
        """Return the next ``size`` bytes, or nothing where they are not in one part; pyarrow calls this to read."""
        start, stop = self._position, min(self._size, self._position + size)
        for first, part in self._parts:
            if first <= start <= stop <= first + part.size:
                self._position = stop
                return _lend(part.slice(start - first, stop - start))
        return _NOTHING

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(self._size if size < 0 else size))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Release the memory."""
        self._parts, self._whole = (), None
        super().close()

"""How does pyarrow read from parts of a file that are in memory already?  As from a file, without copies.

Where the whole file is mapped pyarrow reads from that, and asks nobody. Else `HeldFile` has the methods that
``pyarrow.PythonFile`` calls. Where a part that is not held is asked for it gives nothing, which pyarrow takes for a
file that ends too early.

pyarrow's threads let go of a buffer a little after its bytes were decoded, and need the interpreter for that: where it
is ending, they would end the process (SIGABRT, "terminate called without an active exception"). So the interpreter
waits, as it exits, until all that was given to pyarrow has come back, for a second at most.
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
"""What was given to pyarrow: all that lives, and a few that do not any more."""


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
        time.sleep(_LOOK_S)  # who let go of the last one does so to its end


# It runs when the threads that decode have been joined.
atexit.register(_await_lent)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lent.clear)  # who is to let go of it is not here


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
        if self._whole is None:
            return pa.PythonFile(self, mode="r")
        return pa.BufferReader(pa.py_buffer(_lend(self._whole.slice(0))))

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
        return found if found is _NOTHING else _lend(found)

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

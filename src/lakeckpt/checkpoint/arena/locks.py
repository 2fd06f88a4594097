"""Who uses which part of an arena?  Locks that the kernel lets go of when their holder dies, however it dies.

They belong to an opened file (OFD locks of Linux), so that two openings in one process exclude each other as two
processes do. A forked child holds nothing: it closes what it has of the opened file. Never waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref

__all__ = ["FileLocks"]

_BASE = 1 << 40
"""Beyond the end of every arena: locks are of places, and need no bytes there."""
_FLOCK = "@hhqqi4x"


class FileLocks:
    """Locks of the places 0, 1, 2, … of the file opened as ``descriptor``, which it closes in forked children."""

    __slots__ = ("__weakref__", "_descriptor")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _every.add(self)

    def take(self, place: int, *, shared: bool = False) -> bool:
        """Lock a place, shared or for itself; False where another opening of the file holds it otherwise."""
        return self._set(place, fcntl.F_RDLCK if shared else fcntl.F_WRLCK)

    def drop(self, place: int) -> None:
        """Let go of a place."""
        self._set(place, fcntl.F_UNLCK)

    def taken(self, place: int) -> bool:
        """Whether another opening of the file holds a place for itself or shared."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _BASE + place, 1, 0)
        found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def forget(self) -> None:
        """The file is being closed here: there is nothing left to close in children."""
        _every.discard(self)

    def leave(self) -> None:
        """Close the file in a forked child: the locks are the parent's, and end with the parent."""
        os.close(self._descriptor)

    def _set(self, place: int, kind: int) -> bool:
        asked = struct.pack(_FLOCK, kind, os.SEEK_SET, _BASE + place, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, asked)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


_every: weakref.WeakSet[FileLocks] = weakref.WeakSet()


def _leave() -> None:
    for locks in list(_every):
        locks.leave()
    _every.clear()


os.register_at_fork(after_in_child=_leave)

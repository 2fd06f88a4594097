"""This module locks parts of an arena with locks that the kernel releases when their holder dies.

The locks belong to an open file (OFD locks of Linux), so that two openings in one process exclude each other as two
processes do. A forked child holds no locks: it closes its copy of the open file. Nothing here waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref

__all__ = ["FileLocks"]

_BASE = 1 << 40
"""Beyond the end of every arena: places are locked that have no bytes."""
_FLOCK = "@hhqqi4x"


class FileLocks:
    """Locks of the places 0, 1, 2, … of the file opened as ``descriptor``, which it closes in forked children."""

    __slots__ = ("__weakref__", "_descriptor")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _every.add(self)

    def take(self, place: int, *, shared: bool = False) -> bool:
        """Lock a place, shared or exclusively. Returns False if another opening of the file excludes that."""
        return self._set(place, fcntl.F_RDLCK if shared else fcntl.F_WRLCK)

    def drop(self, place: int) -> None:
        """Release a place."""
        self._set(place, fcntl.F_UNLCK)

    def taken(self, place: int) -> bool:
        """Return whether another opening of the file has locked a place."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _BASE + place, 1, 0)
        found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def forget(self) -> None:
        """Leave the file alone in children: it is being closed here."""
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

"""How do a process and those that it starts share a few bytes?  A file in memory that all of them can open and lock.

The file is made by the process that makes the object, is known by its path to children however they are started
(forked, or spawned with a pickled copy), and is gone when the process is. A copy within one process has a file of its
own. Never waits for anything but the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

__all__ = ["SharedFile"]


def _unlink(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class SharedFile:
    """A file that the process which made it shares with those that it starts; picklable by its path."""

    prefix: ClassVar[str] = "shared"

    def __init__(self) -> None:
        token = uuid.uuid4().hex
        self._owner = os.getpid()
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(f"lakeckpt-{self.prefix}-{token}")
            self._path = f"/proc/{self._owner}/fd/{descriptor}"
            self._name = os.readlink(self._path)
            weakref.finalize(self, os.close, descriptor)
        else:
            descriptor, self._path = tempfile.mkstemp(prefix=f"lakeckpt-{self.prefix}-{token}")
            os.close(descriptor)
            self._name = self._path
            weakref.finalize(self, _unlink, self._path, self._owner)

    def __getstate__(self) -> tuple[int, str, str]:
        return self._owner, self._path, self._name

    def __setstate__(self, state: tuple[int, str, str]) -> None:
        self._owner, self._path, self._name = state
        if self._owner == os.getpid() or not self._is_there():
            # A copy, or the process that made it is gone or on another machine.
            self.__init__()  # type: ignore[misc]

    def _is_there(self) -> bool:
        # By name, too: the number of a process that is gone may be another one's by now.
        try:
            return self._name == (os.readlink(self._path) if os.path.islink(self._path) else self._path)
        except OSError:
            return False

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, locked, at its start."""
        # Opened anew each time: a lock belongs to an opened file, and forked processes would share it.
        with open(self._path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

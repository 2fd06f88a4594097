"""Where does the agent of a run listen, and does one live?  Three files in the folder of the arenas: socket, lock, log.

The lock is the system's, on a file that holds the agent's process id, and ends with the agent, however that ends. Who
has it may remove the files, that of the lock last: whoever waited for it sees that it is another file's by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

__all__ = ["AgentPlace", "short_path"]


class AgentPlace:
    """The place of an agent in ``folder``; ``digest``: by what its run is known there (`digest_of_run`), as text."""

    __slots__ = ("lock", "log", "socket")

    def __init__(self, folder: str, digest: str) -> None:
        base = os.path.join(folder, digest)
        self.socket, self.lock, self.log = f"{base}.socket", f"{base}.lock", f"{base}.log"

    def connected(self) -> socket.socket | None:
        """A connection to the agent; None where none listens, or this process can open no more."""
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return None
        try:
            with short_path(self.socket) as short:
                connection.connect(short)
        except OSError:
            connection.close()
            return None
        return connection

    def listener(self) -> socket.socket:
        """A new socket that listens. Only for whoever has the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self.socket) as short:
            listener.bind(short)
        os.chmod(self.socket, 0o600)
        listener.listen(64)
        return listener

    def take(self) -> int | None:
        """The lock, taken, as a descriptor to be closed; None where another process has it."""
        while True:
            lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            except BaseException:
                os.close(lock)
                raise
            if _is_at(lock, self.lock):
                return lock
            os.close(lock)  # it was removed while we waited for it

    def agent(self) -> int | None:
        """The process id of the agent; None where none lives, 0 while one begins or ends."""
        if not os.path.exists(self.lock):
            return None
        lock = self.take()
        if lock is not None:
            os.close(lock)
            return None
        with contextlib.suppress(OSError, ValueError), open(self.lock, encoding="ascii") as told:
            return int(told.read())
        return 0

    def has(self, lock: int) -> bool:
        """Whether ``lock``, which was taken, is that of this place still: its files may have been removed since."""
        return _is_at(lock, self.lock)

    def remove(self) -> None:
        """Remove what an agent left. Only for whoever has the lock."""
        for path in (self.socket, self.log, self.lock):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _is_at(opened: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Another path to what is, or shall be, at ``path``, that is not too long for a socket's address."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)

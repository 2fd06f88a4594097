"""Which calls of the operating system does the local storage make?

All of them go through one `OsCalls` object, so that a test can record their order, make the n-th of them fail, or let
the process "die" between any two. Nothing here decides anything; every method is one call, relative to an open folder.
"""

from __future__ import annotations

import fcntl
import os
import secrets

__all__ = ["OsCalls"]


class OsCalls:
    """The real calls. ``folder`` is the descriptor of an open directory; ``name`` is one path component in it."""

    __slots__ = ()

    def token(self) -> str:
        """A name that no other writer has chosen."""
        return secrets.token_hex(8)

    def open_root(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_folder(self, name: str, folder: int) -> int:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)

    def open_file(self, name: str, folder: int, follow: bool) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block us
        return os.open(name, flags if follow else flags | os.O_NOFOLLOW, dir_fd=folder)

    def create(self, name: str, folder: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=folder)

    def mkdir_path(self, path: str) -> None:
        os.mkdir(path)

    def mkdir(self, name: str, folder: int) -> None:
        os.mkdir(name, dir_fd=folder)

    def lock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def set_direct(self, descriptor: int, direct: bool) -> bool:
        """Whether writes go past the page cache from now on; False where the file system cannot."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
        except OSError:
            return False
        return direct

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        return os.pread(descriptor, size, offset)

    def preadv(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def fstat(self, descriptor: int) -> os.stat_result:
        return os.fstat(descriptor)

    def lstat(self, name: str, folder: int) -> os.stat_result:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def stat(self, name: str, folder: int) -> os.stat_result:
        return os.stat(name, dir_fd=folder)

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def rename(self, old: str, new: str, folder: int) -> None:
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def link(self, old: str, new: str, folder: int) -> None:
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)

    def unlink(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def rmdir(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

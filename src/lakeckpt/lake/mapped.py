"""May the bytes of a local file be used where they lie in the page cache?  Mapped, while nobody can cut the file.

Mapping spares a copy of every byte that is decoded. But who reads a mapped page of a file that was cut meanwhile, or of
a disk that cannot read it, is killed by the system, with nothing said. So a range is mapped only

* under a *lease* (``fcntl(2)``): whoever opens the file to write to it, or cuts it, waits until we are done, for as
  long as it takes to decode a row group. Whether somebody waits is looked at before another range is mapped;
* when all of its pages are there: the system is asked for them at once and says so where one cannot be had;
* on file systems that are this machine's own.

Leases are given to the owner of a file, and none while somebody has it open for writing. Where any of that is not so,
`map_range` gives nothing, and the range is to be copied. A file that is removed, or replaced by another one of its
name, stays what it was for who has it open.

It reads nothing itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import signal
import threading
from types import TracebackType
from typing import Self

import pyarrow as pa

__all__ = ["LeasedFile", "Mapping"]

_POPULATE_READ, _DONT_NEED = 22, 4
"""``MADV_POPULATE_READ`` of Linux 5.14: have all pages now, and fail where that cannot be. ``MADV_DONTNEED``."""
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs", "btrfs", "overlay"})


class Mapping:
    """A range of a file, mapped. It may be read until `release`, which letting go of it does, too."""

    __slots__ = ("_file", "_pages", "buffer")

    def __init__(self, file: LeasedFile, pages: pa.Buffer, begin: int) -> None:
        self._file: LeasedFile | None = file
        self._pages = pages
        self.buffer = pages.slice(begin)

    def release(self) -> None:
        """The bytes are not looked at any more."""
        file, self._file = self._file, None
        if file is not None:
            _advise(self._pages, _DONT_NEED)
            file._returned()

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LeasedFile:
    """The file that is open, for reading alone, as ``descriptor``. Threads may share it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._mappings = 0
        self._refused = not hasattr(fcntl, "F_SETLEASE") or _file_system(os.fstat(descriptor).st_dev) not in _LOCAL

    def map_range(self, start: int, stop: int) -> Mapping | None:
        """Bytes [start, stop), of which there is one at least; None where they are to be copied."""
        if self._refused or not self._leased():
            return None
        first = start - start % mmap.ALLOCATIONGRANULARITY
        try:
            if os.fstat(self._descriptor).st_size < stop:
                raise OSError("the file ends before")
            pages = mmap.mmap(self._descriptor, stop - first, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first)
            buffer = pa.py_buffer(pages)
            _advise(buffer, _POPULATE_READ)
        except (OSError, ValueError):
            self._returned()
            self._refused = True  # copying will say what is wrong, if anything is
            return None
        return Mapping(self, buffer, start - first)

    def _leased(self) -> bool:
        """Hold the lease for one mapping more, unless somebody else waits for it."""
        with self._lock:
            if self._process != os.getpid():
                return False
            if self._mappings and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                return False
            if not self._mappings:
                try:
                    # Who waits is told to us by a signal that is ignored if not asked for; by default it would end us.
                    fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
                    fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                except OSError:
                    return False
            self._mappings += 1
            return True

    def _returned(self) -> None:
        with self._lock:
            self._mappings -= 1
            if not self._mappings and self._process == os.getpid():
                fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _advise(pages: pa.Buffer, advice: int) -> None:
    """``madvise(2)``, and other threads run meanwhile: they do not while Python does it, or unmaps many pages."""
    if _libc.madvise(ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.size), advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_libc = ctypes.CDLL(None, use_errno=True)


@functools.lru_cache(maxsize=256)
def _file_system(device: int) -> str:
    """The type of the file system on ``device``; empty where the system does not say."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields, _, kind = line.partition(" - ")
                if fields.split(" ", 3)[2] == wanted:
                    return kind.split(" ", 1)[0]
    except OSError:
        return ""
    return ""

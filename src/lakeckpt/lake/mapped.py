"""May the bytes of a local file be used where they lie in the page cache?  Mapped, while nobody can cut the file.

Mapping spares a copy of every byte that is decoded. But who reads a mapped page of a file that was cut meanwhile, or of
a disk that cannot read it, is killed by the system, with nothing said. So a range is mapped only

* under a *lease* (``fcntl(2)``): whoever opens the file to write to it, or cuts it, waits until we are done, for as
  long as it takes to decode a row group. Whether somebody waits is looked at before another range is mapped;
* when all of its pages are there: the system is asked for them at once and says so where one cannot be had;
* on file systems that are this machine's own.

Leases are given to the owner of a file, and none while somebody has it open for writing. Where any of that is not so,
`map_ranges` gives nothing, and they are to be copied. A file that is removed, or replaced by another one of its
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
import sys
from collections.abc import Callable, Sequence

import pyarrow as pa

from lakeckpt.lake.deferring import Deferring

__all__ = ["LeasedFile", "Mapping"]

_POPULATE_READ, _DONT_NEED = 22, 4
"""``MADV_POPULATE_READ`` of Linux 5.14: have all pages now, and fail where that cannot be. ``MADV_DONTNEED``."""
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs", "btrfs", "overlay"})


class Mapping:
    """Ranges of a file, mapped. They may be read until `release`, which letting go of it does, too."""

    __slots__ = ("_file", "_places", "whole")

    def __init__(self, file: LeasedFile, whole: pa.Buffer, places: list[tuple[int, int]]) -> None:
        self._file: LeasedFile | None = file
        self._places = places
        self.whole = whole
        """All of the file, of which no more than the ranges may be looked at."""

    def release(self) -> None:
        """The bytes are not looked at any more."""
        file, self._file = self._file, None
        if file is not None:
            for place in self._places:
                _advise(*place, _DONT_NEED)
            file._returned()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # when the interpreter ends, modules may have been emptied, and the lease ends anyway
            self.release()


class LeasedFile:
    """The file that is open, for reading alone, as ``descriptor``. Threads may share it.

    What the system does at once is asked of it without letting go of the interpreter: a thread that decodes would wait
    for that each time until the training loop lets it in.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = -1
        self._process = os.getpid()
        self._state = Deferring()
        self._mappings = 0
        self._whole: pa.Buffer | None = None
        self._refused = not hasattr(fcntl, "F_SETLEASE") or _file_system(os.fstat(descriptor).st_dev) not in _LOCAL
        if not self._refused:  # the lease is the file's own, and ends when the last range is not looked at any more
            self._descriptor = os.dup(descriptor)

    def close(self) -> None:
        """Map nothing more. What is mapped stays so, under the lease, until it is released."""
        self._state.when_free(self._closed)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_refused"):
            self.close()

    def _closed(self) -> None:
        self._refused, self._whole = True, None
        self._end()

    def _end(self) -> None:
        if self._refused and not self._mappings and self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def map_ranges(self, ranges: Sequence[tuple[int, int]]) -> Mapping | None:
        """Bytes [start, stop) of each of ``ranges``; None where they are to be copied."""
        if self._refused or not ranges or not self._leased():
            return None
        try:
            size = _at_once.lseek(self._descriptor, ctypes.c_int64(0), os.SEEK_END)
            whole = self._whole
            if whole is None or whole.size != size:
                whole = self._whole = pa.py_buffer(mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
            if max(stop for _, stop in ranges) > size:
                raise OSError("the file ends before")
            places = [_pages(whole, start, stop) for start, stop in ranges]
            for place in places:
                _advise(*place, _POPULATE_READ)
        except (OSError, ValueError):
            self._refused = True  # copying will say what is wrong, if anything is
            self._returned()
            return None
        return Mapping(self, whole, places)

    def _leased(self) -> bool:
        """Hold the lease for one mapping more, unless somebody else waits for it."""
        with self._state.lock:
            self._state.catch_up()
            is_held = self._lease()
            self._mappings += is_held
        self._state.settle()  # else a lease might be kept until the file is read again
        return is_held

    def _lease(self) -> bool:
        if self._process != os.getpid() or self._refused:
            return False
        if self._mappings:
            return self._control(fcntl.F_GETLEASE, 0) == fcntl.F_RDLCK
        # Who waits is told to us by a signal that is ignored if not asked for; by default it would end us.
        is_told = self._control(fcntl.F_SETSIG, signal.SIGURG) >= 0
        return is_told and self._control(fcntl.F_SETLEASE, fcntl.F_RDLCK) >= 0

    def _returned(self) -> None:
        self._state.when_free(self._one_less)

    def _one_less(self) -> None:
        self._mappings -= 1
        if not self._mappings and self._process == os.getpid():
            self._control(fcntl.F_SETLEASE, fcntl.F_UNLCK)
        self._end()

    def _control(self, command: int, argument: int) -> int:
        return int(_at_once.fcntl(self._descriptor, command, argument))


def _pages(whole: pa.Buffer, start: int, stop: int) -> tuple[int, int]:
    """Where the pages of a range begin in memory, and their bytes."""
    first = start - start % mmap.PAGESIZE
    return whole.address + first, stop - first


def _advise(address: int, size: int, advice: int) -> None:
    """``madvise(2)``, and other threads run meanwhile: it takes milliseconds."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_libc, _at_once = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None)
_at_once.lseek.restype = ctypes.c_int64


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

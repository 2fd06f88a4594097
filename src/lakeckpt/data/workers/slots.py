"""This module holds micro-batches on their way from a worker to the training loop, in slots of shared memory.

Each worker has one `SlotMemory`, a sparse file in memory without a name (memfd). The main process makes it, and both
processes map it. The worker cuts it into *slots* (`Slots`) and writes a micro-batch into each. The main process
*leases* a slot (`SlotMemory.lease`): arrays over it are views, and hold the lease. When the last view has died, in
whatever thread, the slot is on the list of those that may be written again, which the worker's next task carries. So
nothing that somebody can still see is ever written, and in the steady state no memory is taken or given back.

The file has more addresses than the machine has memory, so a loop that keeps every batch never exhausts it. The memory
is gone with the last process that maps it, however that process ends. A free slot beyond the spare ones gives its
memory back to the system (a hole in the file), and so does a lease that ends after its worker has.

A process that is forked from the main process holds no lease: it sees its parent's batches only until their slots are
written again. The module starts no threads.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "SlotMemory", "Slots"]

ALIGNMENT = 64
"""Columns begin at multiples of this many bytes."""

_LEAST_SPARE = 4
_MOST_ROOM = 1.5
"""A slot is at most about so many times as large as the micro-batch in it: the memory limit counts micro-batches."""
_LEAST_BYTES = 1 << 30
_MOST_BYTES = 1 << 42
_PAGE = mmap.PAGESIZE

_MEMORIES: weakref.WeakValueDictionary[int, SlotMemory] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class SlotMemory:
    """A sparse file in memory, mapped whole: ``size_bytes`` of addresses, memory only where something was written."""

    def __init__(self, descriptor: int, size_bytes: int, number: int | None = None) -> None:
        """Map ``descriptor``, which belongs to the slot memory from now on and is closed with it."""
        self.size_bytes, self.descriptor = size_bytes, descriptor
        self.number = next(_NUMBERS) if number is None else number
        """Its name in the process that made it; copies in other processes have the same."""
        self._process = os.getpid()
        self._map = mmap.mmap(descriptor, size_bytes)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_DONTDUMP)
        self.address: int = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        self._leased: dict[int, int] = {}
        self._ended: deque[int] = deque()
        self._closed = False
        weakref.finalize(self, os.close, descriptor).atexit = False
        _MEMORIES[self.number] = self

    @staticmethod
    def numbered(number: int) -> SlotMemory:
        """Return the slot memory that this process made with that number."""
        return _MEMORIES[number]

    def __reduce__(self) -> tuple[Any, ...]:  # for a process that is being spawned: no other may have the descriptor
        return _mapped, (reduction.DupFd(self.descriptor), self.size_bytes, self.number)

    @classmethod
    def make(cls) -> SlotMemory:
        """Return a new slot memory.

        It has four times as many addresses as the machine has memory: slots of different sizes do not share them.
        OSError if not even a gibibyte can be mapped.
        """
        descriptor = os.memfd_create("lakeckpt-slots")
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            size = min(max(1 << (4 * memory - 1).bit_length(), _LEAST_BYTES), _MOST_BYTES)
            while True:
                try:
                    os.ftruncate(descriptor, size)
                    return cls(descriptor, size)
                except OSError:  # limits on addresses or on sizes of files
                    if size <= _LEAST_BYTES:
                        raise
                    size >>= 1
        except BaseException:
            os.close(descriptor)
            raise

    def lease(self, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the slot's bytes as a writable array; once nothing refers to that any more, the slot has ended."""
        self._leased[offset] = size_bytes
        return np.asarray(_Lease(self, offset, size_bytes))

    def ended(self, most: int = 1024) -> list[int]:
        """Return, once, slots whose leases have ended and which may be written again; at most ``most`` at a time."""
        found: list[int] = []
        while self._ended and len(found) < most:
            found.append(self._ended.popleft())
        return found

    def close(self) -> None:
        """Give the memory back, that of leased slots as soon as their leases end. Nobody writes to it any more."""
        if os.getpid() != self._process:
            return  # a copy in a process that was forked
        self._closed = True
        start = 0
        for offset, size in sorted(self._leased.items()):
            self.punch(start, offset - start)
            start = offset + _pages(size)
        self.punch(start, self.size_bytes - start)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Give the memory of whole pages back to the system; what is read there next is zero."""
        if size_bytes > 0:
            with contextlib.suppress(OSError):  # it stays taken until the slot memory goes
                self._map.madvise(mmap.MADV_REMOVE, offset, _pages(size_bytes))

    def _end(self, offset: int, size_bytes: int) -> None:
        # In any thread, at any moment: only what cannot be interrupted, and no lock.
        if os.getpid() != self._process:
            return
        self._leased.pop(offset, None)
        if self._closed:
            self.punch(offset, size_bytes)
        else:
            self._ended.append(offset)


class _Lease:
    """The memory of a slot, as numpy asks for it. It lives as long as any array over the slot."""

    __slots__ = ("__array_interface__", "_memory", "_offset", "_size_bytes")

    def __init__(self, memory: SlotMemory, offset: int, size_bytes: int) -> None:
        self._memory, self._offset, self._size_bytes = memory, offset, size_bytes
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (memory.address + offset, False),
        }

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # when the interpreter ends, modules may have been emptied, and the memory goes anyway
            self._memory._end(self._offset, self._size_bytes)


class Slots:
    """The worker's side: the parts of ``memory`` that are free to write to.

    A micro-batch takes the smallest free slot that keeps its memory and has room for it, up to half as large
    again as needed; of slots of one size, the one that became free last. So batches of rows of different sizes use the
    same memory again and again. Free slots of ``spare_bytes`` together (and four at least) keep their memory.
    """

    def __init__(self, memory: SlotMemory, *, spare_bytes: int) -> None:
        self._memory, self._spare_bytes = memory, spare_bytes
        self._sizes: dict[int, int] = {}
        """The size of each slot, by its offset."""
        self._spare: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        """The free slots that keep their memory, by offset: (size, a number that falls, offset). The slot that became
        free first is the first."""
        self._by_size: list[tuple[int, int, int]] = []
        """The same slots, in order."""
        self._empty: dict[int, list[int]] = {}
        """The free slots without memory, by size."""
        self._spare_size = self._top = self._freed = 0

    def take(self, size_bytes: int) -> int:
        """Return the offset of a slot of at least ``size_bytes``, which is the caller's to write to.

        MemoryError if the system has no memory for it.
        """
        size = _rounded(size_bytes)
        at = bisect.bisect_left(self._by_size, (size,))
        if at < len(self._by_size) and self._by_size[at][0] <= _MOST_ROOM * size:
            size, _, offset = self._by_size.pop(at)
            self._spare_size -= size
            del self._spare[offset]
            return offset
        empty = self._empty.get(size)
        offset = empty[-1] if empty else self._top
        self._allocate(offset, size)
        if empty:
            empty.pop()
        else:
            self._top += size
            self._sizes[offset] = size
        return offset

    def free(self, offsets: Iterable[int]) -> None:
        """Take slots back that nobody sees any more."""
        for offset in offsets:
            self._freed -= 1
            slot = self._spare[offset] = (self._sizes[offset], self._freed, offset)
            bisect.insort(self._by_size, slot)
            self._spare_size += slot[0]
        while self._spare_size > self._spare_bytes and len(self._spare) > _LEAST_SPARE:
            offset, slot = self._spare.popitem(last=False)
            self._by_size.remove(slot)
            size = slot[0]
            self._memory.punch(offset, size)
            self._spare_size -= size
            self._empty.setdefault(size, []).append(offset)

    def _allocate(self, offset: int, size: int) -> None:
        if offset + size > self._memory.size_bytes:
            raise MemoryError(f"a slot memory of {self._memory.size_bytes} bytes has no room for {size} more")
        try:
            # If there is no memory this says so; writing would end the process with a bus error.
            os.posix_fallocate(self._memory.descriptor, offset, size)
        except OSError as error:
            raise MemoryError(f"no shared memory for a micro-batch of {size} bytes: {error}") from error


def _mapped(descriptor: Any, size_bytes: int, number: int) -> SlotMemory:
    return SlotMemory(descriptor.detach(), size_bytes, number)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _rounded(size_bytes: int) -> int:
    """Return the size of a slot for ``size_bytes``."""
    step = max(_PAGE, 1 << max(0, size_bytes.bit_length() - 4))
    return -(-size_bytes // step) * step

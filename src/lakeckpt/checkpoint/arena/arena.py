"""Which complete cuts are in this memory, and how does the next one get there?  One rank's arena, mapped.

An arena holds a few generations. `Arena.begin` chooses one that nobody needs: never the newest complete one, none
that somebody reads, and none that another rank may have to go back to, which `begin` is told. Its sequence number is
odd from then until it is complete, so that whoever finds the arena after a crash, at any moment, finds complete
generations only; a record with checksums for every slice, valid under one sequence number, is what makes one
complete.

The memory is a file that outlives its processes (`lakeckpt.checkpoint.arena.folder`). One opening writes, any number
read: a generation that is read cannot be begun anew. Slices may be filled by several threads. It copies nothing
itself, starts no threads and imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lakeckpt.checkpoint.arena.filling import Filling, checksum
from lakeckpt.checkpoint.arena.layout import CHECKSUM_BYTES, SUPERBLOCK_BYTES, ArenaLayout, GenerationRecord
from lakeckpt.checkpoint.arena.locks import FileLocks
from lakeckpt.checkpoint.format.digests import leaf_digests
from lakeckpt.errors import ArenaDamaged, ArenaError, WireError

__all__ = ["Arena", "Held"]

_SEQUENCE_BYTES = 8
_REMOVE = 9  # MADV_REMOVE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the interpreter's lock, those of `mmap` do not


class Arena:
    """The arena in the file opened as ``descriptor``, which is the arena's from then on. ``name`` is for messages.

    ``writes``: to fill generations; `ArenaError` where another opening does already. Raises `ArenaDamaged` where the
    file is none, or has not the size that it says, and `ArenaError` where it cannot be mapped.
    """

    def __init__(self, descriptor: int, name: str, *, writes: bool) -> None:
        self.name, self.writes = name, writes
        self._descriptor = descriptor
        self._locks = FileLocks(descriptor)
        try:
            self.layout = _layout_of(descriptor, name)
            self._writer = self.layout.generations
            if writes and not self._locks.take(self._writer):
                raise ArenaError(f"the arena {name!r} is filled by another process: let it end first")
            self._map = _mapped(descriptor, self.layout.size_bytes, name, writes=writes)
        except BaseException:
            self._locks.forget()
            os.close(descriptor)
            raise
        self._view = memoryview(self._map)
        self._process = os.getpid()
        self._holding = [0] * self.layout.generations  # by this opening, whose own locks do not exclude each other
        self._filling: set[int] = set()
        self._read: dict[int, GenerationRecord] = {}
        """The record of each generation as it was read last: it is that as long as its sequence number is."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Arena({self.name!r}, {self.layout.identity})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and its locks. The memory stays mapped for as long as anybody holds a view of it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0 and os.getpid() == self._process:
            self._locks.forget()
            os.close(descriptor)

    @property
    def memory(self) -> memoryview:
        """All of it, as it is mapped; to be written to through a `Filling` only."""
        return self._view

    @property
    def is_filled(self) -> bool:
        """Whether another opening of this arena fills it: its trainer lives."""
        return self._locks.taken(self._writer)

    @property
    def is_there(self) -> bool:
        """Whether anybody can find it: its file has not been removed."""
        return os.fstat(self._descriptor).st_nlink > 0

    # --- what is complete

    def complete(self) -> list[GenerationRecord]:
        """The records of the complete generations, the newest step first. Documents and data are not looked at."""
        found = [record for _, record in self._records()]
        return sorted(found, key=_age, reverse=True)

    @contextmanager
    def hold(self, step: int | None = None, *, attempt: str | None = None) -> Iterator[Held | None]:
        """The complete generation of ``step`` (None: the newest), kept from being written while the block runs.

        None where there is no such generation. ``attempt``: whose it is to be, since an attempt that went on from a
        step in memory may capture that step again. Of several of one step it is the one that was captured last.
        """
        for number, record in sorted(self._records(), key=lambda one: _age(one[1]), reverse=True):
            if step not in (None, record.step) or attempt not in (None, record.attempt):
                continue
            if not self._hold(number):
                continue  # it is being begun
            try:
                if self._record(number) == record:
                    yield Held(arena=self, number=number, record=record)
                    return
            finally:
                self._let_go(number)
        yield None

    def _hold(self, number: int) -> bool:
        with self._lock:
            if number in self._filling:  # our own lock would turn into a shared one
                return False
            if self._holding[number] == 0 and not self._locks.take(number, shared=True):
                return False
            self._holding[number] += 1
            return True

    def _let_go(self, number: int) -> None:
        with self._lock:
            self._holding[number] -= 1
            if self._holding[number] == 0:
                self._locks.drop(number)

    def _records(self) -> list[tuple[int, GenerationRecord]]:
        found = ((number, self._record(number)) for number in range(self.layout.generations))
        return [(number, record) for number, record in found if record is not None]

    def _record(self, number: int) -> GenerationRecord | None:
        sequence = self._sequence(number)
        known = self._read.get(number)
        if known is not None and known.sequence == sequence:
            return known
        at = self.layout.record_at(number)
        try:
            record = GenerationRecord.from_bytes(bytes(self._view[at : at + self.layout.record_room]))
        except WireError:
            return None  # none was ever written here, or a writer is at it
        fits = len(record.checksums) == CHECKSUM_BYTES * self.layout.num_leaves
        fits = fits and record.documents_bytes <= self.layout.documents_bytes
        if not fits or not record.sequence == sequence == self._sequence(number):
            return None
        self._read[number] = record
        return record

    # --- what is written

    def begin(self, *, common: int | None = None) -> Filling | None:
        """Begin a generation; None where there is none to spare: this cut is left out then.

        ``common``: the newest step that every rank is known to have complete; what is not older stays. None: nothing is
        known, and a generation is begun only where those of two newer steps are complete, because one rank may be a
        step ahead of another when it dies. Of several that an attempt has captured of one step only the last one is
        kept, and that of an attempt before as long as there is room.
        """
        assert self.writes, "this opening of the arena only reads"
        with self._lock:  # nothing is completed meanwhile: it would be no longer filled, and not seen as complete yet
            for number in self._spare(common):
                if not self._holding[number] and self._locks.take(number):
                    # Odd, and larger than any before: also where a writer died.
                    sequence = max(map(self._sequence, range(self.layout.generations)))
                    sequence += 1 + sequence % 2
                    self._put_sequence(number, sequence)
                    self._filling.add(number)
                    return Filling(arena=self, number=number, sequence=sequence)
        return None

    def _spare(self, common: int | None) -> list[int]:
        """The generations that may be begun, those first that are missed the least."""
        records = {number: record for number, record in self._records() if number not in self._filling}
        by_age = sorted(records, key=lambda number: _age(records[number]))
        last = {records[number].step: number for number in by_age}
        last_of_attempt = {(records[number].step, records[number].attempt): number for number in by_age}
        steps = sorted(last, reverse=True)
        safe = common if common is not None else (steps[1] if len(steps) > 2 else -1)
        spare = [number for number in range(self.layout.generations) if number not in {*records, *self._filling}]
        spare += [number for number in by_age if number not in last_of_attempt.values()]
        spare += [number for number in by_age if records[number].step < min(safe, steps[0])]
        # Another rank may have nothing newer than what an attempt before has captured of a step: it goes last.
        spare += [number for number in by_age if number not in last.values()]
        return spare

    def forget(self, after: int) -> None:
        """The history goes on behind step ``after``: complete generations of later steps hold nothing any more."""
        assert self.writes, "this opening of the arena only reads"
        for number, record in self._records():
            if record.step > after and self._locks.take(number):
                self._put_sequence(number, record.sequence + 1)
                self._locks.drop(number)

    @property
    def idle_bytes(self) -> int:
        """What `empty` would give back."""
        numbers = [number for number in range(self.layout.generations) if not self._is_held(number)]
        return sum(end - begin for begin, end in map(self._pages_of, numbers))

    def empty(self) -> None:
        """Give back the memory of all generations that nobody holds, also where others have it mapped; they hold
        nothing any more. What somebody holds, to persist it, stays as it is."""
        assert self.writes, "this opening of the arena only reads"
        for number in range(self.layout.generations):
            with self._lock:
                if number in self._filling or self._holding[number] or not self._locks.take(number):
                    continue
                sequence = self._sequence(number)
                self._put_sequence(number, sequence + 1 + sequence % 2)
                self._holding[number] += 1  # so that nobody here takes our own lock for shared
            try:
                begin, end = self._pages_of(number)
                if end > begin:  # where a file system cannot, it stays taken until nobody has it mapped
                    self._advise(begin, end - begin, _REMOVE)
            finally:
                self._let_go(number)

    def _pages_of(self, number: int) -> tuple[int, int]:
        """The whole pages in which documents and data of a generation lie."""
        begin = -(-self.layout.documents_at(number) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.layout.data_at(number) + self.layout.data_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        return begin, max(begin, end)

    def _is_held(self, number: int) -> bool:
        return number in self._filling or self._holding[number] > 0 or self._locks.taken(number)

    def touch(self) -> None:
        """Have all memory of the arena mapped in this process: done later, page by page, it takes as long as a copy."""
        self._advise(0, len(self._map), _POPULATE_WRITE)  # an older Linux maps pages as they are written first

    def _advise(self, at: int, size_bytes: int, advice: int) -> None:
        """Tell the system something of our memory; other threads run meanwhile. Nothing where it does not know that."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + at
        with contextlib.suppress(AttributeError):
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)

    def _end(self, number: int, record: GenerationRecord | None = None) -> None:
        """A generation is filled no more; ``record``: and complete."""
        with self._lock:
            if record is not None:
                self._read[number] = record
                self._put_sequence(number, record.sequence)
            self._filling.discard(number)
            self._locks.drop(number)

    def _sequence(self, number: int) -> int:
        at = self.layout.sequence_at(number)
        return int.from_bytes(self._view[at : at + _SEQUENCE_BYTES], "little")

    def _put_sequence(self, number: int, sequence: int) -> None:
        self._put(self.layout.sequence_at(number), sequence.to_bytes(_SEQUENCE_BYTES, "little"))

    def _put(self, at: int, data: bytes | memoryview) -> None:
        """The one place where this class writes to the memory."""
        self._view[at : at + len(data)] = data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A complete generation that is not written to while it is held."""

    arena: Arena
    number: int
    record: GenerationRecord

    def documents(self) -> bytes:
        """The documents of the cut. `ArenaDamaged` where they are not what was written."""
        at = self.arena.layout.documents_at(self.number)
        found = bytes(self.arena._view[at : at + self.record.documents_bytes])
        if checksum(found) != self.record.documents_checksum:
            raise self._damaged("its documents")
        return found

    @property
    def data(self) -> memoryview:
        """The data of the generation, read-only and not verified: see `slice`."""
        at = self.arena.layout.data_at(self.number)
        return self.arena._view[at : at + self.arena.layout.data_bytes].toreadonly()

    def read_into(self, start: int, into: memoryview) -> None:
        """Copy the data from byte ``start`` on into ``into``, not verified: see `check_leaf`. `ArenaDamaged` where
        there is less. Other threads run meanwhile.

        A system call copies them, not the mapping: having its pages mapped, and taken away at the end, takes as long as
        the copy. Data that is truncated meanwhile is damage, too, not the end of the process.
        """
        layout = self.arena.layout
        at, done = layout.data_at(self.number) + start, 0
        room = min(len(into), layout.data_bytes - start)
        try:
            while done < room and (count := os.preadv(self.arena._descriptor, [into[done:room]], at + done)):
                done += count
        except OSError as error:
            raise ArenaDamaged(f"the arena {self.arena.name!r} cannot be read: {error}: take a checkpoint") from error
        if done < len(into):
            raise self._damaged(f"byte {start + done}")

    def check_leaf(self, number: int, leaf: memoryview) -> None:
        """Compare a copy of leaf ``number`` of the data, whole, with its checksum. `ArenaDamaged`."""
        if (
            leaf_digests(leaf, self.arena.layout.leaf_bytes)
            != self.record.checksums[CHECKSUM_BYTES * number : CHECKSUM_BYTES * (number + 1)]
        ):
            raise self._damaged(f"leaf {number}")

    def slice(self, number: int) -> memoryview:
        """The bytes of slice ``number``, read-only, compared with their checksums. `ArenaDamaged`."""
        layout = self.arena.layout
        low = layout.data_at(self.number) + number * layout.slice_bytes
        high = min(low + layout.slice_bytes, layout.data_at(self.number) + layout.data_bytes)
        found = self.arena._view[low:high].toreadonly()
        if leaf_digests(found, layout.leaf_bytes) != self.record.checksums[layout.checksums_of(number)]:
            raise self._damaged(f"slice {number}")
        return found

    def _damaged(self, what: str) -> ArenaDamaged:
        return ArenaDamaged(
            f"in the arena {self.arena.name!r}, {what} of step {self.record.step} is not what was written: take an "
            "older generation, or a checkpoint"
        )


def _age(record: GenerationRecord) -> tuple[int, int]:
    """By which generations are told apart as older and newer."""
    return record.step, record.sequence


def _mapped(descriptor: int, size_bytes: int, name: str, *, writes: bool) -> mmap.mmap:
    """The memory. `mmap` keeps a copy of what it is given, and with it its locks, so that it gets another opening."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    try:
        another = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            return mmap.mmap(another, size_bytes, mmap.MAP_SHARED, access)
        finally:
            os.close(another)
    except OSError as error:
        raise ArenaError(f"the arena {name!r} cannot be mapped: {error.strerror}") from error


def _layout_of(descriptor: int, name: str) -> ArenaLayout:
    try:
        layout = ArenaLayout.from_bytes(os.pread(descriptor, SUPERBLOCK_BYTES, 0))
    except WireError as error:
        raise ArenaDamaged(f"the file {name!r} is no arena that this lakeckpt can read: {error}") from error
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes != layout.size_bytes:
        raise ArenaDamaged(f"the arena {name!r} has {size_bytes} bytes and says that it has {layout.size_bytes}")
    return layout

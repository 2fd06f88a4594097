"""This module maps the arena of one rank, finds the complete generations in it, and begins new ones.

An arena holds a few generations. `Arena.begin` chooses a generation that nobody needs: never the newest complete one,
none that somebody reads, and none that another rank may have to go back to. The sequence number of a generation is odd
from then until the generation is complete. So a process that finds the arena after a crash, at any moment, finds
complete generations only. A record that is valid under the sequence number makes a generation complete. The checksums
of its data follow behind it: `lakeckpt.checkpoint.arena.checksums` takes them, in the agent.

The memory is a file that outlives its processes (`lakeckpt.checkpoint.arena.folder`). One opening writes, any number
read: a generation that is held cannot be begun anew. Several threads may fill a generation. The module copies nothing
into an arena, starts no threads and imports no torch.
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
from lakeckpt.checkpoint.arena.layout import DataChecksums, GenerationRecord, layout_in
from lakeckpt.checkpoint.arena.locks import FileLocks
from lakeckpt.checkpoint.format.digests import DIGEST_BYTES
from lakeckpt.errors import ArenaDamaged, ArenaError, WireError
from lakeckpt.recovery.facts import CutId

__all__ = ["Arena", "HeldGeneration"]

_SEQUENCE_BYTES = 8
_REMOVE = 9  # MADV_REMOVE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter's lock, those of `mmap` do not


class Arena:
    """The arena in the file opened as ``descriptor``, which the arena owns from then on. ``name`` is for messages.

    ``writes``: to fill generations. Raises `ArenaError` if another opening fills them already, `ArenaDamaged` if
    the file is not an arena of the size that it names, and `ArenaError` if it cannot be mapped.
    """

    def __init__(self, descriptor: int, name: str, *, writes: bool) -> None:
        self.name, self.writes = name, writes
        self._descriptor = descriptor
        self._locks = FileLocks(descriptor)
        try:
            self.layout = layout_in(descriptor, name)
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
        """The record of each generation as it was read last: valid while the sequence number is the same."""
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
        """Close the file and release its locks. The memory stays mapped for as long as anybody holds a view of it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0 and os.getpid() == self._process:
            self._locks.forget()
            os.close(descriptor)

    def fileno(self) -> int:
        """Return the descriptor of the file, for ``os.sendfile``."""
        return self._descriptor

    @property
    def memory(self) -> memoryview:
        """All memory of the arena, as it is mapped; only a `Filling` may write to it."""
        return self._view

    @property
    def is_filled(self) -> bool:
        """True if another opening of this arena fills it: its trainer lives."""
        return self._locks.taken(self._writer)

    @property
    def is_there(self) -> bool:
        """True if others can find the arena: its file has not been removed."""
        return os.fstat(self._descriptor).st_nlink > 0

    # --- what is complete

    def complete(self) -> list[GenerationRecord]:
        """Return the records of the complete generations, the newest step first. Documents and data are not looked
        at."""
        found = [record for _, record in self._records()]
        return sorted(found, key=_age, reverse=True)

    def cuts(self) -> dict[CutId, bytes]:
        """Return the cuts of the complete generations with their digests, as `hold` finds them, the newest first."""
        found: dict[CutId, bytes] = {}
        for record in self.complete():
            found.setdefault(record.cut, record.digest)
        return found

    @contextmanager
    def hold(self, cut: CutId | None = None, *, step: int | None = None) -> Iterator[HeldGeneration | None]:
        """Lock the complete generation of ``cut`` while the block runs, so that it is not written; or that of ``step``,
        whatever attempt captured it; or the newest. The last captured generation counts.

        Yields None if there is no such generation.
        """
        for number, record in sorted(self._records(), key=lambda one: _age(one[1]), reverse=True):
            if cut not in (None, record.cut) or step not in (None, record.cut.step):
                continue
            if not self._hold(number):
                continue  # it is being begun
            try:
                if self._record(number) == record:
                    yield HeldGeneration(arena=self, number=number, record=record)
                    return
            finally:
                self._release(number)
        yield None

    def newest(self) -> HeldGeneration | None:
        """Return the newest complete generation; None if there is none. It is not locked: a capture may begin it anew
        at any time, and `HeldGeneration.is_there` is then False."""
        number, record = max(self._records(), key=lambda one: _age(one[1]), default=(0, None))
        return None if record is None else HeldGeneration(arena=self, number=number, record=record)

    def _hold(self, number: int) -> bool:
        with self._lock:
            if number in self._filling:  # our own lock would turn into a shared one
                return False
            if self._holding[number] == 0 and not self._locks.take(number, shared=True):
                return False
            self._holding[number] += 1
            return True

    def _release(self, number: int) -> None:
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
        fits = record.documents_bytes <= self.layout.documents_bytes
        if not fits or not record.sequence == sequence == self._sequence(number):
            return None
        self._read[number] = record
        return record

    # --- what is written

    def begin(self, *, common: int | None = None) -> Filling | None:
        """Begin a generation; None if there is no generation to spare: the cut is then skipped.

        ``common``: the newest step that every rank is known to have complete; generations from that step on stay. None:
        nothing is known, and a generation is begun only if those of two newer steps are complete, because one rank
        may be a step ahead of another when it dies. An attempt may have captured several generations of one step: only
        the last of them is kept. A generation of the step that an earlier attempt has captured is kept as long as there
        is room.
        """
        assert self.writes, "this opening of the arena only reads"
        with self._lock:  # so that no generation that is completed meanwhile looks as if nobody filled it
            for number in self._spare(common):
                if not self._holding[number] and self._locks.take(number):
                    # Odd, and larger than any before: also if a writer died.
                    sequence = max(map(self._sequence, range(self.layout.generations)))
                    sequence += 1 + sequence % 2
                    self._put_sequence(number, sequence)
                    self._filling.add(number)
                    return Filling(
                        layout=self.layout,
                        number=number,
                        sequence=sequence,
                        memory=self._view,
                        put=self._put,
                        end=self._end,
                    )
        return None

    def _spare(self, common: int | None) -> list[int]:
        """Return the generations that may be begun, the least needed first."""
        records = {number: record for number, record in self._records() if number not in self._filling}
        by_age = sorted(records, key=lambda number: _age(records[number]))
        last = {records[number].cut.step: number for number in by_age}
        last_of_attempt = {records[number].cut: number for number in by_age}
        steps = sorted(last, reverse=True)
        safe = common if common is not None else (steps[1] if len(steps) > 2 else -1)
        spare = [number for number in range(self.layout.generations) if number not in {*records, *self._filling}]
        spare += [number for number in by_age if number not in last_of_attempt.values()]
        spare += [number for number in by_age if records[number].cut.step < min(safe, steps[0])]
        # Another rank may have nothing newer than the generation of an earlier attempt: it is begun last.
        spare += [number for number in by_age if number not in last.values()]
        return spare

    def forget(self, after: int) -> None:
        """Discard the complete generations of steps later than ``after``: the history goes on from there."""
        assert self.writes, "this opening of the arena only reads"
        for number, record in self._records():
            if record.cut.step > after and self._locks.take(number):
                self._put_sequence(number, record.sequence + 1)
                self._locks.drop(number)

    def empty(self) -> None:
        """Free the memory of all generations that nobody holds, also if others have it mapped, and discard them.
        Generations that somebody holds, to persist them, stay as they are."""
        assert self.writes, "this opening of the arena only reads"
        for number in range(self.layout.generations):
            with self._lock:
                if number in self._filling or self._holding[number] or not self._locks.take(number):
                    continue
                sequence = self._sequence(number)
                self._put_sequence(number, sequence + 1 + sequence % 2)
                self._holding[number] += 1  # so that nobody here takes our own lock for shared
            try:
                self._free(number)
            finally:
                self._release(number)

    def _free(self, number: int) -> None:
        """Free the whole pages in which documents and data of a generation lie. If a file system cannot do that,
        they stay taken until nobody has them mapped."""
        begin = -(-self.layout.documents_at(number) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.layout.data_at(number) + self.layout.data_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._advise(begin, end - begin, _REMOVE)

    def touch(self) -> None:
        """Map all memory of the arena in this process: page by page and later, this would take as long as a copy."""
        self._advise(0, len(self._map), _POPULATE_WRITE)  # an older Linux maps pages as they are written first

    def _advise(self, at: int, size_bytes: int, advice: int) -> None:
        """Call ``madvise`` on our memory; other threads run meanwhile. An advice that the system does not know is
        ignored."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + at
        with contextlib.suppress(AttributeError):
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)

    def _end(self, number: int, record: GenerationRecord | None) -> None:
        """End the filling of a generation, which is complete if there is a ``record``."""
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
        """Write to the memory: nothing else in this class does."""
        self._view[at : at + len(data)] = data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldGeneration:
    """A complete generation. If it is held, it is not written to meanwhile."""

    arena: Arena
    number: int
    record: GenerationRecord

    @property
    def is_there(self) -> bool:
        """True if the generation was not begun anew. Bytes of it that were read before are then of the cut."""
        return self.arena._record(self.number) == self.record

    def checksums(self) -> bytes | None:
        """Return the digests of the leaves of the data, one behind the other; None if nobody has taken them."""
        found = self._checksums()
        return None if found is None or found.sequence != self.record.sequence else found.leaves

    def known_leaves(self) -> dict[int, bytes]:
        """Return the digests of leaves that lay there before the capture, and were taken then, by their numbers."""
        found, kept = self._checksums(), self.record.kept
        if found is None or kept is None or found.sequence < kept.since:
            return {}
        numbers = (number for first, stop in kept.ranges for number in range(first, stop))
        return {number: found.leaves[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] for number in numbers}

    def _checksums(self) -> DataChecksums | None:
        """Return what lies there: of this generation, or of an older one in the same place."""
        at = self.arena.layout.checksums_at(self.number)
        with contextlib.suppress(WireError):
            found = DataChecksums.from_bytes(self.arena._view[at : at + self.arena.layout.checksums_room])
            return found if len(found.leaves) == DIGEST_BYTES * self.arena.layout.num_leaves else None
        return None

    def put_checksums(self, leaves: bytes) -> None:
        """Keep the digests of the leaves of the data for all who open the arena. Any opening may do so."""
        found = DataChecksums(sequence=self.record.sequence, leaves=leaves)
        os.pwrite(self.arena._descriptor, found.to_bytes(), self.arena.layout.checksums_at(self.number))

    def documents(self) -> bytes:
        """Return the documents of the cut. Raises `ArenaDamaged` if they are not what was written."""
        at = self.arena.layout.documents_at(self.number)
        found = bytes(self.arena._view[at : at + self.record.documents_bytes])
        if checksum(found) != self.record.documents_checksum:
            raise self.damaged("its documents")
        return found

    @property
    def data_bytes(self) -> int:
        """How many bytes the data have."""
        return self.arena.layout.data_bytes

    @property
    def data(self) -> memoryview:
        """The data of the generation, read-only and not verified."""
        return self.view(0, self.data_bytes)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the data where they lie, read-only and not verified."""
        at = self.arena.layout.data_at(self.number)
        return self.arena._view[at + start : at + stop].toreadonly()

    def read_into(self, start: int, into: memoryview) -> None:
        """Copy the data from byte ``start`` on into ``into``, not verified. Raises `ArenaDamaged` if there is less.
        Other threads run meanwhile.

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
            raise self.damaged(f"byte {start + done}")

    def damaged(self, what: str) -> ArenaDamaged:
        """Return the error that says that ``what`` of the generation is not what was written."""
        return ArenaDamaged(
            f"in the arena {self.arena.name!r}, {what} of step {self.record.cut.step} is not what was written: take an "
            "older generation, or a checkpoint"
        )


def _age(record: GenerationRecord) -> tuple[int, int]:
    """Return what orders generations from old to new."""
    return record.cut.step, record.sequence


def _mapped(descriptor: int, size_bytes: int, name: str, *, writes: bool) -> mmap.mmap:
    """Return the memory. `mmap` keeps a copy of its descriptor, and with it the locks: it gets another opening."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    try:
        another = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            return mmap.mmap(another, size_bytes, mmap.MAP_SHARED, access)
        finally:
            os.close(another)
    except OSError as error:
        raise ArenaError(f"the arena {name!r} cannot be mapped: {error.strerror}") from error

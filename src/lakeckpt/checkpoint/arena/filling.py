"""How does a generation of an arena get its data?  Slice by slice, with checksums, until it is complete or given back.

Slices are written to the arena's memory by whoever fills them, which is fast, or brought (`Filling.bring`), which is
slow and leaves the memory to others meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from lakeckpt.checkpoint.arena.layout import CHECKSUM_BYTES, GenerationRecord
from lakeckpt.checkpoint.format.digests import LeafDigests, leaf_digests
from lakeckpt.errors import ArenaDamaged

if TYPE_CHECKING:
    from lakeckpt.checkpoint.arena.arena import Arena

__all__ = ["Filling", "Run", "checksum"]

_STEP_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes (arrays of uint8) that are to be copied ``to`` byte ``at`` of a generation's data."""

    at: int
    to: npt.NDArray[np.uint8]
    source: npt.NDArray[np.uint8]


def checksum(data: bytes | memoryview) -> bytes:
    """XXH3-128: 16 bytes, at the speed of memory. It notices accidents, not forgery."""
    return xxhash.xxh3_128_digest(data)


class Filling:
    """A generation that is being filled: slices in any order, by any threads, then `complete`, or `abandon`."""

    __slots__ = ("_arena", "_brought", "_checksums", "_lock", "_missing", "_number", "_sequence")

    def __init__(self, *, arena: Arena, number: int, sequence: int) -> None:
        self._arena, self._number, self._sequence = arena, number, sequence
        self._checksums = bytearray(CHECKSUM_BYTES * arena.layout.num_leaves)
        self._missing = set(range(arena.layout.num_slices))
        self._brought: dict[int, bytes] = {}
        """The checksums of slices that were brought."""
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """Which of the arena's generations it is."""
        return self._number

    @property
    def data(self) -> memoryview:
        """The data of the generation, to be written to: ``data_bytes`` bytes."""
        at = self._arena.layout.data_at(self._number)
        return self._arena._view[at : at + self._arena.layout.data_bytes]

    def bring(self, number: int, runs: Sequence[Run]) -> None:
        """Copy ``runs``, all that slice ``number`` still lacks, in the order of where they go, gently.

        A system call copies them, page after page, and what was copied is digested while the processor's own cache
        still has it. That takes twice as long as copying as fast as can be; whoever computes on another core, and
        shares the last cache and the memory with this one, loses a third of what copying fast costs it.
        """
        arena, layout, data = self._arena, self._arena.layout, self.data
        data_at = layout.data_at(self._number)
        begin = number * layout.slice_bytes
        end = min(begin + layout.slice_bytes, layout.data_bytes)
        digests, left = LeafDigests(layout.leaf_bytes), deque(runs)
        for start in range(begin, end, _STEP_BYTES):
            stop = min(start + _STEP_BYTES, end)
            while left and left[0].at < stop:
                run = left[0]
                first, last = max(start, run.at), min(stop, run.at + len(run.source))
                while first < last:
                    rest = run.source.data[first - run.at : last - run.at]
                    first += os.pwrite(arena._descriptor, rest, data_at + first)
                if run.at + len(run.source) > stop:
                    break
                left.popleft()
            digests.update(data[start:stop])
        with self._lock:
            self._brought[number] = digests.digests()

    def bounds(self, number: int) -> tuple[int, int]:
        """Where in the arena slice ``number`` begins and ends."""
        layout = self._arena.layout
        begin, at = number * layout.slice_bytes, layout.data_at(self._number)
        return at + begin, at + min(begin + layout.slice_bytes, layout.data_bytes)

    def filled(self, number: int) -> None:
        """Slice ``number`` is as it shall be: take its checksums. It must not be written to any more."""
        with self._lock:
            checksums = self._brought.pop(number, None)
        if checksums is None:
            begin, end = self.bounds(number)
            checksums = leaf_digests(self._arena._view[begin:end], self._arena.layout.leaf_bytes)
        self.summed(number, checksums)

    def summed(self, number: int, checksums: bytes) -> None:
        """Slice ``number`` is as it shall be, and ``checksums`` are those of its leaves."""
        with self._lock:
            self._checksums[self._arena.layout.checksums_of(number)] = checksums
            self._missing.discard(number)

    def complete(self, *, step: int, attempt: str, cut: bytes, documents: bytes) -> GenerationRecord:
        """Make the generation the complete one of ``step``. Every slice must have been filled.

        ``ArenaDamaged`` where ``documents`` are larger than the arena has room for; the generation is abandoned then.
        """
        arena, layout = self._arena, self._arena.layout
        if self._missing:
            raise ValueError(f"slices {sorted(self._missing)[:5]} of step {step} were not filled")
        if len(documents) > layout.documents_bytes:
            self.abandon()
            raise ArenaDamaged(
                f"the documents of step {step} have {len(documents)} bytes and the arena {arena.name!r} has room for "
                f"{layout.documents_bytes}: make it anew"
            )
        arena._put(layout.documents_at(self._number), documents)
        record = GenerationRecord(
            sequence=self._sequence + 1,
            step=step,
            attempt=attempt,
            cut=cut,
            documents_bytes=len(documents),
            documents_checksum=checksum(documents),
            checksums=bytes(self._checksums),
        )
        data = record.to_bytes()
        if len(data) > layout.record_room:
            self.abandon()
            raise ArenaDamaged(f"the record of step {step} has {len(data)} bytes, more than {layout.record_room}")
        arena._put(layout.record_at(self._number), data)
        arena._end(self._number, record)
        return record

    def abandon(self) -> None:
        """Give the generation back as it is: it holds nothing until it is begun again."""
        self._arena._end(self._number)

"""This module fills a generation of an arena: slice by slice, with checksums, until it is complete or abandoned.

The caller writes the slices to the arena's memory, and calls `Filling.filled` for each. The module starts no threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import xxhash

from lakeckpt.checkpoint.arena.layout import CHECKSUM_BYTES, GenerationRecord
from lakeckpt.checkpoint.format.digests import leaf_digests
from lakeckpt.errors import ArenaDamaged

if TYPE_CHECKING:
    from lakeckpt.checkpoint.arena.arena import Arena

__all__ = ["Filling", "checksum"]


def checksum(data: bytes | memoryview) -> bytes:
    """Return the XXH3-128 of ``data`` (16 bytes), at the speed of memory. It notices accidents, not forgery."""
    return xxhash.xxh3_128_digest(data)


class Filling:
    """A generation that is being filled: slices in any order, by any threads, then `complete`, or `abandon`."""

    __slots__ = ("_arena", "_checksums", "_lock", "_missing", "_number", "_sequence")

    def __init__(self, *, arena: Arena, number: int, sequence: int) -> None:
        self._arena, self._number, self._sequence = arena, number, sequence
        self._checksums = bytearray(CHECKSUM_BYTES * arena.layout.num_leaves)
        self._missing = set(range(arena.layout.num_slices))
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

    def bounds(self, number: int) -> tuple[int, int]:
        """Return where in the arena slice ``number`` begins and ends."""
        layout = self._arena.layout
        begin, at = number * layout.slice_bytes, layout.data_at(self._number)
        return at + begin, at + min(begin + layout.slice_bytes, layout.data_bytes)

    def filled(self, number: int) -> None:
        """Take the checksums of slice ``number``, which must not be written to any more."""
        begin, end = self.bounds(number)
        self.summed(number, leaf_digests(self._arena._view[begin:end], self._arena.layout.leaf_bytes))

    def summed(self, number: int, checksums: bytes) -> None:
        """Take ``checksums`` for those of the leaves of slice ``number``, which must not be written to any more."""
        with self._lock:
            self._checksums[self._arena.layout.checksums_of(number)] = checksums
            self._missing.discard(number)

    def complete(self, *, step: int, attempt: str, cut: bytes, documents: bytes) -> GenerationRecord:
        """Make the generation the complete one of ``step``. Every slice must have been filled.

        Raises `ArenaDamaged` where ``documents`` are larger than the arena has room for, and abandons the generation.
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
        """End the filling without a complete generation."""
        self._arena._end(self._number)

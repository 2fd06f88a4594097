"""This module fills a generation of an arena, until the generation is complete or abandoned.

The caller writes the data to the arena's memory. The module starts no threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from lakeckpt.checkpoint.arena.layout import GenerationRecord
from lakeckpt.checkpoint.format.fields import CutId
from lakeckpt.errors import ArenaDamaged

if TYPE_CHECKING:
    from lakeckpt.checkpoint.arena.arena import Arena

__all__ = ["Filling", "checksum"]


def checksum(data: bytes | memoryview) -> bytes:
    """Return the XXH3-128 of ``data`` (16 bytes), at the speed of memory. It notices accidents, not forgery."""
    return xxhash.xxh3_128_digest(data)


class Filling:
    """A generation that is being filled: in any order, by any threads, then `complete`, or `abandon`."""

    __slots__ = ("_arena", "_number", "_sequence")

    def __init__(self, *, arena: Arena, number: int, sequence: int) -> None:
        self._arena, self._number, self._sequence = arena, number, sequence

    @property
    def number(self) -> int:
        """Which of the arena's generations it is."""
        return self._number

    @property
    def data(self) -> memoryview:
        """The data of the generation, to be written to: ``data_bytes`` bytes."""
        at = self._arena.layout.data_at(self._number)
        return self._arena._view[at : at + self._arena.layout.data_bytes]

    def complete(self, cut: CutId, *, digest: bytes, documents: bytes) -> GenerationRecord:
        """Make the generation the complete one of ``cut``, which has this ``digest`` (16 bytes). Nobody writes
        to its data any more.

        Raises `ArenaDamaged` where ``documents`` are larger than the arena has room for, and abandons the generation.
        """
        arena, layout = self._arena, self._arena.layout
        if len(documents) > layout.documents_bytes:
            self.abandon()
            raise ArenaDamaged(
                f"the documents of step {cut.step} have {len(documents)} bytes and the arena {arena.name!r} has room "
                f"for {layout.documents_bytes}: make it anew"
            )
        arena._put(layout.documents_at(self._number), documents)
        record = GenerationRecord(
            sequence=self._sequence + 1,
            cut=cut,
            digest=digest,
            documents_bytes=len(documents),
            documents_checksum=checksum(documents),
        )
        data = record.to_bytes()
        assert len(data) <= layout.record_room, "its fields are of a few bytes"
        arena._put(layout.record_at(self._number), data)
        arena._end(self._number, record)
        return record

    def abandon(self) -> None:
        """End the filling without a complete generation."""
        self._arena._end(self._number)

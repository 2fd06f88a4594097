"""This module fills a generation of an arena, until the generation is complete or abandoned.

The caller writes the data to the arena's memory. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from lakeckpt.checkpoint.arena.layout import ArenaLayout, GenerationRecord, KeptLeaves
from lakeckpt.errors import ArenaDamaged
from lakeckpt.recovery.facts import CutId

__all__ = ["Filling", "checksum"]


def checksum(data: bytes | memoryview) -> bytes:
    """Return the XXH3-128 of ``data`` (16 bytes), at the speed of memory. It notices accidents, not forgery."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filling:
    """A generation that is being filled: in any order, by any threads, then `complete`, or `abandon`."""

    layout: ArenaLayout
    number: int
    """Its number among the generations of the arena."""
    sequence: int
    """Its sequence number until it is complete: an odd number."""
    memory: memoryview
    """All memory of the arena."""
    put: Callable[[int, bytes], None]
    """Writes bytes to a place of the arena."""
    end: Callable[[int, GenerationRecord | None], None]
    """Ends the filling of a generation, which is complete if there is a record."""

    @property
    def data(self) -> memoryview:
        """The data of the generation, to be written to: ``data_bytes`` bytes."""
        at = self.layout.data_at(self.number)
        return self.memory[at : at + self.layout.data_bytes]

    def complete(
        self,
        cut: CutId,
        *,
        digest: bytes,
        documents: bytes,
        shares: bytes = b"",
        kept: KeptLeaves | None = None,
        divided: bool = False,
    ) -> GenerationRecord:
        """Make the generation the complete one of ``cut``, which has this ``digest`` (16 bytes). Nobody writes to its
        data any more. ``shares``: the digest of the list of shares in the documents. ``kept``: the leaves that lay
        there before. ``divided``: it is a share of what the node's replicas have divided.

        Raises `ArenaDamaged` if ``documents`` are larger than the arena has room for, and abandons the generation.
        """
        if len(documents) > self.layout.documents_bytes:
            self.abandon()
            raise ArenaDamaged(
                f"the documents of step {cut.step} have {len(documents)} bytes and their arena has room for "
                f"{self.layout.documents_bytes}: make it anew"
            )
        self.put(self.layout.documents_at(self.number), documents)
        record = GenerationRecord(
            sequence=self.sequence + 1,
            cut=cut,
            digest=digest,
            documents_bytes=len(documents),
            documents_checksum=checksum(documents),
            divided=divided,
            shares=shares,
            kept=kept,
        )
        data = record.to_bytes()
        assert len(data) <= self.layout.record_room, "its fields are of a few bytes"
        self.put(self.layout.record_at(self.number), data)
        self.end(self.number, record)
        return record

    def abandon(self) -> None:
        """End the filling without a complete generation."""
        self.end(self.number, None)

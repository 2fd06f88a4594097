"""This module defines where the bytes of an arena lie, and the records that describe them.

::

    superblock      written once: whose arena it is, and how large its parts are
    per generation
      sequence      8 bytes, native; odd while the generation is being written
      record        of a complete generation: its step and its cut
      checksums     of the data, one for each leaf (1 MiB); written behind the record, or never
      documents     what is no tensor (trees, reader state), as one run of bytes
      data          the tensors, as `SlicePlan` lays them out

All parts begin at multiples of 4096 bytes. Superblock, record and checksums are documents of ``wire``, each behind its
length in 8 bytes. A record, and the checksums, name the sequence number under which they are valid: what an older
generation left, or what is torn, is not valid.

The module computes places, and makes and reads records. Only `layout_in` touches a file. ``arena`` maps, locks and
copies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, LEAF_BYTES
from lakeckpt.checkpoint.format.fields import Digest
from lakeckpt.errors import ArenaDamaged, WireDamaged, WireError
from lakeckpt.recovery.facts import CutId
from lakeckpt.wire.documents import Count, Positive, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["ArenaIdentity", "ArenaKind", "ArenaLayout", "DataChecksums", "GenerationRecord", "KeptLeaves", "layout_in"]

PAGE = 4096
SUPERBLOCK_BYTES = 4 * PAGE
_KIND, _VERSION = "arena", (1, 0)
_RECORD_KIND, _RECORD_VERSION = "arena-generation", (1, 0)
_CHECKSUMS_KIND, _CHECKSUMS_VERSION = "arena-checksums", (1, 0)
_LENGTH_BYTES = 8
_CHECKSUMS_ROOM = 256
"""The room in the checksums for all but themselves."""


ArenaKind = Literal["own", "copy", "documents", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaIdentity:
    """The owner of the cuts: the run (16 bytes), the rank, and the number of ranks. ``kind``: the rank itself fills the
    arena, or it holds copies of what the rank has captured on another node, or of the documents of that alone. Or it
    holds the parity that the node of the rank keeps of the shares of other ``members`` of a group, which name the rank,
    too, in the order of the group."""

    run: Digest
    rank: Count
    world: Positive
    kind: ArenaKind = "own"
    members: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Where the parts of an arena lie; all sizes in bytes. ``plan`` is the digest of the `SlicePlan`."""

    identity: ArenaIdentity
    plan: Digest
    data_bytes: Count
    documents_bytes: Count
    generations: Positive = 3

    @property
    def num_leaves(self) -> int:
        """How many checksums the data of a generation has."""
        return max(1, -(-self.data_bytes // LEAF_BYTES))

    @property
    def size_bytes(self) -> int:
        """The size of the whole arena."""
        return SUPERBLOCK_BYTES + self.generations * self._stride

    @property
    def record_room(self) -> int:
        """How long a record may be, its length included."""
        return PAGE

    @property
    def checksums_room(self) -> int:
        """How long the checksums of a generation may be, their length included."""
        return _pages(_CHECKSUMS_ROOM + DIGEST_BYTES * self.num_leaves)

    @property
    def _stride(self) -> int:
        documents_bytes, data_bytes = _pages(self.documents_bytes), _pages(self.data_bytes)
        return PAGE + self.record_room + self.checksums_room + documents_bytes + data_bytes

    def sequence_at(self, generation: int) -> int:
        """Return where the sequence number of a generation lies."""
        return SUPERBLOCK_BYTES + generation * self._stride

    def record_at(self, generation: int) -> int:
        """Return where the record of a generation lies."""
        return self.sequence_at(generation) + PAGE

    def checksums_at(self, generation: int) -> int:
        """Return where the checksums of a generation lie."""
        return self.record_at(generation) + self.record_room

    def documents_at(self, generation: int) -> int:
        """Return where the documents of a generation lie."""
        return self.checksums_at(generation) + self.checksums_room

    def data_at(self, generation: int) -> int:
        """Return where the data of a generation lie."""
        return self.documents_at(generation) + _pages(self.documents_bytes)

    def to_bytes(self) -> bytes:
        """Return the superblock."""
        return _framed(dumps(to_plain(self), kind=_KIND, version=_VERSION))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ArenaLayout:
        """Return the layout that a superblock describes. Raises `WireError`."""
        plain = loads(_unframed(data), kind=_KIND, supported=_VERSION)
        found: ArenaLayout = from_plain(cls, plain, "the superblock of an arena")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLeaves:
    """Leaves of a generation's data that its capture did not write, as they were there: ``ranges`` (first, stop) of
    their numbers. They are as they were when the generation of the sequence number ``since`` was complete."""

    since: Count
    ranges: tuple[tuple[Count, Count], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """The record that makes a generation complete. ``digest``: of the cut (16 bytes), the same on every rank.
    ``shares``: of the list of shares among its documents; empty if there is none. ``kept``: the leaves that lay there
    before; None if all were written. ``divided``: the replicas of this node have divided the state, so that a restore
    needs the shares of all."""

    sequence: Count
    cut: CutId
    digest: bytes
    documents_bytes: Count
    documents_checksum: bytes
    divided: bool = False
    shares: bytes = b""
    kept: KeptLeaves | None = None

    def to_bytes(self) -> bytes:
        """Return the record, behind its length."""
        return _framed(dumps(to_plain(self), kind=_RECORD_KIND, version=_RECORD_VERSION))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> GenerationRecord:
        """Return the record that `to_bytes` made into ``data``; bytes behind it are ignored. Raises `WireError`."""
        plain = loads(_unframed(data), kind=_RECORD_KIND, supported=_RECORD_VERSION)
        found: GenerationRecord = from_plain(cls, plain, "the record of a generation")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChecksums:
    """The checksums of a generation's data, valid for the record of the same ``sequence``."""

    sequence: Count
    leaves: bytes
    """16 bytes for each leaf, in their order: `lakeckpt.checkpoint.format.digests.leaf_digests`."""

    def to_bytes(self) -> bytes:
        """Return the document, behind its length."""
        return _framed(dumps(to_plain(self), kind=_CHECKSUMS_KIND, version=_CHECKSUMS_VERSION))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DataChecksums:
        """Return the checksums that `to_bytes` made into ``data``; bytes behind it are ignored. Raises `WireError`."""
        plain = loads(_unframed(data), kind=_CHECKSUMS_KIND, supported=_CHECKSUMS_VERSION)
        found: DataChecksums = from_plain(cls, plain, "the checksums of a generation")
        return found


def layout_in(descriptor: int, name: str) -> ArenaLayout:
    """Return the layout that the superblock of an open file describes. Raises `ArenaDamaged` if the file, whose
    ``name`` is for messages, is not an arena of the size that it names."""
    try:
        layout = ArenaLayout.from_bytes(os.pread(descriptor, SUPERBLOCK_BYTES, 0))
    except WireError as error:
        raise ArenaDamaged(f"the file {name!r} is no arena that this lakeckpt can read: {error}") from error
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes != layout.size_bytes:
        raise ArenaDamaged(f"the arena {name!r} has {size_bytes} bytes and its superblock names {layout.size_bytes}")
    return layout


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def _framed(document: bytes) -> bytes:
    return len(document).to_bytes(_LENGTH_BYTES, "little") + document


def _unframed(data: bytes | memoryview) -> bytes:
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not 0 < size <= len(data) - _LENGTH_BYTES:
        raise WireDamaged(f"there is no document in these {len(data)} bytes: {size} are claimed")
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + size])

"""This module defines the documents beside the data of a generation, and reads the tensors of a generation.

::

    trees      item → the document of its tree, as checkpoints hold it; the random states are one of them
    table      a document of its own: key, dtype, shape and place of every tensor. The same for all cuts of a plan, so
               that it is made once
    readers    name → the record of a reader at the cut, opaque here
    sums       key → the sum of a tensor that the replicas of a node divide (`lakeckpt.checkpoint.arena.dividing`), as
               this rank has it; only if the cut is saved
    samples    8 bytes for each tensor that replicas divide, in the order of keys: equal on ranks that have sampled the
               same at the cut (`lakeckpt.checkpoint.arena.drift`)
    shares     the list of the shares of all ranks (`lakeckpt.recovery.shares`), if it is known
    frozen     key → how often a tensor that captures may skip was changed, as torch counts it; only if none was skipped

`GenerationDocuments` writes and reads them. `contents_of` joins them with the data of a generation that is held, and
`contents_from` with those of one that lies elsewhere: `Contents` verifies tensors, and copies them to where they
belong. Tensors are verified only if somebody has taken the checksums of the generation (`Contents.checksums`).

Imports without torch. Threads are started and joined inside `Contents.verify`, `Contents.fill` and
`Contents.fill_range`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol, TypeVar

from lakeckpt.checkpoint.arena.arena import HeldGeneration
from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, LEAF_BYTES, leaf_digests, leaves_of_all
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.errors import ArenaDamaged, WireError
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "Contents",
    "Generation",
    "GenerationDocuments",
    "TensorPlace",
    "TensorTable",
    "contents_from",
    "contents_of",
]

_KIND, _VERSION = "arena-contents", (1, 0)
_TABLE_KIND, _TABLE_VERSION = "arena-table", (1, 0)
_MOST_THREADS = 8
_LEAVES_AT_ONCE = 16

_T = TypeVar("_T")
_Piece = tuple[int, memoryview]
"""The first of some bytes of the data, and where these bytes go."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor, and the byte of a generation's data at which it begins; it has ``spec.size_bytes``."""

    spec: TensorSpec
    start: Count

    @property
    def stop(self) -> int:
        """The byte after its last byte."""
        return self.start + self.spec.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable:
    """Where the tensors of a plan lie. ``document`` is made once, however many cuts name it."""

    places: Mapping[str, TensorPlace]
    document: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = to_plain(self.places.values(), tuple[TensorPlace, ...])
        object.__setattr__(self, "document", dumps(plain, kind=_TABLE_KIND, version=_TABLE_VERSION))

    def to_plain(self) -> bytes:
        """Return the document, as the documents of a generation hold it."""
        return self.document

    @classmethod
    def from_plain(cls, plain: object) -> TensorTable:
        """Return the table that `to_plain` made into ``plain``. Raises `WireError`."""
        data = from_plain(bytes, plain, "a table of tensors")
        found = loads(data, kind=_TABLE_KIND, supported=_TABLE_VERSION)
        rows: tuple[TensorPlace, ...] = from_plain(tuple[TensorPlace, ...], found, "a table of tensors")
        return cls(places={one.spec.key: one for one in rows})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDocuments:
    """The documents of a generation, beside its data."""

    trees: Mapping[str, bytes]
    table: TensorTable
    readers: Mapping[str, bytes] = field(default_factory=dict)
    sums: Mapping[str, bytes] = field(default_factory=dict)
    samples: bytes = b""
    shares: bytes = b""
    frozen: Mapping[str, Count] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the document of a generation."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> GenerationDocuments:
        """Return the documents that `to_bytes` made into ``data``. Raises `WireError`."""
        plain = loads(data, kind=_KIND, supported=_VERSION)
        found: GenerationDocuments = from_plain(cls, plain, "the contents of a generation")
        return found


class Generation(Protocol):
    """The data of a generation, wherever they lie. Any thread may call it. Nothing is verified."""

    @property
    def data_bytes(self) -> int:
        """How many bytes the data have."""

    def read_into(self, start: int, into: memoryview) -> None:
        """Copy the data from byte ``start`` on into ``into``. Raises `ArenaDamaged` if that cannot be done."""

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the data. Raises `ArenaDamaged`."""

    def damaged(self, what: str) -> ArenaDamaged:
        """Return the error that says that ``what`` of the generation is not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """A generation that is held, with its documents: a `lakeckpt.checkpoint.state.loaded.TensorSource`. Its memory is
    valid for as long as it is held."""

    held: Generation
    documents: GenerationDocuments
    checksums: bytes | None = field(repr=False)
    """The digests of the leaves of the data; None if nobody has taken them. Nothing is verified then."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """key → the spec of each tensor, in the order of their bytes."""
        return {key: one.spec for key, one in self.documents.table.places.items()}

    def leaves(self) -> dict[str, bytes]:
        """Return key → the digests of each tensor's leaves (`lakeckpt.checkpoint.format.digests.leaf_digests`).

        The checksums of the memory are taken for tensors that lie at whole leaves; only the others are read, on several
        threads. Nothing is verified: see `verify`.
        """
        places, view = self.documents.table.places, self.held.view
        known, rest = {}, {}
        for key, one in places.items():
            leaves = one.spec.size_bytes // LEAF_BYTES
            if self.checksums is None or not leaves or one.start % LEAF_BYTES:
                rest[key] = view(one.start, one.stop)
                continue
            first = DIGEST_BYTES * (one.start // LEAF_BYTES)
            pieces = [self.checksums[first : first + DIGEST_BYTES * leaves]]
            if one.spec.size_bytes % LEAF_BYTES:  # its last leaf is shorter than the one of the memory
                pieces.append(leaf_digests(view(one.start + leaves * LEAF_BYTES, one.stop), LEAF_BYTES))
            known[key] = b"".join(pieces)
        return known | dict(zip(rest, leaves_of_all(list(rest.values())), strict=True))

    def verify(self) -> None:
        """Compare all data with their checksums where they lie mapped, on several threads. Raises `ArenaDamaged`."""
        if self.checksums is not None:
            every = range(len(self.checksums) // DIGEST_BYTES)
            _on_threads(self._verify_leaf, every)

    def _verify_leaf(self, number: int) -> None:
        low = number * LEAF_BYTES
        self._check(number, self.held.view(low, min(low + LEAF_BYTES, self.held.data_bytes)))

    def _check(self, number: int, leaf: memoryview) -> None:
        """Compare leaf ``number`` of the data, whole, with its checksum, if there is one. Raises `ArenaDamaged`."""
        at = DIGEST_BYTES * number
        if self.checksums is not None and leaf_digests(leaf, LEAF_BYTES) != self.checksums[at : at + DIGEST_BYTES]:
            raise self.held.damaged(f"leaf {number}")

    def fill(self, into: Mapping[str, memoryview]) -> None:
        """Copy the tensors named into these buffers (uint8, of their sizes), on several threads. Each leaf is verified
        as it comes. Raises `ArenaDamaged`: the buffers may hold anything then."""
        places = self.documents.table.places
        self._copy([(places[key].start, target) for key, target in into.items() if len(target)])

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        """Do the same with some bytes of one tensor, from ``start`` on."""
        self._copy([(self.documents.table.places[key].start + start, into)])

    def unit_bytes(self, key: str) -> int:
        """Return how many bytes of a tensor are verified together."""
        return LEAF_BYTES

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors hold the same bytes. Raises as `fill` does."""
        places = self.documents.table.places
        made = [bytearray(places[key].spec.size_bytes) for key in (one, other)]
        self.fill({key: memoryview(data) for key, data in zip((one, other), made, strict=True)})
        return made[0] == made[1]

    def _copy(self, pieces: Iterable[_Piece]) -> None:
        by_leaf: defaultdict[int, list[_Piece]] = defaultdict(list)
        for start, target in pieces:
            for leaf in range(start // LEAF_BYTES, (start + len(target) - 1) // LEAF_BYTES + 1):
                by_leaf[leaf].append((start, target))
        leaves = sorted(by_leaf.items(), key=itemgetter(0))
        _on_threads(
            self._copy_leaves, [leaves[at : at + _LEAVES_AT_ONCE] for at in range(0, len(leaves), _LEAVES_AT_ONCE)]
        )

    def _copy_leaves(self, leaves: Sequence[tuple[int, list[_Piece]]]) -> None:
        """Copy what each leaf has of some tensors, and verify the leaf while it is in the cache."""
        data_bytes = self.held.data_bytes
        buffer = memoryview(bytearray(min(LEAF_BYTES, data_bytes)))
        for number, pieces in leaves:
            low = number * LEAF_BYTES
            high = min(low + LEAF_BYTES, data_bytes)
            start, target = pieces[0]
            is_inside = start <= low and high <= start + len(target)
            leaf = target[low - start : high - start] if is_inside else buffer[: high - low]
            self.held.read_into(low, leaf)
            self._check(number, leaf)
            for start, target in pieces[is_inside:]:
                first, last = max(start, low), min(start + len(target), high)
                target[first - start : last - start] = leaf[first - low : last - low]


def contents_of(held: HeldGeneration) -> Contents:
    """Return the contents of a held generation. Tensors are not looked at. Raises `ArenaDamaged` if the documents
    make no sense."""
    where = f"in the arena {held.arena.name!r}, what step {held.record.cut.step} holds"
    return contents_from(held, held.documents(), held.checksums(), where)


def contents_from(held: Generation, data: bytes, checksums: bytes | None, where: str) -> Contents:
    """Return the contents of a generation, whose documents are ``data``, as `contents_of` does. ``where`` names it in
    errors."""
    try:
        documents = GenerationDocuments.from_bytes(data)
    except WireError as error:
        raise ArenaDamaged(f"{where} cannot be read: {error}. Take an older generation, or a checkpoint") from error
    return Contents(held=held, documents=documents, checksums=checksums)


def _on_threads(work: Callable[[_T], object], every: Sequence[_T]) -> None:
    """Do ``work`` for each of ``every``, on several threads. Raises the first error, and leaves the rest undone."""
    threads = max(2, min(_MOST_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="lakeckpt-arena") as pool:
        jobs = [pool.submit(work, one) for one in every]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

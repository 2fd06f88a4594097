"""What is in a generation, besides bytes?  The document beside its data: trees, readers, and where each tensor lies.

::

    trees      item → the document of its tree, as checkpoints hold it; the random states are one of them
    table      a document of its own: key, dtype, shape and place of every tensor. The same for all cuts of a plan, so
               that it is made once
    readers    name → the record of a reader at the cut, opaque here
    extra      name → whatever else whoever made the cut has to say of it, opaque here

`Documents` writes and reads it; `contents_of` joins it with the data of a generation that is held, and gives tensors
as memory whose checksums were compared, or copies them to where they belong. What was read is checked against the
arena's size before anything is looked at.

Imports without torch. Threads are started and joined inside the calls that verify and `Contents.fill`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from lakeckpt.checkpoint.arena.arena import Held
from lakeckpt.checkpoint.arena.layout import CHECKSUM_BYTES
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests, leaves_of_all
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import fields_of, number, taken
from lakeckpt.errors import ArenaDamaged, WireDamaged, WireError
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Contents", "Documents", "TensorPlace", "TensorTable", "contents_of"]

_KIND, _VERSION = "arena-contents", (1, 0)
_TABLE_KIND, _TABLE_VERSION = "arena-table", (1, 0)
_MOST_THREADS = 8
_VERIFY_THREADS = 4
_LEAVES_AT_ONCE = 16
_PAGE = 4096
_TOO_CLOSE = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Bytes of the data, from ``start`` on, and where they go."""

    start: int
    target: memoryview
    straight: bool = field(init=False)
    """Whether a system call copies them there at full speed. Processors of AMD take three times as long (for ``rep
    movsb``, which the system copies with) where a byte goes to less than 64 bytes behind where it comes from, counted
    in a page. Tensors and what an arena holds lie at multiples of 64 bytes: it takes a view into a buffer of one's own.
    """

    def __post_init__(self) -> None:
        address = np.frombuffer(self.target, np.uint8).ctypes.data
        object.__setattr__(self, "straight", not 0 < (address - self.start) % _PAGE < _TOO_CLOSE)

    @property
    def stop(self) -> int:
        """Behind its last byte."""
        return self.start + len(self.target)

    def takes(self, low: int, high: int) -> bool:
        """Whether bytes [low, high) of the data are to be copied straight there."""
        return self.straight and self.start <= low and high <= self.stop


_Leaf = tuple[int, list[_Piece]]
"""The number of a leaf, and the tensors that have something of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor, and the byte of a generation's data at which it begins; it has ``spec.size_bytes``."""

    spec: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        """Behind its last byte."""
        return self.start + self.spec.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable:
    """Where the tensors of a plan lie. ``document`` is made once, however many cuts name it."""

    places: Mapping[str, TensorPlace]
    document: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = [(key, one.spec.dtype, one.spec.shape, one.start) for key, one in self.places.items()]
        object.__setattr__(self, "document", dumps(rows, kind=_TABLE_KIND, version=_TABLE_VERSION))

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorTable:
        """The table of which ``data`` is the document. `WireError`."""
        rows = loads(data, kind=_TABLE_KIND, supported=_TABLE_VERSION).value
        if not isinstance(rows, list):
            raise WireDamaged(f"a table of tensors is a {type(rows).__name__}, not a list")
        places = {one.spec.key: one for one in map(_place, rows)}
        if len(places) != len(rows):
            raise WireDamaged("a table of tensors names one of them twice")
        return cls(places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """What a generation says besides its data."""

    trees: Mapping[str, bytes]
    table: TensorTable
    readers: Mapping[str, bytes] = field(default_factory=dict)
    extra: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The document of a generation."""
        value = {
            "trees": dict(self.trees),
            "table": self.table.document,
            "readers": dict(self.readers),
            "extra": dict(self.extra),
        }
        return dumps(value, kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> Documents:
        """What `to_bytes` made ``data`` of. `WireError`."""
        plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "the contents of a generation")
        return cls(
            trees=_named(plain, "trees"),
            table=TensorTable.from_bytes(taken(plain, "table", bytes)),
            readers=_named(plain, "readers"),
            extra=_named(plain, "extra"),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """A generation that is held, read. Its memory is valid for as long as it is held."""

    held: Held
    documents: Documents
    _verified: set[int] = field(default_factory=set)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """key → the spec of each tensor, in the order of their bytes."""
        return {key: one.spec for key, one in self.documents.table.places.items()}

    def tensor(self, key: str) -> memoryview:
        """The bytes of a tensor, read-only; the slices that they lie in are compared with their checksums, once each.

        `ArenaDamaged` where they are not what was written; ``KeyError`` where there is no such tensor.
        """
        place = self.documents.table.places[key]
        slice_bytes = self.held.arena.layout.slice_bytes
        if place.start < place.stop:
            self._verify(range(place.start // slice_bytes, (place.stop - 1) // slice_bytes + 1))
        return self.held.data[place.start : place.stop]

    def leaves(self) -> dict[str, bytes]:
        """key → the digests of each tensor's leaves (`lakeckpt.checkpoint.format.digests.leaf_digests`), as of the
        capture.

        The checksums of the memory are taken for those that lie at whole leaves; only the others are read, on several
        threads. Nothing is verified: see `verify`.
        """
        layout, places, data = self.held.arena.layout, self.documents.table.places, self.held.data
        known, rest = {}, {}
        for key, one in places.items():
            leaves = one.spec.size_bytes // LEAF_BYTES
            if not leaves or one.start % LEAF_BYTES or layout.leaf_bytes != LEAF_BYTES:
                rest[key] = data[one.start : one.stop]
                continue
            first = CHECKSUM_BYTES * (one.start // LEAF_BYTES)
            pieces = [self.held.record.checksums[first : first + CHECKSUM_BYTES * leaves]]
            if one.spec.size_bytes % LEAF_BYTES:  # its last leaf is shorter than the one of the memory
                pieces.append(leaf_digests(data[one.start + leaves * LEAF_BYTES : one.stop], LEAF_BYTES))
            known[key] = b"".join(pieces)
        return known | dict(zip(rest, leaves_of_all(list(rest.values())), strict=True))

    def verify(self) -> None:
        """Compare all data with their checksums, in several threads. `ArenaDamaged`."""
        _on_threads(self._fill, [(one, []) for one in range(self.held.arena.layout.num_leaves)])

    def verify_mapped(self) -> None:
        """The same where the memory lies mapped, for who reads it there anyway: nothing is copied for it, which takes
        half the time. `ArenaDamaged`."""
        with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="lakeckpt-verify") as pool:
            for job in [pool.submit(self._verify, (one,)) for one in range(self.held.arena.layout.num_slices)]:
                job.result()

    def fill(self, into: Mapping[str, memoryview]) -> None:
        """Copy the tensors named into these buffers (uint8, of their sizes): leaf by leaf, several at once, each
        verified as it comes. `ArenaDamaged`: the buffers may hold anything then.
        """
        places = self.documents.table.places
        self._copy([_Piece(places[key].start, target) for key, target in into.items() if len(target)])

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        """The same with some bytes of one tensor, from ``start`` on."""
        self._copy([_Piece(self.documents.table.places[key].start + start, into)])

    def _copy(self, pieces: Iterable[_Piece]) -> None:
        leaf_bytes = self.held.arena.layout.leaf_bytes
        by_leaf: defaultdict[int, list[_Piece]] = defaultdict(list)
        for piece in pieces:
            for one in range(piece.start // leaf_bytes, (piece.stop - 1) // leaf_bytes + 1):
                by_leaf[one].append(piece)
        _on_threads(self._fill, sorted(by_leaf.items(), key=itemgetter(0)))

    def _fill(self, leaves: Sequence[_Leaf]) -> None:
        """Copy what each leaf has of some tensors (perhaps of none), and verify it while it is in the cache."""
        held, layout = self.held, self.held.arena.layout
        aside: memoryview | None = None
        for at_leaf, pieces in leaves:
            low = at_leaf * layout.leaf_bytes
            high = min(low + layout.leaf_bytes, layout.data_bytes)
            if len(pieces) == 1 and pieces[0].takes(low, high):
                leaf = pieces[0].target[low - pieces[0].start : high - pieces[0].start]
                pieces = []
            else:
                aside = _aside(layout.leaf_bytes) if aside is None else aside
                leaf = aside[: high - low]
            held.read_into(low, leaf)
            held.check_leaf(at_leaf, leaf)
            for one in pieces:
                at, to = max(one.start, low), min(one.stop, high)
                one.target[at - one.start : to - one.start] = leaf[at - low : to - low]

    def _verify(self, numbers: Iterable[int]) -> None:
        for one in numbers:
            if one not in self._verified:
                self.held.slice(one)
                self._verified.add(one)


def contents_of(held: Held) -> Contents:
    """Read what a held generation says it holds. `ArenaDamaged` where that is no sense; tensors are not looked at."""
    data = held.documents()
    try:
        documents = Documents.from_bytes(data)
        for key, one in documents.table.places.items():
            if one.stop > held.arena.layout.data_bytes:
                raise WireDamaged(f"the tensor {key!r} would end at {one.stop} of {held.arena.layout.data_bytes} bytes")
    except WireError as error:
        raise ArenaDamaged(
            f"in the arena {held.arena.name!r}, what step {held.record.step} holds cannot be read: {error}. Take an "
            "older generation, or a checkpoint"
        ) from error
    return Contents(held=held, documents=documents)


def _place(row: Any) -> TensorPlace:
    if not isinstance(row, tuple) or len(row) != 4:
        raise WireDamaged(f"a row of a table of tensors has four fields, got {row!r:.80}")
    plain = dict(zip(("key", "dtype", "shape", "start"), row, strict=True))
    shape = taken(plain, "shape", tuple)
    if not all(type(size) is int for size in shape):
        raise WireDamaged(f"a shape consists of integers, got {shape!r:.80}")
    spec = TensorSpec(key=taken(plain, "key", str), dtype=taken(plain, "dtype", str), shape=shape)
    return TensorPlace(spec=spec, start=number(plain, "start"))


def _aside(size_bytes: int) -> memoryview:
    """Memory for a leaf, neither whose bytes nor where they go on to lie close to it in a page: see `_Piece`."""
    made = np.empty(size_bytes + _PAGE, np.uint8)
    first = (_PAGE // 2 - made.ctypes.data) % _PAGE
    return made[first : first + size_bytes].data


def _on_threads(work: Callable[[Sequence[_Leaf]], None], leaves: Sequence[_Leaf]) -> None:
    """Do ``work`` for all leaves, some at a time, on several threads. What it raises is raised, and the rest left."""
    threads = max(2, min(_MOST_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="lakeckpt-recall") as pool:
        jobs = [pool.submit(work, leaves[at : at + _LEAVES_AT_ONCE]) for at in range(0, len(leaves), _LEAVES_AT_ONCE)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def _named(plain: Mapping[str, object], name: str) -> Mapping[str, bytes]:
    found = fields_of(plain.get(name), f"field {name!r}")
    if not all(type(key) is str and type(value) is bytes for key, value in found.items()):
        raise WireDamaged(f"field {name!r} maps names to bytes, got {found!r:.80}")
    return found  # type: ignore[return-value]

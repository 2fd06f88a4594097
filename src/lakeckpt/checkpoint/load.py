"""What did a committed checkpoint hold for this rank?  Says what there is, and reads it to wherever it belongs.

`load` reads and verifies the parts and trees, the heads and sizes of all files of tensors, and those tensors that no
rank needs: a checkpoint is restored whole or not at all. The tensors of this rank are read when it is known where to
(`Loaded.fill`): into new memory, or straight into that of the live objects. It changes nothing live by itself.

After a change of the world size, rank r takes the state of the old rank r, a new rank that of the old rank r mod W:
where that could be another's, it is refused (``unlike``).
Its threads are started and joined inside of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fetch import fetch_part
from lakeckpt.checkpoint.fields import Ranks
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import SHARING, PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.random_states import RANDOM, check_random
from lakeckpt.checkpoint.ranged import StoredSlab, open_files, read_slabs
from lakeckpt.checkpoint.shards import Whole
from lakeckpt.checkpoint.tensors import empty_for, in_dim_order
from lakeckpt.checkpoint.tree import references, tree_from_bytes
from lakeckpt.checkpoint.unlike import Unlike, different, refuse_divided, refuse_several, unlike_of
from lakeckpt.checkpoint.wholes import Wholes, is_part_key
from lakeckpt.errors import CheckpointDamaged, LimitExceeded, UnsupportedValue, WireDamaged
from lakeckpt.lake.storage import Storage

__all__ = ["Loaded", "TensorSource", "load", "loaded_of"]

_READ_THREADS = 8
_BLOCK_BYTES = 64 * 2**20
"""Of a part of a tensor, so many are read at a time on their way to another shape."""


class TensorSource(Protocol):
    """Where the tensors of a state are."""

    def fill(self, into: Mapping[str, memoryview]) -> None:
        """Put the tensors named into these buffers (uint8, of their sizes), verified. `CheckpointDamaged`: the buffers
        may hold anything then."""
        ...

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        """The same with the bytes of one tensor from ``start`` on."""
        ...

    def unit_bytes(self, key: str) -> int:
        """Of a tensor, how many bytes are verified together: a range that is not made of such takes more than that."""
        ...

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The state of one rank, of which the tensors are still where they were saved."""

    trees: Mapping[str, Any]
    """item → its tree, with a ``TensorRef`` for each tensor; random states not among them."""
    specs: Mapping[str, TensorSpec]
    """key → the spec of each tensor: of wholes, where they were saved in parts."""
    wholes: Mapping[str, Whole]
    """key → the parts of each tensor that was saved in parts."""
    source: TensorSource
    random: dict[str, Any] | None
    """The random states of this rank; None where it is new."""
    per_rank: tuple[str, ...]
    """The units of which ranks had different contents."""
    is_own: bool = False
    """Whether it is what this rank of several had, and nobody knows what the others have."""
    dim_orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """key → how a tensor lay in memory, of those that did not lie row by row."""
    unlike: Unlike | None = None
    """After a change of the world size: which tensors ranks had different contents of."""

    def whole(self, key: str) -> Whole:
        """In which parts a tensor was saved: a plain one in one."""
        return self.wholes[key] if key in self.wholes else Whole.plain(self.specs[key])

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors in new host memory, whole, verified and contiguous."""
        made = {key: empty_for(self.specs[key]) for key in keys}
        self.source.fill({key: view for key, (_, view) in made.items() if key not in self.wholes})
        for key, (tensor, _) in made.items():
            if key in self.wholes:
                self.read_part(key, (0,) * tensor.dim(), tensor)
        return {key: tensor for key, (tensor, _) in made.items()}

    def read_as_saved(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """What `read` gives, laid out in memory as the tensors were that were saved."""
        found = self.read(keys)
        for key in found.keys() & self.dim_orders.keys():
            found[key] = in_dim_order(found[key], self.dim_orders[key])
        return found

    def read_part(self, key: str, offsets: tuple[int, ...], into: torch.Tensor) -> None:
        """Fill ``into`` with what begins at ``offsets`` in a tensor, from one saved part after the other; verified.

        Of a part, those rows are read that are wanted, some at a time: beside ``into``, a bounded number of bytes is
        taken (or one row).
        """
        whole = self.whole(key)
        shapes = {part.key: part.sizes for part in whole.parts}
        for region in whole.regions(offsets, tuple(into.shape)):
            target = into
            for dim, size in enumerate(region.sizes):
                target = target.narrow(dim, region.target[dim], size)
            spec = TensorSpec(key=region.key, dtype=whole.spec.dtype, shape=shapes[region.key])
            if not spec.shape:
                rows, view = empty_for(spec)
                self.source.fill({region.key: view})
                _copy(rows, target)
                continue
            first, stop = region.source[0], region.source[0] + region.sizes[0]
            for low, rows in self._rows(spec, first, stop):
                for dim in range(1, len(spec.shape)):
                    rows = rows.narrow(dim, region.source[dim], region.sizes[dim])
                _copy(rows, target.narrow(0, low - first, len(rows)))

    def _rows(self, spec: TensorSpec, first: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows [first, stop) of a tensor as it was saved: the number of the first one of each block, and the block."""
        row_bytes = spec.size_bytes // spec.shape[0]
        block = max(1, max(_BLOCK_BYTES, self.source.unit_bytes(spec.key)) // row_bytes)
        for low in range(first, stop, block):
            count = min(block, stop - low)
            rows, view = empty_for(TensorSpec(key=spec.key, dtype=spec.dtype, shape=(count, *spec.shape[1:])))
            self.source.fill_range(spec.key, low * row_bytes, view)
            yield low, rows


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


_Where = tuple[PartRecord, int]
"""A part, and which of its files."""


class _Stored:
    """Tensors in the files of a checkpoint, which are opened when something of them is wanted."""

    __slots__ = ("_found", "_opened", "_storage", "_wanted")

    def __init__(
        self, storage: Storage, found: Iterable[StoredSlab], wanted: Mapping[str, tuple[TensorRecord, PartRecord]]
    ):
        self._storage, self._wanted = storage, wanted
        self._found: defaultdict[int, list[StoredSlab]] = defaultdict(list)
        self._opened: set[str] = set()
        self._take(found)

    def _take(self, found: Iterable[StoredSlab]) -> None:
        for one in found:
            self._found[id(one.tensor)].append(one)
            self._opened.add(one.path)

    def fill(self, into: Mapping[str, memoryview]) -> None:
        wanted = [self._wanted[key] for key in into]
        self._open((part, slab.file) for record, part in wanted for slab in record.slabs)
        read_slabs(self._storage, [one for record, _ in wanted for one in self._found[id(record)]], into)

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        record, part = self._wanted[key]
        slabs = [slab for slab in record.slabs if slab.start < start + len(into) and slab.stop > start]
        self._open((part, slab.file) for slab in slabs)
        first, stop = min(slab.start for slab in slabs), max(slab.stop for slab in slabs)
        whole = into if (first, stop) == (start, start + len(into)) else np.empty(stop - first, np.uint8).data
        chosen = {slab.start for slab in slabs}
        moved = [
            replace(one, slab=replace(one.slab, start=one.slab.start - first))  # to where it lies in what is read
            for one in self._found[id(record)]
            if one.slab.start in chosen
        ]
        read_slabs(self._storage, moved, {key: whole})
        if whole is not into:
            into[:] = whole[start - first : start - first + len(into)]

    def unit_bytes(self, key: str) -> int:
        return max(slab.stop - slab.start for slab in self._wanted[key][0].slabs)

    def _open(self, places: Iterable[_Where]) -> None:
        files = {part.files[at].path: (part, at) for part, at in places}
        self._take(open_files(self._storage, [where for path, where in files.items() if path not in self._opened]))

    def same(self, one: str, other: str) -> bool:
        return self._wanted[one][0].digest == self._wanted[other][0].digest


def load(storage: Storage, manifest: Manifest, *, rank: int, world_size: int) -> Loaded:
    """Say what ``rank`` of ``world_size`` needs of a checkpoint, and verify this rank's share of what no rank needs.

    Raises `CheckpointDamaged` naming the object, `CheckpointMismatch` where the world size changed and a unit is not on
    every old rank, or ranks had different tensors in parts, `StorageError` where the store fails.
    """
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-load") as pool:
        parts = list(pool.map(lambda ref: fetch_part(storage, manifest, ref), manifest.parts))
    source = rank % manifest.world_size
    try:
        wholes = Wholes(parts)
        if world_size != manifest.world_size:
            refuse_divided(parts, manifest.world_size)
            refuse_several(wholes, manifest.world_size)
        composed = wholes.of(source)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"slot {manifest.slot}: {error}") from error
    records = _tensors_of(parts, source)
    composed = {name: one for name, one in composed.items() if name not in records}
    records = {piece.spec.key: piece for one in composed.values() for _, piece in one.pieces} | records
    needed, spare = _shares(parts, records, min(world_size, manifest.world_size), rank, world_size)
    files = {part.files[index].path: (part, index) for part, index, _ in (*needed, *spare)}
    stored = open_files(storage, files.values())
    unneeded = {(part.files[index].path, id(record)) for part, index, some in spare for record in some}
    read_slabs(storage, [one for one in stored if (one.path, id(one.tensor)) in unneeded], {})
    documents = {item: record.document for item, record in _trees_of(parts, source).items()}
    wanted = {
        record.spec.key: (record, part)
        for part in parts
        for record in part.tensors
        if records.get(record.spec.key) is record
    }
    loaded = loaded_of(
        documents,
        specs={key: record.spec for key, record in records.items()},
        wholes={name: Whole.of(one) for name, one in composed.items()},
        source=_Stored(storage, stored, wanted),
        is_new=rank >= manifest.world_size,
        per_rank=different(parts),
        what=f"slot {manifest.slot}, rank {source}",
    )
    return (
        loaded if world_size == manifest.world_size else replace(loaded, unlike=unlike_of(parts, manifest.world_size))
    )


def loaded_of(
    documents: Mapping[str, bytes],
    *,
    specs: Mapping[str, TensorSpec],
    wholes: Mapping[str, Whole],
    source: TensorSource,
    is_new: bool,
    per_rank: tuple[str, ...],
    what: str,
    is_own: bool = False,
) -> Loaded:
    """The state that the ``documents`` of trees (random states among them) and ``source`` make up.

    ``is_new``: the rank was not there, and takes no random states. `CheckpointDamaged` where they do not fit together.
    """
    trees = {item: _tree(item, document) for item, document in documents.items() if item != SHARING}
    specs = {**specs, **{key: whole.spec for key, whole in wholes.items()}}
    if RANDOM not in trees:
        raise CheckpointDamaged(f"{what} has no random states")
    dim_orders: dict[str, tuple[int, ...]] = {}
    for item, tree in trees.items():
        for one in references(tree):
            if one.key not in specs:
                raise CheckpointDamaged(f"the state of {item!r} refers to the tensor {one.key!r}, which no part holds")
            if one.dim_order is not None:
                dim_orders[one.key] = one.dim_order
                if len(one.dim_order) != len(specs[one.key].shape):
                    raise CheckpointDamaged(
                        f"the state of {item!r} says of the tensor {one.key!r} that its dimensions lie in the order "
                        f"{list(one.dim_order)}, and its shape is {list(specs[one.key].shape)}"
                    )
    random = check_random(trees.pop(RANDOM))
    return Loaded(
        trees=trees,
        specs=specs,
        wholes=wholes,
        source=source,
        random=None if is_new else random,
        per_rank=per_rank,
        is_own=is_own,
        dim_orders=dim_orders,
    )


def _has(ranks: Ranks, rank: int) -> bool:
    return any(start <= rank < stop for start, stop in ranks)


def _tensors_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TensorRecord]:
    """The tensors that ``rank`` had, parts of tensors among them."""
    found: dict[str, TensorRecord] = {}
    for record in (record for part in parts for record in part.tensors if _has(record.ranks, rank)):
        if record.spec.key in found:
            raise CheckpointDamaged(f"two parts hold tensor {record.spec.key!r} of rank {rank}")
        found[record.spec.key] = record
    return found


def _trees_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TreeRecord]:
    found: dict[str, TreeRecord] = {}
    for part in parts:
        for record in part.trees:
            if _has(record.ranks, rank):
                if record.item in found:
                    raise CheckpointDamaged(f"two parts hold the state of {record.item!r} of rank {rank}")
                found[record.item] = record
    return found


def _tree(item: str, document: bytes) -> Any:
    try:
        return tree_from_bytes(document)
    except (WireDamaged, UnsupportedValue, LimitExceeded) as error:
        raise CheckpointDamaged(f"the state of {item!r}: {error}") from error


_Share = list[tuple[PartRecord, int, list[TensorRecord]]]
"""Files, by part and number, and the tensors of which something is in them."""


def _shares(
    parts: Sequence[PartRecord], records: Mapping[str, TensorRecord], sources: int, rank: int, world_size: int
) -> tuple[_Share, _Share]:
    """The files with ``records``, and this rank's share of the tensors that none of the ``sources`` first ranks has.

    A tensor that only ranks of those have is read by them, and all parts of a tensor by those that hold it now, so that
    all of a checkpoint is verified by someone.
    """
    mine = {id(record) for record in records.values()}
    needed: _Share = []
    spare: _Share = []
    for part in parts:
        by_file: defaultdict[int, list[TensorRecord]] = defaultdict(list)
        for record in part.tensors:
            for index in {slab.file for slab in record.slabs}:
                by_file[index].append(record)
        for index in range(len(part.files)):
            plain = [record for record in by_file[index] if not is_part_key(record.spec.key)]
            some = [record for record in plain if id(record) in mine]
            rest = [record for record in plain if not any(start < sources for start, _ in record.ranks)]
            if some:
                needed.append((part, index, some))
            if rest or not by_file[index]:
                spare.append((part, index, rest))
    return needed, spare[rank::world_size]

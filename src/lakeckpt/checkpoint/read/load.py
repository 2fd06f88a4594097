"""This module loads the state that a committed checkpoint holds for one rank.

`load` reads and verifies the parts and trees, but no tensor. `Loaded.check` verifies the heads and sizes of all files
of tensors, and the tensors that no rank needs: a checkpoint is restored whole or not at all. The tensors of this rank
are read later, into the memory that the caller names. The module changes no live object.

On the same number of ranks, each rank first reads its own part and the parts that hold the rest of its state
(`load_own`); these are few, even where a thousand ranks share all tensors. Together the ranks read and verify the whole
checkpoint. A rank reads the parts of all ranks only if it needs bytes of a tensor that it did not hold itself.

After a change of the world size, rank r takes the state of the old rank r, and a new rank takes the state of the old
rank r mod W. State for which this could be wrong is refused (``differences``). Modules and optimizers that differed
between ranks, as the stages of a pipeline do, are merged by names: a rank takes the parts of them that it has now.

Each call starts and joins its own threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import holds
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import SHARING, PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.format.sharing import sharing_from_bytes
from lakeckpt.checkpoint.read.differences import different, refuse_divided, refuse_several, unlike_of
from lakeckpt.checkpoint.read.fetch import fetch_part
from lakeckpt.checkpoint.read.loaded import Loaded, TensorSource
from lakeckpt.checkpoint.read.ranged import StoredSlab, open_files, read_slabs
from lakeckpt.checkpoint.state.random_states import RANDOM, check_random
from lakeckpt.checkpoint.state.shards import Whole, wholes_of
from lakeckpt.checkpoint.state.tree import references, tree_from_bytes, union_of
from lakeckpt.checkpoint.state.wholes import Composed, Wholes, is_part_key
from lakeckpt.errors import CheckpointDamaged, UnsupportedValue, WireDamaged, WireError
from lakeckpt.lake.storage.base import Storage

__all__ = ["fetch_parts", "load", "load_from", "load_own", "loaded_of"]

_READ_THREADS = 8


_Where = tuple[PartRecord, int]
"""A part, and the number of one of its files."""


class _Stored:
    """Tensors in the files of a checkpoint. A file is opened when one of its tensors is read for the first time."""

    __slots__ = ("_found", "_opened", "_storage", "_wanted")

    def __init__(self, storage: Storage, wanted: Mapping[str, tuple[TensorRecord, PartRecord]]):
        self._storage, self._wanted = storage, wanted
        self._found: defaultdict[int, list[StoredSlab]] = defaultdict(list)
        self._opened: set[str] = set()

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
            replace(one, slab=replace(one.slab, start=one.slab.start - first))  # its place in ``whole``
            for one in self._found[id(record)]
            if one.slab.start in chosen
        ]
        read_slabs(self._storage, moved, {key: whole})
        if whole is not into:
            into[:] = whole[start - first : start - first + len(into)]

    def unit_bytes(self, key: str) -> int:
        return max(slab.stop - slab.start for slab in self._wanted[key][0].slabs)

    def check(self, needed: _Share, spare: _Share) -> None:
        """Open the files in ``needed``, and verify the tensors in ``spare``."""
        self._open((part, index) for part, index, _ in (*needed, *spare))
        unneeded = {(part.files[index].path, id(record)) for part, index, some in spare for record in some}
        every = (one for slabs in self._found.values() for one in slabs)
        read_slabs(self._storage, [one for one in every if (one.path, id(one.tensor)) in unneeded], {})

    def _open(self, places: Iterable[_Where]) -> None:
        files = {part.files[at].path: (part, at) for part, at in places}
        self._take(open_files(self._storage, [where for path, where in files.items() if path not in self._opened]))

    def same(self, one: str, other: str) -> bool:
        return self._wanted[one][0].digest == self._wanted[other][0].digest


def load(
    storage: Storage, manifest: Manifest, *, rank: int, world_size: int, items: Collection[str] | None = None
) -> Loaded:
    """Return the state that ``rank`` of ``world_size`` takes from a checkpoint; reads the records of the parts alone.

    With ``items``, only these items are loaded; the tensors of other items are neither read nor verified.

    Raises `CheckpointDamaged`, which names the object; `CheckpointMismatch` if the world size changed and a unit is
    missing on an old rank, or tensors in parts differed between ranks; `StorageError` if the store fails.
    """
    parts = fetch_parts(storage, manifest)
    return load_from(storage, manifest, parts, rank=rank, world_size=world_size, items=items)


def fetch_parts(storage: Storage, manifest: Manifest) -> list[PartRecord]:
    """Read and verify the records of all parts of a checkpoint, for `load_from`. Raises as `load` does."""
    return _fetched(storage, manifest, range(manifest.world_size))


def load_from(
    storage: Storage,
    manifest: Manifest,
    parts: Sequence[PartRecord],
    *,
    rank: int,
    world_size: int,
    items: Collection[str] | None = None,
) -> Loaded:
    """Return the state that ``rank`` takes from a checkpoint, as `load` does, from the records of `fetch_parts`."""
    wanted = parts if items is None else [_only(part, items) for part in parts]
    source = rank % manifest.world_size
    divided: dict[str, list[TreeRecord]] = {}
    try:
        wholes = Wholes(wanted)
        if world_size != manifest.world_size:
            divided = _divided(wanted, manifest.world_size)
            refuse_divided(wanted, manifest.world_size, but=divided.keys())
            refuse_several(wholes, manifest.world_size)
        sources = [source, *sorted({tree.ranks[0][0] for trees in divided.values() for tree in trees} - {source})]
        composed: dict[str, Composed] = {}
        records: dict[str, TensorRecord] = {}
        for one in sources:  # all items of the first, which is this rank's old rank; divided items of the others
            for name, whole in wholes.of(one).items():
                if one == source or _is_of(name, divided):
                    composed.setdefault(name, whole)
            for key, record in _tensors_of(wanted, one).items():
                if one == source or _is_of(key, divided):
                    records.setdefault(key, record)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"slot {manifest.slot}: {error}") from error
    composed = {name: one for name, one in composed.items() if name not in records}
    records = {piece.spec.key: piece for one in composed.values() for _, piece in one.pieces} | records
    needed, spare = _shares(parts, records, min(world_size, manifest.world_size))
    spare = spare if items is None else []
    stored = _stored(storage, parts, records)
    loaded = loaded_of(
        _documents_of(wanted, source),
        specs={key: record.spec for key, record in records.items()},
        wholes={name: Whole.of(one) for name, one in composed.items()},
        source=stored,
        is_new=rank >= manifest.world_size,
        per_rank=different(wanted),
        what=f"slot {manifest.slot}, rank {source}",
        check=partial(stored.check, needed, spare[rank::world_size]),
        divided={item: [tree.document for tree in trees] for item, trees in divided.items()},
    )
    return (
        loaded if world_size == manifest.world_size else replace(loaded, unlike=unlike_of(wanted, manifest.world_size))
    )


def _is_of(key: str, items: Collection[str]) -> bool:
    return key.partition("/")[0] in items


def _divided(parts: Sequence[PartRecord], world_size: int) -> dict[str, list[TreeRecord]]:
    """Return the trees of each module and optimizer that differed between ranks, as the stages of a pipeline do."""
    found: defaultdict[str, list[TreeRecord]] = defaultdict(list)
    for record in (tree for part in parts for tree in part.trees if tree.item not in (RANDOM, SHARING)):
        found[record.item].append(record)
    everywhere = ((0, world_size),)
    return {
        item: sorted(trees, key=lambda tree: tree.ranks)
        for item, trees in found.items()
        if trees[0].ranks != everywhere and all(_tree(item, one.document)[1] for one in trees)
    }


def _only(part: PartRecord, items: Collection[str]) -> PartRecord:
    """Return a part without the tensors and trees of other items. Its list of files stays as it is."""
    return replace(
        part,
        tensors=tuple(one for one in part.tensors if one.spec.key.partition("/")[0] in items),
        trees=tuple(one for one in part.trees if one.item in items or one.item in (RANDOM, SHARING)),
    )


def load_own(storage: Storage, manifest: Manifest, *, rank: int, items: Collection[str] | None = None) -> Loaded | None:
    """Load as `load` does for the same number of ranks, but read only the parts that hold the state of ``rank``.

    Returns None if the rank's own part does not name these parts, or if they are damaged or incomplete: the caller then
    calls `load`, which names the damage. Raises `StorageError` if the store fails.
    """
    if manifest.world_size == 1:
        return None  # there is only one part
    try:
        (own,) = _fetched(storage, manifest, [rank])
        if own.outline is None:
            return None
        others = [one for one in range(manifest.world_size) if one != rank and holds(own.outline.elsewhere, one)]
        parts = [own, *_fetched(storage, manifest, others)]
        records = _tensors_of(parts, rank)
        specs = {key: record.spec for key, record in records.items()}
        documents = _documents_of(parts, rank)
        if len(records) + len(documents) - (RANDOM in documents) != own.outline.units:
            return None
        if items is not None:
            wanted = [_only(part, items) for part in parts]
            records, documents = _tensors_of(wanted, rank), _documents_of(wanted, rank)
            specs = {key: specs[key] for key in records}
        shared = sharing_from_bytes(documents[SHARING]) if SHARING in documents else {}
        needed, _ = _shares(parts, records, manifest.world_size)  # on the same number of ranks, some rank needs each
        stored = _stored(storage, parts, records)
        return loaded_of(
            documents,
            specs=specs,
            wholes=wholes_of(specs, shared),
            source=stored,
            is_new=False,
            per_rank=own.outline.different,
            what=f"slot {manifest.slot}, rank {rank}",
            of_all=cache(partial(load, storage, manifest, rank=rank, world_size=manifest.world_size, items=items)),
            check=partial(stored.check, needed, []),
        )
    except (CheckpointDamaged, WireError):
        return None


def _fetched(storage: Storage, manifest: Manifest, ranks: Iterable[int]) -> list[PartRecord]:
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-load") as pool:
        return list(pool.map(lambda rank: fetch_part(storage, manifest, manifest.parts[rank]), ranks))


def _stored(storage: Storage, parts: Sequence[PartRecord], records: Mapping[str, TensorRecord]) -> _Stored:
    """Return the source of the tensors of ``records``."""
    wanted = {
        record.spec.key: (record, part)
        for part in parts
        for record in part.tensors
        if records.get(record.spec.key) is record
    }
    return _Stored(storage, wanted)


def _documents_of(parts: Sequence[PartRecord], rank: int) -> dict[str, bytes]:
    return {item: record.document for item, record in _trees_of(parts, rank).items()}


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
    of_all: Callable[[], Loaded] | None = None,
    check: Callable[[], None] = lambda: None,
    divided: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
) -> Loaded:
    """Return the state that the ``documents`` of trees (random states among them) and ``source`` make up.

    ``is_new``: the rank did not exist when the checkpoint was saved, and takes no random states. ``divided``: the
    documents of all ranks for items whose states are merged. `CheckpointDamaged` where documents and tensors do not
    match.
    """
    read = {item: _tree(item, document) for item, document in documents.items() if item != SHARING}
    for item, more in divided.items():
        for tree, kind in (_tree(item, document) for document in more):
            read[item] = (union_of(read[item][0], tree) if item in read else tree), kind
    trees = {item: tree for item, (tree, _) in read.items()}
    specs = {**specs, **{key: whole.spec for key, whole in wholes.items()}}
    if RANDOM not in trees:
        raise CheckpointDamaged(f"{what} has no random states")
    for item, tree in trees.items():
        for one in references(tree):
            if one.key not in specs:
                raise CheckpointDamaged(f"the state of {item!r} refers to the tensor {one.key!r}, which no part holds")
    orders = {one.key: one.dim_order for tree in trees.values() for one in references(tree) if one.dim_order}
    random = check_random(trees.pop(RANDOM))
    return Loaded(
        trees=trees,
        kinds={item: kind for item, (_, kind) in read.items()},
        merged=frozenset(divided),
        specs=specs,
        wholes=wholes,
        source=source,
        random=None if is_new else random,
        per_rank=per_rank,
        is_own=is_own,
        of_all=of_all,
        dim_orders=orders,
        check=check,
    )


def _tensors_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TensorRecord]:
    """Return the tensors that ``rank`` had, parts of tensors among them."""
    found: dict[str, TensorRecord] = {}
    for record in (record for part in parts for record in part.tensors if holds(record.ranks, rank)):
        if record.spec.key in found:
            raise CheckpointDamaged(f"two parts hold tensor {record.spec.key!r} of rank {rank}")
        found[record.spec.key] = record
    return found


def _trees_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TreeRecord]:
    found: dict[str, TreeRecord] = {}
    for part in parts:
        for record in part.trees:
            if holds(record.ranks, rank):
                if record.item in found:
                    raise CheckpointDamaged(f"two parts hold the state of {record.item!r} of rank {rank}")
                found[record.item] = record
    return found


def _tree(item: str, document: bytes) -> tuple[Any, str]:
    try:
        return tree_from_bytes(document)
    except (WireDamaged, UnsupportedValue) as error:
        raise CheckpointDamaged(f"the state of {item!r}: {error}") from error


_Share = list[tuple[PartRecord, int, list[TensorRecord]]]
"""Files, by part and number, and the tensors that have bytes in them."""


def _shares(parts: Sequence[PartRecord], records: Mapping[str, TensorRecord], sources: int) -> tuple[_Share, _Share]:
    """Return the files with ``records``, and the tensors that none of the first ``sources`` ranks has.

    The ranks divide the second list among themselves and verify its tensors. All other tensors, and all parts of
    tensors, are verified by the ranks that read them. So every byte of a checkpoint is verified by some rank.
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
    return needed, spare

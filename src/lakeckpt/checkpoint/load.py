"""What did a committed checkpoint hold for this rank?  Says what there is, and reads it to wherever it belongs.

`load` reads and verifies the parts and trees, and no tensor. `Loaded.check` verifies the heads and sizes of all files
of tensors, and those tensors that no rank needs: a checkpoint is restored whole or not at all. The tensors of this rank
are read when it is known where to. Nothing live is changed here.

On as many ranks as saved it, each begins with its own part and those that hold the rest of its state (`load_own`): of a
thousand ranks that share all tensors, with few. Between them they read and verify all of it. The parts of all are read
by a rank that wants of a tensor what it did not hold itself.

After a change of the world size, rank r takes the state of the old rank r, a new rank that of the old rank r mod W:
where that could be another's, it is refused (``unlike``).
Its threads are started and joined inside of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fetch import fetch_part
from lakeckpt.checkpoint.fields import holds
from lakeckpt.checkpoint.loaded import Loaded, TensorSource
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import SHARING, PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.random_states import RANDOM, check_random
from lakeckpt.checkpoint.ranged import StoredSlab, open_files, read_slabs
from lakeckpt.checkpoint.shards import Whole, wholes_of
from lakeckpt.checkpoint.sharing import sharing_from_bytes
from lakeckpt.checkpoint.tree import references, tree_from_bytes
from lakeckpt.checkpoint.unlike import different, refuse_divided, refuse_several, unlike_of
from lakeckpt.checkpoint.wholes import Wholes, is_part_key
from lakeckpt.errors import CheckpointDamaged, LimitExceeded, UnsupportedValue, WireDamaged, WireError
from lakeckpt.lake.storage import Storage
from lakeckpt.wire.collector import collector_waits

__all__ = ["load", "load_own", "loaded_of"]

_READ_THREADS = 8


_Where = tuple[PartRecord, int]
"""A part, and which of its files."""


class _Stored:
    """Tensors in the files of a checkpoint, which are opened when something of them is wanted."""

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
            replace(one, slab=replace(one.slab, start=one.slab.start - first))  # to where it lies in what is read
            for one in self._found[id(record)]
            if one.slab.start in chosen
        ]
        read_slabs(self._storage, moved, {key: whole})
        if whole is not into:
            into[:] = whole[start - first : start - first + len(into)]

    def unit_bytes(self, key: str) -> int:
        return max(slab.stop - slab.start for slab in self._wanted[key][0].slabs)

    def check(self, needed: _Share, spare: _Share) -> None:
        """Open the files that are ``needed``, and verify what is ``spare``."""
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
    """Say what ``rank`` of ``world_size`` needs of a checkpoint; reads the records of its parts alone.

    With ``items``, only these items are loaded; the tensors of other items are neither read nor verified.

    Raises `CheckpointDamaged` naming the object, `CheckpointMismatch` where the world size changed and a unit is not on
    every old rank, or ranks had different tensors in parts, `StorageError` where the store fails.
    """
    with collector_waits():  # for nothing of this is garbage, and there may be a million records
        return _load(storage, manifest, rank, world_size, items)


def _load(storage: Storage, manifest: Manifest, rank: int, world_size: int, items: Collection[str] | None) -> Loaded:
    parts = _fetched(storage, manifest, range(manifest.world_size))
    wanted = parts if items is None else [_only(part, items) for part in parts]
    source = rank % manifest.world_size
    try:
        wholes = Wholes(wanted)
        if world_size != manifest.world_size:
            refuse_divided(wanted, manifest.world_size)
            refuse_several(wholes, manifest.world_size)
        composed = wholes.of(source)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"slot {manifest.slot}: {error}") from error
    records = _tensors_of(wanted, source)
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
    )
    return (
        loaded if world_size == manifest.world_size else replace(loaded, unlike=unlike_of(wanted, manifest.world_size))
    )


def _only(part: PartRecord, items: Collection[str]) -> PartRecord:
    """A part without the tensors and trees of other items. Its files, and where in them tensors lie, stay."""
    return replace(
        part,
        tensors=tuple(one for one in part.tensors if one.spec.key.partition("/")[0] in items),
        trees=tuple(one for one in part.trees if one.item in items or one.item in (RANDOM, SHARING)),
    )


def load_own(storage: Storage, manifest: Manifest, *, rank: int, items: Collection[str] | None = None) -> Loaded | None:
    """The same for as many ranks as saved it, from the parts alone that hold what ``rank`` had. None where its own does
    not say which these are, or they do not do: then `load` says what is wrong.

    Raises `StorageError` where the store fails.
    """
    if manifest.world_size == 1:
        return None  # its part is all there is
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
        needed, _ = _shares(parts, records, manifest.world_size)  # there is none that no rank needs
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
    """Where ``records`` are."""
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
        of_all=of_all,
        dim_orders=dim_orders,
        check=check,
    )


def _tensors_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TensorRecord]:
    """The tensors that ``rank`` had, parts of tensors among them."""
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


def _tree(item: str, document: bytes) -> Any:
    try:
        return tree_from_bytes(document)
    except (WireDamaged, UnsupportedValue, LimitExceeded) as error:
        raise CheckpointDamaged(f"the state of {item!r}: {error}") from error


_Share = list[tuple[PartRecord, int, list[TensorRecord]]]
"""Files, by part and number, and the tensors of which something is in them."""


def _shares(parts: Sequence[PartRecord], records: Mapping[str, TensorRecord], sources: int) -> tuple[_Share, _Share]:
    """The files with ``records``, and the tensors that none of the ``sources`` first ranks has, to be shared out.

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
    return needed, spare

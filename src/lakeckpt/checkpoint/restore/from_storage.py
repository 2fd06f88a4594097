"""This module loads the state that a committed checkpoint holds for one rank.

It reads and verifies the records of parts and the trees of items, but no tensor. `Loaded.check` verifies the heads and
sizes of the files of tensors that this rank needs. The tensors are read later, into the memory that the caller names,
and verified as they come. What no rank needs is not read (``lakeckpt verify`` reads all). The module changes no live
object.

On the same number of ranks, each rank first reads its own part and the parts that hold the rest of its state
(`load_own`); these are few, even if a thousand ranks share all tensors. A rank reads the parts of all ranks only if
it needs bytes of a tensor that it did not hold itself.

After a change of the world size, rank r takes the state of the old rank r, and a new rank takes the state of the old
rank r mod W. State for which this could be wrong is refused (`lakeckpt.checkpoint.state.rank_differences`). Modules
and optimizers that differed between ranks, as the stages of a pipeline do, are merged by names: a rank takes the parts
of them that it has now.

Each call starts and joins its own threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np

from lakeckpt.checkpoint.format.fields import holds
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import SHARING, PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.format.register import Register
from lakeckpt.checkpoint.format.sharing import is_part_key
from lakeckpt.checkpoint.format.verified_reads import StoredSlab, fetch_part, fetch_register, open_files, read_slabs
from lakeckpt.checkpoint.persist.log import read_entry, slot_path
from lakeckpt.checkpoint.restore.compare import Candidate
from lakeckpt.checkpoint.state.loaded import Loaded, TensorSource, loaded_of, tree_of
from lakeckpt.checkpoint.state.random_states import RANDOM
from lakeckpt.checkpoint.state.rank_differences import (
    Contents,
    Unlike,
    contents_of,
    different,
    refuse_divided,
    unlike_of,
)
from lakeckpt.checkpoint.state.wholes import Whole, Wholes
from lakeckpt.errors import CheckpointDamaged, NewerFormat, WireError
from lakeckpt.lake.storage.base import Storage

__all__ = ["Selection", "commit_in", "committed", "fetch_parts", "load", "load_from", "load_own"]

_READ_THREADS = 8
_Record = TypeVar("_Record", TensorRecord, TreeRecord)


class _Stored:
    """Tensors in the files of a checkpoint. A file is opened when one of its tensors is read for the first time."""

    __slots__ = ("_found", "_opened", "_storage", "_wanted")

    def __init__(self, storage: Storage, parts: Sequence[PartRecord], records: Iterable[TensorRecord]) -> None:
        self._storage = storage
        ids = {id(record) for record in records}
        self._wanted = {one.spec.key: (one, part) for part in parts for one in part.tensors if id(one) in ids}
        self._found: defaultdict[int, list[StoredSlab]] = defaultdict(list)
        self._opened: set[str] = set()

    def fill(self, into: Mapping[str, memoryview]) -> None:
        self.open(into)
        records = [self._wanted[key][0] for key in into]
        read_slabs(self._storage, [one for record in records for one in self._found[id(record)]], into)

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

    def open(self, keys: Iterable[str]) -> None:
        """Open the files of the tensors ``keys``: verify their heads and sizes."""
        self._open((self._wanted[key][1], slab.file) for key in keys for slab in self._wanted[key][0].slabs)

    def _open(self, places: Iterable[tuple[PartRecord, int]]) -> None:
        files = {part.files[at].path: (part, at) for part, at in places}
        for one in open_files(self._storage, [at for path, at in files.items() if path not in self._opened]):
            self._found[id(one.tensor)].append(one)
            self._opened.add(one.path)

    def same(self, one: str, other: str) -> bool:
        return self._wanted[one][0].digest == self._wanted[other][0].digest


def commit_in(storage: Storage, slot: int) -> Manifest:
    """Return the commit in ``slot``. `CheckpointDamaged` if there is none, `NewerFormat`."""
    try:
        manifest = read_entry(storage, slot)
    except NewerFormat:
        raise
    except WireError as error:
        raise CheckpointDamaged(f"{slot_path(slot)}: {error}") from error
    if not isinstance(manifest, Manifest):
        raise CheckpointDamaged(f"{slot_path(slot)}: expected a commit")
    return manifest


def committed(
    storage: Storage, slot: int, *, rank: int, world_size: int, items: Collection[str] | None = None
) -> Candidate:
    """Return what ``slot`` committed, as ``rank`` of ``world_size`` takes it; with ``items``, these alone. Raises as
    `load` does."""
    manifest = commit_in(storage, slot)
    loaded = load(storage, manifest, rank=rank, world_size=world_size, items=items)
    readers = {name: one for name, one in manifest.readers.items() if items is None or name in items}
    return Candidate(manifest=manifest, step=manifest.step, readers=readers, loaded=loaded)


def load(
    storage: Storage, manifest: Manifest, *, rank: int, world_size: int, items: Collection[str] | None = None
) -> Loaded:
    """Return the state that ``rank`` of ``world_size`` takes from a checkpoint, by the fewest requests: `load_own`
    if that is possible, else `load_from` the records of all parts.

    With ``items``, only these items are loaded, and nothing of other items is verified.

    Raises `CheckpointDamaged`, which names the object; `CheckpointMismatch` if the world size changed and a unit is
    missing on an old rank, or tensors in parts differed between ranks; `StorageError` if the store fails.
    """
    own = load_own(storage, manifest, rank=rank, items=items) if world_size == manifest.world_size else None
    if own is not None:
        return own
    return load_from(storage, manifest, fetch_parts(storage, manifest), rank=rank, world_size=world_size, items=items)


def fetch_parts(storage: Storage, manifest: Manifest) -> list[PartRecord]:
    """Read and verify the records of all parts of a checkpoint, for `load_from`. Raises as `load` does."""
    return _fetched(storage, manifest, fetch_register(storage, manifest), range(manifest.world_size))


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
    wanted = [_only(part, items) for part in parts]
    try:
        chosen = Selection.of(wanted, saved_by=manifest.world_size, rank=rank, world_size=world_size)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"slot {manifest.slot}: {error}") from error
    stored = _Stored(storage, parts, chosen.records.values())
    loaded = chosen.loaded(stored, what=f"slot {manifest.slot}, rank {rank % manifest.world_size}")
    return replace(loaded, check=partial(stored.open, [key for key in chosen.records if not is_part_key(key)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What ``rank`` of ``world_size`` takes from the parts that ``saved_by`` ranks have saved, or captured."""

    parts: Sequence[PartRecord]
    saved_by: int
    rank: int
    world_size: int
    contents: Contents
    wholes: Mapping[str, Whole]
    records: Mapping[str, TensorRecord]
    """key → the record of each tensor, and of each part of a tensor."""
    divided: Mapping[str, Sequence[TreeRecord]]

    @classmethod
    def of(cls, parts: Sequence[PartRecord], *, saved_by: int, rank: int, world_size: int) -> Selection:
        """Select from ``parts``. Raises `CheckpointDamaged`; `CheckpointMismatch` as `load` does."""
        contents, wholes = contents_of(parts), Wholes(parts)
        divided: dict[str, list[TreeRecord]] = {}
        if world_size != saved_by:
            divided = _divided(parts, saved_by)
            refuse_divided(contents, saved_by, but=divided.keys())
            if several := wholes.several():
                raise Unlike(world_size=saved_by, tensors=several).refusal(sorted(several))
        composed, records = _of_ranks(parts, wholes, rank % saved_by, divided)
        return cls(
            parts=parts,
            saved_by=saved_by,
            rank=rank,
            world_size=world_size,
            contents=contents,
            wholes=composed,
            records=records,
            divided=divided,
        )

    def loaded(self, source: TensorSource, *, what: str) -> Loaded:
        """Return the state, whose tensors are read from ``source``. Raises `CheckpointDamaged`."""
        trees = _trees_of(self.parts, self.rank % self.saved_by)
        loaded = loaded_of(
            {item: record.document for item, record in trees.items()},
            specs={key: record.spec for key, record in self.records.items()},
            wholes=self.wholes,
            source=source,
            per_rank=different(self.contents),
            what=what,
            divided={item: [tree.document for tree in several] for item, several in self.divided.items()},
        )
        return replace(
            loaded,
            random=loaded.random if self.rank < self.saved_by else None,
            unlike=None if self.world_size == self.saved_by else unlike_of(self.contents, self.saved_by),
        )


def _of_ranks(
    parts: Sequence[PartRecord], wholes: Wholes, source: int, divided: Mapping[str, Sequence[TreeRecord]]
) -> tuple[dict[str, Whole], dict[str, TensorRecord]]:
    """Return the tensors in parts, and the records of all tensors, that the rank ``source`` had.

    Of the ``divided`` items, those that the other ranks had are among them.
    """
    composed: dict[str, tuple[Whole, list[TensorRecord]]] = {}
    records: dict[str, TensorRecord] = {}
    for one in [source, *sorted({tree.ranks[0][0] for trees in divided.values() for tree in trees} - {source})]:
        mine, own = wholes.of(one), _tensors_of(parts, one)
        if one != source:
            mine = {name: whole for name, whole in mine.items() if name.partition("/")[0] in divided}
            own = {key: record for key, record in own.items() if key.partition("/")[0] in divided}
        composed, records = mine | composed, own | records
    composed = {name: one for name, one in composed.items() if name not in records}
    pieces = {record.spec.key: record for _, several in composed.values() for record in several}
    return {name: whole for name, (whole, _) in composed.items()}, pieces | records


def _divided(parts: Sequence[PartRecord], world_size: int) -> dict[str, list[TreeRecord]]:
    """Return the trees of each module and optimizer that differed between ranks, as the stages of a pipeline do."""
    found: defaultdict[str, list[TreeRecord]] = defaultdict(list)
    for record in (tree for part in parts for tree in part.trees if tree.item not in (RANDOM, SHARING)):
        found[record.item].append(record)
    everywhere = ((0, world_size),)
    return {
        item: sorted(trees, key=lambda tree: tree.ranks)
        for item, trees in found.items()
        if trees[0].ranks != everywhere and all(tree_of(item, one.document)[1] for one in trees)
    }


def _only(part: PartRecord, items: Collection[str] | None) -> PartRecord:
    """Return a part without the tensors and trees of other items. Its list of files stays as it is."""
    if items is None:
        return part
    return replace(
        part,
        tensors=tuple(one for one in part.tensors if one.spec.key.partition("/")[0] in items),
        trees=tuple(one for one in part.trees if one.item in items or one.item in (RANDOM, SHARING)),
    )


def load_own(storage: Storage, manifest: Manifest, *, rank: int, items: Collection[str] | None = None) -> Loaded | None:
    """Load as `load` does for the same number of ranks, but read only the parts that hold the state of ``rank``.

    Returns None if the rank's own part does not name these parts, or if they are damaged or incomplete: `load_from`
    then names the damage. Raises `StorageError` if the store fails.
    """
    if manifest.world_size == 1:
        return None  # there is only one part
    try:
        register = fetch_register(storage, manifest)
        own = fetch_part(storage, manifest, register, rank)
        if own.outline is None:
            return None
        others = [one for one in range(manifest.world_size) if one != rank and holds(own.outline.elsewhere, one)]
        parts = [own, *_fetched(storage, manifest, register, others)]
        units = len(_tensors_of(parts, rank)) + len(_trees_of(parts, rank).keys() - {RANDOM})
        if units != own.outline.units:
            return None
        wanted = [_only(part, items) for part in parts]
        records = _tensors_of(wanted, rank)
        stored = _Stored(storage, parts, records.values())
        loaded = loaded_of(
            {item: record.document for item, record in _trees_of(wanted, rank).items()},
            specs={key: record.spec for key, record in records.items()},
            source=stored,
            per_rank=own.outline.different,
            what=f"slot {manifest.slot}, rank {rank}",
        )
    except (CheckpointDamaged, WireError):
        return None

    @cache
    def of_all() -> Loaded:
        every = fetch_parts(storage, manifest)
        return load_from(storage, manifest, every, rank=rank, world_size=manifest.world_size, items=items)

    return replace(loaded, of_all=of_all, check=partial(stored.open, list(records)))


def _fetched(storage: Storage, manifest: Manifest, register: Register, ranks: Iterable[int]) -> list[PartRecord]:
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-load") as pool:
        return list(pool.map(lambda rank: fetch_part(storage, manifest, register, rank), ranks))


def _tensors_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TensorRecord]:
    """Return the tensors that ``rank`` had, parts of tensors among them."""
    return _of_rank(((one.spec.key, one) for part in parts for one in part.tensors), rank, "tensor")


def _trees_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TreeRecord]:
    return _of_rank(((one.item, one) for part in parts for one in part.trees), rank, "the state of")


def _of_rank(every: Iterable[tuple[str, _Record]], rank: int, what: str) -> dict[str, _Record]:
    found: dict[str, _Record] = {}
    for name, record in ((name, record) for name, record in every if holds(record.ranks, rank)):
        if name in found:
            raise CheckpointDamaged(f"two parts hold {what} {name!r} of rank {rank}")
        found[name] = record
    return found

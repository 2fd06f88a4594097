"""What did a committed checkpoint hold for this rank?  Reads all of it, verifies every byte, changes nothing live.

After a change of the world size, rank r takes the state of the old rank r, a new rank that of the old rank r mod W.
Files that hold nothing for any of the ranks are verified all the same, each by one of them: a checkpoint is restored
whole or not at all. Its threads are started and joined inside `load`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fetch import fetch_file, fetch_part
from lakeckpt.checkpoint.fields import Ranks
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.random_states import RANDOM, check_random
from lakeckpt.checkpoint.tensors import empty_for
from lakeckpt.checkpoint.tree import references, tree_from_bytes
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, LimitExceeded, UnsupportedValue, WireDamaged
from lakeckpt.lake.storage import Storage

__all__ = ["Loaded", "load"]

_READ_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The verified state of one rank, in host memory, apart from any live object."""

    trees: Mapping[str, Any]
    """item → its tree, with a ``TensorRef`` for each tensor; random states not among them."""
    tensors: Mapping[str, torch.Tensor]
    specs: Mapping[str, TensorSpec]
    random: dict[str, Any] | None
    """The random states of this rank; None where it is new."""
    per_rank: tuple[str, ...]
    """The units of which ranks had different contents."""


def load(storage: Storage, manifest: Manifest, *, rank: int, world_size: int) -> Loaded:
    """Read what ``rank`` of ``world_size`` needs of a checkpoint, and verify this rank's share of the rest.

    Raises `CheckpointDamaged` naming the object, `CheckpointMismatch` where the world size changed and a unit is not on
    every old rank, `StorageError` where the store fails.
    """
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-load") as pool:
        parts = list(pool.map(lambda ref: fetch_part(storage, manifest, ref), manifest.parts))
        if world_size != manifest.world_size:
            _refuse_shards(parts, manifest.world_size)
        source = rank % manifest.world_size
        records = _tensors_of(parts, source)
        made = {key: empty_for(record.spec) for key, record in records.items()}
        into = {key: view for key, (_, view) in made.items()}
        jobs = []
        for part, index in _files_to_read(parts, source, manifest.world_size, rank, world_size):
            # A key may lie in other files as well, with another rank's content: only ours goes into the buffer.
            ours = {
                one.spec.key: into[one.spec.key]
                for one in part.tensors
                if one.file == index and records.get(one.spec.key) is one
            }
            jobs.append(pool.submit(fetch_file, storage, part, index, into=ours))
        for job in jobs:
            job.result()
    documents = _trees_of(parts, source)
    trees = {item: _tree(record) for item, record in documents.items()}
    if RANDOM not in trees:
        raise CheckpointDamaged(f"slot {manifest.slot} has no random states for rank {source}")
    for item, tree in trees.items():
        for key in references(tree):
            if key not in records:
                raise CheckpointDamaged(f"the state of {item!r} refers to the tensor {key!r}, which no part holds")
    random = check_random(trees.pop(RANDOM))
    return Loaded(
        trees=trees,
        tensors={key: tensor for key, (tensor, _) in made.items()},
        specs={key: record.spec for key, record in records.items()},
        random=random if rank < manifest.world_size else None,
        per_rank=_different(parts),
    )


def _has(ranks: Ranks, rank: int) -> bool:
    return any(start <= rank < stop for start, stop in ranks)


def _tensors_of(parts: Sequence[PartRecord], rank: int) -> dict[str, TensorRecord]:
    found: dict[str, TensorRecord] = {}
    for part in parts:
        for record in part.tensors:
            if _has(record.ranks, rank):
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


def _tree(record: TreeRecord) -> Any:
    try:
        return tree_from_bytes(record.document)
    except (WireDamaged, UnsupportedValue, LimitExceeded) as error:
        raise CheckpointDamaged(f"the state of {record.item!r}: {error}") from error


def _files_to_read(
    parts: Sequence[PartRecord], source: int, old_size: int, rank: int, world_size: int
) -> list[tuple[PartRecord, int]]:
    """The files with a tensor of ``source``, and this rank's share of those that no rank needs."""
    sources = range(min(world_size, old_size))
    mine, spare = [], []
    for part in parts:
        users: defaultdict[int, list[Ranks]] = defaultdict(list)
        for one in part.tensors:
            users[one.file].append(one.ranks)
        for index in range(len(part.files)):
            if any(_has(ranks, source) for ranks in users[index]):
                mine.append((part, index))
            elif not any(start < sources.stop for ranks in users[index] for start, _ in ranks):
                spare.append((part, index))
    return mine + spare[rank::world_size]


def _contents(parts: Sequence[PartRecord]) -> dict[str, list[Ranks]]:
    """unit → the ranks of each of its contents."""
    found: defaultdict[str, list[Ranks]] = defaultdict(list)
    for part in parts:
        for tensor in part.tensors:
            found[f"tensor:{tensor.spec.key}"].append(tensor.ranks)
        for tree in part.trees:
            if tree.item != RANDOM:
                found[f"tree:{tree.item}"].append(tree.ranks)
    return found


def _different(parts: Sequence[PartRecord]) -> tuple[str, ...]:
    return tuple(sorted(name for name, contents in _contents(parts).items() if len(contents) > 1))


def _refuse_shards(parts: Sequence[PartRecord], old_size: int) -> None:
    for name, contents in sorted(_contents(parts).items()):
        held = sum(stop - start for ranks in contents for start, stop in ranks)
        if held != old_size:
            raise CheckpointMismatch(
                f"{name} is on {held} of {old_size} ranks: a state that is divided over ranks can only be restored on "
                f"as many ranks. Restart with {old_size} ranks"
            )

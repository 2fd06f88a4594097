"""Parts that are not those that were committed: refused with a typed error."""

from __future__ import annotations

import pickle
from dataclasses import replace

import msgpack
import pytest

from lakeckpt.checkpoint.format.manifest import entry_to_bytes
from lakeckpt.checkpoint.format.parts import PartRecord
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.checkpoint.restore.from_storage import load
from lakeckpt.errors import CheckpointDamaged, DamageWarning, LakeckptError, WireError
from tests.checkpoint.rig import (
    Counter,
    EventWaiter,
    HubExchange,
    MemoryStorage,
    good,
    manager,
    run_ranks,
    training,
    with_parts,
)

BOOM = b"cos\nsystem\n(S'touch /tmp/lakeckpt-was-here'\ntR."


def saved() -> MemoryStorage:
    storage = MemoryStorage()
    saver = manager(storage, training() | {"n": Counter([1])})
    saver.restore()
    saver.save()
    return storage


def part(storage: MemoryStorage, rank: int = 0) -> PartRecord:
    return PartRecord.from_bytes(storage.objects[read_history(storage).tip.save.part_path(rank)])


def test_a_tensor_that_two_parts_hold_for_one_rank_is_refused() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def save(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, training() | {"n": Counter([1])}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(2, save, waiters=[waiter]))
    manifest = read_history(storage).tip
    first, second = part(storage, 0), part(storage, 1)
    moved = [
        replace(one, slabs=tuple(replace(slab, file=len(second.files) + slab.file) for slab in one.slabs))
        for one in first.tensors
    ]
    both = replace(second, files=(*second.files, *first.files), tensors=(*second.tensors, *moved))
    manifest = with_parts(storage, manifest, {1: both.to_bytes()})
    with pytest.raises(CheckpointDamaged, match="two parts hold tensor 'model/"):
        load(storage, manifest, rank=0, world_size=2)


def test_the_part_unchanged_is_taken() -> None:
    storage = saved()
    manifest = with_parts(storage, read_history(storage).tip, {0: part(storage).to_bytes()})
    storage.objects[slot_path(manifest.slot)] = entry_to_bytes(manifest)
    assert manager(storage, training(seed=1) | {"n": Counter()}).restore() == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        BOOM,
        pickle.dumps([1, 2, 3]),
        msgpack.packb({"attempt": 1}),
        b"LAKECKPT",
        b"LAKECKPT" + bytes(100),
        msgpack.packb(msgpack.ExtType(99, b"x")),
    ],
)
def test_bytes_that_are_not_ours_are_refused_as_parts_and_as_entries(data: bytes) -> None:
    with pytest.raises(WireError):
        PartRecord.from_bytes(data)
    storage = saved()
    storage.objects[slot_path(1)] = data
    with pytest.warns(DamageWarning), pytest.raises(LakeckptError):
        manager(storage, training() | {"n": Counter()}).restore()


def test_a_valid_part_that_is_not_the_one_that_was_committed_is_refused() -> None:
    storage = saved()
    other = replace(part(storage), trees=tuple(reversed(part(storage).trees)))
    storage.objects[read_history(storage).tip.save.part_path(0)] = other.to_bytes()
    with pytest.warns(DamageWarning, match="not what slot 1 committed"), pytest.raises(CheckpointDamaged):
        manager(storage, training() | {"n": Counter()}).restore()

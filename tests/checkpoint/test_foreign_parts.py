"""Parts that are not those that were committed: refused with a typed error."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.manifest import PartRef, entry_to_bytes
from lakeckpt.checkpoint.format.parts import PartRecord
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.checkpoint.restore.from_storage import load
from lakeckpt.errors import CheckpointDamaged, DamageWarning, LakeckptError, WireError
from lakeckpt.wire.envelope import dumps, loads
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks, training

BOOM = b"cos\nsystem\n(S'touch /tmp/lakeckpt-was-here'\ntR."


def saved() -> MemoryStorage:
    storage = MemoryStorage()
    saver = manager(storage, training() | {"n": Counter([1])})
    saver.restore()
    saver.save()
    return storage


def plain_part(storage: MemoryStorage) -> dict[str, Any]:
    (path,) = (name for name in storage.objects if name.startswith("parts/"))
    value: dict[str, Any] = loads(storage.objects[path], kind="part", supported=(1, 0))
    return value


def reseal(storage: MemoryStorage, plain: dict[str, Any]) -> None:
    """Put a changed part in place, with a manifest that vouches for it: every checksum is right."""
    manifest = read_history(storage).tip
    data = dumps(plain, kind="part", version=(1, 0))
    path = manifest.parts[0].path
    storage.objects[path] = data
    ref = PartRef(rank=0, path=path, size_bytes=len(data), digest=short_digest(data))
    storage.objects[slot_path(manifest.slot)] = entry_to_bytes(replace(manifest, parts=(ref,)))


def test_a_tensor_that_two_parts_hold_for_one_rank_is_refused() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def save(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, training() | {"n": Counter([1])}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(2, save, waiters=[waiter]))
    manifest = read_history(storage).tip
    first, second = (loads(storage.objects[ref.path], kind="part", supported=(1, 0)) for ref in manifest.parts)
    for spec, digest, slabs, ranks in first["tensors"]:
        slabs = [[of, start, found, len(second["files"]) + file, at] for of, start, found, file, at in slabs]
        second["tensors"].append([spec, digest, slabs, ranks])
    second["files"] += first["files"]
    data = dumps(second, kind="part", version=(1, 0))
    ref = replace(manifest.parts[1], size_bytes=len(data), digest=short_digest(data))
    storage.objects[ref.path] = data
    with pytest.raises(CheckpointDamaged, match="two parts hold tensor 'model/"):
        load(storage, replace(manifest, parts=(manifest.parts[0], ref)), rank=0, world_size=2)


def test_the_part_unchanged_is_taken() -> None:
    storage = saved()
    reseal(storage, plain_part(storage))
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
    plain = plain_part(storage)
    plain["trees"] = list(reversed(plain["trees"]))
    path = read_history(storage).tip.parts[0].path
    storage.objects[path] = dumps(plain, kind="part", version=(1, 0))
    with pytest.warns(DamageWarning, match="not what slot 1 committed"), pytest.raises(CheckpointDamaged):
        manager(storage, training() | {"n": Counter()}).restore()

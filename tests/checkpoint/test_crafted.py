"""Parts and trees made to attack: refused with a typed error, and nothing outside of the run is named."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.manifest import PartRef, entry_to_bytes
from lakeckpt.checkpoint.format.parts import FileRecord, PartRecord, SaveId, TensorRecord
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.checkpoint.restore.from_storage import load
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, LakeckptError, WireDamaged, WireError
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


def set_row(name: str, at: int, value: Any, row: int = 0) -> Any:
    def change(plain: dict[str, Any]) -> None:
        plain[name][row][at] = value

    return change


def set_place(file: int) -> Any:
    """The first slab of a tensor in another file, which need not be there."""

    def change(plain: dict[str, Any]) -> None:
        plain["tensors"][0][4][0][0] = file

    return change


def in_two_slabs(plain: dict[str, Any]) -> None:
    """A tensor of 2^40 bytes that is said to lie in the one slab of another one."""
    key, _, _, _, ((file, digest),), ranks = plain["tensors"][0]
    plain["tensors"].append([f"{key}~", "uint8", [2**40], digest, [[file, digest]] * 4, ranks])


CHANGES = [
    in_two_slabs,
    set_row("files", 0, "../outside.safetensors"),
    set_row("files", 0, "/etc/passwd"),
    set_row("files", 0, "objects/../../outside"),
    set_row("files", 0, "objects/./x"),
    set_row("files", 0, "log/0000000000.lkc"),
    set_row("files", 0, "objects/a\0b"),
    set_row("files", 1, -5),
    set_row("files", 1, 2**63),
    set_row("files", 2, b"short"),
    set_row("tensors", 0, "model/other"),
    set_row("tensors", 1, "object"),
    set_row("tensors", 1, "float64"),
    set_row("tensors", 2, [2**40, 2**40]),
    set_row("tensors", 2, [-1]),
    set_row("tensors", 2, ["8", "8"]),
    set_row("tensors", 4, 0),
    set_row("tensors", 4, []),
    set_row("tensors", 4, [[0]]),
    set_row("tensors", 4, [["0", bytes(16)]]),
    set_row("tensors", 4, [[0, bytes(16)]]),
    set_row("tensors", 4, [[0, b"short"]]),
    set_place(7),
    set_place(-1),
    lambda plain: plain["tensors"][0].__setitem__(4, plain["tensors"][0][4] * 2),
    lambda plain: plain.update(slab_bytes=0),
    lambda plain: plain.update(slab_bytes=5),
    lambda plain: plain.update(slab_bytes=2**20 + 1),
    lambda plain: plain.update(slab_bytes=2**63),
    lambda plain: plain.pop("slab_bytes"),
    set_row("tensors", 5, [[5, 2]]),
    set_row("tensors", 5, [[0, 2**40]]),
    set_row("tensors", 5, [[0, 1], [0, 1]]),
    set_row("tensors", 5, []),
    set_row("trees", 1, BOOM),
    set_row("trees", 1, pickle.dumps({"a": 1})),
    set_row("trees", 1, dumps({"a": 1}, kind="log", version=(1, 0))),
    set_row("trees", 1, b"\x81" * 10_000),
    lambda plain: plain.update(rank=1),
    lambda plain: plain.update(world_size=0),
    lambda plain: plain["save"].update(step=9),
    lambda plain: plain.update(run="another"),
    lambda plain: plain.update(cut=b""),
    lambda plain: plain.update(files=[]),
    lambda plain: plain.update(tensors={}),
    lambda plain: plain.update(tensors=plain["tensors"] * 2),
    lambda plain: plain.update(trees=plain["trees"] * 2),
    lambda plain: plain.update(trees=[]),
    lambda plain: plain.pop("trees"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_crafted_part_whose_checksums_are_right_is_refused(number: int) -> None:
    storage = saved()
    plain = plain_part(storage)
    CHANGES[number](plain)
    reseal(storage, plain)
    touched: list[str] = []

    class Watched(MemoryStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            touched.append(path)
            return super().read(path, start, stop)

    watched = Watched()
    watched.objects = storage.objects
    objects = training(seed=1) | {"n": Counter([2])}
    before = str({name: one.state_dict() for name, one in objects.items()})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises((CheckpointDamaged, CheckpointMismatch)) as found:
            manager(watched, objects).restore()
    # Another dtype of the same size is a misfit: what is compared first is records, and not heads of files.
    assert found.type is CheckpointMismatch or [one.category for one in told] == [DamageWarning]
    assert str({name: one.state_dict() for name, one in objects.items()}) == before
    assert all(path.startswith(("log/", "parts/00", "objects/00", "remap/00")) for path in touched)


def test_two_things_of_one_name_in_a_file_are_refused() -> None:
    digest = bytes(16)
    file = FileRecord(path="objects/x", size_bytes=2**22, head_digest=digest, digest=digest)
    large, small = (
        TensorSpec(key=key, dtype="uint8", shape=(size,)) for key, size in (("x", 2**20 + 1), ("x::slab 1", 1))
    )
    records = [
        TensorRecord.of(spec, digest, [(0, digest)] * count, ((0, 1),), slab_bytes=2**20)
        for spec, count in ((large, 2), (small, 1))
    ]
    save = SaveId(attempt=0, step=0, number=0)
    for some in (records, records[:1] * 2):
        with pytest.raises(WireDamaged, match="one name for two things"):
            PartRecord(run="r", save=save, rank=0, world_size=1, cut=b"", files=(file,), tensors=tuple(some), trees=())


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
    for key, dtype, shape, digest, places, ranks in first["tensors"]:
        places = [[len(second["files"]) + file, digest] for file, digest in places]
        second["tensors"].append([key, dtype, shape, digest, places, ranks])
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

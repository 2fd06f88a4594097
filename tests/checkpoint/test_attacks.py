"""Whole checkpoints made to attack, through the front doors: restore, verify, read_state. A typed error, no code that
runs, nothing outside that is touched, and live objects as they were."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from lakeckpt import CheckpointManager, read_state
from lakeckpt.checkpoint.digests import short_digest
from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.checkpoint.log import slot_path
from lakeckpt.checkpoint.manifest import PartRef, entry_from_bytes, entry_to_bytes
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.checkpoint.verify import verify
from lakeckpt.errors import CheckpointError, CheckpointNotFound, LakeckptError, NewerFormat, WireError
from lakeckpt.lake.local import LocalStorage
from lakeckpt.wire.codec import dumps, loads
from tests.checkpoint.rig import Counter, MemoryStorage, training
from tests.wire.crafted import sealed


class Boom:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["LAKECKPT_BOOM"],))


PAYLOADS: dict[str, bytes] = {
    "a pickle": b"cos\nsystem\n(S'true'\ntR.",
    "an extension of nobody": msgpack.packb(msgpack.ExtType(99, b"x")),
    "a timestamp": msgpack.packb(msgpack.Timestamp(1)),
    "one key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a deep list": b"\x91" * 100_000 + b"\x01",
    "a deep map": b"\x81\xa1a" * 100_000 + b"\x01",
    "a list of 2^32 items": b"\xdd\xff\xff\xff\xff\x01",
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xffx",
    "nothing": b"",
    "two values": b"\x01\x01",
    "a list": b"\x90",
    "an empty map": b"\x80",
}


@functools.cache
def files() -> dict[str, bytes]:
    """A run with one checkpoint."""
    storage = MemoryStorage()
    with CheckpointManager(storage, training() | {"n": Counter([1, torch.ones(3)])}) as manager:
        manager.restore()
        manager.save()
    return storage.objects


def saved(folder: Path) -> LocalStorage:
    """It in a folder."""
    for path, data in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return LocalStorage(folder)


def reseal(storage: LocalStorage, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the part of the checkpoint, and let the manifest vouch for it: every checksum is right."""
    manifest = read_history(storage).tip
    assert manifest is not None
    path = manifest.parts[0].path
    plain = loads(storage.read(path), kind="part", supported=(3, 0)).value
    change(plain)
    put_part(storage, dumps(plain, kind="part", version=(3, 0)))


def put_part(storage: LocalStorage, data: bytes) -> None:
    manifest = read_history(storage).tip
    assert manifest is not None
    path = manifest.parts[0].path
    storage.put(path, [data])
    ref = PartRef(rank=0, path=path, size_bytes=len(data), digest=short_digest(data))
    storage.put(slot_path(manifest.slot), [entry_to_bytes(replace(manifest, parts=(ref,)))])


def change_entry(**fields: Any) -> Callable[[LocalStorage], None]:
    def change(storage: LocalStorage) -> None:
        for slot in (1, 0):
            plain = loads(storage.read(slot_path(slot)), kind="log", supported=(1, 4)).value
            if plain["entry"] == "begin" or slot == 1:
                storage.put(slot_path(slot), [dumps({**plain, **fields}, kind="log", version=(1, 4))])

    return change


def row(name: str, at: int, value: Any) -> Callable[[LocalStorage], None]:
    return lambda storage: reseal(storage, lambda plain: plain[name][0].__setitem__(at, value))


def attacks() -> Iterator[tuple[str, Callable[[LocalStorage], None]]]:
    for name, payload in PAYLOADS.items():
        yield f"entry: {name}", lambda storage, payload=payload: change_all(storage, payload)
        yield f"part: {name}", lambda storage, payload=payload: put_part(storage, sealed(payload, kind="part"))
        yield f"tree: {name}", row("trees", 1, sealed(payload, kind="tree"))
    yield "part: a file outside", row("files", 0, "../../secret")
    yield "part: an absolute file", row("files", 0, "/etc/passwd")
    yield "part: a file of 2^62 bytes", row("files", 1, 2**62)
    yield "part: a tensor of 2^61 elements", row("tensors", 2, [2**30, 2**31])
    yield "part: a tensor of no dtype", row("tensors", 1, "Generator")
    yield "part: a part that is larger than its whole", row("tensors", 0, "model/0.bias::at 0 of 2")
    yield "part: a whole of 2^80 elements", row("tensors", 0, f"model/0.bias::at 0 of {2**80}")
    yield "part: a whole of which most is missing", row("tensors", 0, "model/0.bias::at 0 of 1000000000")
    yield "part: a whole of a number of many digits", row("tensors", 0, "model/0.bias::at 0 of " + "9" * 10_000)
    yield "part: a whole of other dimensions", row("tensors", 0, "model/0.bias::at 0,0,0 of 8")
    yield "entry: an attempt that never was", change_entry(attempt=-1)
    yield "entry: a part outside", change_entry(parts=[[0, "parts/../../secret", 9, bytes(16)]])
    yield "entry: no rule of what is kept", change_entry(keep_best=[-1, "lowest"])
    yield "entry: a cut of no memory", change_entry(captured=[1, -1], keep_every=0)
    yield "entry: a metric that is code", change_entry(metric=pickle.dumps(Boom), captured="x")


def change_all(storage: LocalStorage, payload: bytes) -> None:
    for slot in (0, 1):
        storage.put(slot_path(slot), [sealed(payload, kind="log")])


ATTACKS = dict(attacks())


@pytest.mark.parametrize("name", ATTACKS)
def test_a_run_made_to_attack_is_refused_with_nothing_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKECKPT_BOOM", str(tmp_path / "boom"))
    (tmp_path / "secret").write_bytes(b"secret")
    storage = saved(tmp_path / "run")
    ATTACKS[name](storage)
    objects = training(seed=1) | {"n": Counter([2])}
    before = str({name: one.state_dict() for name, one in objects.items()})
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamageWarning)
            with pytest.raises(LakeckptError):
                CheckpointManager(storage, objects).restore()
            with pytest.raises((CheckpointError, WireError)):
                read_state(tmp_path / "run")
            with contextlib.suppress(LakeckptError):
                assert verify(storage).every_damage or name.startswith("tree")  # of what no checksum vouches for
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert str({name: one.state_dict() for name, one in objects.items()}) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "secret"]
    assert (tmp_path / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("what", ["objects", "parts", "log"])
@pytest.mark.parametrize("whole_folder", [True, False])
def test_links_out_of_a_run_are_not_followed(what: str, whole_folder: bool, tmp_path: Path) -> None:
    storage = saved(tmp_path / "run")
    path = tmp_path / "run" / what
    if not whole_folder:
        path = next(one for one in sorted(path.rglob("*"), reverse=True) if one.is_file())
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        with pytest.raises(LakeckptError, match=r"link|whole"):
            CheckpointManager(storage, training(seed=1) | {"n": Counter([2])}).restore()


HEADS = {
    "a head of 2^62 bytes": (2**62).to_bytes(8, "little") + b"{}",
    "a head of 90 MB that is not there": (90_000_000).to_bytes(8, "little") + b"{}",
    "a deep head": b"[" * 50_000,
    "one name twice": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":1}',
    "two tensors in one place": json.dumps(
        {key: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for key in "ab"}
    ).encode(),
    "a tensor beyond the end": json.dumps(
        {"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
    ).encode(),
    "a negative shape": json.dumps({"a": {"dtype": "U8", "shape": [-4, -1], "data_offsets": [0, 4]}}).encode(),
    "a dtype of nobody": json.dumps({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}).encode(),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("name", HEADS)
def test_safetensors_made_to_attack_are_refused(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    data = head if name.startswith("a head") else len(head).to_bytes(8, "little") + head + bytes(4)
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        read_state(tmp_path)


def test_a_format_that_is_newer_is_refused_by_its_name_and_no_older_checkpoint_is_taken(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    for kind, put in {
        "part": lambda data: put_part(storage, data),
        "log": lambda data: storage.put(slot_path(1), [data]),
    }.items():
        put(sealed(b"\x80", kind=kind, version=(9, 0)))
        with pytest.raises(NewerFormat, match=rf"this {kind} document has format 9\.0 .*upgrade lakeckpt"):
            CheckpointManager(storage, training(seed=1) | {"n": Counter([2])}).restore()
        with pytest.raises(NewerFormat, match=rf"this {kind} document has format 9\.0 .*upgrade lakeckpt"):
            read_state(tmp_path)


def test_a_slot_that_is_not_there_is_told(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointNotFound, match="there is no slot 7 in"):
        read_state(tmp_path, slot=7)


def test_entries_of_the_log_are_read_as_they_were_written(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    for slot in (0, 1):
        entry = entry_from_bytes(storage.read(slot_path(slot)))
        assert entry_from_bytes(entry_to_bytes(entry)) == entry

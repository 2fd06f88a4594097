"""Checkpoints made to attack, as a folder: any change of a run of one checkpoint whose checksums are all right."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import torch

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.manifest import PartRef, entry_to_bytes
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.wire.envelope import dumps, loads
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
    plain = loads(storage.read(path), kind="part", supported=(1, 0))
    change(plain)
    put_part(storage, dumps(plain, kind="part", version=(1, 0)))


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
            plain = loads(storage.read(slot_path(slot)), kind="log", supported=(1, 4))
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


def link_out(storage: LocalStorage, what: str, *, whole_folder: bool) -> None:
    """Have a folder of the run, or the last file in it, be a link to one that lies beside the run."""
    run = Path(storage.name)
    path = run / what
    if not whole_folder:
        path = next(one for one in sorted(path.rglob("*"), reverse=True) if one.is_file())
    path.rename(run.parent / "outside")
    path.symlink_to(run.parent / "outside")

"""How soon is a checkpoint refused that was made to attack?  ``python -m benchmarks.attacks [--json FILE]``

First every attack that the tests know (pickles in any field, extension types, keys twice, depth, sizes that are a lie,
paths and links that lead out of the run, heads of safetensors), through the doors that a user has: `restore`,
`read_state`, `verify`. Limit: each is refused in less than 100 ms.

Then documents that are large, of what takes longest to read, with what is wrong at their end: as a part of a run, until
`read_state` refuses it. They take time in proportion to their size: so how large one may be that is refused in less
than 100 ms is printed, too. Beside them, in the same run: the decoder of msgpack, written in C, which checks less, on
the same bytes; and `torch.load` (``weights_only``) on a pickle of as many bytes, a list of numbers and, at its end,
what it refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import torch

from benchmarks.measure import show
from lakeckpt import CheckpointManager, read_state
from lakeckpt.checkpoint.verify import verify
from lakeckpt.errors import LakeckptError
from lakeckpt.lake.local import LocalStorage
from lakeckpt.wire.values import NODE_BYTES, Tag
from tests.checkpoint.attacks import ATTACKS, HEADS, link_out, put_part, saved, with_head
from tests.checkpoint.rig import Counter, training
from tests.wire.crafted import sealed

LIMIT_S = 0.1
SIZES = [2**14, 2**16, 2**18, 2**20, 2**22]
END = b"\xc1"
"""One byte too many."""


def scalar(number: int) -> bytes:
    """An extension: a numpy scalar of 2 bytes."""
    content = msgpack.packb("<i2") + msgpack.packb(number.to_bytes(2, "little"))
    return bytes([0xC7, len(content), Tag.NUMPY_SCALAR]) + content


COSTLY: dict[str, Callable[[int], bytes]] = {
    "numbers": lambda at: b"\x01",
    "pairs of a text and a number": lambda at: b"\x81" + msgpack.packb(f"{at:06d}") + b"\x01",
    "empty lists, as many as may be": lambda at: b"\x90" + b"\x01" * (NODE_BYTES - 1),
    "numpy scalars": lambda at: scalar(at % 2**15),
}


def crafted(one: Callable[[int], bytes], size_bytes: int) -> bytes:
    """A payload of about ``size_bytes``: a list of these, and behind it what must not be."""
    made = bytearray()
    count = 0
    while len(made) < size_bytes:
        piece = one(count)
        made += piece
        count += NODE_BYTES if piece[:1] == b"\x90" else 1
    return b"\xdd" + count.to_bytes(4, "big") + bytes(made) + END


def refused(door: Callable[[], object]) -> float:
    """Seconds until a typed error came; it must come."""
    begin_s = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            door()
    except LakeckptError:
        return time.perf_counter() - begin_s
    raise AssertionError("it was taken")


def runs(place: Path) -> Iterator[tuple[str, Path]]:
    """Every attack of the tests, by name, in a folder of its own."""
    for number, (name, attack) in enumerate(ATTACKS.items()):
        storage = saved(place / str(number) / "run")
        attack(storage)
        yield name, place / str(number) / "run"
    for what in ("objects", "parts", "log"):
        for whole in (True, False):
            storage = saved(place / f"{what}-{whole}" / "run")
            link_out(storage, what, whole_folder=whole)
            yield f"link: {'the folder' if whole else 'a file of'} {what}", place / f"{what}-{whole}" / "run"


def doors(run: Path) -> dict[str, Callable[[], object]]:
    storage = LocalStorage(run)
    objects = training(seed=1) | {"n": Counter([2])}
    return {
        "restore": lambda: CheckpointManager(storage, objects).restore(),
        "read_state": lambda: read_state(run),
        "verify": lambda: verify(storage),
    }


def known(place: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Attack → door → seconds of each round. `verify` tells damage instead of raising it."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, run in runs(place):
        found[name] = {}
        for door, opened in doors(run).items():
            found[name][door] = [_timed(opened) if door == "verify" else refused(opened) for _ in range(rounds)]
    for number, name in enumerate(HEADS):
        (folder := place / f"head-{number}").mkdir()
        (folder / "x.safetensors").write_bytes(with_head(name))
        found[f"safetensors: {name}"] = {
            "read_state": [refused(lambda at=folder: read_state(at)) for _ in range(rounds)]
        }
    return found


def _timed(door: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    with contextlib.suppress(LakeckptError):
        door()
    return time.perf_counter() - begin_s


def large(place: Path, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """What it consists of → bytes → who reads it → seconds, the median."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, one in COSTLY.items():
        found[name] = {}
        for size_bytes in SIZES:
            payload = crafted(one, size_bytes)
            storage = saved(place / f"{name}-{size_bytes}")
            put_part(storage, sealed(payload, kind="part"))
            seconds: dict[str, list[float]] = {"read_state": [], "msgpack": [], "torch.load": []}
            pickle = _pickle_of(size_bytes)
            for _ in range(rounds):
                seconds["read_state"].append(refused(lambda at=storage.name: read_state(at)))
                seconds["msgpack"].append(_c_decoder(payload))
                seconds["torch.load"].append(_torch(pickle))
            found[name][size_bytes] = {who: statistics.median(some) for who, some in seconds.items()}
    return found


def _c_decoder(payload: bytes) -> float:
    begin_s = time.perf_counter()
    with contextlib.suppress(ValueError):
        msgpack.unpackb(payload, strict_map_key=False)
    return time.perf_counter() - begin_s


def _pickle_of(size_bytes: int) -> bytes:
    """A pickle of protocol 2 that appends as many numbers to a list, and then names a function."""
    return b"\x80\x02]q\x00(" + b"K\x01" * (size_bytes // 2) + b"ecos\nsystem\n."


def _torch(data: bytes) -> float:
    begin_s = time.perf_counter()
    with contextlib.suppress(Exception):
        torch.load(io.BytesIO(data), weights_only=True)
    return time.perf_counter() - begin_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lakeckpt-attacks-") as folder:
        attacks = known(Path(folder), given.rounds)
        documents = large(Path(folder), given.rounds)
    slowest = show_known(attacks)
    show_large(documents)
    if given.json is not None:
        given.json.write_text(json.dumps({"attacks": attacks, "documents": documents}, indent=1))
    return 0 if slowest < LIMIT_S else 1


def show_known(attacks: dict[str, dict[str, list[float]]]) -> float:
    """Print them by kind; the slowest median."""
    kinds: dict[tuple[str, str], dict[str, float]] = {}
    for name, by_door in attacks.items():
        for door, seconds in by_door.items():
            kinds.setdefault((name.partition(":")[0], door), {})[name] = statistics.median(seconds)
    rows: list[tuple[Any, ...]] = []
    for (kind, door), medians in kinds.items():
        worst = max(medians, key=medians.__getitem__)
        middle = statistics.median(medians.values())
        rows.append((kind, door, f"{len(medians)}", f"{middle * 1e3:.1f}", f"{medians[worst] * 1e3:.1f}", worst))
    columns = ("attacks on", "door", "number", "median, ms", "slowest, ms", "which")
    show("attacks that the tests know, until they are refused", columns, rows)
    slowest = max(max(medians.values()) for medians in kinds.values())
    print(f"the slowest takes {slowest * 1e3:.1f} ms; the limit is {LIMIT_S * 1e3:.0f}")
    return slowest


def show_large(documents: dict[str, dict[int, dict[str, float]]]) -> None:
    rows = [
        (name, f"{size / 2**10:.0f}", *(f"{found[who] * 1e3:.1f}" for who in ("read_state", "msgpack", "torch.load")))
        for name, by_size in documents.items()
        for size, found in by_size.items()
    ]
    columns = ("a part of", "KiB", "read_state", "msgpack in C", "torch.load of a pickle")
    show("large documents, ms until they are refused", columns, rows)
    sizes = [
        max((size for size, found in by.items() if found["read_state"] < LIMIT_S), default=0)
        for by in documents.values()
    ]
    print(
        f"of these sizes, up to {min(sizes) / 2**10:.0f} KiB are refused in less than {LIMIT_S * 1e3:.0f} ms, "
        "of whatever they consist"
    )


if __name__ == "__main__":
    raise SystemExit(main())

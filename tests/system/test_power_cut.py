"""Cut the power at every system call of a series of puts: what was acknowledged is there, whole, afterwards.

The cut comes *instead of* the n-th call that `LocalStorage` makes, for n from the first to the last and one more (right
after the last put returned). The same with one fsync left out must lose something: this shows that the cut is real.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.local import LocalStorage
from tests.lake.traced import os_of_the_storage
from tests.system.cutting import CuttingCalls, PowerCut
from tests.system.disks import Disk


@dataclass
class Outcome:
    """What was acknowledged, what was on its way, and every content that a key may have had."""

    acknowledged: dict[str, bytes] = field(default_factory=dict)
    ever: dict[str, set[bytes]] = field(default_factory=dict)


def _content(name: str, size_bytes: int) -> bytes:
    return (name.encode() + b"|") * (size_bytes // (len(name) + 1) + 1)


PUTS = [
    ("put", "objects/0001/step-1/a.bin", _content("a1", 200_000)),
    ("put", "objects/0001/step-1/b.bin", _content("b1", 10)),
    ("put_new", "log/0000000001.lkc", _content("first entry", 900)),
    ("put", "objects/0001/step-1/a.bin", _content("a2", 70_000)),
    ("put", "objects/0002/step-2/c.bin", b""),
    ("put_new", "log/0000000002.lkc", _content("second entry", 5_000)),
]


def write(storage: LocalStorage, outcome: Outcome) -> None:
    for method, key, data in PUTS:
        outcome.ever.setdefault(key, set()).add(data)
        if method == "put":
            storage.put(key, [data[: len(data) // 2], data[len(data) // 2 :]])
        else:
            storage.put_new(key, data)
        outcome.acknowledged[key] = data


def cut_and_look(disk: Disk, cut_at: int, **calls: Any) -> tuple[list[str], bool]:
    """Write until the power is cut at a call, restart, and tell what is wrong; and whether all puts had returned."""
    root = disk.path / f"run-{disk.cuts}"
    calls_made = CuttingCalls(disk, cut_at, **calls)
    outcome = Outcome()
    try:
        with os_of_the_storage(calls_made):
            write(LocalStorage(root), outcome)
        all_returned = True
        with contextlib.suppress(PowerCut):
            calls_made.cut()
    except StorageError:
        assert calls_made.dark, "a put failed while there was power"
        all_returned = False
    disk.restart()
    return list(_wrong(LocalStorage(root), outcome)), all_returned


def _wrong(storage: LocalStorage, outcome: Outcome) -> Iterator[str]:
    found = {info.path for info in storage.list()}
    for key in outcome.acknowledged:
        if key not in found:
            yield f"{key} was acknowledged and is gone"
    for key in found:
        data = storage.read(key)
        if data not in outcome.ever.get(key, set()):
            yield f"{key} has {len(data)} bytes that nobody wrote"
        elif key in outcome.acknowledged and data != outcome.acknowledged[key]:
            on_its_way = [put for put in PUTS if put[1] == key and put[2] == data]
            if not on_its_way or PUTS.index(on_its_way[0]) < _last_acknowledged(outcome, key):
                yield f"{key} is as it was before the put that was acknowledged"
    storage.clear_leftovers()
    storage.put("after/the/cut", [b"works again"])


def _last_acknowledged(outcome: Outcome, key: str) -> int:
    return max(i for i, put in enumerate(PUTS) if put[1] == key and put[2] == outcome.acknowledged[key])


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    made.close()


def calls_of_all_puts(disk: Disk) -> int:
    counting = CuttingCalls(disk, cut_at=0)
    with os_of_the_storage(counting):
        write(LocalStorage(disk.path / "counted"), Outcome())
    return counting.made


def test_what_was_acknowledged_survives_a_cut_at_every_system_call(disk: Disk) -> None:
    calls = calls_of_all_puts(disk)
    assert calls > 50
    failures = {}
    for cut_at in range(1, calls + 2):
        wrong, all_returned = cut_and_look(disk, cut_at)
        assert all_returned == (cut_at > calls)
        if wrong:
            failures[cut_at] = wrong
    assert failures == {}
    print(f"{disk.kind}: {disk.cuts} cuts, one at every system call: everything acknowledged was intact")


def test_what_was_acknowledged_survives_many_cuts_right_after_the_last_put(disk: Disk) -> None:
    for _ in range(25):
        assert cut_and_look(disk, cut_at=0) == ([], True)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


@pytest.mark.parametrize(
    "leave_out", [lambda descriptor: True, _is_file, _is_folder], ids=["every fsync", "of files", "of folders"]
)
def test_the_same_with_fsync_left_out_loses_data(disk: Disk, leave_out: Callable[[int], bool]) -> None:
    damaged = sum(bool(cut_and_look(disk, cut_at=0, leave_out=leave_out)[0]) for _ in range(10))
    assert damaged == 10

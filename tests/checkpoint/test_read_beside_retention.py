"""Whoever reads a checkpoint while the run goes on and removes it: a newer one, or a typed error; never a mixture."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lakeckpt import Keep
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.convert import read_state
from lakeckpt.errors import AttemptSuperseded, CheckpointNotFound
from lakeckpt.lake.storage.base import ObjectInfo
from tests.checkpoint.rig import Counter, MemoryStorage, manager


class Read(MemoryStorage):
    """What somebody else sees of a storage, in which something happens before the ``at``-th read of a file or part."""

    def __init__(self, inner: MemoryStorage, at: int, happens: Callable[[], None]) -> None:
        super().__init__()
        self.objects, self.changed = inner.objects, inner.changed
        self.left, self.happens = at, happens

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        if path.startswith(("objects/", "parts/")):
            self.left -= 1
            if self.left == 0:
                self.happens()
        return super().read(path, start, stop)


def run(storage: MemoryStorage) -> Callable[[], None]:
    """A run of one step, that keeps one checkpoint; what is returned makes two more."""
    counter = Counter()
    saver = manager(storage, {"n": counter}, keep=1)
    saver.restore()
    done = 0

    def go_on(steps: int = 2) -> None:
        nonlocal done
        for _ in range(steps):
            done += 1
            counter.value = {name: torch.full((5000,), float(done)) for name in "abc"}
            saver.step()
            saver.save()

    go_on(1)
    return go_on


def alike(value: Any) -> float:
    (found,) = {float(x) for one in value.values() for x in one}
    return found


@pytest.mark.parametrize("at", range(1, 8))
def test_a_restore_takes_the_newer_checkpoint_where_the_one_that_it_reads_is_removed(at: int) -> None:
    """Its records are read before the claim, its tensors behind it: then it cannot be removed any more."""
    storage = MemoryStorage()
    go_on = run(storage)

    def live_on() -> None:
        with contextlib.suppress(AttemptSuperseded):
            go_on()

    counter = Counter({name: torch.zeros(5000) for name in "abc"})
    step = manager(Read(storage, at, live_on), {"n": counter}).restore()
    assert step == (3 if at in (1, 2) else 1) and alike(counter.value) == step


@pytest.mark.parametrize("at", range(1, 8))
def test_what_was_removed_while_it_was_verified_is_no_damage(at: int) -> None:
    storage = MemoryStorage()
    report = verify(Read(storage, at, run(storage)))
    assert report.exit_status == 0, report
    assert report.checkpoints[0].status in ("removed", "intact")


@pytest.mark.parametrize("at", range(1, 8))
def test_a_state_that_is_read_beside_the_run_is_of_one_checkpoint(at: int) -> None:
    storage = MemoryStorage()
    assert alike(read_state(Read(storage, at, run(storage)))["n"]["value"]) in (1.0, 3.0)
    storage = MemoryStorage()
    go_on = run(storage)
    beside = Read(storage, at, go_on)
    with contextlib.suppress(CheckpointNotFound):
        assert alike(read_state(beside, step=1)["n"]["value"]) == 1.0
    go_on()
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 1 that its rule \(keep=\) keeps"):
        read_state(storage, step=1)


class Busy(Read):
    """A storage in which the run commits whenever somebody lists its log."""

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        if prefix == "log":
            self.left += 1
            assert self.left < 20, "it follows the run for ever"
            self.happens()
        return super().list(prefix)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        return MemoryStorage.read(self, path, start, stop)


@pytest.mark.parametrize("is_missing", [True, False])
def test_damage_beside_a_run_that_commits_all_the_time_is_found_once(is_missing: bool) -> None:
    storage, counter = MemoryStorage(), Counter()
    saver = manager(storage, {"n": counter}, keep=Keep(last=1, every=1))
    saver.restore()

    def go_on() -> None:
        counter.value = torch.full((5000,), float(saver.steps_done))
        saver.step()
        saver.save()

    go_on()
    go_on()
    path = min(path for path in storage.objects if path.startswith("objects/"))
    if is_missing:
        del storage.objects[path]
    else:
        storage.objects[path] = storage.objects[path][:-1]
    report = verify(Busy(storage, 0, go_on))
    assert report.exit_status == 1 and {one.path for one in report.every_damage} == {path}
    assert [one.step for one in report.checkpoints] == [1, 2, 3]  # those of when it began
    assert [one.status for one in report.checkpoints] == ["damaged", "intact", "intact"]


def test_a_checkpoint_that_is_pruned_between_the_looks_of_verify_is_removed_not_damaged() -> None:
    for at in range(1, 30):
        storage = MemoryStorage()
        go_on = run(storage)
        go_on()
        counted = itertools.count(1)
        beside = Busy(storage, 0, lambda: None)
        read = beside.read

        def reading(path: str, *args: Any, at: int = at, go_on: Any = go_on, counted: Any = counted, read: Any = read):
            if next(counted) == at:
                go_on()
            return read(path, *args)

        beside.read = reading  # type: ignore[method-assign]
        report = verify(beside)
        assert report.exit_status == 0, report
        if next(counted) <= at:
            return
    raise AssertionError("not every read was tried")

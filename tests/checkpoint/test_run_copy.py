"""A copy of a run is a run: whole or not there at all, whenever the copying ends, and a job goes on from it exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.copying.run_copy import RunCopied, RunCopy
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import list_slots
from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.cli.main import main
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing.faulty_storage import FaultyStorage, Killed, StoreFault
from tests.checkpoint.rig import Counter, HubExchange, MemoryStorage, Reader, changed, good, manager, run_ranks
from tests.checkpoint.scripts import Script, write_table

GOAL = 12


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A run with checkpoints of steps 4, 8 and 12, of which two keep their data; rolled over two attempts."""
    made = Script(write_table(tmp_path / "lake"))
    made.attempt(6, keep=2)
    made.attempt(8, keep=2)
    return made


def copied(source: Any, target: Any, *, step: int | None = None) -> RunCopied:
    copy = RunCopy(source, target, step=step)
    copy.copy_files()
    return copy.commit()


def goes_on(script: Script, storage: MemoryStorage, steps: int) -> None:
    """Train on from what lies at ``storage``; every row counts once, and the audit says so."""
    script.storage = storage
    done = script.attempt(steps, keep=2, save_last=True)
    report = audit(storage)
    assert report.verdict == "proved" and verify(storage).every_damage == ()
    assert sum(one.once for reader in report.readers for one in reader.epochs) == script.truth(done).total()
    assert set(script.truth(done).values()) == {1}


@pytest.mark.parametrize("step", [None, 8])
def test_a_copy_is_verified_audited_and_trained_on_as_the_run_is(script: Script, step: int | None) -> None:
    source, target = script.storage, MemoryStorage()
    done = copied(source, target, step=step)
    assert done.step == (step or GOAL) and done.written_bytes == done.size_bytes > 0
    report = verify(target)
    assert report.every_damage == () and report.leftover_files == 0
    assert [one.step for one in report.checkpoints if one.status == "intact"] == [done.step]
    whole, part = read_history(source).chain, read_history(target).chain
    assert [one.write_id for one in part] == [one.write_id for one in whole if one.step <= done.step]
    assert {path: data for path, data in target.objects.items() if source.objects.get(path) != data}.keys() == {
        f"log/{done.slot:010d}.lkc",
        part[-1].save.register_path,
    }
    goes_on(script, target, 5)


@pytest.mark.parametrize("fault", [StoreFault.KILL_AFTER, pytest.param(StoreFault.ERROR, marks=pytest.mark.soak)])
def test_whenever_a_second_copy_ends_the_place_holds_a_whole_run_and_goes_on(script: Script, fault: StoreFault) -> None:
    source, before = script.storage, MemoryStorage()
    copied(source, before, step=8)
    seen = FaultyStorage(stored(before))
    copied(source, seen)
    for number in range(1, len(seen.calls) + 1):
        target = stored(before)
        with pytest.raises((Killed, OSError)):
            copied(source, FaultyStorage(target, fail_at={("*", number): fault}))
        kept = [one.step for one in verify(target).checkpoints if one.status == "intact"]
        assert set(kept) <= {8, GOAL} and kept, f"call {number}: {kept}"
        objects = {"count": Counter(), "model": torch.nn.Linear(3, 2), "reader": script.loaders(1)[0]}
        steps = manager(stored(target), objects).restore()
        assert steps == kept[-1] and objects["count"].value == 0
        copied(source, target)
        assert [one.status for one in verify(target).checkpoints if one.step == GOAL] == ["intact"]
        assert verify(target).every_damage == () and verify(target).leftover_files == 0


def stored(of: MemoryStorage) -> MemoryStorage:
    made = MemoryStorage()
    made.objects = dict(of.objects)
    return made


def test_a_copy_that_was_interrupted_writes_only_what_is_not_there(script: Script) -> None:
    target = MemoryStorage()
    RunCopy(script.storage, target).copy_files()
    assert list_slots(target) == []  # no run yet
    (path, *_) = (path for path in target.objects if path.startswith("objects/"))
    target.objects[path] = changed(target.objects[path])
    done = copied(script.storage, target)
    assert done.written_bytes == len(target.objects[path]) and verify(target).every_damage == ()


def test_a_damaged_file_is_not_copied_and_an_older_checkpoint_may_be(script: Script) -> None:
    source, target = script.storage, MemoryStorage()
    newest = read_history(source).tip
    assert newest is not None
    (path,) = (path for path in source.objects if path.startswith(f"objects/{newest.save.folder}"))
    source.objects[path] = changed(source.objects[path])
    with pytest.raises(CheckpointDamaged, match=rf"not committed: {re.escape(path)}.*--step copies an older"):
        copied(source, target)
    assert list_slots(target) == [] and path not in target.objects
    assert copied(source, target, step=8).step == 8


def test_what_a_place_holds_already_is_never_replaced_by_a_copy_of_something_else(script: Script) -> None:
    source, target = script.storage, MemoryStorage()
    copied(source, target, step=8)
    alone = stored(target)
    script.storage = alone
    script.attempt(1, every=1)  # a job went on from the copy
    copied(source, target)
    other = MemoryStorage()
    manager(other, {"n": Counter()}, persist_every=1).restore()
    for place, step in ((alone, None), (other, None), (target, 8)):
        held = dict(place.objects)
        with pytest.raises(ConfigError, match=r"Nothing there was changed\. Name an empty place"):
            copied(source, place, step=step)
        assert place.objects == held
    with pytest.raises(CheckpointNotFound, match=r"keeps no checkpoint of step 5\. It keeps 8, 12: name one"):
        copied(source, MemoryStorage(), step=5)
    with pytest.raises(CheckpointNotFound, match="there is no run at"):
        copied(MemoryStorage(), target)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_job_begins_from_a_copy_once_and_goes_on_at_its_own_place(world_size: int) -> None:
    source, own = MemoryStorage(), MemoryStorage()

    def job(storage: MemoryStorage, steps: int, **options: Any) -> list[int]:
        def body(rank: int, exchange: HubExchange) -> int:
            objects = {"n": Counter(), "reader": Reader(rank=rank, world_size=world_size)}
            with manager(storage, objects, exchange=exchange) as saver:
                done = saver.restore(**options)
                for _, _ in zip(range(steps), objects["reader"], strict=False):
                    objects["n"].value += 1
                    saver.step()
            return done

        return good(run_ranks(world_size, body))

    assert job(source, 3) == [0] * world_size
    assert job(own, 2, source=source) == [3] * world_size
    assert job(source, 4) == [3] * world_size  # the run that was copied goes on by itself
    assert job(own, 1, source=source) == [5] * world_size
    assert job(own, 1, source=MemoryStorage()) == [6] * world_size  # which is not looked at
    assert [one.step for one in read_history(own).chain] == [3, 5, 6, 7]


def test_ranks_copy_the_checkpoint_that_rank_0_has_chosen_though_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, own = MemoryStorage(), MemoryStorage()

    def save(value: float) -> None:  # each rank has a tensor of its own, in a file of its own
        def trained(rank: int, exchange: HubExchange) -> None:
            objects = {"tensor": Counter()}
            with manager(source, objects, exchange=exchange) as saver:
                saver.restore()
                objects["tensor"].value = torch.full((4,), value + rank)
                saver.step()

        good(run_ranks(2, trained))

    save(1.0)
    begins, goes_on = RunCopy.__init__, [lambda: save(5.0)]

    def chosen(self: RunCopy, *given: Any, **named: Any) -> None:
        begins(self, *given, **named)
        if goes_on:
            goes_on.pop()()  # a newer checkpoint, before another rank looks

    monkeypatch.setattr(RunCopy, "__init__", chosen)

    def body(rank: int, exchange: HubExchange) -> tuple[int, float]:
        objects = {"tensor": Counter()}
        done = manager(own, objects, exchange=exchange).restore(source=source)
        return done, float(objects["tensor"].value[0])

    assert good(run_ranks(2, body)) == [(1, 1.0), (1, 2.0)]
    assert verify(own).every_damage == () and len(read_history(source).chain) == 2


def test_rows_that_leave_the_deal_by_an_order_are_not_lost_by_a_copy(script: Script) -> None:
    roll_back(script.storage, 8, exclude_steps=(9, 11))
    with pytest.raises(ConfigError, match="without rows that an order or a crash has excluded"):
        copied(script.storage, MemoryStorage())
    script.attempt(0, keep=2)  # the order is obeyed, and nothing is saved yet
    with pytest.raises(ConfigError, match="copy it after the next save"):
        copied(script.storage, MemoryStorage())
    script.attempt(2, every=1, keep=2)
    target = MemoryStorage()
    assert copied(script.storage, target).step == 10
    assert audit(target).verdict == audit(script.storage).verdict == "except"


def test_a_source_without_a_run_is_an_error_and_begins_none() -> None:
    own = MemoryStorage()
    with pytest.raises(CheckpointNotFound, match="there is no run at"):
        manager(own, {"n": Counter()}).restore(source=MemoryStorage())
    assert own.objects == {}


def test_the_command_says_what_it_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, to = str(tmp_path / "run"), str(tmp_path / "copy")
    with manager(LocalStorage(run), {"n": Counter()}) as saver:
        saver.restore()
        saver.step()
    assert main(["copy", run, to]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"step 1 of {run} is in {to}, with its history" in printed and f"restore(source={to!r})" in printed
    assert main(["copy", run, to, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"run": "", "size_bytes": 0} == {
        "run": "", "slot": 1, "step": 1, "entries": 1, "files": 0, "size_bytes": 0, "written_bytes": 0,
    }  # fmt: skip
    assert main(["copy", str(tmp_path / "none"), to]) == 2
    assert "there is no run at" in capsys.readouterr().err

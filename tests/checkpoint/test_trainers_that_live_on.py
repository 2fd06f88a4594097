"""A trainer that lives on while another one restores: it is refused or superseded in words, and costs no restore."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import torch

from lakeckpt import LakeDataset, LakeLoader, open_table
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import list_slots, read_log
from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.errors import AttemptSuperseded, CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, StateMismatch
from lakeckpt.testing.faulty_storage import FaultyStorage, Killed, StoreFault
from tests.checkpoint.rig import (
    Counter,
    EventWaiter,
    HubExchange,
    MemoryStorage,
    Reader,
    good,
    manager,
    run_ranks,
    train_step,
    training,
)
from tests.checkpoint.scripts import write_table

ROWS = 100_000


class Trainer:
    """A job that goes on, whoever restores beside it: `save` makes a step, saves it and removes what is older."""

    def __init__(self, storage: Any, *, keep: int = 1, small: bool = False) -> None:
        self.objects = ({} if small else training()) | {"n": Counter(torch.zeros(2)), "reader": Reader(rows=ROWS)}
        self.saver = manager(storage, self.objects, keep=keep)
        self.saver.restore()
        self.batches = iter(self.objects["reader"])
        self.superseded = ""
        self.committed = 0

    def save(self) -> None:
        if self.superseded:
            return
        next(self.batches)
        if "model" in self.objects:
            train_step(self.objects)
        self.objects["n"].value = self.objects["n"].value + 1
        self.saver.step()
        try:
            self.committed = self.saver.save().step
        except AttemptSuperseded as error:
            self.superseded = str(error)


def fresh(**changed: Any) -> dict[str, Any]:
    return training(seed=4) | {"n": Counter(-1), "reader": Reader(rows=ROWS)} | changed


def at_calls(happens: Callable[[], None], *, every: int, first: int = 1) -> Callable[..., None]:
    """What happens before the ``first``-th storage call, and ``every`` so many behind it: 30 times at most, of which
    before a put 3 times: a job that commits right before every put of another one cannot be shut out by anybody."""
    calls = puts = done = 0
    one_at_a_time = threading.Lock()  # several threads read the log

    def before(method: str, path: str) -> None:
        nonlocal calls, puts, done
        with one_at_a_time:
            calls += 1
            if calls < first or (calls - first) % every:
                return
            puts += method == "put_new"
            if done < 30 and (method != "put_new" or puts <= 3):
                done += 1
                happens()

    return before


def rows_of(storage: Any) -> int:
    """How many rows the history consumed; none of them twice."""
    history = read_history(storage)
    every = [rows for one in history.chain if (rows := one.readers["reader"].consumed().get(0)) is not None]
    total = every[0]
    for rows in every[1:]:
        assert not total.intersection(rows)
        total = total.union(rows)
    return total.size


@pytest.mark.parametrize(
    ("every", "keep"),
    [(1, 1), (3, 2), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((2, 1), (3, 1), (5, 1), (7, 1)))],
)
def test_every_restore_succeeds_at_its_first_try_while_a_trainer_saves_between_its_calls(every: int, keep: int) -> None:
    """No warning is given: none of this is damage."""
    for first in range(1, every + 1):
        storage = MemoryStorage()
        old = Trainer(storage, keep=keep, small=True)
        old.save()
        for _ in range(2):
            before = at_calls(old.save, every=every, first=first)
            objects = {"n": Counter(torch.zeros(2)), "reader": Reader(rows=ROWS)}
            saver = manager(FaultyStorage(storage, before=before), objects, keep=keep)
            done = saver.restore()
            assert done == int(objects["n"].value[0]) == objects["reader"].state_dict()["step"] == old.committed
            assert saver.restore_report.damaged == ()
            old.save()
            assert "is superseded" in old.superseded
            next_one = Trainer(storage, keep=keep, small=True)  # the job is started anew, and lives on in its turn
            next_one.save()
            old = next_one
        assert rows_of(storage) == 10 * old.committed


def test_a_step_that_a_trainer_is_removing_is_refused_and_the_trainer_goes_on() -> None:
    storage = MemoryStorage()
    told: list[str] = []

    def before(method: str, path: str) -> None:
        if method == "delete" and not told:
            for ask in (lambda: roll_back(storage, 1), lambda: manager(storage, {"n": Counter()}).restore(1)):
                with pytest.raises(CheckpointNotFound) as caught:
                    ask()
                told.append(str(caught.value))

    live = Trainer(FaultyStorage(storage, before=before), keep=3, small=True)
    for _ in range(6):
        live.save()
    assert len(told) == 2 and all("can be restored: 2 (slot 2), 3 (slot 3), 4 (slot 4)." in one for one in told)
    assert live.committed == 6 and not live.superseded


def test_a_step_that_is_removed_before_the_claim_costs_the_trainer_nothing() -> None:
    storage = MemoryStorage()
    live = Trainer(storage, keep=2, small=True)
    for _ in range(2):
        live.save()
    done: list[str] = []

    def before(method: str, path: str) -> None:
        if method == "put_new" and not done:
            done.append(path)
            live.save()

    asks = {"n": Counter(torch.zeros(2)), "reader": Reader(rows=ROWS)}
    with pytest.raises(CheckpointNotFound, match=r"can be restored: 2 \(slot 2\), 3 \(slot 3\)\."):
        manager(FaultyStorage(storage, before=before), asks).restore(1)
    live.save()
    assert done and live.committed == 4 and not live.superseded
    done.clear()
    saver = manager(FaultyStorage(storage, before=before), asks, keep=2)
    assert saver.restore(4) == 4, "that one stays, so the run is claimed behind the commit"
    live.save()
    assert done and live.committed == 5 and live.superseded


def test_a_trainer_that_removes_every_choice_before_it_is_read_is_shut_out_and_then_followed() -> None:
    storage = MemoryStorage()
    old = Trainer(storage)
    old.save()
    looks = []

    def overtake(method: str, path: str) -> None:
        if method == "read" and path.endswith("register.lkc"):
            looks.append(path)
            old.save()

    saver = manager(FaultyStorage(storage, before=overtake), fresh())
    assert saver.restore() == old.committed > 5 and saver.restore_report.damaged == ()
    assert old.superseded and len(looks) == old.committed


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_that_saves_while_records_are_compared_is_followed_to_its_newest_commit(world_size: int) -> None:
    storage = MemoryStorage()
    old = Trainer(storage)
    old.save()

    def body(rank: int, exchange: HubExchange) -> Any:
        before = at_calls(old.save, every=2) if rank == 0 else None
        objects = {**fresh(), "reader": Reader(rank=rank, world_size=world_size, rows=ROWS)}
        saver = manager(
            FaultyStorage(storage, before=before), objects, exchange=exchange, waiter=EventWaiter(storage), keep=1
        )
        return saver.restore(), saver.restore_report.damaged

    assert good(run_ranks(world_size, body)) == [(old.committed, ())] * world_size


# --- a second job that does not fit


def another_model() -> dict[str, Any]:
    return fresh(model=torch.nn.Linear(3, 2))


def another_dtype() -> dict[str, Any]:
    objects = fresh()
    objects["model"].double()
    return objects


def without_an_object() -> dict[str, Any]:
    objects = fresh()
    del objects["n"]
    return objects


def another_order() -> dict[str, Any]:
    return fresh(reader=Reader(seed=5, rows=ROWS))


@pytest.mark.parametrize("made", [another_model, another_dtype, without_an_object, another_order])
def test_a_second_job_that_does_not_fit_is_refused_and_harms_nothing(made: Callable[[], dict[str, Any]]) -> None:
    storage = MemoryStorage()
    old = Trainer(storage)
    old.save()
    before, reads = dict(storage.objects), []
    objects = made()
    states = str({name: one.state_dict() for name, one in objects.items()})
    watched = FaultyStorage(storage, before=lambda method, path: reads.append(path))
    with pytest.raises((CheckpointMismatch, StateMismatch)):
        manager(watched, objects).restore()
    assert storage.objects == before and str({name: one.state_dict() for name, one in objects.items()}) == states
    assert not [path for path in reads if path.startswith("objects/")], "no tensor is read to find out"
    old.save()
    assert old.committed == 2 and not old.superseded


def test_a_second_job_with_another_filter_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    table = open_table(write_table(tmp_path / "lake"))
    storage = MemoryStorage()

    def objects(least: int) -> dict[str, Any]:
        dataset = LakeDataset(
            table, batch_size=5, columns=["id"], filters=ds.field("id") >= least, rank=0, world_size=1
        )
        return {"n": Counter(0), "reader": LakeLoader(dataset)}

    mine = objects(10)
    live = manager(storage, mine)
    live.restore()
    batches = iter(mine["reader"])
    next(batches)
    live.step()
    live.save()
    before = dict(storage.objects)
    with pytest.raises(StateMismatch, match="keeps other rows than were counted for the state"):
        manager(storage, objects(20)).restore()
    assert storage.objects == before
    next(batches)
    live.step()
    assert live.save().step == 2


def test_a_misfit_on_one_rank_alone_writes_nothing_and_the_trainer_goes_on() -> None:
    storage = MemoryStorage()
    old = Trainer(storage)
    old.save()
    slots = list_slots(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        objects = fresh(reader=Reader(rank=rank, world_size=2, rows=ROWS))
        if rank == 1:
            objects["model"] = torch.nn.Linear(3, 2)
        manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage)).restore()

    assert [type(one) for one in run_ranks(2, body)] == [CheckpointMismatch] * 2
    assert list_slots(storage) == slots
    old.save()
    assert old.committed == 2


def test_what_was_committed_between_the_comparison_and_the_claim_is_compared_again() -> None:
    """It is of another model by then: the restore is refused, though the run is claimed already."""
    storage = MemoryStorage()
    old = manager(storage, {"n": Counter(1), "model": torch.nn.Linear(2, 2)})
    old.restore()
    old.save()
    grown: list[CheckpointManager] = []

    def grow(method: str, path: str) -> None:
        if method == "put_new" and not grown:
            grown.append(manager(storage, {"n": Counter(2), "model": torch.nn.Linear(2, 2)}))
            grown[0].restore()
            grown[0]._saves._objects["model"] = torch.nn.Linear(3, 3)
            grown[0].step()
            grown[0].save()

    with pytest.raises(CheckpointMismatch, match=r"weight is float32 \[3, 3\]"):
        manager(FaultyStorage(storage, before=grow), {"n": Counter(), "model": torch.nn.Linear(2, 2)}).restore()
    assert read_history(storage).tip.step == 1


# --- who superseded whom


def test_the_superseded_process_is_told_by_whom_and_the_successor_says_whom(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    old = Trainer(storage)
    old.save()
    with caplog.at_level(logging.INFO, logger="lakeckpt"):
        manager(storage, fresh()).restore()
    process = f"process {os.getpid()} on {socket.gethostname()}, 20"
    (record,) = [one for one in caplog.records if one.name == "lakeckpt"]
    said = record.getMessage()
    assert said.startswith(f"attempt 2 ({process}") and f"takes the run over from attempt 0 ({process}" in said
    old.save()
    assert f"slot 2 of the log was taken by attempt 2 ({process}" in old.superseded


def test_a_first_attempt_says_nothing_of_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lakeckpt"):
        manager(MemoryStorage(), {"n": Counter()}).restore()
    assert not caplog.records


# --- nothing is removed by who is superseded


def test_an_attempt_that_is_superseded_while_it_looks_what_to_remove_removes_nothing() -> None:
    storage = MemoryStorage()
    old = Trainer(storage, keep=1)
    old.save()
    taken = []

    def take_over(method: str, path: str) -> None:
        if (method, path) == ("list", "parts") and not taken:
            taken.append(manager(storage, fresh()))
            assert taken[0].restore() == 2

    old.saver._saves._publisher._retention._storage = FaultyStorage(storage, before=take_over)
    before = {name for name in storage.objects if name.startswith(("parts/", "objects/"))}
    old.save()
    assert taken and before < storage.objects.keys()


# --- a restore that dies


def test_a_restore_that_dies_at_any_call_leaves_the_history_as_it_was_and_the_next_one_succeeds() -> None:
    def run(storage: MemoryStorage) -> None:
        Trainer(storage).save()

    whole = MemoryStorage()
    run(whole)
    counted = FaultyStorage(whole)
    manager(counted, fresh()).restore()
    for fault in (StoreFault.KILL, StoreFault.KILL_AFTER):
        for n in range(1, len(counted.calls) + 1):
            storage = MemoryStorage()
            run(storage)
            before = read_history(storage)
            with pytest.raises(Killed):
                manager(FaultyStorage(storage, fail_at={("*", n): fault}), fresh()).restore()
            after = read_history(storage)
            assert (after.chain, after.abandoned, after.damaged) == (before.chain, (), ())
            objects = fresh()
            assert manager(storage, objects).restore() == int(objects["n"].value[0]) == 1


def test_a_restore_that_finds_damage_behind_its_claim_has_changed_nothing_of_the_history() -> None:
    storage = MemoryStorage()
    Trainer(storage).save()
    for path in [one for one in storage.objects if one.startswith("objects/")]:
        storage.objects[path] += b"?"
    with pytest.warns(UserWarning, match="not whole"), pytest.raises(CheckpointDamaged, match="no checkpoint"):
        manager(storage, fresh()).restore()
    view = read_log(storage)
    assert len(view.begins) == 2 and len(view.restores) == 1 and read_history(storage).tip.step == 1

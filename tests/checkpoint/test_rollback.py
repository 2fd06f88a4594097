"""A roll-back is an order given once: the history goes on from an earlier checkpoint, through any number of crashes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import list_slots, read_log
from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.cli.main import main
from lakeckpt.errors import (
    AttemptSuperseded,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    DamageWarning,
)
from tests.checkpoint.rig import (
    Counter,
    EventWaiter,
    HubExchange,
    MemoryStorage,
    Reader,
    good,
    manager,
    run_ranks,
)
from tests.checkpoint.scripts import Script, write_table
from tests.checkpoint.test_remembered import managed, objects_of, train


def job(
    storage: Any, steps: int, *, step: int | None = None, keep: int | Keep = 10, every: int = 1, **options: Any
) -> tuple[int, CheckpointManager]:
    """Restore, then make so many steps, saving ``every`` so many; the step that was restored. Then it is dead."""
    objects = {"n": Counter(0), "tensor": Counter(torch.zeros(3)), "reader": Reader()}
    saver = manager(storage, objects, keep=keep, persist_every=every, **options)
    done = saver.restore(step)
    assert objects["n"].value == done == objects["reader"].state_dict()["step"]
    batches = iter(objects["reader"])
    for now in range(done + 1, done + steps + 1):
        next(batches)
        objects["n"].value, objects["tensor"].value = now, torch.full((3,), float(now))
        saver.step()
    return done, saver


def steps_of(storage: Any) -> list[int]:
    return [one.step for one in read_history(storage).chain]


@pytest.mark.parametrize("every", [1, 3])
def test_a_script_that_rolls_back_loses_at_most_one_interval_with_each_crash_behind_it(every: int) -> None:
    storage = MemoryStorage()
    job(storage, 12, every=every)
    assert job(storage, 7, every=every, step=6)[0] == 6
    reached = 6 + 7 // every * every
    for _ in range(3):  # the same script, started again after every crash
        done, _ = job(storage, 4, every=every, step=6)
        assert done == reached, "at most one save interval is lost"
        reached += 4 // every * every
    history = read_history(storage)
    assert history.whole and [one.rolled_back_to for one in history.restores] == [None, 6, None, None, None]
    assert [one.step for one in history.abandoned] == [step for step in range(7, 13) if step % every == 0]
    assert steps_of(storage) == list(range(every, reached + 1, every))
    assert verify(storage).every_damage == ()


def test_a_roll_back_to_the_newest_checkpoint_is_an_order_too() -> None:
    storage = MemoryStorage()
    job(storage, 4)
    assert job(storage, 3, step=4)[0] == 4
    assert job(storage, 2, step=4)[0] == 7
    assert job(storage, 0, step=4)[0] == 9


def test_an_order_that_died_before_it_was_obeyed_is_given_again() -> None:
    storage = MemoryStorage()
    job(storage, 4)
    last = len(list_slots(storage))

    class Dies(MemoryStorage):
        def put_new(self, path: str, data: bytes) -> None:
            if path.endswith(f"{last + 1:010d}.lkc"):
                raise KeyboardInterrupt
            super().put_new(path, data)

    dying = Dies()
    dying.objects = storage.objects
    with pytest.raises(KeyboardInterrupt):
        job(dying, 0, step=2)
    assert steps_of(storage) == [1, 2, 3, 4]
    assert job(storage, 0, step=2)[0] == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_go_back(world_size: int) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def life(step: int | None, reached: int) -> None:
        def body(rank: int, exchange: HubExchange) -> None:
            counter = Counter(0)
            saver = manager(storage, {"n": counter}, persist_every=1, keep=9, exchange=exchange, waiter=waiter)
            done = saver.restore(step)
            assert counter.value == done == reached
            for counter.value in range(done + 1, done + 4):
                saver.step()

        good(run_ranks(world_size, body, waiters=[waiter]))

    for step, reached in ((None, 0), (2, 2), (2, 5), (None, 8)):
        life(step, reached)


def test_the_command_sends_the_next_restore_back_once_and_stops_who_is_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, live = job(tmp_path, 5)
    assert main(["rollback", str(tmp_path), "--step", "2"]) == 0
    told = capsys.readouterr().out
    assert "goes on from step 2 (slot 2)" in told and "still runs on this run is superseded" in told
    with pytest.raises(AttemptSuperseded, match=r"slot 6 of the log was taken by a roll-back to step 2 \(process"):
        live.save()
    assert [one.step for one in read_history(live._storage).chain] == [1, 2]
    assert job(tmp_path, 4)[0] == 2
    assert job(tmp_path, 0)[0] == 6, "it was obeyed; from now on the newest is taken"
    assert job(tmp_path, 0, step=2)[0] == 6, "by a script that asks for the same, too"
    assert main(["rollback", str(tmp_path), "--step", "2", "--json"]) == 0, "the command is a new order every time"
    assert json.loads(capsys.readouterr().out)["slot"] == 2
    assert job(tmp_path, 0, step=2)[0] == 2
    history = read_history(live._storage)
    assert [(one.attempt, one.rolled_back_to) for one in history.restores if one.restored == 2] == [
        (None, 2),
        (7, None),
        (None, 2),
        (history.begins[-1].attempt, None),
    ]


def test_a_step_that_cannot_be_had_is_refused_with_those_that_can_and_nothing_is_written() -> None:
    storage = MemoryStorage()
    job(storage, 6, keep=2)
    before = dict(storage.objects)
    said = r"step {}: its history has no checkpoint.*can be restored: 5 \(slot 5\), 6 \(slot 6\)"
    for step in (2, 7):  # removed by retention; never saved
        with pytest.raises(CheckpointNotFound, match=said.format(step)):
            job(storage, 0, step=step)
        with pytest.raises(CheckpointNotFound, match=said.format(step)):
            roll_back(storage, step)
    assert storage.objects == before
    roll_back(storage, 5)
    with pytest.raises(CheckpointNotFound, match=r"can be restored: 5 \(slot 5\)\."):  # 6 is abandoned
        job(storage, 0, step=6)
    with pytest.raises(CheckpointNotFound, match=r"can be restored: 5 \(slot 5\), 6 \(slot 6\)\."):
        roll_back(storage, 2)
    job(storage, 1)
    with pytest.raises(CheckpointNotFound, match=r"can be restored: 5 \(slot 5\), 6 \(slot 10\)\."):
        roll_back(storage, 2)
    for wrong in (-1, 2.0, "5", True):
        with pytest.raises(ConfigError, match="step is the optimizer step"):
            manager(storage, {"n": Counter()}).restore(wrong)
    with pytest.raises(CheckpointNotFound, match="there is no run"):
        roll_back(MemoryStorage(), 0)
    with pytest.raises(CheckpointNotFound, match="can be restored: none"):
        manager(MemoryStorage(), {"n": Counter()}).restore(3)


def test_a_checkpoint_that_is_damaged_is_not_gone_back_behind() -> None:
    """Who names a step wants that one."""
    storage = MemoryStorage()
    job(storage, 4)
    (path,) = [one for one in storage.objects if one.startswith("objects/") and "000000000002-" in one]
    storage.objects[path] += b"?"
    with (
        pytest.warns(UserWarning, match="not whole"),
        pytest.raises(
            CheckpointNotFound, match=r"(?s)step 2: .*: 1 \(slot 1\), 3 \(slot 3\), 4.*Found damaged:.*0002-"
        ),
    ):
        job(storage, 0, step=2)
    assert job(storage, 0)[0] == 4


def test_a_misfit_is_refused_before_the_order_is_given() -> None:
    storage = MemoryStorage()
    job(storage, 4)
    before = dict(storage.objects)
    with pytest.raises(CheckpointMismatch):
        manager(storage, {"other": Counter()}).restore(2)
    assert storage.objects == before


def test_damage_behind_a_roll_back_never_leads_to_what_was_left() -> None:
    storage = MemoryStorage()
    job(storage, 5)
    roll_back(storage, 3)
    (path,) = [one for one in storage.objects if one.startswith("objects/") and "000000000003-" in one]
    storage.objects[path] += b"?"
    with pytest.warns(UserWarning, match="not whole"):
        assert job(storage, 1)[0] == 2
    assert steps_of(storage) == [1, 2, 3] and [one.step for one in read_history(storage).abandoned] == [3, 4, 5]


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_order_whose_checkpoint_is_not_whole_is_named_and_can_be_replaced(is_gone: bool) -> None:
    storage = MemoryStorage()
    job(storage, 5, keep=3)
    roll_back(storage, 3)
    for path in [one for one in storage.objects if "000000000003-" in one]:
        if is_gone:
            storage.delete(path)
        elif path.startswith("objects/"):
            storage.objects[path] += b"?"
    hidden = (
        r"(?s)no checkpoint of this run is whole.*roll-back to step 3 in slot 6 hides .*: step 4 \(.*5 \(slot 5\)\. "
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match="not whole"), pytest.raises(CheckpointDamaged, match=hidden):
            job(storage, 0)
    roll_back(storage, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)  # who removes data by hand may be told that the log lost its end
        assert job(storage, 3, keep=3)[0] == 4
    history = read_history(storage)
    assert [one.step for one in history.chain] == [1, 2, 3, 4, 5, 6, 7] and [one.slot for one in history.abandoned] == [
        5
    ]
    assert job(storage, 0)[0] == 7


def test_an_order_that_a_commit_has_followed_is_not_replaced() -> None:
    storage = MemoryStorage()
    job(storage, 5)
    roll_back(storage, 3)
    roll_back(storage, 5)
    roll_back(storage, 3)
    assert job(storage, 0)[0] == 3
    roll_back(storage, 4)
    assert job(storage, 2)[0] == 4
    with pytest.raises(CheckpointNotFound, match=r"4 \(slot 4\), 5 \(slot 1[0-9]\), 6 "):
        roll_back(storage, 7)
    assert steps_of(storage) == [1, 2, 3, 4, 5, 6] and verify(storage).every_damage == ()


def test_memory_of_the_branch_that_was_left_is_not_restored(tmp_path: Path) -> None:
    storage = MemoryStorage()
    alive: list[CheckpointManager] = []  # nobody closes what crashed

    def life(steps: int, step: int | None = None, *, save: bool = False) -> tuple[int, int | None]:
        objects = objects_of(len(alive))
        saver = managed(storage, objects, tmp_path, keep=9)
        alive.append(saver)
        done = saver.restore(step)
        assert done == objects["n"].value
        train(saver, objects, steps)
        if save:
            saver.save()
        return done, saver.restore_report.captured

    assert life(2, save=True) == (0, None)
    assert life(3) == (2, 2)
    assert life(2) == (5, 5), "captured up to step 7, of which only step 2 was committed"
    roll_back(storage, 2)
    assert life(2) == (2, None)
    assert life(2) == (4, 4), "memory of the new branch is"
    assert life(2, step=2, save=True) == (6, 6), "the order was obeyed"
    assert steps_of(storage) == [2, 8]
    assert life(2) == (8, 8)
    assert life(0, step=8) == (8, None), "who names a step wants its checkpoint, and nothing newer of memory"
    roll_back(storage, 2)
    assert life(0) == (2, None)


def test_the_audit_proves_the_history_behind_a_roll_back(tmp_path: Path) -> None:
    table = write_table(tmp_path / "lake")
    script = Script(table)
    script.attempt(20, every=2, keep=20)
    roll_back(script.storage, 8)
    assert script.attempt(30, every=2, keep=20) == 38
    script.attempt(20, every=2, keep=20)
    report = audit(script.storage)
    assert report.readers[0].epochs and not report.every_doubt, report
    assert [branch.last_step for branch in report.branches] == [20]
    assert {row for row, count in script.truth(58).items() if count != 1} == set()


def test_a_damaged_order_is_told_and_nothing_is_proved(tmp_path: Path) -> None:
    script = Script(write_table(tmp_path / "lake"))
    script.attempt(8)
    roll_back(script.storage, 4)
    path = f"log/{list_slots(script.storage)[-1]:010d}.lkc"
    script.storage.objects[path] = script.storage.objects[path][:-1]
    assert audit(script.storage).exit_status != 0
    with pytest.warns(UserWarning, match=path):
        assert script.attempt(0) == 8


# --- the newest entries of the log are gone


def remove_last(storage: MemoryStorage, count: int = 1) -> None:
    for slot in list_slots(storage)[-count:]:
        storage.delete(f"log/{slot:010d}.lkc")


def test_a_newest_manifest_that_is_damaged_is_not_told_as_lost() -> None:
    storage = MemoryStorage()
    job(storage, 9, keep=1)
    path = f"log/{list_slots(storage)[-1]:010d}.lkc"
    storage.objects[path] = storage.objects[path][:-1]
    with pytest.warns(UserWarning, match="damage in"), pytest.raises(CheckpointDamaged, match="is whole") as caught:
        job(storage, 0)
    assert path in str(caught.value) and "lost" not in str(caught.value)


def test_a_log_whose_end_is_there_is_not_suspected_whatever_retention_removed() -> None:
    storage = MemoryStorage()
    job(storage, 9, keep=2)
    job(storage, 5, keep=4)
    job(storage, 3, keep=1)
    roll_back(storage, 17)
    job(storage, 3, keep=2)
    assert read_log(storage).damaged == ()
    for path in [one for one in storage.objects if one.startswith(("parts/", "objects/"))]:
        storage.delete(path)  # of a run that is over
    assert not [one for one in audit(storage).every_doubt if "lost" in one]
    with pytest.warns(UserWarning, match="not whole"), pytest.raises(CheckpointDamaged, match="no checkpoint"):
        job(storage, 0)


def test_an_old_checkpoint_that_somebody_removed_by_hand_is_no_lost_end() -> None:
    storage = MemoryStorage()
    job(storage, 9, keep=Keep(last=2, every=3))
    for path in [one for one in storage.objects if "/000000000003-" in one]:
        storage.delete(path)
    assert job(storage, 0)[0] == 9
    assert not [one for one in audit(storage).every_doubt if "lost" in one]

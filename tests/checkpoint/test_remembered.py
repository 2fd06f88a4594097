"""What nodes' memory still holds is restored where all ranks have it and it goes on from the log; else a checkpoint."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.agent.generations import Generations, digest_of_run
from lakeckpt.checkpoint.agent.leftovers import kept_in
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.format.manifest import entry_from_bytes, entry_to_bytes
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import read_log
from lakeckpt.checkpoint.restore.from_memory import Offer, Remembered, where_it_goes_on
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, DamageWarning
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.agent.rig import take_checksums
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
from tests.patience import PATIENCE_S


def objects_of(seed: int = 0, **reader: Any) -> dict[str, Any]:
    return training(seed=seed) | {"n": Counter(0), "reader": Reader(**reader)}


_last: dict[tuple[str, str], CheckpointManager] = {}


def managed(storage: Any, objects: dict[str, Any], arenas: Path, **options: Any) -> CheckpointManager:
    """A manager. The one before it, of a trainer that has died, fills its memory no more, as the kernel sees to."""
    where = str(arenas), storage.name
    if (dead := _last.pop(where, None)) is not None and dead._saves is not None:
        dead._saves._engine.close()
    saver = manager(storage, objects, **{"capture_every": 1, "arenas": arenas, "timeout_s": PATIENCE_S, **options})
    _last[where] = saver
    return saver


def train(saver: CheckpointManager, objects: dict[str, Any], steps: int) -> str:
    """So many steps, each captured; what the state is then."""
    batches = iter(objects["reader"])
    for _ in range(steps):
        next(batches)
        train_step(objects)
        objects["n"].value += 1
        saver.step()
        captured(saver)
    return said(objects)


def captured(saver: CheckpointManager) -> int | None:
    """Let the capture under way become complete; its step."""
    return saver._saves._engine.wait()


def said(objects: dict[str, Any]) -> str:
    return str({name: one.state_dict() for name, one in objects.items()})


def killed_at_5(storage: Any, arenas: Path, *, commit_at: int = 2) -> tuple[CheckpointManager, list[str]]:
    """A job that committed step 2 and got to step 5: its manager, abandoned, and the states at steps 2, 4 and 5."""
    objects = objects_of()
    saver = managed(storage, objects, arenas)
    saver.restore()
    states = [train(saver, objects, commit_at)]
    if commit_at:
        saver.save()
    states.append(train(saver, objects, 4 - commit_at))
    states.append(train(saver, objects, 1))
    return saver, states


def again(storage: Any, arenas: Path, seed: int = 9) -> tuple[CheckpointManager, int, dict[str, Any]]:
    objects = objects_of(seed)
    saver = managed(storage, objects, arenas)
    return saver, saver.restore(), objects


def rows_recorded(storage: Any) -> list[int]:
    """How many rows each commit of the history recorded; no row is in two of them."""
    seen, sizes = None, []
    for one in read_history(storage).chain:
        rows = one.readers["reader"].consumed().get(0)
        if rows is None:
            sizes.append(0)
            continue
        assert seen is None or not seen.intersection(rows)
        seen = rows if seen is None else seen.union(rows)
        sizes.append(rows.size)
    return sizes


def test_a_job_that_died_goes_on_at_its_last_step_and_every_row_is_recorded_once(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (_, _, last) = killed_at_5(storage, tmp_path)
    saver, step, objects = again(storage, tmp_path)
    assert step == 5 and said(objects) == last
    report = saver.restore_report
    assert report is not None and report.captured == 5 and report.damaged == ()
    assert report.restored is not None and report.restored.step == 2
    train(saver, objects, 2)
    info = saver.save()
    assert info is not None and info.step == 7
    assert rows_recorded(storage) == [20, 50] and verify(storage).every_damage == ()
    restores = read_log(storage).restores
    assert [one.captured for one in restores] == [None, CutId(attempt=0, step=5)]
    assert manager(storage, objects_of(3)).restore() == 7
    assert dead.steps_done == 5


def test_a_copy_of_a_run_goes_its_own_way(tmp_path: Path) -> None:
    """It has the same id, attempts and steps, and beside the run memory and an agent of its own."""
    run, copy, arenas = tmp_path / "run", tmp_path / "copy", tmp_path / "arenas"
    with managed(run, objects_of(), arenas) as saver:
        saver.restore()
    shutil.copytree(run, copy)
    objects, others = objects_of(1), objects_of(2)
    with managed(run, objects, arenas) as saver, managed(copy, others, arenas) as beside:
        saver.restore(), beside.restore()
        train(saver, objects, 2), train(beside, others, 2)
        saver.save(), beside.save()
        for place, its in ((run, objects), (copy, others)):
            shutil.copytree(place, tmp_path / "looked at" / place.name)
            restored = objects_of(3)
            assert manager(tmp_path / "looked at" / place.name, restored).restore() == 2
            assert said(restored) == said(its) != said(objects_of(3))
        agents = {one.agents for one in kept_in(ArenaFolder(arenas))}
        assert len(agents) == 2 and () not in agents


def test_a_link_to_a_run_is_no_copy(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    one, other = LocalStorage(tmp_path / "run"), LocalStorage(tmp_path / "linked")
    assert digest_of_run("id", one) == digest_of_run("id", other) != digest_of_run("id", LocalStorage(tmp_path))
    assert digest_of_run("id", one) != digest_of_run("other id", one)


def test_leaving_at_once_commits_what_was_restored_from_memory(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, _ = killed_at_5(storage, tmp_path)
    objects = objects_of(4)
    with managed(storage, objects, tmp_path) as saver:
        assert saver.restore() == 5
    assert manager(storage, objects_of(3)).restore() == 5 and rows_recorded(storage) == [20, 30]
    assert dead.steps_done == 5


def test_before_the_first_commit_memory_is_all_there_is(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (_, _, last) = killed_at_5(storage, tmp_path, commit_at=0)
    saver, step, objects = again(storage, tmp_path)
    assert step == 5 and said(objects) == last
    saver.save()
    assert rows_recorded(storage) == [50] and dead.steps_done == 5


def test_a_job_that_dies_again_before_it_captures_goes_on_from_the_same_cut(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (_, _, last) = killed_at_5(storage, tmp_path)
    alive = [dead]
    for seed in (7, 8, 9):
        saver, step, objects = again(storage, tmp_path, seed)
        alive.append(saver)
        assert step == 5 and said(objects) == last


def test_the_cut_that_was_committed_is_taken_from_memory_too(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (_, _, last) = killed_at_5(storage, tmp_path)
    dead.save()
    reads: list[str] = []

    class Watched(MemoryStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            reads.append(path)
            return super().read(path, start, stop)

    watched = Watched()
    watched.name, watched.objects = storage.name, storage.objects
    saver, step, objects = again(watched, tmp_path)
    assert step == 5 and said(objects) == last and saver.restore_report.restored.step == 5
    assert not [path for path in reads if path.startswith("objects/")]
    train(saver, objects, 1)
    saver.save()
    assert rows_recorded(watched) == [20, 30, 10]


def flip(arenas: Path, text: bytes) -> None:
    """Flip a bit in the first place where ``text`` lies, in each arena that holds it, of one or more. Agents have taken
    the checksums before."""
    take_checksums(arenas)
    wholes = {path: path.read_bytes() for path in arenas.glob("*.arena")}
    holding = {path: whole.index(text) for path, whole in wholes.items() if text in whole}
    assert holding
    for path, at in holding.items():
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([wholes[path][at] ^ 1]))


def weight_bytes(state: dict[str, Any]) -> bytes:
    return state["model"].state_dict()["0.weight"].numpy().tobytes()


def test_memory_that_is_damaged_is_told_and_an_older_cut_is_taken(tmp_path: Path) -> None:
    storage = MemoryStorage()
    objects = objects_of()
    dead = managed(storage, objects, tmp_path)
    dead.restore()
    train(dead, objects, 2)
    dead.save()
    fourth = train(dead, objects, 2)
    train(dead, objects, 1)
    flip(tmp_path, weight_bytes(objects))
    with pytest.warns(DamageWarning, match=r"memory/0:5: this cut is not restored from memory: .*not what was written"):
        saver, step, found = again(storage, tmp_path)
    assert step == 4 and said(found) == fourth
    train(saver, found, 1)
    saver.save()
    assert rows_recorded(storage) == [20, 30]


def test_damaged_memory_before_the_first_commit_leaves_a_fresh_start_with_nothing_changed(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), objects_of()
    dead = managed(storage, objects, tmp_path)
    dead.restore()
    train(dead, objects, 2)
    flip(tmp_path, weight_bytes(objects))
    with pytest.warns(DamageWarning, match=r"memory/0:2: this cut is not restored from memory"):
        _, step, found = again(storage, tmp_path, seed=9)
    assert step == 0 and said(found) == said(objects_of(9))


def test_memory_that_is_damaged_as_it_is_copied_is_no_fresh_start_where_nothing_can_replace_it(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), objects_of()
    dead = managed(storage, objects, tmp_path)
    dead.restore()
    train(dead, objects, 2)
    take_checksums(tmp_path)
    weight = weight_bytes(objects)

    class Damages(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            if state["value"]:
                flip(tmp_path, weight)

    damaging = objects_of(9) | {"n": Damages(0)}
    with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged, match="no checkpoint was committed") as caught:
        managed(storage, damaging, tmp_path).restore()
    assert "hold a mixture" in caught.value.__notes__[0] and damaging["n"].value == 0


@pytest.mark.parametrize("hashed", [True, False])
def test_a_cut_that_no_agent_has_hashed_is_restored_and_the_report_says_that_it_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hashed: bool
) -> None:
    """The trainer died right behind its capture, or its agent was killed before it."""
    monkeypatch.setattr(Generations, "look_over", lambda *_: None)
    storage = MemoryStorage()
    _, (_, _, last) = killed_at_5(storage, tmp_path)
    if hashed:
        take_checksums(tmp_path)
    with caplog.at_level("INFO", "lakeckpt"):
        saver, step, objects = again(storage, tmp_path)
    assert step == 5 and said(objects) == last and saver.restore_report is not None
    assert saver.restore_report.checked == hashed
    assert ("step 5 in memory was not checked" in caplog.text) != hashed


def test_a_checkpoint_whose_data_are_damaged_is_not_needed_where_memory_goes_on_from_it(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (_, _, last) = killed_at_5(storage, tmp_path)
    for path in storage.objects:
        if path.startswith("objects/"):
            storage.objects[path] = b"?"
    _, step, objects = again(storage, tmp_path)
    assert step == 5 and said(objects) == last and dead.steps_done == 5


def test_what_another_attempt_left_behind_is_not_restored(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (second, _, _) = killed_at_5(storage, tmp_path)
    elsewhere = objects_of(3)
    assert manager(storage, elsewhere).restore() == 2  # on another node, say: it has begun an attempt
    _, step, objects = again(storage, tmp_path)
    assert step == 2 and said(objects) == second and dead.steps_done == 5


def test_a_job_that_does_not_capture_does_not_look_at_memory(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, (second, _, _) = killed_at_5(storage, tmp_path)
    objects = objects_of(3)
    assert manager(storage, objects).restore() == 2 and said(objects) == second and dead.steps_done == 5


def test_memory_that_cannot_be_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    dead, (second, _, _) = killed_at_5(storage, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no")

    objects = objects_of(3)
    monkeypatch.setattr(Remembered, "found", refuse)
    saver = managed(storage, objects, tmp_path)
    with pytest.warns(DamageWarning, match="rank 0 cannot look at .* older one: no"):
        assert saver.restore() == 2
    assert said(objects) == second and dead.steps_done == 5


def test_memory_of_another_model_is_not_restored_and_the_checkpoint_says_what_does_not_fit(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, _ = killed_at_5(storage, tmp_path)
    objects = objects_of(3) | {"model": torch.nn.Linear(2, 2)}
    with (
        pytest.warns(DamageWarning, match=r"the cut of step \d .* nothing of it is damaged: .* does not fit") as told,
        pytest.raises(CheckpointMismatch, match="checkpoint in slot 1 does not fit"),
    ):
        managed(storage, objects, tmp_path).restore()
    assert dead.steps_done == 5 and not [one for one in told if "damage in the run" in str(one.message)]


def test_memory_of_another_model_is_no_damage_of_the_run_where_a_checkpoint_does_fit(tmp_path: Path) -> None:
    storage = MemoryStorage()
    dead, _ = killed_at_5(storage, tmp_path)
    other = managed(storage, objects_of(3), tmp_path)
    recall = Remembered.recall

    def refused(*args: Any, **kwargs: Any) -> Any:
        recall(*args, **kwargs)
        raise CheckpointMismatch("it has another shape")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remembered, "recall", refused)
        with pytest.warns(DamageWarning, match=r"the cut of step \d that attempt 0 left in memory .* another shape"):
            assert other.restore() == 2 and dead.steps_done == 5
    assert other.restore_report.captured is None and other.restore_report.damaged == ()


def test_the_newest_cut_that_all_ranks_have_is_taken(tmp_path: Path) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    alive = []

    def options(rank: int, exchange: HubExchange) -> dict[str, Any]:
        return {"exchange": exchange, "waiter": waiter, "arenas": tmp_path / str(rank)}

    def first(rank: int, exchange: HubExchange) -> str:
        objects = objects_of(rank=rank, world_size=2)
        saver = managed(storage, objects, **options(rank, exchange))
        alive.append(saver)
        saver.restore()
        train(saver, objects, 1)
        saver.save()
        state = train(saver, objects, 3)
        train(saver, objects, 1) if rank == 0 else None  # rank 1 has died by then
        return state

    fourth = good(run_ranks(2, first, waiters=[waiter]))

    def second(rank: int, exchange: HubExchange) -> str:
        objects = objects_of(5, rank=rank, world_size=2)
        saver = managed(storage, objects, **options(rank, exchange))
        alive.append(saver)
        assert saver.restore() == 4
        state = said(objects)
        train(saver, objects, 1)
        saver.save()
        return state

    assert good(run_ranks(2, second, waiters=[waiter])) == fourth
    assert rows_recorded(storage) == [20, 80]

    def third(rank: int, exchange: HubExchange) -> int:
        one = "1" if rank == 0 else "none"  # another node: nothing is in its memory
        saver = managed(
            storage,
            objects_of(6, rank=rank, world_size=2),
            exchange=exchange,
            waiter=waiter,
            arenas=tmp_path / one,
        )
        alive.append(saver)
        return saver.restore()

    assert good(run_ranks(2, third, waiters=[waiter])) == [5, 5]


def test_a_step_of_which_ranks_have_other_cuts_in_memory_is_not_restored(tmp_path: Path) -> None:
    """Their readers had gone different ways before that step."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    alive = []

    def body(rank: int, exchange: HubExchange, attempt: int) -> int:
        objects = objects_of(rank=rank, world_size=2)
        options: dict[str, Any] = {"exchange": exchange, "waiter": waiter, "arenas": tmp_path / str(rank)}
        saver = managed(storage, objects, **options)
        alive.append(saver)
        step = saver.restore()
        if attempt == 0:
            train(saver, objects, 1)
            saver.save()
            train(saver, objects, 1)
            objects["reader"].lie = rank
            train(saver, objects, 1)
        return step

    for attempt, expected in enumerate([0, 2]):
        found = run_ranks(2, functools.partial(body, attempt=attempt), waiters=[waiter])
        assert good(found) == [expected, expected]


def test_a_step_of_which_ranks_tracked_other_readers_is_not_restored(tmp_path: Path) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    alive = []

    def body(rank: int, exchange: HubExchange) -> int:
        objects = objects_of(rank=rank, world_size=2) | ({} if rank else {"val": Reader(world_size=2)})
        options: dict[str, Any] = {"exchange": exchange, "waiter": waiter, "arenas": tmp_path / str(rank)}
        saver = managed(storage, objects, **options)
        alive.append(saver)
        step = saver.restore()
        if not step:
            train(saver, objects, 2)
        return step

    for _ in range(2):
        assert good(run_ranks(2, body, waiters=[waiter])) == [0, 0]


JOB = """
    import os, signal, sys
    import torch
    from lakeckpt import CheckpointManager
    from tests.checkpoint.test_remembered import captured, objects_of, said, train
    objects = objects_of(int(sys.argv[3]))
    manager = CheckpointManager(sys.argv[1], objects, persist_every=10**9, capture_every=1, arenas=sys.argv[2])
    print(manager.restore(), flush=True)
    train(manager, objects, 3)
    os.kill(manager._saves._agent.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_trainer_and_agent_killed_together_lose_no_step(tmp_path: Path) -> None:
    """Nothing was ever committed: what is restored lies in the arena alone."""
    run, arenas = tmp_path / "run", tmp_path / "arenas"
    found = []
    for seed in (1, 2):
        job = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(JOB), str(run), str(arenas), str(seed)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert job.returncode == -signal.SIGKILL, job.stderr
        found.append(int(job.stdout))
    assert found == [0, 3] and len(ArenaFolder(arenas).found()) == 1


@pytest.mark.parametrize("also", [None, CutId(attempt=3, step=9)])
def test_offers_and_begins_say_what_they_said(also: CutId | None) -> None:
    offer = Offer(attempt=7, least=4, also=also)
    assert Offer.from_text(offer.to_text()) == offer
    assert offer.takes(CutId(attempt=7, step=4)) and not offer.takes(CutId(attempt=7, step=3))
    assert offer.takes(CutId(attempt=3, step=9)) == (also is not None)
    assert not offer.takes(CutId(attempt=3, step=10)) and not offer.takes(CutId(attempt=6, step=9))
    storage = MemoryStorage()
    manager(storage, {"n": Counter()}).restore()
    (first,) = read_log(storage).restores
    again = replace(first, slot=9, captured=also)
    assert entry_from_bytes(entry_to_bytes(again)) == again


def test_memory_goes_on_from_the_commit_that_its_attempt_went_on_from_alone() -> None:
    storage = MemoryStorage()
    for _ in range(2):
        saver = manager(storage, {"n": Counter([1])}, persist_every=1)
        saver.restore()
        saver.step()
    view = read_log(storage)
    first, second = view.restores  # of the attempts 0 and 2; each has committed once
    newer, older = view.manifests
    assert where_it_goes_on(None, None) is None
    assert where_it_goes_on(first, None) == Offer(attempt=0, least=0, also=None)
    assert where_it_goes_on(first, older) == Offer(attempt=0, least=1, also=None)
    assert where_it_goes_on(second, newer) == Offer(attempt=2, least=2, also=None)
    assert where_it_goes_on(second, older) == Offer(attempt=2, least=2, also=None)  # the newer one is damaged
    assert where_it_goes_on(second, None) is None  # the one that it went on from is damaged
    assert where_it_goes_on(replace(second, restored=None), older) is None  # that one was passed over

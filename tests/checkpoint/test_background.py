"""Saves behind training: what is committed is what a synchronous save commits, whatever runs ahead, fails or dies."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lakeckpt
from lakeckpt import CheckpointManager
from lakeckpt.checkpoint import outage
from lakeckpt.checkpoint.agent.logs import agents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.consumed.pending import pending_from_bytes
from lakeckpt.checkpoint.consumed.tracks import Journal
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import (
    ArenaError,
    AttemptSuperseded,
    CaptureWarning,
    ConfigError,
    RetentionWarning,
    SaveFailed,
    SaveWarning,
    StorageError,
    TrackingError,
)
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from lakeckpt.tracking.waiting import SystemWaiter
from tests.checkpoint.agent.test_agent import ended
from tests.checkpoint.rig import (
    EventWaiter,
    Gone,
    MemoryStorage,
    Reader,
    good,
    manager,
    run_ranks,
    train_step,
    training,
)
from tests.checkpoint.seams import believing
from tests.patience import PATIENCE_S


def weights(objects: dict[str, Any]) -> list[list[float]]:
    return [one.detach().flatten().tolist() for one in objects["model"].parameters()]


BESIDE = {"capture_every": 1, "timeout_s": PATIENCE_S}


def managed(storage: Any, objects: dict[str, Any], arenas: Path, **options: Any) -> CheckpointManager:
    return manager(storage, objects, **{**BESIDE, "arenas": arenas, **options})


def train(saver: CheckpointManager, objects: dict[str, Any], steps: int) -> dict[int, list[list[float]]]:
    """So many steps; the weights after each."""
    made = {}
    batches = iter(objects["reader"]) if "reader" in objects else None
    for _ in range(steps):
        if batches is not None:
            next(batches)
        train_step(objects)
        saver.step()
        made[saver.steps_done] = weights(objects)
    return made


def steps_of(storage: Any) -> list[int]:
    assert verify(storage).every_damage == ()
    return [one.step for one in read_history(storage).chain]


def restored(storage: Any, make: Callable[[], dict[str, Any]] = training) -> tuple[int, list[list[float]]]:
    objects = make()
    with manager(storage, objects) as saver:
        step = saver.restore()
    return step, weights(objects)


def test_what_is_saved_behind_training_is_the_cut_and_not_what_training_made_of_it(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), training()
    with managed(storage, objects, tmp_path) as saver:
        saver.restore()
        made = train(saver, objects, 3)
        handle = saver.save(sync=False, metric=0.25)
        train_step(objects)  # changes everything, while the save is under way
        info = saver.wait()
        assert info is not None and (info.step, info.metric) == (3, 0.25)
        assert handle.step == 3 and handle.done and handle.wait() == info
        assert restored(_copy(storage)) == (3, made[3])
        saver.step()
    assert steps_of(storage)[:1] == [3]


def test_captures_need_a_run_that_another_process_can_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capture_every needs the URL of the run, and got .*MemoryStorage"):
        CheckpointManager(MemoryStorage(), training(), capture_every=1)
    with pytest.raises(ConfigError, match=r"storage_options go to the agent.*credential_provider"):
        CheckpointManager("s3://b", training(), capture_every=1, storage_options={"credential_provider": dict})
    CheckpointManager(LocalStorage(tmp_path), training(), capture_every=1, arenas=tmp_path).close()


def test_a_policy_saves_behind_training_and_leaving_well_saves_the_last_cut(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), training()
    with managed(storage, objects, tmp_path, persist_every=4) as saver:
        saver.restore()
        made = train(saver, objects, 10)
    assert steps_of(storage)[-1] == 10 and restored(storage) == (10, made[10])
    assert ArenaFolder(tmp_path).found() == []


def test_a_synchronous_save_returns_what_it_committed(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), training()
    with managed(storage, objects, tmp_path) as saver:
        saver.restore()
        for _ in range(4):
            made = train(saver, objects, 1)
            info = saver.save()
            assert info is not None and info.step == saver.steps_done
            assert restored(_copy(storage)) == (info.step, made[info.step])


def _copy(storage: MemoryStorage) -> MemoryStorage:
    other = MemoryStorage()
    other.objects = dict(storage.objects)
    return other


def make_with_reader(**options: Any) -> dict[str, Any]:
    return {**training(), "reader": Reader(**options)}


@pytest.mark.parametrize("persist_every", [1, 3])
def test_every_consumed_row_is_recorded_once_whichever_cuts_were_committed(tmp_path: Path, persist_every: int) -> None:
    storage = MemoryStorage()
    for attempt in range(3):
        objects = make_with_reader()
        options = {"persist_every": persist_every}
        with managed(storage, objects, tmp_path / str(attempt), **options) as saver:
            saver.restore()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SaveWarning)  # left out for a newer one
                train(saver, objects, 8)
    consumed = [record.consumed() for one in read_history(storage).chain for record in one.readers.values()]
    spans = [span for found in consumed for rows in found.values() for span in rows]
    positions = [row for start, stop in spans for row in range(start, stop)]
    assert sorted(positions) == list(range(240)) and len(set(positions)) == 240
    history = read_history(storage)
    steps = [run for one in history.chain for run in one.readers["reader"].steps.runs]
    assert sum(run.count for run in steps) == 24
    assert history.tip is not None and history.tip.step == 24


def test_saves_that_fail_lose_no_record_of_what_was_consumed(tmp_path: Path) -> None:
    inner = MemoryStorage()
    objects = make_with_reader()
    waiter = EventWaiter(inner)
    faulty = FaultyStorage(inner)
    with managed(faulty, objects, tmp_path, waiter=waiter, timeout_s=5.0) as saver:
        saver.restore()
        train(saver, objects, 2)
        saver.save()
        waiter.died()  # the clock jumps
        fine, faulty.put = faulty.put, _refusing  # type: ignore[method-assign]
        train(saver, objects, 2)
        with pytest.raises(SaveFailed):
            saver.save()
        faulty.put, waiter.someone_died = fine, False  # type: ignore[method-assign]
        train(saver, objects, 2)
        saver.save()
    rows = [one.readers["reader"].consumed()[0] for one in read_history(inner).chain]
    assert [one.size for one in rows] == [20, 40] and sum(one.size for one in rows) == 60


def test_checkpoints_that_cannot_be_removed_are_told_of_and_training_goes_on(tmp_path: Path) -> None:
    inner = MemoryStorage()
    objects = make_with_reader()
    waiter = EventWaiter(inner)
    faulty = FaultyStorage(inner, fail_at={("delete", n): StoreFault.ERROR for n in range(1, 1000)})
    waiter.died()  # the clock jumps
    with managed(faulty, objects, tmp_path, waiter=waiter, timeout_s=5.0, keep=1) as saver:
        saver.restore()
        train(saver, objects, 2)
        assert saver.save() is not None
        train(saver, objects, 2)
        with pytest.warns(RetentionWarning, match="could not be removed, and take up room until a save can"):
            found = saver.save()
        assert found is not None and found.step == 4


def _refusing(path: str, chunks: Any) -> int:
    raise StorageError("the disk is full")


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_save_behind_training_without_waiting_for_one_another(tmp_path: Path, world_size: int) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: Any) -> list[list[float]]:
        objects = training()
        with managed(storage, objects, tmp_path, exchange=exchange, waiter=waiter, persist_every=3) as saver:
            saver.restore()
            for _ in range(7):
                train_step(objects, torch.full((16, 8), 0.5) + torch.arange(8) * saver.steps_done)
                saver.step()
            return weights(objects)

    results = good(run_ranks(world_size, body))
    assert steps_of(storage)[-1] == 7 and restored(storage) == (7, results[0])


def test_ranks_that_are_not_at_one_cut_are_told_so_whatever_a_failure_does(tmp_path: Path) -> None:
    """Rank 1 reads in another order. A save that fails is a warning; this one would fail for ever."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: Any) -> None:
        objects = training() | {"reader": Reader(rank=rank, world_size=2, seed=rank)}
        options = {"exchange": exchange, "waiter": waiter, "persist_every": 3}
        with managed(storage, objects, tmp_path, **options) as saver:
            saver.restore()
            train(saver, objects, 3)
            saver.wait()

    for result in run_ranks(2, body):
        assert isinstance(result, TrackingError) and "state of reader 'reader'" in str(result)
    assert read_history(storage).chain == ()


def test_ranks_save_one_cut_at_the_end_of_an_epoch_though_one_has_captured_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 found no memory for the last step, and captures it when the loop has seen the end of the epoch."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    cut = CaptureEngine.cut

    def scarce(self: CaptureEngine, which: CutId, *, must: bool, **given: Any) -> bool:
        has_room = must or which.step < 2 or threading.current_thread().name != "rank 1"
        return cut(self, which, must=must, **given) if has_room else False

    monkeypatch.setattr(CaptureEngine, "cut", scarce)

    def body(rank: int, exchange: Any) -> None:
        threading.current_thread().name = f"rank {rank}"
        objects = training() | {"reader": Reader(rank=rank, world_size=2, rows=40)}
        with managed(storage, objects, tmp_path, exchange=exchange, waiter=waiter, fail_after=0) as saver:
            saver.restore()
            for _ in objects["reader"]:
                saver.step()
                cast(Background, saver._saves)._engine.wait()
            saver.save()

    good(run_ranks(2, body))
    assert steps_of(storage) == [2]
    assert read_history(storage).tip.readers["reader"].consumed()[0].size == 40


def test_what_a_commit_has_recorded_is_not_handed_over_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[tuple[int, int]]] = []
    cut = CaptureEngine.cut

    def seen(self: CaptureEngine, which: CutId, **given: Any) -> bool:
        handed.append([(one.first, one.step) for one in pending_from_bytes(given["readers"]["reader"])])
        return cut(self, which, **given)

    monkeypatch.setattr(CaptureEngine, "cut", seen)
    objects = make_with_reader()
    with managed(MemoryStorage(), objects, tmp_path, persist_every=1) as saver:
        saver.restore()
        for _ in range(4):
            train(saver, objects, 1)
            saver.wait()
    assert [pending for pending in handed if pending[-1][1]] == [[(step, step + 1)] for step in range(4)]


def test_a_rank_that_is_gone_at_the_first_save_leaves_it_incomplete(tmp_path: Path) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: Any) -> None:
        objects = training()
        saver = managed(storage, objects, tmp_path, exchange=exchange, waiter=waiter)
        saver.restore()
        train(saver, objects, 1)
        if rank:
            raise Gone
        saver.save()

    result, _ = run_ranks(2, body, waiters=[waiter])
    assert isinstance(result, SaveFailed)


def test_a_save_that_is_left_out_for_a_newer_one_is_no_failure(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), training()
    go_on, begun = [threading.Event() for _ in range(3)], threading.Event()

    def before(method: str, path: str) -> None:
        for step in (1, 2, 3):
            if method == "put" and path.startswith("parts/") and f"{step:012d}-" in path:
                begun.set()
                assert go_on[step - 1].wait(PATIENCE_S)

    with managed(FaultyStorage(storage, before=before), objects, tmp_path, persist_every=1) as saver:
        saver.restore()
        background = saver._saves
        assert background is not None
        for steps in (1, 2):  # the first is taken before there are others
            train(saver, objects, steps)
            background._engine.wait()
            saver._reporter.report(background.results())  # as the next step does
            assert begun.wait(PATIENCE_S)
        try:
            assert len(background._pending) == 3
            go_on[0].set()
            while len(background._pending) > 1:  # 1 is committed, 2 left out
                assert background._agent.wait(PATIENCE_S)
                saver._reporter.report(background.results())
        finally:
            for event in go_on:
                event.set()
        saver.wait()
    assert steps_of(storage) == [1, 3]


def test_captures_go_on_while_the_store_is_silent_about_a_save_that_waited_for_another(tmp_path: Path) -> None:
    objects = training()
    go_on, begun = ({step: threading.Event() for step in (2, 4)} for _ in range(2))

    def before(method: str, path: str) -> None:
        for step, event in begun.items():
            if method == "put" and path.startswith("parts/") and f"{step:012d}-" in path:
                event.set()
                assert go_on[step].wait(PATIENCE_S)

    with managed(FaultyStorage(MemoryStorage(), before=before), objects, tmp_path, persist_every=2) as saver:
        saver.restore()
        background = saver._saves
        assert background is not None
        try:
            for _ in (2, 4):
                train(saver, objects, 2)
                background._engine.wait()
                background._order_ready()  # step 4 while nothing was heard of step 2
                assert begun[2].wait(PATIENCE_S)
            go_on[2].set()
            assert begun[4].wait(PATIENCE_S)  # in the agent's hands, and stays there
            for _ in range(6):
                train(saver, objects, 1)
                assert background._engine.wait() == saver.steps_done
        finally:
            for event in go_on.values():
                event.set()
        saver.wait()


def test_a_job_whose_arena_does_not_fit_on_one_rank_is_refused_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    create = ArenaFolder.create

    def too_large(self: ArenaFolder, layout: Any) -> Any:
        if layout.identity.rank == 1:
            raise ArenaError("an arena of 3 generations does not fit")
        return create(self, layout)

    monkeypatch.setattr(ArenaFolder, "create", too_large)

    def body(rank: int, exchange: Any) -> None:
        objects = training()
        with managed(storage, objects, tmp_path, exchange=exchange, waiter=waiter) as saver:
            saver.restore()
            train(saver, objects, 1)
            saver.save()

    one, other = run_ranks(2, body)
    assert isinstance(other, ArenaError) and "Without capture_every, saves are synchronous" in str(other)
    assert isinstance(one, SaveFailed) and "does not fit" in str(one)
    assert steps_of(storage) == []


def test_memory_that_is_gone_costs_captures_and_is_told_once_and_at_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on: what was captured before stays, and the next capture comes when there is memory again."""
    storage, objects = MemoryStorage(), training()
    room, is_full = ArenaFolder._check_room, False

    def checked(*given: Any, **options: Any) -> None:
        if is_full:
            raise ArenaError("an arena of 3 generations does not fit")
        room(*given, **options)

    monkeypatch.setattr(ArenaFolder, "_check_room", checked)
    monkeypatch.setattr(outage, "_FIRST_S", 300.0)  # however slow the machine is, the save of step 15 is put off
    with managed(storage, objects, tmp_path, persist_every=5) as saver:
        saver.restore()
        engine = saver._saves._engine  # type: ignore[union-attr]

        def steps(count: int) -> None:
            for _ in range(count):
                train(saver, objects, 1)
                with contextlib.suppress(ArenaError):
                    engine._idle()

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            steps(5)
            saver.wait()
            is_full = True
            objects["model"].register_buffer("grown", torch.zeros(2**20))
            steps(10)
            lost = [str(one.message) for one in told if one.category is SaveWarning]
            steps_lost = [one.partition(":")[0].rpartition(" ")[2] for one in lost]
            assert steps_lost == ["7", "10"] and all("does not fit" in one for one in lost)
            with pytest.raises(SaveFailed, match="does not fit"):
                saver.save()
            is_full = False
            steps(3)
        assert saver.save() is not None
    assert steps_of(storage) == [5, 18]


def test_training_goes_on_where_no_more_files_can_be_opened_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, objects = MemoryStorage(), training()
    with managed(storage, objects, tmp_path, persist_every=2) as saver:
        saver.restore()
        trainer, opened, refused = threading.current_thread(), os.open, list[object]()

        def refuse(path: Any, *args: Any, **more: Any) -> int:
            if threading.current_thread() is trainer:
                refused.append(path)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opened(path, *args, **more)

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuse)
            made = train(saver, objects, 3)
            info = saver.wait()
        assert refused and info is not None and info.step in made
    assert steps_of(storage)[-1] == 3 and restored(storage) == (3, made[3])


def test_training_goes_on_where_no_more_threads_can_be_started_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    storage, objects = MemoryStorage(), training()
    with managed(storage, objects, tmp_path, persist_every=3) as saver:
        saver.restore()
        believing(saver)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.warns(SaveWarning, match=r"can't start new thread.*ulimit -u"):
                train(saver, objects, 2)
        train(saver, objects, 4)
    assert steps_of(storage)[-1] == 6


def test_a_superseded_attempt_is_told_so(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), training()
    saver = managed(storage, objects, tmp_path)
    saver.restore()
    train(saver, objects, 2)
    manager(storage, training()).restore()
    with pytest.raises(AttemptSuperseded):
        saver.save()
    saver.close()
    assert steps_of(storage) == []


def test_a_step_that_is_saved_twice_keeps_no_later_one_from_being_saved(tmp_path: Path) -> None:
    """Also by a job that goes on from the memory that was left."""
    storage, objects = MemoryStorage(), training()
    with contextlib.suppress(KeyError), managed(storage, objects, tmp_path, persist_every=3) as saver:
        saver.restore()
        train(saver, objects, 3)
        saver.save()
        saver.save()
        train(saver, objects, 1)
        saver.wait()
        raise KeyError("the job fails")
    objects = training()
    with managed(storage, objects, tmp_path, persist_every=3) as saver:
        done = saver.restore()
        assert done in (3, 4)  # the agent of the failed job may have had no time yet
        for _ in range(4):
            train(saver, objects, 3)
            info = saver.wait()
            assert info is not None and info.step > done
            done = info.step


def test_a_save_that_is_not_captured_though_nothing_is_under_way_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, objects = MemoryStorage(), training()
    with contextlib.suppress(KeyError), managed(storage, objects, tmp_path, fail_after=0) as saver:
        saver.restore()
        train(saver, objects, 1)
        saver.save()
        with monkeypatch.context() as patched:
            patched.setattr(CaptureEngine, "cut", lambda *args, **options: False)
            for step in (2, 3):
                train(saver, objects, 1)
                with pytest.raises(SaveFailed, match=f"step {step} was not captured: no memory of the arena"):
                    saver.save(sync=False)
                saver.wait()
        train(saver, objects, 1)
        assert saver.save() is not None
        raise KeyError


def test_a_step_asks_the_store_for_nothing_however_slow_it_is(tmp_path: Path) -> None:
    """The footers of a table are written by the agent, also those of a second table."""
    storage, asked = MemoryStorage(), list[str]()
    trains = threading.Event()

    def before(method: str, path: str) -> None:
        if trains.is_set() and threading.current_thread() is threading.main_thread():
            asked.append(f"{method} {path}")

    loaders = {}
    for name in ("one", "two"):
        pq.write_table(pa.table({"x": pa.array(range(32))}), tmp_path / f"{name}.parquet")
        dataset = lakeckpt.LakeDataset(tmp_path / f"{name}.parquet", batch_size=4, rank=0, world_size=1)
        loaders[name] = lakeckpt.LakeLoader(dataset)
    objects = {**training(), **loaders}
    with managed(FaultyStorage(storage, before=before), objects, tmp_path / "arenas", persist_every=2) as saver:
        saver.restore()
        trains.set()
        for pair in zip(*loaders.values(), strict=True):
            train_step(objects)
            saver.step(dict(zip(loaders, pair, strict=True)))
        saver.wait()
        trains.clear()
    assert asked == [] and verify(storage).every_damage == ()
    assert sum(path.startswith("index/") for path in storage.objects) == 2


def test_leaving_while_the_last_cut_is_being_saved_saves_it_once(tmp_path: Path) -> None:
    storage, objects, left = MemoryStorage(), training(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "put" and path.startswith("parts/"):
            assert left.wait(PATIENCE_S)

    with managed(FaultyStorage(storage, before=before), objects, tmp_path, persist_every=3) as saver:
        saver.restore()
        made = train(saver, objects, 3)
        left.set()
    assert steps_of(storage) == [3] and restored(storage) == (3, made[3])


def test_leaving_saves_the_last_cut_where_its_save_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, objects = MemoryStorage(), training()
    completes, dropped = CaptureEngine._completes, list[int]()

    def once(self: CaptureEngine, job: Any) -> bool:
        if job.cut.step == 3 and not dropped:
            dropped.append(3)
            return False  # as where the state was changed meanwhile
        return completes(self, job)

    monkeypatch.setattr(CaptureEngine, "_completes", once)
    with managed(storage, objects, tmp_path, persist_every=3) as saver:
        saver.restore()
        train(saver, objects, 1)
        saver.save()
        made = train(saver, objects, 2)
    assert dropped and steps_of(storage) == [1, 3] and restored(storage) == (3, made[3])


def test_leaving_saves_the_last_cut_again_where_its_save_fails_and_that_is_a_warning(tmp_path: Path) -> None:
    storage, objects, left = MemoryStorage(), training(), threading.Event()
    failed: list[str] = []

    def before(method: str, path: str) -> None:
        if method == "put" and path.startswith("objects/") and not failed:
            assert left.wait(PATIENCE_S)
            failed.append(path)
            raise SaveFailed("the store is away")

    saver = managed(FaultyStorage(storage, before=before), objects, tmp_path, persist_every=3)
    saver.restore()
    believing(saver)
    made = train(saver, objects, 3)
    left.set()
    with pytest.warns(SaveWarning, match=r"without a checkpoint of step 3: .*the store is away"):
        saver.__exit__(None, None, None)
    assert steps_of(storage) == [3] and restored(storage) == (3, made[3])


def test_the_warning_of_a_save_that_failed_names_its_step(tmp_path: Path) -> None:
    storage, objects, is_away = MemoryStorage(), training(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "put" and is_away.is_set():
            raise SaveFailed("the store is away")

    with managed(FaultyStorage(storage, before=before), objects, tmp_path, persist_every=2) as saver:
        saver.restore()
        believing(saver)
        background = saver._saves
        assert background is not None
        is_away.set()
        train(saver, objects, 2)
        background._engine.wait()
        background._order_ready()
        assert background._agent.wait(PATIENCE_S)
        with pytest.warns(SaveWarning, match=r"without a checkpoint of step 2: .*the store is away"):
            train(saver, objects, 1)
        is_away.clear()
    assert steps_of(storage) == [3]


@pytest.mark.parametrize("fail_after", [0, 60])
def test_a_failure_that_is_heard_of_together_with_a_commit_before_it_is_told(tmp_path: Path, fail_after: int) -> None:
    storage, objects, begun, go_on = MemoryStorage(), training(), threading.Event(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "put" and path.startswith("objects/"):
            begun.set()
            assert go_on.wait(PATIENCE_S)
        if method == "put" and f"{2:012d}-" in path:
            raise SaveFailed("the store is away")

    faulty = FaultyStorage(storage, before=before)
    saver = managed(faulty, objects, tmp_path, fail_after=fail_after)
    saver.restore()
    background = saver._saves
    assert background is not None
    try:
        for _ in range(2):
            train(saver, objects, 1)
            saver.save(sync=False)
            background._engine.wait()
            background._order_ready()
            assert begun.wait(PATIENCE_S)  # else the agent would skip the first save for the second one
    finally:
        go_on.set()
    background.wait()  # both are heard of by the next call
    if not fail_after:
        with pytest.raises(SaveFailed, match="the store is away"):
            saver.wait()
    else:
        with pytest.warns(SaveWarning, match=r"without a checkpoint of step 2: .*the store is away"):
            train(saver, objects, 1)
    info = saver.wait()  # the commit is not forgotten
    assert info is not None and info.step == 1
    saver.close()
    assert steps_of(storage) == [1]


def test_what_failed_in_the_last_capture_is_told_when_the_manager_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, objects = MemoryStorage(), training()
    saver = managed(storage, objects, tmp_path)
    saver.restore()
    train(saver, objects, 1)
    saver.save()

    def failing(self: CaptureEngine, job: Any) -> bool:
        raise MemoryError("no memory")

    monkeypatch.setattr(CaptureEngine, "_completes", failing)
    train(saver, objects, 1)
    with pytest.warns(CaptureWarning, match="the capture of step 2 failed: MemoryError.'no memory'"):
        saver.close()
    assert steps_of(storage) == [1]


@pytest.mark.parametrize("capture_every", [0, -1, 1.5, True, "1"])
def test_how_often_to_capture_is_a_positive_number_of_steps(capture_every: Any) -> None:
    with pytest.raises(ConfigError, match="capture_every"):
        manager(MemoryStorage(), training(), capture_every=capture_every)


JOB = """
    import os, signal, sys
    import torch
    from lakeckpt.lake.storage.local import LocalStorage
    from tests.checkpoint.rig import train_step, training
    from tests.checkpoint.test_background import managed, weights
    torch.manual_seed(5)
    objects = training()
    saver = managed(sys.argv[1], objects, sys.argv[2], persist_every=4)
    saver.restore()
    made = {}
    for _ in range(10):
        train_step(objects)
        saver.step()
        made[saver.steps_done] = weights(objects)
        saver._saves._engine.wait()  # however slow the machine is, no cut is left out
    newest = saver._saves._engine.wait()  # what is captured, and not ordered
    assert newest > 8
    print((newest, made[newest]))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(script: str, run: Path, arenas: Path, *more: Path) -> str:
    """What a job said that killed itself; its agent has made the final save, and ended."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, (run, arenas, *more))]
    job = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert job.returncode == -signal.SIGKILL, job.stderr
    (log,) = arenas.glob("*.log")
    while b"begins" not in log.read_bytes():  # it may have started when its trainer was dead already
        threading.Event().wait(0.01)
    assert all(map(ended, agents_of(str(log))))
    return job.stdout.strip()


def test_a_trainer_that_is_killed_loses_nothing_that_was_captured(tmp_path: Path) -> None:
    """The agent's process persists the newest capture, and ends: its trainer comes back to another place."""
    run, arenas = tmp_path / "run", tmp_path / "arenas"
    said = killed(JOB, run, arenas)
    storage = LocalStorage(run)
    assert str(restored(storage)) == said and verify(storage).every_damage == ()


def test_another_agent_goes_on_behind_what_the_first_one_committed(tmp_path: Path) -> None:
    run, objects = tmp_path / "run", training()
    with managed(run, objects, tmp_path / "arenas") as saver:
        saver.restore()
        train(saver, objects, 2)
        first = saver.save()
        assert saver._saves._agent._begin.attempt.last == first.slot  # another agent reads no log to know it
        agent = saver._saves._agent.pid
        os.kill(agent, signal.SIGKILL)
        assert ended(agent)
        train(saver, objects, 1)
        second = saver.save()
        assert saver._saves._agent.pid != agent
    assert (first.slot, second.slot) == (1, 2)
    assert steps_of(LocalStorage(run)) == [2, 3]


BEFORE_ANY_SAVE = """
    import os, signal, sys
    import lakeckpt
    from tests.checkpoint.rig import train_step, training
    from tests.checkpoint.test_background import managed
    objects = training()
    objects["reader"] = lakeckpt.LakeLoader(lakeckpt.LakeDataset(sys.argv[3], batch_size=4))
    saver = managed(sys.argv[1], objects, sys.argv[2], persist_every=1000)
    saver.restore()
    for _ in zip(range(5), objects["reader"]):
        train_step(objects)
        saver.step()
        saver._saves._engine.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_final_save_before_any_save_has_what_a_checkpoint_needs(tmp_path: Path) -> None:
    run, arenas, lake = tmp_path / "run", tmp_path / "arenas", tmp_path / "lake"
    lake.mkdir()
    pq.write_table(pa.table({"id": range(40)}), lake / "a.parquet")
    killed(BEFORE_ANY_SAVE, run, arenas, lake)
    report = verify(LocalStorage(run))
    assert report.every_damage == () and [one.step for one in report.checkpoints] == [5]
    assert list((run / "index").iterdir())


def test_a_save_right_after_a_captured_cut_takes_no_second_copy_and_is_never_left_out(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), make_with_reader()
    copies = 0
    with managed(storage, objects, tmp_path) as saver:
        saver.restore()
        background = saver._saves
        assert background is not None
        begin = background._engine._begun

        def counted(*given: Any) -> Any:
            nonlocal copies
            filling = begin(*given)
            copies += filling is not None
            return filling

        background._engine._begun = counted  # type: ignore[method-assign]
        for step in range(1, 6):
            made = train(saver, objects, 1)
            info = saver.save()
            assert info is not None and info.step == step and copies == step
        again = saver.save()  # of the same cut: it consumed nothing, and is a commit all the same
        assert again is not None and again.step == 5 and copies == 6
    assert restored(storage, make_with_reader) == (5, made[5])


class Captures:
    """An engine whose captures are complete when they are waited for; of ``left_out`` there is none."""

    def __init__(self, left_out: int | None) -> None:
        self.completed: int | None = None
        self._left_out, self._pending = left_out, None

    def wait(self) -> int | None:
        self.finish()
        return self.completed

    def finish(self) -> None:
        self.completed, self._pending = self._pending or self.completed, None

    def dropped(self, step: int) -> tuple[bool, None]:
        return False, None

    def waits(self) -> tuple[()]:
        return ()

    def cut(self, cut: CutId, **_: Any) -> bool:
        if cut.step != self._left_out:
            self._pending = cut.step
        return cut.step != self._left_out


class Orders:
    """Notes what an agent is given."""

    def __init__(self) -> None:
        self.got: list[tuple[int, int]] = []

    def order(self, order: Any) -> None:
        self.got.append((order.step, order.number))

    def outcomes(self) -> list[Any]:
        return []

    def wait(self, timeout_s: float) -> bool:
        return True

    @contextlib.contextmanager
    def hold(self, *_: Any) -> Iterator[None]:
        yield None

    rank, world_size = 1, 2


@pytest.mark.parametrize(("second", "left_out"), [(1, None), (2, None), (2, 2)])
def test_orders_are_given_one_after_the_other_and_none_is_dropped(second: int, left_out: int | None) -> None:
    every = Orders()
    background = Background(
        cast(Any, Captures(left_out)),
        cast(Any, every),
        cast(Any, every),
        cast(Any, every),
        Attempt(run="r", number=0, last=0, parent=None, seed=1),
        tracks={},
        journal=Journal({}, 0),
        waiter=SystemWaiter(),
        timeout_s=5,
    )
    background._settled = True
    for step in (1, second):
        background.save(step, None, patient=False)
    cast(Any, background._engine).wait()
    background._order_ready()
    assert every.got == [(1, 0), (second, 1)]

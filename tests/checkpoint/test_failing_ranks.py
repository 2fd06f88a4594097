"""One of two ranks fails: both raise the one error with its cause, and neither waits until its time is over.

`TIMEOUT_S` is far longer than a test may take: a rank that waits for the failing one hangs.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint import manager as manager_module
from lakeckpt.checkpoint import opening, sync_save
from lakeckpt.checkpoint.agent.orders import Order, Outcome
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.restore import applying
from lakeckpt.errors import (
    AgentError,
    ArenaError,
    CaptureWarning,
    CheckpointError,
    LakeckptError,
    SaveFailed,
    SaveRefused,
    SaveWarning,
    StateUnavailable,
    StorageError,
    TrackingError,
    UnsupportedValue,
)
from lakeckpt.lake.table.table import Table
from lakeckpt.testing.faulty_storage import FaultyStorage
from lakeckpt.tracking.obstacles import Obstacle
from lakeckpt.tracking.waiting import SystemWaiter
from tests.checkpoint.flow_readers import FlowReader
from tests.checkpoint.rig import (
    Counter,
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
from tests.checkpoint.seams import ThreadAgent, manager_with
from tests.patience import PATIENCE_S

TIMEOUT_S = 10_000.0


class Rank:
    """What a way to fail needs of the failing rank."""

    def __init__(self, rank: int, storage: MemoryStorage) -> None:
        self.rank = rank
        self.fails = threading.Event()
        self.storage = FaultyStorage(storage, before=self._before)
        self.refuse: Callable[[str, str], None] = lambda method, path: None
        self.objects: dict[str, Any] = {
            **training(),
            "own": Counter(float(rank)),
            "reader": Reader(rank=rank, world_size=2),
        }

    def _before(self, method: str, path: str) -> None:
        if self.fails.is_set():
            self.refuse(method, path)


def _raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def a_state_that_cannot_be_built(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    rank.objects["own"].state_dict = _raises(RuntimeError("the cause"))


def a_state_that_cannot_be_written(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    rank.objects["own"].value = {"the cause": print}


def a_reader_that_cannot_tell_its_place(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    rank.objects["reader"].state_dict = _raises(StateUnavailable("the cause"))


def a_reader_that_fails(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    rank.objects["reader"].state_dict = _raises(KeyError("the cause"))


def a_reader_that_cannot_go_on(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    rank.objects["reader"].mark = _raises(RuntimeError("the cause"))


def _refusing(error: Exception, *, notes_too: bool) -> Callable[[Rank, pytest.MonkeyPatch], None]:
    def fail(rank: Rank, patch: pytest.MonkeyPatch) -> None:
        def refuse(method: str, path: str) -> None:
            if method in ("put", "put_new") and (notes_too or not path.endswith(".failed")):
                raise error

        rank.refuse = refuse

    return fail


def _full() -> StorageError:
    return StorageError(errno.ENOSPC, "the cause")


a_full_disk_that_takes_a_note = _refusing(_full(), notes_too=False)
a_full_disk = _refusing(_full(), notes_too=True)
a_folder_that_may_not_be_written = _refusing(StorageError(errno.EACCES, "the cause"), notes_too=True)
a_storage_of_a_users_own = _refusing(OSError(errno.EDQUOT, "the cause"), notes_too=True)


def _of_engine(name: str, error: Exception) -> Callable[[Rank, pytest.MonkeyPatch], None]:
    """The engine of the rank raises ``error`` when it is asked for ``name``."""

    def fail(rank: Rank, patch: pytest.MonkeyPatch) -> None:
        found = getattr(CaptureEngine, name)

        def failing(self: CaptureEngine, *args: Any, **options: Any) -> Any:
            if self._store._identity.rank == rank.rank:
                raise error
            return found(self, *args, **options)

        patch.setattr(CaptureEngine, name, failing)

    return fail


a_capture_that_cannot_begin = _of_engine("cut", RuntimeError("the cause"))
a_capture_without_memory = _of_engine("cut", ArenaError("the cause"))
a_capture_that_fails_later = _of_engine("_completes", MemoryError("the cause"))


def an_agent_that_was_killed(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    order = ThreadAgent.order

    def failing(self: ThreadAgent, given: Order, /) -> None:
        if self.rank == rank.rank:
            self.report(Outcome(step=given.step, number=given.number, kind="save_failed", text="the cause"))
        else:
            order(self, given)

    patch.setattr(ThreadAgent, "order", failing)


EITHER = {
    "state cannot be built": (a_state_that_cannot_be_built, RuntimeError),
    "state cannot be written": (a_state_that_cannot_be_written, UnsupportedValue),
    "reader cannot tell its place": (a_reader_that_cannot_tell_its_place, StateUnavailable),
    "reader fails": (a_reader_that_fails, KeyError),
    "reader cannot go on": (a_reader_that_cannot_go_on, RuntimeError),
    "full disk that takes a note": (a_full_disk_that_takes_a_note, SaveRefused),
    "full disk": (a_full_disk, SaveRefused),
    "folder may not be written": (a_folder_that_may_not_be_written, SaveRefused),
    "storage of a user's own": (a_storage_of_a_users_own, SaveRefused),
}
"""A way to fail, and what the failing rank raises: the other one raises that, too, or `CheckpointError` for what a
user's code has raised."""
CAPTURED = {
    "capture cannot begin": (a_capture_that_cannot_begin, RuntimeError),
    "capture without memory": (a_capture_without_memory, SaveFailed),
    "capture fails later": (a_capture_that_fails_later, SaveFailed),
    "agent was killed": (an_agent_that_was_killed, SaveFailed),
}
WAYS = [
    pytest.param(
        way,
        kind,
        every,
        good,
        id=f"{name}, {'synchronous' if every is None else f'captured every {every}'}, after {good} steps",
        marks=[] if good and every != 4 else [pytest.mark.soak],
    )
    for good in (0, 2)
    for every in (None, 1, 4)
    for name, (way, kind) in (EITHER if every is None else EITHER | CAPTURED).items()
    if good or name != "capture without memory"  # where there never was any, all ranks save without it
]


def results_of(
    way: Callable[[Rank, pytest.MonkeyPatch], None],
    patch: pytest.MonkeyPatch,
    storage: MemoryStorage,
    failing: int,
    *,
    good: int,
    **options: Any,
) -> list[Any]:
    """What both ranks raised; one fails in the ``way`` after ``good`` steps, of which every second one is saved."""
    meeting = threading.Barrier(2, timeout=PATIENCE_S / 2)  # a rank that fails too early is seen in the results

    def body(rank: int, exchange: HubExchange) -> Any:
        mine = Rank(rank, storage)
        beside = {"persist_every": 2, "timeout_s": TIMEOUT_S, "fail_after": 0, **options}
        saver = manager(mine.storage, mine.objects, exchange=exchange, **beside)
        saver.restore()
        batches = iter(mine.objects["reader"])
        try:
            for step in range(good + 3):
                if step == good:
                    saver.wait()
                    meeting.wait()
                    if rank == failing:
                        mine.fails.set()
                        way(mine, patch)
                    meeting.wait()
                next(batches)
                train_step(mine.objects)
                saver.step()
            saver.wait()
        except Exception as error:
            mine.fails.clear()
            saver.__exit__(type(error), error, None)
            exchange.hub.leave(rank)  # its connections are closed
            return error
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # of captures that no save needs
        return run_ranks(2, body)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("way", "kind", "capture_every", "good"), WAYS)
def test_both_ranks_raise_the_one_error_with_its_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Rank, pytest.MonkeyPatch], None],
    kind: type[Exception],
    capture_every: int | None,
    good: int,
    failing: int,
) -> None:
    storage = MemoryStorage()
    beside = {} if capture_every is None else {"capture_every": capture_every, "arenas": tmp_path}
    # What no retry mends is raised at once. Did one rank take it for an outage, it would train on alone.
    fail_after = 3600 if kind is SaveRefused else 0
    results = results_of(way, monkeypatch, storage, failing, good=good, fail_after=fail_after, **beside)
    own, other = results[failing], results[1 - failing]
    assert isinstance(own, kind) and "the cause" in str(own), results
    assert isinstance(other, kind if issubclass(kind, LakeckptError) else CheckpointError), results
    assert "the cause" in str(other) and f"rank {failing}" in str(other), other
    assert [one.step for one in read_history(storage).chain] == [2] * (good == 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_a_store_fails_on_one_rank_is_a_warning_on_both_and_the_next_save_succeeds(failing: int) -> None:
    storage, meeting = MemoryStorage(), threading.Barrier(2, timeout=PATIENCE_S)

    def body(rank: int, exchange: HubExchange) -> int:
        mine = Rank(rank, storage)
        if rank == failing:
            mine.refuse = lambda *_: _raises(StorageError(errno.EIO, "the cause"))()
        with manager(mine.storage, mine.objects, exchange=exchange, persist_every=2, timeout_s=TIMEOUT_S) as saver:
            saver.restore()
            batches = iter(mine.objects["reader"])
            for step in range(1, 6):
                if rank == failing:
                    mine.fails.set() if step == 4 else mine.fails.clear()
                next(batches)
                train_step(mine.objects)
                saver.step()
                meeting.wait()
            return saver.save().step

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert good(run_ranks(2, body)) == [5, 5]
    texts = [str(one.message) for one in said if one.category is SaveWarning]
    assert len(texts) == 2 and all("without a checkpoint of step 4" in one and "the cause" in one for one in texts)
    assert [one.step for one in read_history(storage).chain] == [2, 5]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return lakeckpt.open_table(write_table(tmp_path_factory.mktemp("lake")))


def a_table_index_that_cannot_be_written(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sync_save, "write_documents", _raises(SaveFailed("the cause")))


def a_commit_that_cannot_be_written(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    rank.refuse = lambda method, path: _raises(_full())() if method == "put_new" and path.startswith("log/") else None


OF_RANK_0 = {
    "table index cannot be written": a_table_index_that_cannot_be_written,
    "commit cannot be written": a_commit_that_cannot_be_written,
}
QUICK = {
    *(("state cannot be built", every, 2) for every in (None, 1)),
    *((name, None, 0) for name in OF_RANK_0),
    *((name, 2, 2) for name in CAPTURED),
}
FLOWS = [
    pytest.param(
        way,
        every,
        failing,
        id=f"{name} on rank {failing}, {'synchronous' if every is None else f'captured every {every}'}",
        marks=[] if (name, every, failing) in QUICK else [pytest.mark.soak],
    )
    for every in (None, 1, 2)
    for failing in (0, 2)
    for name, way in {
        **{name: way for name, (way, _) in (EITHER if every is None else EITHER | CAPTURED).items()},
        **(OF_RANK_0 if failing == 0 else {}),
    }.items()
    if not (every and name.startswith("table index"))  # the agent writes it
    if not name.startswith("reader")  # where the reader itself fails, its rank has no record
]


@pytest.mark.parametrize(("way", "capture_every", "failing"), FLOWS)
def test_a_save_of_a_flow_that_fails_once_on_one_of_three_ranks_fails_no_later_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: Table,
    way: Callable[[Rank, pytest.MonkeyPatch], None],
    capture_every: int | None,
    failing: int,
) -> None:
    storage, meeting = MemoryStorage(), threading.Barrier(3, timeout=PATIENCE_S)
    beside = {} if capture_every is None else {"capture_every": capture_every, "arenas": tmp_path}

    def body(rank: int, exchange: HubExchange) -> list[int]:
        mine, failed = Rank(rank, storage), []
        mine.objects["reader"] = reader = FlowReader(table, rank=rank, world_size=3, num_lanes=6)
        saver = manager(
            mine.storage,
            mine.objects,
            exchange=exchange,
            persist_every=2,
            timeout_s=TIMEOUT_S,
            keep=9,
            fail_after=0,
            **beside,
        )
        saver.restore()
        batches = iter(reader)
        for step in range(1, 9):
            if step == 4 and rank == failing:
                mine.fails.set()
                way(mine, monkeypatch)
            meeting.wait()
            next(batches)
            train_step(mine.objects)
            try:
                saver.step(reader.last_receipt)
                if step % 2 == 0:
                    saver.wait()
            except (LakeckptError, RuntimeError):
                failed.append(step)
            meeting.wait()
            if step == 4 and rank == failing:  # all is well again
                mine.fails.clear()
                monkeypatch.undo()
                mine.objects["own"].__dict__.clear()
                mine.objects["own"].value = 0.0
        saver.close()
        return failed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        assert good(run_ranks(3, body)) == [[4]] * 3
    assert [one.step for one in read_history(storage).chain] == [2, 6, 8]
    report = audit(storage)
    assert report.verdict == "proved", report.to_plain()


@pytest.mark.parametrize(("persist_every", "fail_after"), [(10**9, 0), (2, 60)])
def test_where_the_save_fails_as_rank_0_leaves_the_others_hear_of_it_before_its_notes_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persist_every: int, fail_after: int
) -> None:
    storage = MemoryStorage()
    ranks = [Rank(rank, storage) for rank in range(2)]
    options = {"persist_every": persist_every, "fail_after": fail_after, "timeout_s": TIMEOUT_S}

    def body(rank: int, exchange: HubExchange) -> None:
        mine = ranks[rank]
        saver = manager(mine.storage, mine.objects, exchange=exchange, capture_every=1, arenas=tmp_path, **options)
        try:
            with saver:
                saver.restore()
                batches = iter(mine.objects["reader"])
                if rank == 0:
                    a_full_disk(mine, monkeypatch)
                    mine.fails.set()
                for _ in range(2):
                    next(batches)
                    train_step(mine.objects)
                    saver.step()
        finally:
            if rank == 0:  # its process ends, and the store of the exchange with it
                exchange.hub.notes.clear()
                exchange.hub.leave(rank)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        results = run_ranks(2, body)
    ranks[0].fails.clear()  # not earlier: its agent would leave its note in storage
    for result in results:
        assert isinstance(result, SaveRefused) and "the cause" in str(result), results


def test_a_trainer_that_stops_tells_its_agent_first_which_ranks_have_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, list[int]] = {}
    pass_on = ThreadAgent.pass_on

    def tells(link: ThreadAgent, obstacle: Obstacle) -> None:
        told.setdefault(threading.get_ident(), []).append(obstacle.rank)
        pass_on(link, obstacle)

    monkeypatch.setattr(ThreadAgent, "pass_on", tells)
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> list[int]:
        mine, error = Rank(rank, storage), RuntimeError("the cause")
        options = {"capture_every": 1, "arenas": tmp_path, "timeout_s": TIMEOUT_S}
        saver = manager(mine.storage, mine.objects, exchange=exchange, **options)
        saver.restore()
        next(iter(mine.objects["reader"]))
        saver.step()
        if rank == 0:  # its agent waits for the part of rank 1
            saver.save(sync=False)
            saver._saves._next_look_s = float("inf")  # it does not look again while it trains
        meeting.wait()
        if rank == 1:
            saver.__exit__(RuntimeError, error, None)
        meeting.wait()
        if rank == 0:
            saver.__exit__(RuntimeError, error, None)
        return told.get(threading.get_ident(), [])

    of_rank_0, _ = good(run_ranks(2, body))
    assert 1 in of_rank_0


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("while_saving", [False, True])
def test_nobody_waits_for_a_rank_whose_loop_ended_by_an_exception(failing: int, while_saving: bool) -> None:
    """Also where Ctrl-C stops it in the midst of a save."""
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        waiter = SystemWaiter()
        mine = Rank(rank, storage)

        def interrupt(method: str, path: str) -> None:
            if method == "put":
                raise KeyboardInterrupt("the cause")

        mine.refuse = interrupt
        with manager(mine.storage, mine.objects, exchange=exchange, waiter=waiter, timeout_s=TIMEOUT_S) as saver:
            saver.restore()
            saver.step()
            if rank == failing and not while_saving:
                raise KeyboardInterrupt("the cause")
            if rank == failing:
                mine.fails.set()
            saver.save()

    results = run_ranks(2, body)
    assert isinstance(results[failing], KeyboardInterrupt), results
    other = results[1 - failing]
    assert type(other) is CheckpointError and f"rank {failing} has stopped: KeyboardInterrupt: the cause" in str(other)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_say_what_it_reads_is_heard_by_both_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def versions(objects: dict[str, Any]) -> dict[str, str]:
        if objects["own"].value == failing:
            raise StorageError("the cause")
        return {}

    monkeypatch.setattr(applying, "opened_versions", versions)
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        manager(storage, {"own": Counter(rank)}, exchange=exchange, timeout_s=TIMEOUT_S).restore()

    for result in run_ranks(2, body):
        assert isinstance(result, StorageError) and "the cause" in str(result)


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_rank_cannot_begin_to_capture_neither_begins_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    storage, open_saves = MemoryStorage(), opening.open_saves

    def opened(objects: Any, storage: Any, exchange: Any, *args: Any, **options: Any) -> Any:
        if exchange.rank == failing:
            raise AgentError("the cause")
        return open_saves(objects, storage, exchange, *args, **options)

    monkeypatch.setattr(manager_module, "open_saves", opened)

    def body(rank: int, exchange: HubExchange) -> None:
        options = {"capture_every": 1, "arenas": tmp_path, "timeout_s": TIMEOUT_S}
        with manager(storage, training(), exchange=exchange, **options) as saver:
            saver.restore()

    for result in run_ranks(2, body):
        assert isinstance(result, AgentError) and "the cause" in str(result)


@pytest.mark.parametrize(
    ("mine", "others", "said"),
    [
        (
            {"persist_every": 3},
            {"persist_every": 4},
            "persist_every: 3 on rank 0; 4 on rank 1",
        ),
        ({}, {"persist_every": timedelta(hours=1)}, "1:00:00 on rank 1"),
        ({"capture_every": 2}, {}, "capture_every: 2 on rank 0; None on rank 1"),
        ({"keep": 3}, {"keep": 2}, "keep: Keep(last=3"),
        ({"fail_after": 60}, {}, "fail_after: 60.0 on rank 0; 3600.0 on rank 1"),
    ],
)
def test_ranks_that_would_save_at_different_steps_are_told_so_when_they_restore(
    tmp_path: Path, mine: dict[str, Any], others: dict[str, Any], said: str
) -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        options = others if rank else mine
        manager_with(storage, training(), exchange=exchange, timeout_s=TIMEOUT_S, **options).restore()

    for result in run_ranks(2, body):
        assert isinstance(result, TrackingError) and said in str(result), result
    assert storage.objects == {}

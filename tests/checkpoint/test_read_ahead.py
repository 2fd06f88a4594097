"""Loops that read ahead, killed and resumed.

With ``step(batch)`` no row is lost, and that is proved. With a bare ``step()`` rows may be lost; the loop is warned
then, and the audit proves what was delivered alone.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.errors import ConfigError, StateUnavailable
from tests.checkpoint.reading_ahead import BATCH, FILES, ROWS, Filler, Run, Wrapped, loader_of
from tests.checkpoint.rig import HubExchange, MemoryStorage, good, run_ranks
from tests.checkpoint.scripts import write_table
from tests.checkpoint.seams import manager_with
from tests.examples import examples
from tests.patience import PATIENCE_S

DEPTH = 3


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(write_table(tmp_path_factory.mktemp("table"), files=FILES))


# --- what reads ahead


def plain(loader: lakeckpt.LakeLoader) -> Iterator[Any]:
    return iter(loader)


def a_queue(loader: lakeckpt.LakeLoader) -> Iterator[Any]:
    source, held = iter(loader), deque[Any]()
    while True:
        held.extend(islice(source, DEPTH + 1 - len(held)))
        if not held:
            return
        yield held.popleft()


class OneAhead:
    """A wrapper as Ray Train's and others': one batch ahead, a dict made anew, the receipt gone."""

    def __init__(self, loader: lakeckpt.LakeLoader) -> None:
        self.source = iter(loader)
        self.ready = self.fetch()

    def fetch(self) -> Any:
        batch = next(self.source, None)
        return None if batch is None else dict(batch.items())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ready is None:
            raise StopIteration
        batch, self.ready = self.ready, self.fetch()
        return batch


def slow_thread(loader: lakeckpt.LakeLoader) -> Filler:
    return Filler(loader, lambda taken: 0)


def quick_thread(loader: lakeckpt.LakeLoader) -> Filler:
    return Filler(loader, lambda taken: DEPTH)


def late_thread(loader: lakeckpt.LakeLoader) -> Filler:
    return Filler(loader, lambda taken: 0 if taken < 6 else DEPTH)


WRAPPERS = [a_queue, OneAhead, slow_thread, quick_thread, late_thread]


@pytest.mark.parametrize("killed_after", [2, 8])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_bare_step_behind_what_reads_ahead_is_warned_of_and_proved_of_what_was_delivered(
    wrap: Wrapped, killed_after: int, table: lakeckpt.Table
) -> None:
    run = Run(table)
    run.attempt(wrap, says=False, steps=killed_after)
    run.attempt(wrap, says=False)
    if wrap is not slow_thread:
        assert run.lost or killed_after < 6
    assert run.warned and all("manager.step(batch)" in one for one in run.warned)
    assert run.verdict == "delivered"


@pytest.mark.parametrize("killed_after", [1, 8, 19])
@pytest.mark.parametrize("wrap", [plain, a_queue, slow_thread, quick_thread, late_thread])
def test_a_step_that_says_its_batch_loses_nothing_behind_whatever_reads_ahead(
    wrap: Wrapped, killed_after: int, table: lakeckpt.Table
) -> None:
    run = Run(table)
    run.attempt(wrap, says=True, steps=killed_after)
    run.attempt(wrap, says=True)
    assert run.used_once and not run.warned
    assert run.verdict == "proved"


def test_a_number_survives_wrappers_that_make_batches_anew_on_two_ranks(table: lakeckpt.Table) -> None:
    run = Run(table, world_size=2)
    run.attempt(OneAhead, says=True, steps=4, column="n")
    run.attempt(OneAhead, says=True, column="n")
    assert run.used_once and not run.warned
    assert run.verdict == "proved"


def test_wrappers_that_make_batches_anew_are_found_out_on_two_ranks(table: lakeckpt.Table) -> None:
    run = Run(table, world_size=2)
    run.attempt(OneAhead, says=False, steps=4)
    run.attempt(OneAhead, says=False)
    assert run.lost == 20  # one batch of each rank
    assert len(run.warned) == 4 and run.verdict == "delivered"


@pytest.mark.parametrize("killed_after", [3, 8])
def test_an_ordinary_loop_that_says_nothing_is_proved_of_what_was_delivered(
    killed_after: int, table: lakeckpt.Table
) -> None:
    run = Run(table)
    run.attempt(plain, says=False, steps=killed_after)
    run.attempt(plain, says=False)
    assert run.used_once and not run.warned
    report = audit(run.storage)
    assert (report.verdict, report.exit_status, report.exactly_once) == ("delivered", 3, False)
    assert report.readers[0].inferred == "2 of 2 attempts"


def test_what_ended_before_its_third_step_is_proved_of_what_was_delivered(table: lakeckpt.Table) -> None:
    run = Run(table)
    run.attempt(plain, says=False, steps=2)
    run.attempt(plain, says=True)
    assert run.used_once and not run.warned
    report = audit(run.storage)
    assert (report.verdict, report.readers[0].inferred) == ("delivered", "1 of 2 attempts")


def test_what_was_read_before_restore_is_suspected(table: lakeckpt.Table) -> None:
    loader = loader_of(table)
    batches = iter(loader)
    primed = deque(islice(batches, DEPTH))
    manager = CheckpointManager(MemoryStorage(), {"reader": loader}, persist_every=1)
    manager.restore()
    primed.append(next(batches))
    with pytest.warns(lakeckpt.ReadAheadWarning, match="before restore"):
        manager.step()
    manager.close()


def test_rows_are_stated_if_the_loops_of_all_ranks_state_them(table: lakeckpt.Table) -> None:
    """Rank 1 reads on another thread and states nothing; rank 0, which commits, states its batches."""
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        loader = loader_of(table, rank=rank, world_size=2)
        manager = manager_with(storage, {"reader": loader}, persist_every=4, exchange=exchange, timeout_s=PATIENCE_S)
        manager.restore()
        batches = slow_thread(loader) if rank else iter(loader)
        for _, batch in zip(range(4), batches, strict=False):
            manager.step(None if rank else batch)
        if isinstance(batches, Filler):
            batches.stop()

    with pytest.warns(lakeckpt.ReadAheadWarning, match="another thread"):
        good(run_ranks(2, body))
    assert audit(storage).verdict == "delivered"


def test_the_warning_comes_once_and_names_the_remedy(table: lakeckpt.Table) -> None:
    loader = loader_of(table)
    manager = CheckpointManager(MemoryStorage(), {"reader": loader})
    manager.restore()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in a_queue(loader):
            manager.step()
    manager.close()
    assert [one.category for one in caught] == [lakeckpt.ReadAheadWarning]
    assert "lakeckpt.prefetch" in str(caught[0].message) and caught[0].filename == __file__


# --- prefetch


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("killed_after", [1, 4, 18])
def test_prefetch_counts_what_the_loop_has(killed_after: int, says: bool, table: lakeckpt.Table) -> None:
    def prefetched(loader: lakeckpt.LakeLoader) -> Iterator[Any]:
        return iter(lakeckpt.prefetch(loader, depth=DEPTH, device="cpu"))

    run = Run(table)
    run.attempt(prefetched, says=says, steps=killed_after)
    run.attempt(prefetched, says=says)
    assert run.used_once and not run.warned


def test_prefetch_keeps_order_receipts_and_length_over_epochs(table: lakeckpt.Table) -> None:
    mine, bare = loader_of(table), loader_of(table)
    ahead = lakeckpt.prefetch(mine)
    assert len(ahead) == len(bare)
    for _ in range(2):
        for one, other in zip(ahead, bare, strict=True):
            assert one.receipt == other.receipt and one["id"].tolist() == other["id"].tolist()
            assert mine.last_receipt == one.receipt and mine.state_dict() == bare.state_dict()


def test_prefetch_stands_for_its_loader_in_the_state_of_a_manager(table: lakeckpt.Table, tmp_path: Path) -> None:
    used: list[int] = []
    for steps in (3, None):
        ahead = lakeckpt.prefetch(loader_of(table), depth=DEPTH)
        with lakeckpt.CheckpointManager(tmp_path / "run", {"reader": ahead}) as manager:
            manager.restore()
            assert ahead.epoch == 0 and copy.copy(ahead).epoch == 0
            for batch in islice(ahead, steps):
                used += batch["id"].tolist()
                manager.step(batch)
    assert sorted(used) == list(range(ROWS))
    with pytest.raises(AttributeError, match="nothing"):
        _ = ahead.nothing


def test_prefetch_holds_batches_ready_on_the_device(table: lakeckpt.Table) -> None:
    made: list[int] = []

    def note(batch: Any, context: lakeckpt.TransformContext) -> Any:
        made.append(context.receipt.step)
        return batch

    ahead = iter(lakeckpt.prefetch(loader_of(table, transform=note), depth=DEPTH, device="meta"))
    batch = next(ahead)
    assert batch["id"].device.type == "meta" and batch.receipt.step == 0
    assert made == [0, 1, 2, 3]


def test_what_fails_behind_held_batches_fails_after_them(table: lakeckpt.Table) -> None:
    def fail(batch: Any, context: lakeckpt.TransformContext) -> Any:
        if context.receipt.step == 5:
            raise RuntimeError("here")
        return batch

    loader = loader_of(table, transform=fail)
    ahead = iter(lakeckpt.prefetch(loader, depth=DEPTH))
    assert len(list(islice(ahead, 5))) == 5
    with pytest.raises(RuntimeError, match="here"):
        next(ahead)
    assert loader.state_dict()["step"] == 5


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"depth": None}])
def test_prefetch_refuses_what_it_cannot_do(wrong: dict[str, Any], table: lakeckpt.Table) -> None:
    with pytest.raises(ConfigError, match="depth"):
        lakeckpt.prefetch(loader_of(table), **wrong)
    with pytest.raises(ConfigError, match=r"takes a lakeckpt\.LakeLoader, got list"):
        lakeckpt.prefetch([1, 2])  # type: ignore[arg-type]


# --- what step takes


def test_step_takes_a_batch_a_receipt_a_number_or_a_tensor_of_numbers(table: lakeckpt.Table) -> None:
    loader = loader_of(table, receipt_column="n")
    storage = MemoryStorage()
    manager = CheckpointManager(storage, {"reader": loader}, persist_every=1)
    manager.restore()
    batches = list(islice(loader, 12))
    ways: list[Callable[[Any], Any]] = [
        lambda batch: batch,
        lambda batch: batch.receipt,
        lambda batch: dict(batch),
        lambda batch: batch["n"],
        lambda batch: torch.tensor(batch["n"]),
        lambda batch: torch.tensor([0, batch["n"]]),
        lambda batch: [batch["n"], 0],
        lambda batch: {"reader": batch},
        lambda batch: {"reader": batch["n"]},
        lambda batch: batch.to("cpu"),
    ]
    for batch, way in zip(batches, ways, strict=False):
        manager.step(way(batch))
    manager.close()
    chain = lakeckpt.checkpoint.persist.history.read_history(storage).chain  # type: ignore[attr-defined]
    assert [one.readers["reader"].state["step"] for one in chain] == list(range(1, len(ways) + 1))
    assert audit(storage).verdict == "proved"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"id": 1}, ConfigError, r"a dict with \['id'\] for reader 'reader', whose receipt_column is 'n'"),
        ((1, "x"), ConfigError, r"got \(1, 'x'\)"),
        (1.5, ConfigError, "got 1.5"),
        (True, ConfigError, "got True"),
        (10**6, StateUnavailable, "number 1000000 is not of a batch"),
        (3 * 2**32, StateUnavailable, "is not of a batch"),
    ],
)
def test_step_refuses_what_names_no_batch_and_counts_no_step(
    wrong: Any, error: type[Exception], text: str, table: lakeckpt.Table
) -> None:
    loader = loader_of(table, receipt_column="n")
    manager = CheckpointManager(MemoryStorage(), {"reader": loader})
    manager.restore()
    batch = next(iter(loader))
    with pytest.raises(error, match=text):
        manager.step(wrong)
    assert manager.steps_done == 0
    manager.step(batch)
    manager.close()


def test_a_receipt_column_that_cannot_be_is_refused_before_anything_is_counted(table: lakeckpt.Table) -> None:
    loader = loader_of(table, receipt_column="id")
    with pytest.raises(ConfigError, match="has a column 'id'"):
        next(iter(loader))
    assert loader.last_receipt is None
    with pytest.raises(ConfigError, match="is a Table"):
        next(iter(loader_of(table, receipt_column="n", output="arrow")))
    with pytest.raises(ConfigError, match="for single rows"):
        lakeckpt.LakeLoader(lakeckpt.LakeDataset(table, batch_size=None), receipt_column="n")


# --- silence


def test_batches_without_a_step_are_warned_of_at_the_end(table: lakeckpt.Table) -> None:
    loader = loader_of(table)
    manager = CheckpointManager(MemoryStorage(), {"reader": loader})
    manager.restore()
    assert len(list(loader)) == 20
    with pytest.warns(lakeckpt.ConsumptionWarning, match=r"delivered 20 batches.*step\(batch\) was never called"):
        manager.close()


def test_many_batches_without_a_step_are_warned_of_at_once(table: lakeckpt.Table) -> None:
    loader = loader_of(table, endless=True)
    manager = CheckpointManager(MemoryStorage(), {"reader": loader})
    manager.restore()
    with pytest.warns(lakeckpt.ConsumptionWarning, match=r"delivered 1,000 batches"):
        batches = list(islice(loader, 1000))
    manager.step(batches[-1])
    manager.close()


def test_a_manager_that_steps_without_the_loader_that_delivers_says_so_once(table: lakeckpt.Table) -> None:
    loader = loader_of(table)
    manager = CheckpointManager(MemoryStorage(), {"model": torch.nn.Linear(1, 1)})
    manager.restore()
    batches = iter(loader)
    next(batches)
    with pytest.warns(lakeckpt.ConsumptionWarning, match="no reader is in this manager's state"):
        manager.step()
    for _ in batches:
        manager.step()
    manager.close()


def test_a_loader_for_validation_beside_one_that_is_saved_is_nothing_to_warn_of(table: lakeckpt.Table) -> None:
    loader, validation = loader_of(table), loader_of(table)
    with CheckpointManager(MemoryStorage(), {"reader": loader}) as manager:
        manager.restore()
        for batch in loader:
            for _ in islice(validation, 2):
                pass
            manager.step(batch)


def test_a_dataset_that_is_saved_itself_is_nothing_to_warn_of(table: lakeckpt.Table) -> None:
    dataset = lakeckpt.LakeDataset(table, batch_size=BATCH)
    with CheckpointManager(MemoryStorage(), {"reader": dataset}) as manager:
        manager.restore()
        for _ in dataset:
            manager.step()


@settings(max_examples=examples(25), deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=12), ahead=st.integers(0, 4))
def test_a_loop_that_says_its_batch_is_never_suspected(counts: list[int], ahead: int, table: lakeckpt.Table) -> None:
    """Token budgets, steps that a gradient scaler leaves out, and queues: as many batches for a step as it happens."""
    loader = loader_of(table)
    storage = MemoryStorage()
    with CheckpointManager(storage, {"reader": loader}, persist_every=3) as manager:
        manager.restore()
        held, source, batch = deque[Any](), iter(loader), None
        for count in [1, *counts]:
            for _ in range(count):
                held.extend(islice(source, ahead + 1 - len(held)))
                batch = held.popleft() if held else batch
            manager.step(batch)
    assert audit(storage).verdict == "proved"


def late_queue(loader: lakeckpt.LakeLoader) -> Iterator[Any]:
    """Fills up after some steps, on the thread that steps."""
    source, held = iter(loader), deque[Any]()
    for number in itertools.count():
        held.extend(islice(source, (1 if number < 6 else DEPTH + 1) - len(held)))
        if not held:
            return
        yield held.popleft()


def test_a_queue_that_fills_late_is_warned_of_at_the_end_of_the_epoch(table: lakeckpt.Table) -> None:
    run = Run(table)
    run.attempt(late_queue, says=False, steps=18)
    assert len(run.warned) == 1 and "end of its rows" in run.warned[0]
    assert run.verdict == "delivered"


def test_readers_that_take_turns_are_not_suspected_and_each_is_stated_by_name(table: lakeckpt.Table) -> None:
    for says in (True, False):
        storage = MemoryStorage()
        one, other = loader_of(table), loader_of(table)
        with CheckpointManager(storage, {"one": one, "other": other}, persist_every=4) as manager:
            manager.restore()
            for name, loader in (("one", one), ("other", other), ("one", one)):
                for batch in loader:
                    manager.step({name: batch} if says else None)
        assert audit(storage).verdict == ("proved" if says else "delivered")


def test_a_batch_from_before_what_was_used_is_refused_and_no_step_is_counted(table: lakeckpt.Table) -> None:
    loader, validation = loader_of(table), loader_of(table)
    manager = CheckpointManager(MemoryStorage(), {"reader": loader}, persist_every=5)
    manager.restore()
    for batch in islice(loader, 12):
        manager.step(batch)
    with pytest.raises(ConfigError, match="has used up to epoch 0, step 11"):
        manager.step(list(islice(loader, 0)) or next(islice(loader_of(table), 10, 11)))
    with pytest.raises(StateUnavailable):
        manager.step(next(iter(validation)))
    assert manager.steps_done == 12
    manager.step(batch)
    loader.rewind()
    manager.step(next(iter(loader)))
    manager.close()


def test_a_loader_in_the_state_that_delivers_nothing_is_warned_of_and_nothing_is_proved(table: lakeckpt.Table) -> None:
    loader, iterated = loader_of(table), loader_of(table)
    storage = MemoryStorage()
    manager = CheckpointManager(storage, {"reader": loader}, persist_every=1)
    manager.restore()
    batches = iter(iterated)
    for _ in range(2):
        next(batches)
        manager.step()
    with pytest.warns(lakeckpt.ConsumptionWarning, match="reader in this manager's state delivered nothing"):
        manager.step()
    manager.close()
    report = audit(storage)
    assert report.verdict == "not proved" and "no reader of the run delivered anything" in report.doubts[0]


def test_saves_without_a_step_are_warned_of(table: lakeckpt.Table) -> None:
    loader = loader_of(table)
    manager = CheckpointManager(MemoryStorage(), {"reader": loader})
    manager.restore()
    next(iter(loader))
    with pytest.warns(lakeckpt.ConsumptionWarning, match="was never called"):
        manager.save()


def test_single_rows_are_not_taken_for_batches_without_a_step(table: lakeckpt.Table) -> None:
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(table, batch_size=None, endless=True))
    with CheckpointManager(MemoryStorage(), {"reader": loader}) as manager:
        manager.restore()
        rows = list(islice(loader, 1_500))
        manager.step(rows[-1])

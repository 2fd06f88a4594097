"""Readers whose consumption depends on the data: each rank reports its lanes, and a checkpoint has all of them."""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.ledger.audit import audit, audit_history
from lakeckpt.checkpoint.ledger.consumed_keys import consumed_keys
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import ConfigError, TrackingError
from lakeckpt.lake.table.table import Table
from tests.checkpoint.flow_readers import FlowReader, Item, items_of
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks, training
from tests.checkpoint.scripts import write_table
from tests.patience import PATIENCE_S

Spoil = Callable[[int, FlowReader], None]
Stage = tuple[int, int, int | None]
"""Ranks, steps, and lanes."""
EVER = 10**6


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return lakeckpt.open_table(write_table(tmp_path_factory.mktemp("lake")))


def attempt(
    storage: MemoryStorage, table: Table, stage: Stage, *, every: int = EVER, spoil: Spoil = lambda rank, reader: None
) -> list[list[Item]]:
    """Restore, take the steps of the stage and save, and take a step more, which is lost. The items by rank."""
    (world_size, steps, num_lanes), waiter = stage, EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> list[Item]:
        reader = FlowReader(table, rank=rank, world_size=world_size, num_lanes=num_lanes)
        saver = manager(storage, {"reader": reader}, exchange=exchange, waiter=waiter, persist_every=every)
        saver.restore()
        found: list[Item] = []
        for number, batch in enumerate(reader, 1):
            if number > steps:
                return found
            found += batch
            saver.step(reader.last_receipt)
            if number == steps:
                spoil(rank, reader)
                saver.save()
        saver.save()
        return found

    return good(run_ranks(world_size, body, waiters=[waiter]))


def tip(storage: MemoryStorage) -> State:
    return State.from_plain(read_history(storage).tip.readers["reader"].state)


CHAINS: Sequence[Sequence[Stage]] = [
    [(1, 9, 4), (2, 7, 4), (4, 5, 4), (1, EVER, 4)],
    [(4, 7, 4), (3, 5, None), (2, 9, None), (3, EVER, None)],
    [(2, 1, 2), (2, 1, 2), (1, 1, 2), (4, EVER, None)],
]


@pytest.mark.parametrize("every", [EVER, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_every_item_counts_once_on_any_chain_of_topologies_and_the_audit_proves_it(
    chain: Sequence[Stage], every: int, table: Table
) -> None:
    storage, found, begun = MemoryStorage(), Multiset[Item](), 0
    for stage in chain:
        for items in attempt(storage, table, stage, every=every):
            found.update(items)
        begun += len(Plan(tip(storage)).begun)
    assert begun  # some positions were consumed in part
    rows = table.index.num_rows
    assert found == Multiset(item for position in range(rows) for item in items_of(0, position))
    report = audit(storage)
    assert report.verdict == "proved", report.to_plain()
    (epoch,) = report.readers[0].epochs[:1]
    assert (epoch.status, epoch.once, epoch.lost, epoch.repeated) == ("complete", rows, 0, 0)


def refused(table: Table, spoil: Spoil, *, world_size: int = 3, ranks: int = 3) -> list[str]:
    """The errors of a save of ``world_size`` ranks, of which the reader knows ``ranks``."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> None:
        reader = FlowReader(table, rank=rank % ranks, world_size=ranks, num_lanes=6)
        saver = manager(storage, {"reader": reader}, exchange=exchange, waiter=waiter)
        saver.restore()
        batches = iter(reader)
        for _ in range(3):
            next(batches)
            saver.step(reader.last_receipt)
        spoil(rank, reader)
        saver.save()

    results = run_ranks(world_size, body, waiters=[waiter])
    assert all(isinstance(one, TrackingError) for one in results), results
    assert not read_history(storage).chain
    return list(map(str, results))


def spoiled(rank: int, **changes: object) -> Spoil:
    """Change the state of one rank that it would save."""

    def spoil(which: int, reader: FlowReader) -> None:
        if which == rank:
            own = reader.state_dict
            reader.state_dict = lambda at=None: {**own(at), **changes}  # type: ignore[method-assign]

    return spoil


def test_lanes_of_two_ranks_are_refused(table: Table) -> None:
    for error in refused(table, spoiled(2, held=[[1, 1], [9, 9], [0, 0]])):
        assert "of reader 'reader' between the steps 0 and 3: two parts hold the lanes of the ranks" in error
        assert "[1, 2)" in error


def test_lanes_of_no_rank_are_refused_though_those_of_another_come_twice(table: Table) -> None:
    """Ranks that report the same are replicas, as the stages of a pipeline are."""

    def as_rank_1(rank: int, reader: FlowReader) -> None:
        if rank == 2:
            other = FlowReader(table, rank=1, world_size=3, num_lanes=6)
            batches = iter(other)
            for _ in range(3):
                next(batches)
            reader.state_dict, reader.stretches = (  # type: ignore[method-assign]
                lambda at=None: other.state_dict(),
                lambda at=None: other.stretches(),
            )

    for error in refused(table, as_rank_1):
        assert "no rank reported the places of reader 'reader' between the steps 0 and 3 that rank 2 of 3" in error


def test_a_rank_at_another_step_or_in_another_order_is_named(table: Table) -> None:
    for error in refused(table, spoiled(1, step=4)):
        assert "state of reader 'reader', 'step': 3 on ranks 0, 2; 4 on rank 1" in error


def test_a_rank_whose_stretches_are_others_is_named(table: Table) -> None:
    def spoil(rank: int, reader: FlowReader) -> None:
        if rank == 2:
            reader.stretches = lambda at=None: []  # type: ignore[method-assign]

    for error in refused(table, spoil):
        assert "rank 2 reports places of another order, or of other steps of reader 'reader' between the steps" in error


def test_ranks_that_read_the_same_data_save_it_once(table: Table) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> None:
        reader = FlowReader(table, rank=rank // 2, world_size=2, num_lanes=4)
        saver = manager(storage, {"reader": reader}, exchange=exchange, waiter=waiter)
        saver.restore()
        next(iter(reader))
        saver.step(reader.last_receipt)
        saver.save()

    good(run_ranks(4, body, waiters=[waiter]))
    assert tip(storage).is_whole and tip(storage).segment.world_size == 2 and tip(storage).step == 1


def test_a_position_that_goes_on_elsewhere_than_where_it_stopped_is_no_proof(table: Table) -> None:
    storage = MemoryStorage()
    for steps in (3, 3, 3):
        attempt(storage, table, (2, steps, 4))
    history = read_history(storage)
    orders = orders_of(storage, history)
    before, after = history.chain[0], history.chain[1]
    (stretch,) = after.readers["reader"].stretches
    begin = State.from_plain(stretch.begin)
    assert any(begin.held.offsets)
    wrong = replace(begin, held=replace(begin.held, offsets=tuple(max(one - 1, 0) for one in begin.held.offsets)))
    record = replace(after.readers["reader"], stretches=(replace(stretch, begin=wrong.to_plain()),))
    chain = (before, replace(after, readers={"reader": record}), *history.chain[2:])
    report = audit_history(replace(history, chain=chain), orders)
    assert report.verdict != "proved"
    assert any("go on elsewhere than where they stopped" in one for one in report.readers[0].doubts)
    assert audit_history(history, orders).verdict == "proved"


def test_a_step_cannot_be_explained_and_the_error_says_why(table: Table) -> None:
    storage = MemoryStorage()
    attempt(storage, table, (2, 3, 4))
    with pytest.raises(ConfigError, match="'reader' made a step depends on what its transform yielded"):
        explain(storage, 2)


def test_a_cut_in_the_memory_of_all_nodes_goes_on_with_the_lanes_of_all_ranks(table: Table, tmp_path: Path) -> None:
    """Each node has its own ranks' parts. Steps 1 to 3 are saved beside training, 4 and 5 are in memory alone."""
    storage = MemoryStorage()
    alive: dict[int, Any] = {}
    waiter = EventWaiter(storage)

    def saver_of(rank: int, exchange: HubExchange) -> tuple[FlowReader, CheckpointManager]:
        reader = FlowReader(table, rank=rank, world_size=2, num_lanes=4)
        options = {"exchange": exchange, "waiter": waiter, "arenas": tmp_path / str(rank), "timeout_s": PATIENCE_S}
        saver = manager(storage, {"reader": reader, **training()}, capture_every=1, **options)
        alive[rank] = saver
        return reader, saver

    def first(rank: int, exchange: HubExchange) -> list[Item]:
        reader, saver = saver_of(rank, exchange)
        saver.restore()
        found: list[Item] = []
        for step, batch in enumerate(reader, 1):
            found += batch
            saver.step(reader.last_receipt)
            saver._saves._engine.wait()
            if step == 3:
                saver.save()
            if step == 5:
                return found
        raise AssertionError

    def second(rank: int, exchange: HubExchange) -> list[Item]:
        alive[rank]._saves._engine.close()
        reader, saver = saver_of(rank, exchange)
        assert saver.restore() == 5 and saver.restore_report.captured == 5
        found = []
        for batch in reader:
            found += batch
            saver.step(reader.last_receipt)
            saver._saves._engine.wait()
        saver.save()
        return found

    found = Multiset[Item]()
    for body in (first, second):
        for items in good(run_ranks(2, body, waiters=[waiter])):
            found.update(items)
    rows = table.index.num_rows
    assert found == Multiset(item for position in range(rows) for item in items_of(0, position))
    assert [one.step for one in read_history(storage).chain][:1] == [3]
    assert audit(storage).verdict == "proved"


def test_what_is_left_of_an_epoch_cannot_become_another_selection(table: Table) -> None:
    storage = MemoryStorage()
    attempt(storage, table, (2, 3, 4))
    with pytest.raises(ConfigError, match="another version of its table cannot go on in the middle of an epoch"):
        consumed_keys(storage, table, key="id")

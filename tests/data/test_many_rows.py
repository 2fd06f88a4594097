"""Transforms that yield any number of rows: each yielded row is delivered once, on any chain of topologies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, merge_states, mix, pack, prefetch
from lakeckpt.core.consumption import consumption
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.data.flows.ends import JobEnds, last_border
from lakeckpt.errors import ConfigError, MissingRanksError, StateError, StateMismatch, StateUnavailable
from lakeckpt.testing import assert_exactly_once
from tests.data.flow_jobs import count_of, cut, items, job_store, loader_of, run_ranks, whole
from tests.data.reading import ROWS, as_json, dataset_of, same, some, table_of, until_error
from tests.examples import examples
from tests.patience import PATIENCE_S

__all__ = ["job_store"]

EVERY = whole(ROWS)


def all_items(batches: Any) -> list[tuple[int, int]]:
    return [item for batch in batches for item in items(batch)]


def test_every_yielded_row_comes_once_in_full_batches(lake: Path) -> None:
    loader = loader_of(lake, num_lanes=2)
    for epoch in range(2):
        assert loader.epoch == epoch
        batches = list(loader)
        assert sorted(all_items(batches)) == EVERY
        sizes = [len(items(batch)) for batch in batches]
        assert sizes.count(4) >= len(batches) - 2 and [batch.receipt.rows for batch in batches] == sizes
        assert [batch.receipt.weight for batch in batches] == [size / 4 for size in sizes]
    assert loader.state_dict()["epoch"] == 2


def test_batches_do_not_depend_on_workers(lake: Path) -> None:
    expected = list(loader_of(lake, num_lanes=5))
    for num_workers in (1, 2, 3):
        found = list(loader_of(lake, num_lanes=5, num_workers=num_workers))
        assert same([dict(one) for one in found], [dict(one) for one in expected])
        assert [one.receipt for one in found] == [one.receipt for one in expected]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_at_every_place_with_what_was_not_delivered(lake: Path, num_workers: int) -> None:
    expected = list(loader_of(lake, num_lanes=3))
    for stop in range(0, len(expected) + 1, 3 if num_workers == 0 else 11):
        loader = loader_of(lake, num_lanes=3, num_workers=num_workers)
        assert same([dict(one) for one in some(loader, stop)], [dict(one) for one in expected[:stop]])
        resumed = loader_of(lake, num_workers=num_workers)
        resumed.load_state_dict(as_json(loader.state_dict()))
        assert same([dict(one) for one in resumed], [dict(one) for one in expected[stop:]])
        assert resumed.epoch == 1


def test_the_same_loader_goes_on_after_a_break_and_begins_again_on_demand(lake: Path) -> None:
    loader = loader_of(lake, num_lanes=3)
    first = some(loader, 4)
    assert sorted(all_items(first) + all_items(loader)) == EVERY
    some(loader, 3)
    loader.rewind()
    assert sorted(all_items(loader)) == EVERY
    loader.set_epoch(0)
    assert same([dict(one) for one in some(loader, 4)], [dict(one) for one in first])
    peeked = loader.peek()
    assert same(dict(peeked), dict(next(iter(loader))))


def test_prefetch_restart_and_persistent_workers_go_on_as_with_rows(lake: Path) -> None:
    expected = list(loader_of(lake, num_lanes=2))
    loader = loader_of(lake, num_lanes=2)
    found = some(prefetch(loader, depth=3), 4)  # what is held back is not delivered
    assert found[-1].receipt == loader.last_receipt == expected[3].receipt
    assert same([dict(one) for one in loader], [dict(one) for one in expected[4:]])
    again = loader_of(lake, num_lanes=2, loader={"restart": True})
    for _ in range(2):
        assert same([dict(one) for one in again], [dict(one) for one in expected])
    lasting = loader_of(lake, num_lanes=2, num_workers=2, loader={"persistent_workers": True})
    some(lasting, 3)
    assert same([dict(one) for one in lasting], [dict(one) for one in expected[3:]])
    assert sorted(all_items(lasting)) == EVERY and lasting.epoch == 2


topologies = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 6), st.integers(0, 9))
"""(world size, lanes per rank, batch size, steps)"""


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(topologies, max_size=3), st.integers(1, 3))
def test_every_yielded_row_counts_once_on_any_chain_of_ranks(
    lake: Path, job_store: Any, chain: list[tuple[int, int, int, int]], last: int
) -> None:
    state, found = None, []
    for world_size, lanes, batch_size, steps in chain:
        ran = run_ranks(lake, world_size, state=state, steps=steps, num_lanes=world_size * lanes, batch_size=batch_size)
        state = ran.state
        found += ran.items
        if state["epoch"]:
            break
    if state is None or not state["epoch"]:
        ran = run_ranks(lake, last, state=state, num_lanes=last)
        assert len({len(batches) for batches in ran.batches}) == 1, "all ranks have as many steps"
        found += ran.items
        assert ran.state["epoch"] == 1
    assert sorted(found) == EVERY


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_without_rows_get_empty_batches_until_all_are_through(
    lake: Path, job_store: Any, world_size: int
) -> None:
    ran = run_ranks(lake, world_size, num_lanes=world_size, num_workers=1)
    assert sorted(ran.items) == EVERY
    (steps,) = {len(batches) for batches in ran.batches}
    empty = [batch for batches in ran.batches for batch in batches if not batch.receipt.rows]
    assert empty and all(batch["id"].shape == (0,) and batch["name"] == [] for batch in empty)
    assert all(batch.receipt.weight == 0 and batch["noise"].dtype == torch.float32 for batch in empty)
    assert any(batches[-1].receipt.rows for batches in ran.batches)
    assert [batch.receipt.step for batch in ran.batches[0]] == list(range(steps))


def nothing_but_row(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of row 5 alone."""
    return [{"id": row["id"], "part": part} for part in range(40)] if int(row["id"]) == 5 else []


def test_a_rank_that_never_has_a_row_knows_the_columns(lake: Path, job_store: Any) -> None:
    ran = run_ranks(lake, 2, num_lanes=2, transform=nothing_but_row, batch_size=3)
    assert sorted(ran.items) == [(5, part) for part in range(40)]
    assert [len(batches) for batches in ran.batches] == [14, 14]
    idle = min(ran.batches, key=lambda batches: sum(batch.receipt.rows for batch in batches))
    assert all(batch["part"].shape == (0,) and batch["part"].dtype == torch.int64 for batch in idle)


def test_lanes_that_yield_nothing_are_done_when_the_last_batch_is(lake: Path) -> None:
    loader = loader_of(lake, transform=nothing_but_row, num_lanes=4, batch_size=3)
    states = [loader.state_dict() for _ in loader]
    assert sum(states[-1]["held"][1]) == ROWS and sum(states[-2]["held"][1]) < ROWS
    assert [len(batch.receipt.moves) for batch in loader].count(1) < len(states)
    loader.load_state_dict(states[-1])
    assert list(loader) == [] and loader.epoch == 1


def nothing(row: dict[str, Any]) -> list[dict[str, Any]]:
    """No row of any row."""
    return []


def test_an_epoch_may_have_no_row_at_all(lake: Path, job_store: Any) -> None:
    assert [len(batches) for batches in run_ranks(lake, 2, num_lanes=2, transform=nothing).batches] == [0, 0]
    loader = loader_of(lake, transform=nothing)
    assert list(loader) == [] and loader.epoch == 1
    endless = loader_of(lake, transform=nothing, endless=True)
    with pytest.raises(ConfigError, match=r"38 rows of lane 0, one after another .* gave nothing"):
        next(iter(endless))


def test_endless_streams_need_no_store_and_have_full_batches(lake: Path) -> None:
    options = {"endless": True, "num_lanes": 2}
    loaders = [loader_of(lake, rank=rank, world_size=2, **options) for rank in range(2)]
    batches = [some(loader, 40) for loader in loaders]
    found = [item for each in batches for item in all_items(each)]
    assert all(batch.receipt.rows == 4 for each in batches for batch in each)
    state = merge_states([loader.state_dict() for loader in loaders])
    again = loader_of(lake, endless=True, num_lanes=3, batch_size=5)
    again.load_state_dict(as_json(state))
    found += all_items(some(again, 30))
    rest = Plan(State.from_plain(again.state_dict())).left  # type: ignore[arg-type]
    epochs = rest.next_epoch - len(rest.begun)
    assert epochs >= 2
    counts = {item: found.count(item) for item in EVERY}
    assert all(epochs <= count <= rest.next_epoch for count in counts.values())


def test_without_a_store_several_ranks_are_refused(lake: Path) -> None:
    loader = loader_of(lake, rank=0, world_size=2)
    with pytest.raises(ConfigError, match=r"rank 0 of 2.*init_process_group.*endless=True"):
        next(iter(loader))


def test_a_state_can_be_had_as_of_recent_receipts(lake: Path) -> None:
    loader = loader_of(lake, num_lanes=3)
    states, batches = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    reader = loader._reader
    for batch, state in zip(batches, states, strict=True):
        assert loader.state_dict(batch.receipt) == state
        assert reader.receipt_of(batch.receipt.number) == batch.receipt
    reader.mark(batches[5].receipt)
    ((begin, end),) = reader.stretches(batches[9].receipt)
    assert (begin.to_plain(), end.to_plain()) == (states[5], states[9])
    with pytest.raises(StateUnavailable, match="not among what this loader has delivered"):
        loader.state_dict(batches[2].receipt)
    reader.mark()
    assert reader.stretches() == []


def test_a_recent_receipt_is_found_without_a_search(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(lake, num_lanes=3)
    batches = iter(loader)
    receipts = [next(batches).receipt for _ in range(8)]
    run = loader.dataset._progress.runs.last
    compared: list[object] = []
    monkeypatch.setattr(Receipt, "__eq__", lambda self, other: compared.append(other) or self is other)
    assert all(map(run.has, receipts)) and len(compared) <= len(receipts)
    for _ in range(3):  # as the oldest ones go after thousands of steps
        run.receipts.popleft()
    assert not any(map(run.has, receipts[:3])) and all(map(run.has, receipts[3:]))


def test_what_was_consumed_between_states_adds_up_to_the_epoch(lake: Path) -> None:
    loader = loader_of(lake, num_lanes=3)
    finished = []
    for _ in loader:
        ((begin, end),) = loader._reader.stretches()
        found = consumption(begin, end)  # type: ignore[arg-type]
        finished.append(found.get(0, Intervals.empty()))
        loader._reader.mark()
    assert sum(one.size for one in finished) == ROWS
    assert Intervals.empty().union(*finished) == Intervals.whole(ROWS)


def test_receipts_name_the_positions_of_their_rows(lake: Path) -> None:
    loader = loader_of(lake, num_lanes=3)
    order = {}
    plain = LakeLoader(dataset_of(table_of(lake), batch_size=1, shuffle=True, num_lanes=3))
    for batch in plain:
        order[batch.receipt.spans[0].start] = int(batch["id"])
    seen = set()
    for batch in loader:
        receipt = batch.receipt
        assert isinstance(receipt, Receipt) and Receipt.from_plain(receipt.to_plain()) == receipt
        positions = [at for span in receipt.spans for at in range(span.start, span.stop)]
        seen |= set(positions)
        rows = [order[at] for at in positions]
        assert [row for row in rows if count_of(row)] == list(dict.fromkeys(row for row, _ in items(batch)))
    assert seen == set(range(ROWS))


def test_randomness_depends_on_the_row_and_not_on_the_topology(lake: Path, job_store: Any) -> None:
    def noise(batches: Any) -> dict[Any, Any]:
        return {
            item: value for batch in batches for item, value in zip(items(batch), batch["noise"].tolist(), strict=True)
        }

    expected = noise(loader_of(lake, num_lanes=2))
    loader = loader_of(lake, num_lanes=2)
    first = some(loader, 5)
    state = as_json(loader.state_dict())
    assert any(state["held"][2]), "a row had begun"
    ran = run_ranks(lake, 3, state=state, num_lanes=3, batch_size=3)
    assert sorted(all_items(first) + ran.items) == EVERY
    assert noise(first) | noise(batch for rank in ran.batches for batch in rank) == expected
    assert len(set(expected.values())) == len(expected)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_state_of_the_end_of_an_epoch_shows_the_end_to_any_number_of_ranks(
    lake: Path, job_store: Any, world_size: int
) -> None:
    whole_epoch = run_ranks(lake, 3, num_lanes=3)
    ran = run_ranks(lake, 3, num_lanes=3, steps=len(whole_epoch.batches[0]))
    assert ran.state["epoch"] == 0 and sorted(ran.items) == EVERY
    for num_workers in (0, 1):
        after = run_ranks(lake, world_size, state=ran.state, num_workers=num_workers)
        assert after.batches == [[]] * world_size and after.state["epoch"] == 1
    assert after.state["segments"][-1][4] == world_size


def test_parts_are_merged_before_they_are_loaded(lake: Path, job_store: Any) -> None:
    ran = run_ranks(lake, 2, steps=3, num_lanes=2)
    loader = loader_of(lake, num_lanes=2)
    with pytest.raises(StateError, match=r"part of the ranks .* of 2: lakeckpt\.merge_states joins"):
        loader.load_state_dict(ran.states[0])
    loader.load_state_dict(ran.state)
    assert sorted(ran.items + all_items(loader)) == EVERY


def test_a_state_of_another_transform_or_reader_is_refused(lake: Path) -> None:
    loader = loader_of(lake)
    some(loader, 2)
    state = loader.state_dict()
    other = loader_of(lake, transform=nothing_but_row)
    with pytest.raises(StateMismatch, match=r"transform: .*nothing_but_row.*flow_jobs\.cut"):
        other.load_state_dict(state)
    loader_of(lake, transform=nothing_but_row, accept_changes=["transform"]).load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed: 3 in this dataset"):
        loader_of(lake, seed=3).load_state_dict(state)
    rows = LakeLoader(dataset_of(table_of(lake), batch_size=4))
    with pytest.raises(StateError, match="give any number of rows"):
        rows.load_state_dict(state)
    with pytest.raises(StateError, match="saved by a reader in which each row is one row"):
        loader.load_state_dict(rows.state_dict())


_YIELDS = {"rows": 40}


def unsteady(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows whose number somebody changes."""
    return [{"id": row["id"], "part": 0}] * _YIELDS["rows"]


def test_a_transform_that_yields_fewer_rows_the_second_time_is_refused(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(lake, transform=unsteady, batch_size=37)
    some(loader, 1)
    resumed = loader_of(lake, transform=unsteady, batch_size=37)
    resumed.load_state_dict(loader.state_dict())
    monkeypatch.setitem(_YIELDS, "rows", 35)
    with pytest.raises(StateMismatch, match=r"the row at position 0 of epoch 0 yielded 35 rows, and 37 of its rows"):
        some(resumed, 1)


@pytest.mark.parametrize(
    ("yields", "named"),
    [
        (lambda row: row, "returned a dict in the transform of the row at position 0 of epoch 0: yield the row"),
        (lambda row: None, "returned a NoneType"),
        (lambda row: [3], "yielded a int and a int in one micro-batch"),
        (lambda row: [{"a": 1}, {"b": 1}], r"yielded a row of \['b'\] and a row of \['a'\]"),
        (lambda row: [{"a": [1, 2]}], "values of 'a' .* they are list.* make tensors of lists"),
        (lambda row: [{"a": 1}, {"a": 1.5}], "values of 'a' .* they are float, int"),
        (
            lambda row: [{"a": torch.zeros(1)}, {"a": torch.zeros(2)}],
            "values of 'a' .* cannot be stacked: stack",
        ),
    ],
)
def test_what_is_no_row_is_refused_by_name(lake: Path, yields: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        next(iter(loader_of(lake, transform=yields, batch_size=2)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_transform_names_the_row_and_the_run_can_go_on(lake: Path, num_workers: int) -> None:
    loader = loader_of(lake, transform=_fails_at_seven, num_workers=num_workers, shuffle=False, batch_size=2)
    found, error = until_error(loader)
    assert all_items(found) == [(row, 0) for row in range(6)]
    assert isinstance(error, ZeroDivisionError)
    assert num_workers or error.__notes__ == ["in the transform of the row at position 7 of epoch 0"]
    assert loader.state_dict()["held"][1] == [6]


def _fails_at_seven(row: dict[str, Any]) -> Any:
    if int(row["id"]) == 7:
        raise ZeroDivisionError
    yield {"id": row["id"], "part": 0}


def test_values_are_stacked_by_the_output(lake: Path) -> None:
    def several(row: dict[str, Any]) -> Any:
        yield {"array": np.ones(2, np.float32), "flag": True, "text": "a", "number": 2.5, "whole": 7}

    batch = next(iter(loader_of(lake, transform=several)))
    assert batch["array"].dtype == torch.float32 and batch["array"].shape == (4, 2) and batch["text"] == ["a"] * 4
    assert (batch["flag"].dtype, batch["number"].dtype) == (torch.bool, torch.float64)
    arrays = next(iter(loader_of(lake, transform=several, output="numpy")))
    assert isinstance(arrays["whole"], np.ndarray) and arrays["whole"].dtype == np.int64
    assert next(iter(loader_of(lake, transform=cut, output="numpy")))["part"].tolist() != []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"transform": None}, "needs transform="),
        ({"batch_size": None}, "needs a batch_size="),
        ({"output": "arrow"}, "needs output="),
        ({"drop_last": True}, "needs drop_last=False"),
        ({"options": ReadOptions(on_new_version="next_epoch")}, 'needs on_new_version="keep"'),
        ({"consumed": {}}, "needs no consumed="),
        ({"follow": True}, "needs no follow="),
        ({"rows": "few"}, "rows must be one of 'many'"),
    ],
)
def test_what_does_not_go_with_many_rows_is_refused(lake: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LakeDataset(lake, **{"batch_size": 4, "transform": cut, "rows": "many", **options})


def test_other_loaders_and_lengths_are_refused(lake: Path) -> None:
    dataset = loader_of(lake).dataset
    with pytest.raises(ConfigError, match="worker processes of another DataLoader"):
        list(DataLoader(dataset, batch_size=None, num_workers=1))
    with pytest.raises(TypeError, match="depends on what the transform yields"):
        len(dataset)
    with pytest.raises(ConfigError, match='a transform with rows="many"'):
        pack(dataset, length=4)
    with pytest.raises(ConfigError, match="check that it yields the same whenever it gets the same row"):
        assert_exactly_once(lambda rank, world_size, num_workers: loader_of(lake, rank=rank, world_size=world_size))
    with pytest.raises(ConfigError, match=r"source 'a' has a transform with rows.*exhausted='stop' cannot be"):
        mix({"a": (dataset, 1.0)}, exhausted="stop")
    assert sorted(all_items(DataLoader(dataset, batch_size=None))) == EVERY
    assert dataset.state_dict()["epoch"] == 1


def test_filtered_rows_yield_nothing(lake: Path) -> None:
    loader = loader_of(lake, filters=[("id", ">=", 10)], num_lanes=2)
    first = some(loader, 3)
    resumed = loader_of(lake, filters=[("id", ">=", 10)], num_lanes=3)
    resumed.load_state_dict(as_json(loader.state_dict()))
    assert sorted(all_items(first) + all_items(resumed)) == [item for item in EVERY if item[0] >= 10]


def test_chunks_of_borders_hold_at_most_eight() -> None:
    ends = [last_border(border) for border in range(200)]
    assert all(border <= end <= border + 7 for border, end in enumerate(ends))
    assert all(last_border(end) == end and last_border(end + 1) > end for end in ends)


def test_a_rank_that_never_states_its_end_is_named(job_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeckpt.data.flows.ends._PATIENCE", timedelta(milliseconds=10))
    ends, other = both_ends(job_store)
    other.state(0, None)
    assert not ends.is_over(0)
    with pytest.raises(MissingRanksError, match="rank 0 has no more rows, and rank 1 has not stated"):
        ends.is_over(1)
    other.state(1, 5)
    assert not ends.is_over(1) and not ends.is_over(4)
    monkeypatch.setattr("lakeckpt.data.flows.ends._LEAVE", timedelta(milliseconds=10))
    assert ends.is_over(5)  # and rank 1, which does not come to the end, does not keep it there


def both_ends(store: Any) -> tuple[JobEnds, JobEnds]:
    """The ends of one iteration of ranks 0 and 1."""
    return JobEnds(store, "state", rank=0, world_size=2), JobEnds(store, "state", rank=1, world_size=2)


def test_rank_0_whose_process_may_hold_the_store_leaves_each_iteration_from_one_state_last(job_store: Any) -> None:
    peeked = JobEnds(job_store, "state", rank=0, world_size=2)  # rank 0 alone looks at a batch: others need not know
    peeked.state(0, 0)
    for _ in range(3):
        first, other = both_ends(job_store)
        for one in (first, other):
            one.state(0, 0)
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(first.is_over, 0)
            with pytest.raises(TimeoutError):
                left.result(timeout=0.2)
            assert other.is_over(0) and other.is_over(0)
            assert left.result(timeout=PATIENCE_S)
        assert first.is_over(0)


def test_iterations_that_begin_with_one_state_do_not_delete_what_the_others_wait_for(
    job_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeckpt.data.flows.ends._PATIENCE", timedelta(milliseconds=10))
    waits, ahead = JobEnds(job_store, "state", rank=0, world_size=2), JobEnds(job_store, "state", rank=1, world_size=2)
    behind = JobEnds(job_store, "state", rank=1, world_size=2)
    for border in range(0, 1200, 8):
        if border == 400:
            behind.state(80, None)
        ahead.state(border, None)
    assert not waits.is_over(80)


def test_a_rank_alone_deletes_what_it_stated_long_ago(job_store: Any) -> None:
    alone = JobEnds(job_store, "other", rank=1, world_size=2)
    for border in range(0, 1200, 8):
        alone.state(border, None)
    assert not job_store.check(["lakeckpt/ends/other/1/7"]) and job_store.check(["lakeckpt/ends/other/1/1191"])

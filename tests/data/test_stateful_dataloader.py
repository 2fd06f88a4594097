"""LakeDataset under torchdata's unmodified StatefulDataLoader, and its states elsewhere by `convert_state`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lakeckpt import LakeDataset, LakeLoader, convert_state
from lakeckpt.errors import StateInvalid
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import ROWS, as_json, flat, ids, some, table_of, until_error

Make = Callable[..., StatefulDataLoader]


def stateful(lake: Path, num_workers: int, *, persistent: bool = False, start: Any = None, **case: Any) -> Any:
    """Batched by the dataset, or (``batch``) row-wise and batched by the loader; it begins at the state ``start``."""
    batch = case.pop("batch", None)
    arguments = {"batch_size": None if batch else 4, "shuffle": True, "block_size": 6, **case}
    dataset = LakeDataset(table_of(lake), **arguments)
    if start is not None:
        dataset.load_state_dict(start)
    return StatefulDataLoader(dataset, batch_size=batch, num_workers=num_workers, persistent_workers=persistent)


CASES: list[dict[str, Any]] = [{}, {"batch": 5}]
WORKERS = [0, 1, pytest.param(3, marks=pytest.mark.soak)]


@pytest.mark.parametrize("case", CASES, ids=["batched", "rowwise"])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_every_row_once_an_epoch_over_several_epochs(lake: Path, num_workers: int, case: dict[str, Any]) -> None:
    loader = stateful(lake, num_workers, persistent=num_workers == 3, **case)
    orders = [flat(loader) for _ in range(3)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("num_workers", WORKERS)
def test_the_order_of_micro_batches_does_not_depend_on_workers(lake: Path, num_workers: int) -> None:
    expected = [ids(LakeLoader(LakeDataset(lake, batch_size=4, shuffle=True, num_lanes=6))) for _ in range(1)]
    assert ids(stateful(lake, num_workers, num_lanes=6)) == expected[0]


@pytest.mark.parametrize("case", CASES, ids=["batched", "rowwise"])
@pytest.mark.parametrize(
    ("num_workers", "persistent"),
    [(0, False), (2, True), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((1, False), (3, False)))],
)
def test_a_restored_loader_goes_on_exactly_and_into_the_next_epochs(
    lake: Path, num_workers: int, persistent: bool, case: dict[str, Any]
) -> None:
    whole = stateful(lake, num_workers, persistent=persistent, **case)
    epochs = [ids(whole) for _ in range(3)]
    for taken in (0, 4, len(epochs[0])) if num_workers else range(len(epochs[0]) + 1):
        first = stateful(lake, num_workers, persistent=persistent, **case)
        before = some(first, taken)
        resumed = stateful(lake, num_workers, persistent=persistent, **case)
        resumed.load_state_dict(first.state_dict())
        rest = list(resumed)
        assert ids(before) + ids(rest) == epochs[0], taken
        assert [ids(resumed), ids(resumed)] == epochs[1:], taken


@pytest.mark.parametrize("case", CASES, ids=["batched", "rowwise"])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_state_of_a_finished_epoch_goes_on_with_the_next(lake: Path, num_workers: int, case: dict[str, Any]) -> None:
    whole = stateful(lake, num_workers, **case)
    epochs = [ids(whole) for _ in range(3)]
    first = stateful(lake, num_workers, **case)
    list(first)
    state = first.state_dict()
    resumed = stateful(lake, num_workers, **case)
    resumed.load_state_dict(state)
    assert [ids(resumed), ids(resumed)] == epochs[1:]
    elsewhere = stateful(lake, 0, start=as_json(convert_state(state)), **case)
    found = flat(elsewhere)
    assert sorted(found) == list(range(ROWS))
    if not case or num_workers < 2:  # row-wise, workers take turns in batches, not in blocks
        assert found == flat_of(epochs[1])


def flat_of(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("case", CASES, ids=["batched", "rowwise"])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_states_go_on_in_a_lakeloader_or_with_other_workers_and_ranks(
    lake: Path, num_workers: int, case: dict[str, Any]
) -> None:
    steps = len(list(stateful(lake, num_workers, **case)))
    for taken in (2, 4, steps) if num_workers else range(steps + 1):
        first = stateful(lake, num_workers, **case)
        before = flat(some(first, taken))
        state = as_json(convert_state(first.state_dict()))
        own = {name: value for name, value in case.items() if name != "batch"}
        arguments = {"batch_size": None if case.get("batch") else 4, "shuffle": True, "block_size": 6, **own}
        as_loader = LakeLoader(LakeDataset(lake, **arguments))
        as_loader.load_state_dict(state)
        rests = [flat(as_loader)]
        ranks = []
        for rank in range(3):
            dataset = LakeDataset(lake, rank=rank, world_size=3, **arguments)
            dataset.load_state_dict(state)
            ranks += flat(StatefulDataLoader(dataset, batch_size=case.get("batch"), num_workers=0))
        rests.append(ranks)
        if taken == 4:
            rests.append(flat(stateful(lake, 2, start=state, **case)))
        for rest in rests:
            assert Counter(before + rest) == Counter(range(ROWS)), taken


def test_the_law_holds_for_it_in_lockstep_ranks(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> StatefulDataLoader:
        return stateful(lake, num_workers, rank=rank, world_size=world_size)

    assert_exactly_once(make_loader, topologies=[(1, 0), (2, 0), (3, 0)], offsets=8)
    assert_exactly_once(make_loader, topologies=[(2, 1), (1, 0)], offsets=2, chains=1)


def test_the_law_holds_for_it_row_by_row(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> StatefulDataLoader:
        return stateful(lake, num_workers, rank=rank, world_size=world_size, batch=3)

    assert_exactly_once(make_loader, topologies=[(1, 0)], offsets="all")


@pytest.mark.parametrize(("batch", "num_workers"), [(1, 2), (3, 1), (3, 2)])
def test_where_ranks_get_a_row_more_than_others_states_of_any_rank_are_exact_or_refused(
    lake: Path, batch: int, num_workers: int
) -> None:
    case = {"batch": batch, "block_size": 7, "num_lanes": 3, "shuffle": False}
    seen: list[list[list[int]]] = []
    states: list[list[Any]] = []
    for rank in range(3):  # 13, 12 and 12 rows
        loader = stateful(lake, num_workers, rank=rank, world_size=3, **case)
        found = [(batch["id"].tolist(), loader.state_dict()) for batch in loader]
        seen.append([rows for rows, _ in found])
        states.append([state for _, state in found])
        ended = convert_state(loader.state_dict())
        assert (ended["epoch"], ended["step"]) == (1, 0)
    outcomes: Counter[str] = Counter()
    for rank, taken in [(k, count) for k in range(3) for count in range(1, len(states[k]) + 1)]:
        before = list(itertools.chain.from_iterable(flat_of(rows[:taken]) for rows in seen))
        try:
            state = as_json(convert_state(states[rank][taken - 1]))
        except StateInvalid as error:
            outcomes["refused"] += "a row more for some ranks" in str(error)
            continue
        dataset = LakeDataset(table_of(lake), batch_size=None, block_size=7, num_lanes=3)
        dataset.load_state_dict(state)
        assert sorted(before + flat(dataset)) == list(range(ROWS)), (rank, taken)
        outcomes["exact"] += 1
    assert outcomes.total() == sum(map(len, states)) and outcomes["exact"] >= 3
    assert (outcomes["refused"] > 0) == (num_workers > 1)


def test_after_an_end_that_other_ranks_came_to_workers_read_the_next_epochs(lake: Path) -> None:
    alone = stateful(lake, 0)
    some(alone, 10)
    ended = convert_state(alone.state_dict())
    for resume in (False, True):
        rest: list[list[int]] = []
        for rank in range(2):
            loader = stateful(lake, 2, rank=rank, world_size=2, num_lanes=4, start=ended)
            assert len(loader.dataset) and flat(loader) == []
            if resume:
                state = loader.state_dict()
                loader = stateful(lake, 2, rank=rank, world_size=2, num_lanes=4)
                loader.load_state_dict(state)
            rest += [flat(loader), flat(loader)]
        assert sorted(rest[0] + rest[2]) == sorted(rest[1] + rest[3]) == list(range(ROWS))


def test_a_state_before_the_first_batch_and_asked_twice(lake: Path) -> None:
    for num_workers in (0, 2):
        loader = stateful(lake, num_workers)
        state = loader.state_dict()
        assert convert_state(state) == convert_state(loader.state_dict())
        resumed = stateful(lake, num_workers)
        resumed.load_state_dict(state)
        assert ids(resumed) == ids(loader) == ids(stateful(lake, num_workers))


def test_other_ranks_are_refused_and_told_what_to_do(lake: Path) -> None:
    first = stateful(lake, 1)
    some(first, 3)
    other = stateful(lake, 1, rank=0, world_size=2)
    other.load_state_dict(first.state_dict())
    _, error = until_error(other)
    assert isinstance(error, StateInvalid) and "convert_state" in str(error)


def test_states_that_do_not_fit_together_are_not_converted(lake: Path) -> None:
    first = stateful(lake, 2)
    some(first, 3)
    state = first.state_dict()
    with pytest.raises(StateInvalid, match="mapping"):
        convert_state([])  # type: ignore[arg-type]
    with pytest.raises(StateInvalid, match="found 0 reader states and 0"):
        convert_state({})
    with pytest.raises(StateInvalid, match="snapshot_every_n_steps"):
        convert_state({**state, "_steps_since_snapshot": 2})
    parts = state["_snapshot"]["_worker_snapshots"]
    one = {**state, "_snapshot": {"_worker_snapshots": {"worker_1": parts["worker_1"]}}}
    with pytest.raises(StateInvalid, match=r"parts of 2 workers, found those of \[1\]"):
        convert_state(one)
    later = stateful(lake, 2)
    list(later)
    some(later, 3)
    mixed = later.state_dict()["_snapshot"]["_worker_snapshots"]["worker_1"]
    both = {**state, "_snapshot": {"_worker_snapshots": {"worker_0": parts["worker_0"], "worker_1": mixed}}}
    with pytest.raises(StateInvalid, match="different iterations"):
        convert_state(both)


def test_a_converted_state_is_converted_to_itself(lake: Path) -> None:
    loader = LakeLoader(LakeDataset(lake, batch_size=4))
    some(loader, 2)
    assert convert_state(loader.state_dict()) == loader.state_dict()

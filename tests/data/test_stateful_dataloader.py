"""LakeDataset under torchdata's unmodified StatefulDataLoader: exact for as many ranks and workers as it had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lakeckpt import LakeDataset, LakeLoader, ReadOptions
from lakeckpt.errors import ConfigError, StateError, StateUnavailable
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import ROWS, dataset_of, ids, some, table_of, until_error

Make = Callable[..., StatefulDataLoader]


def stateful(lake: Path, num_workers: int, *, persistent: bool = False, **case: Any) -> Any:
    """Batched by the dataset, or (``batch``) row-wise and batched by the loader."""
    batch = case.pop("batch", None)
    arguments = {"batch_size": None if batch else 4, "shuffle": True, **case}
    dataset = dataset_of(table_of(lake), **arguments)
    return StatefulDataLoader(dataset, batch_size=batch, num_workers=num_workers, persistent_workers=persistent)


def epoch_of(loader: Any, epoch: int) -> list[list[int]]:
    loader.dataset.set_epoch(epoch)
    return ids(loader)


CASES = [(0, {}), (0, {"batch": 5}), (1, {}), pytest.param(3, {}, marks=pytest.mark.soak)]


@pytest.mark.parametrize(("num_workers", "case"), CASES)
def test_every_row_once_an_epoch_over_several_epochs(lake: Path, num_workers: int, case: dict[str, Any]) -> None:
    loader = stateful(lake, num_workers, persistent=num_workers == 3, **case)
    orders = [[row for rows in epoch_of(loader, epoch) for row in rows] for epoch in range(3)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("num_workers", [0, 1, pytest.param(3, marks=pytest.mark.soak)])
def test_the_order_of_micro_batches_does_not_depend_on_workers(lake: Path, num_workers: int) -> None:
    expected = ids(LakeLoader(LakeDataset(lake, batch_size=4, shuffle=True, options=ReadOptions(num_lanes=6))))
    assert ids(stateful(lake, num_workers, num_lanes=6)) == expected


@pytest.mark.parametrize(
    ("num_workers", "persistent", "case"),
    [
        (0, False, {}),
        (0, False, {"batch": 5}),
        (0, False, {"drop_last": True, "num_lanes": 6}),
        (2, True, {}),
        *(pytest.param(*one, {}, marks=pytest.mark.soak) for one in ((1, False), (3, False))),
    ],
)
def test_a_restored_loader_goes_on_exactly_and_into_the_next_epochs(
    lake: Path, num_workers: int, persistent: bool, case: dict[str, Any]
) -> None:
    whole = stateful(lake, num_workers, persistent=persistent, **case)
    epochs = [epoch_of(whole, epoch) for epoch in range(3)]
    for taken in (0, 4, len(epochs[0])) if num_workers else range(len(epochs[0]) + 1):
        first = stateful(lake, num_workers, persistent=persistent, **case)
        before = some(first, taken)
        resumed = stateful(lake, num_workers, persistent=persistent, **case)
        resumed.load_state_dict(first.state_dict())
        rest = list(resumed)
        assert ids(before) + ids(rest) == epochs[0], taken
        assert [epoch_of(resumed, epoch) for epoch in (1, 2)] == epochs[1:], taken


@pytest.mark.parametrize(("num_workers", "case"), CASES)
def test_a_state_of_a_finished_epoch_goes_on_with_the_next(lake: Path, num_workers: int, case: dict[str, Any]) -> None:
    whole = stateful(lake, num_workers, **case)
    epochs = [epoch_of(whole, epoch) for epoch in range(3)]
    first = stateful(lake, num_workers, **case)
    list(first)
    state = first.state_dict()
    resumed = stateful(lake, num_workers, **case)
    resumed.load_state_dict(state)
    assert [epoch_of(resumed, 1), epoch_of(resumed, 2)] == epochs[1:]


@pytest.mark.parametrize("topology", [(1, 0), (3, 0), pytest.param((2, 1), marks=pytest.mark.soak)])
def test_the_law_holds_for_it_in_lockstep_ranks(lake: Path, topology: tuple[int, int]) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> StatefulDataLoader:
        return stateful(lake, num_workers, rank=rank, world_size=world_size)

    assert_exactly_once(make_loader, topologies=[topology], offsets=2 if topology[1] else 8, chains=1)


def test_the_law_holds_for_it_row_by_row(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> StatefulDataLoader:
        return stateful(lake, num_workers, rank=rank, world_size=world_size, batch=3)

    assert_exactly_once(make_loader, topologies=[(1, 0)], offsets="all")


def test_the_law_asked_for_several_topologies_says_that_it_goes_on_with_one(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> StatefulDataLoader:
        return stateful(lake, num_workers, rank=rank, world_size=world_size)

    with pytest.raises(ConfigError, match="one of topologies= at a time"):
        assert_exactly_once(make_loader, topologies=[(1, 0), (2, 0)], offsets=2)


def test_a_state_before_the_first_batch_and_asked_twice(lake: Path) -> None:
    for num_workers in (0, 2):
        loader = stateful(lake, num_workers)
        state = loader.state_dict()
        assert state == loader.state_dict()
        resumed = stateful(lake, num_workers)
        resumed.load_state_dict(state)
        assert ids(resumed) == ids(loader) == ids(stateful(lake, num_workers))


def test_single_rows_from_workers_have_no_state(lake: Path) -> None:
    _, error = until_error(stateful(lake, 1, batch=5))
    assert isinstance(error, StateUnavailable) and "single rows" in str(error)


def test_other_ranks_are_refused_and_told_what_to_do(lake: Path) -> None:
    first = stateful(lake, 1)
    some(first, 3)
    other = stateful(lake, 1, rank=0, world_size=2)
    other.load_state_dict(first.state_dict())
    _, error = until_error(other)
    assert isinstance(error, StateError) and "LakeLoader" in str(error)

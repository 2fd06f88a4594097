"""The law, for what users are offered: every kind of end, order and output, restored everywhere and chained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import LakeLoader, open_table
from lakeckpt.testing import Attempt, assert_exactly_once, histories, replay, topologies
from tests.data.reading import dataset_of
from tests.examples import examples
from tests.lakes import LakeSpec, tables

SHAPES = [(1, 0), (2, 0), (3, 0), (4, 0, {"num_lanes": 8}), (2, 0, {"batch_size": 3})]


def make_of(lake: Path, *, early: bool = False, **fixed: Any) -> Callable[..., LakeLoader]:
    """Makes loaders; ``early``: that begin to read before a state is loaded."""
    table = open_table(lake)

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> LakeLoader:
        dataset = dataset_of(table, **{"batch_size": 4, **fixed, **options}, rank=rank, world_size=world_size)
        loader = LakeLoader(dataset, num_workers=num_workers)
        if early and not num_workers:
            loader._reader.start()
        return loader

    return make_loader


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "drop_last": True},
        {"shuffle": True, "endless": True},
        {"drop_last": True, "num_lanes": 6},
        {"output": "numpy", "shuffle": True, "shuffle_window": 1},
        {"output": "arrow"},
        {"batch_size": 64},
    ],
    ids=lambda case: ",".join(f"{name}={value}" for name, value in case.items()) or "plain",
)
def test_every_row_counts_once_restored_everywhere(lake: Path, case: dict[str, Any]) -> None:
    assert_exactly_once(make_of(lake, **case), topologies=SHAPES, offsets=4, chains=3)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"drop_last": True, "shuffle": True},
        {"endless": True},
        {"shuffle": True, "num_lanes": 12},
    ],
    ids=lambda case: ",".join(f"{name}={value}" for name, value in case.items()),
)
def test_every_row_counts_once_row_by_row(lake: Path, case: dict[str, Any]) -> None:
    shapes = [(1, 0), (2, 0), (3, 0)]
    assert_exactly_once(make_of(lake, batch_size=None, **case), topologies=shapes, offsets=5, chains=3)


@pytest.mark.filterwarnings("ignore:.* windows of .* row groups are open at once")
@settings(max_examples=examples(40))
@given(
    spec=tables(max_columns=2),
    history=histories(topologies(max_world_size=6, max_batch_size=9, max_lanes=13), max_attempts=6, max_steps=10),
    ends=st.sampled_from([{}, {"drop_last": True}, {"endless": True}]),
    window=st.integers(0, 5),
    seed=st.integers(-(2**63), 2**64 - 1),
    ahead=st.fixed_dictionaries({"early": st.booleans(), "memory_limit_bytes": st.none() | st.integers(1, 5000)}),
)
def test_any_history_of_any_table_counts_every_row_once(
    make_lake: Callable[[LakeSpec], Path],
    spec: LakeSpec,
    history: list[Attempt],
    ends: dict[str, Any],
    window: int,
    seed: int,
    ahead: dict[str, Any],
) -> None:
    if ends == {"endless": True} and not spec.rows:
        return
    order = {"shuffle": window > 0, "shuffle_window": max(window, 1), "seed": seed}
    replay(make_of(make_lake(spec), **ends, **order, **ahead), history)


@settings(max_examples=examples(25))
@given(
    spec=tables(max_columns=1, max_group_rows=7),
    history=histories(topologies(max_world_size=4, max_lanes=9), max_attempts=5, max_steps=9),
    case=st.sampled_from([{}, {"drop_last": True}, {"endless": True}]),
)
def test_any_history_of_single_rows_counts_every_row_once(
    make_lake: Callable[[LakeSpec], Path], spec: LakeSpec, history: list[Attempt], case: dict[str, Any]
) -> None:
    if case == {"endless": True} and not spec.rows:
        return
    make_loader = make_of(make_lake(spec), shuffle=True, **{"batch_size": None, **case})
    replay(make_loader, history)

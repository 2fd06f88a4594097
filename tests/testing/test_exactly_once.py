"""`assert_exactly_once` passes what is right and catches what is wrong, with a history that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import Batch, LakeDataset, LakeLoader, open_table
from lakeckpt.errors import ConfigError
from lakeckpt.testing import Attempt, Topology, assert_exactly_once, histories, replay, topologies
from tests.data.reading import dataset_of
from tests.examples import examples
from tests.lakes import LakeSpec, tables
from tests.testing.wrong_loaders import UNTRACKED, WRONG, Wrapped, make_of

SPEC = LakeSpec(files=((7, 0, 5), (), (9, 4)), columns=("string",))
FEW = ((2, 0), (1, 0), (3, 0))
NAMES = {"Attempt": Attempt, "Topology": Topology}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return SPEC.write(tmp_path / "lake")


def script_of(error: BaseException) -> str:
    found = re.search(r"Replay it with:\n\n(.*?\n\))\n\n", str(error), re.DOTALL)
    assert found, str(error)
    return found.group(1)


def test_a_right_loader_passes_at_every_offset(lake: Path) -> None:
    assert_exactly_once(make_of(None, lake), topologies=FEW, offsets="all")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_loader_is_caught_and_its_script_replays_the_failure(wrong: type[Wrapped], lake: Path) -> None:
    make_loader = make_of(wrong, lake, columns=["id"])
    with pytest.raises(AssertionError, match="exactly-once does not hold") as caught:
        assert_exactly_once(make_loader, topologies=FEW)
    script = script_of(caught.value)
    assert script.count("Attempt(") <= 2, script
    if wrong.__name__ == "ReordersAfterARestore":
        return  # whose rows are all there: it shows beside a run that did not crash, not in a replay
    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        exec(script, {"make_loader": make_loader})


def test_the_order_after_a_restore_is_held_to_that_of_the_run_without_a_crash(lake: Path) -> None:
    with pytest.raises(AssertionError, match="and without a crash it gave"):
        assert_exactly_once(make_of(_named("ReordersAfterARestore"), lake), topologies=[(1, 0)], chains=0)


@pytest.mark.parametrize("wrong", [None, *UNTRACKED], ids=lambda wrong: getattr(wrong, "__name__", "right"))
def test_without_receipts_rows_are_counted(wrong: type[LakeDataset] | None, lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> LakeDataset:
        return (wrong or LakeDataset)(lake, batch_size=4, rank=rank, world_size=world_size, shuffle=True)

    if wrong is None:
        assert_exactly_once(make_loader, topologies=FEW)
        return
    with pytest.raises(AssertionError, match=r"consumed too often|never consumed|without a crash"):
        assert_exactly_once(make_loader, topologies=FEW)


@pytest.mark.parametrize("name", ["CountsPrefetched", "ForgetsTheState", "ResumesOneLate"])
@pytest.mark.parametrize("case", [{"endless": True}, {"drop_last": True}, {"batch_size": None}])
def test_wrong_loaders_are_caught_at_other_ends_too(name: str, case: dict[str, Any], lake: Path) -> None:
    wrong = next(one for one in WRONG if one.__name__ == name)
    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        assert_exactly_once(make_of(wrong, lake, **case), topologies=FEW, offsets=8)


class _SkipsTheLastRow(Wrapped):
    def __iter__(self) -> Any:
        for number, row in enumerate(super().__iter__(), start=1):
            if number < len(self.inner):
                yield row


def test_a_last_row_that_is_never_given_is_caught(lake: Path) -> None:
    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        assert_exactly_once(make_of(_SkipsTheLastRow, lake, batch_size=None), topologies=FEW, offsets=8)


@pytest.mark.parametrize(
    "case",
    [{"endless": True}, pytest.param({"drop_last": True}, marks=pytest.mark.soak), {"batch_size": None}],
)
def test_a_right_loader_passes_at_other_ends(case: dict[str, Any], lake: Path) -> None:
    assert_exactly_once(make_of(None, lake, **case), topologies=FEW, offsets=4)


@pytest.mark.soak
def test_batches_in_flight_in_workers_are_not_counted(lake: Path) -> None:
    assert_exactly_once(make_of(None, lake, num_lanes=None), topologies=[(1, 2), (2, 1)], offsets=2, chains=1)


def test_sizes_and_lanes_may_change_on_restore(lake: Path) -> None:
    shapes = [(1, 0, {"batch_size": 5}), (3, 0, {"num_lanes": None}), Topology(world_size=2, options={"num_lanes": 4})]
    assert_exactly_once(make_of(None, lake), topologies=shapes)


def doubled(batch: Batch) -> dict[str, Any]:
    return {"twice": batch["id"] * 2}


def test_the_rows_of_a_transform_are_compared_with_a_run_without_a_restore(lake: Path) -> None:
    assert_exactly_once(make_of(None, lake, transform=doubled), topologies=FEW)
    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        assert_exactly_once(make_of(_named("ForgetsTheState"), lake, transform=doubled, num_lanes=1), topologies=FEW)


def test_a_transform_that_loses_a_row_is_caught_by_a_column(lake: Path) -> None:
    def loses(batch: Batch) -> dict[str, Any]:
        return {"id": batch["id"][:-1]} if (batch["id"] == 11).any() else {"id": batch["id"]}

    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        assert_exactly_once(make_of(None, lake, transform=loses), topologies=FEW, key="id")


def test_a_function_says_which_rows_an_item_holds(lake: Path) -> None:
    def text(batch: Batch) -> str:
        return ",".join(str(i) for i in batch["id"].tolist())

    def keys(item: str) -> Iterable[str]:
        return item.split(",") if item else []

    every = [str(i) for i in range(SPEC.rows)]
    assert_exactly_once(make_of(None, lake, transform=text), topologies=FEW, key=keys, expected=every)
    with pytest.raises(AssertionError, match=r"never consumed.*'25'"):
        assert_exactly_once(make_of(None, lake, transform=text), topologies=FEW, key=keys, expected=[*every, "25"])


def test_what_cannot_be_compared_is_refused(lake: Path) -> None:
    with pytest.raises(ConfigError, match="at least one topology"):
        assert_exactly_once(make_of(None, lake), topologies=[])
    with pytest.raises(ConfigError, match="give expected="):
        assert_exactly_once(make_of(None, lake, transform=doubled, endless=True))
    with pytest.raises(ConfigError, match=r"not among the columns"):
        assert_exactly_once(make_of(None, lake, transform=doubled), key="id")
    with pytest.raises(ConfigError, match="must return a LakeLoader"):
        assert_exactly_once(lambda rank, world_size, num_workers: [])
    with pytest.raises(ConfigError, match="key=function"):
        assert_exactly_once(make_of(None, lake, transform=str))
    with pytest.raises(ConfigError, match="at least one attempt"):
        replay(make_of(None, lake), [])
    with pytest.raises(ConfigError, match="a topology is"):
        Attempt(topology=3)  # type: ignore[arg-type]


def _named(name: str) -> type[Wrapped]:
    return next(one for one in WRONG if one.__name__ == name)


def test_failures_are_told_with_the_smallest_history_found(lake: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_exactly_once(make_of(_named("ForgetsTheState"), lake), topologies=FEW)
    history = eval(re.search(r"\[\n.*?\n    \]", str(caught.value), re.DOTALL).group(0), NAMES)  # type: ignore[union-attr]
    assert history == [Attempt(topology=(2, 0), steps=1), Attempt(topology=(2, 0))]


@given(
    st.lists(
        st.builds(Attempt, topology=topologies(max_batch_size=4, max_lanes=3), steps=st.none() | st.integers(0, 5))
    )
)
def test_histories_print_as_the_source_that_makes_them(history: list[Attempt]) -> None:
    assert eval(repr(history), NAMES) == history


@pytest.mark.soak
@settings(max_examples=examples(100))
@given(
    spec=tables(nulls=False, max_group_rows=8),
    history=histories(topologies(max_batch_size=6, max_lanes=8), max_attempts=4, max_steps=8),
    case=st.sampled_from([{}, {"drop_last": True}, {"endless": True}, {"shuffle": False}, {"batch_size": None}]),
)
def test_any_history_over_any_table_counts_every_row_once(
    make_lake: Callable[[LakeSpec], Path], spec: LakeSpec, history: list[Attempt], case: dict[str, Any]
) -> None:
    if case == {"endless": True} and not spec.rows:
        return
    table = open_table(make_lake(spec))

    def make_loader(rank: int, world_size: int, num_workers: int, batch_size: int, num_lanes: int | None) -> LakeLoader:
        arguments = {"batch_size": batch_size, "num_lanes": num_lanes, "shuffle": True, **case}
        return LakeLoader(dataset_of(table, rank=rank, world_size=world_size, **arguments))

    replay(make_loader, history)

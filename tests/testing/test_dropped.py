"""What ``drop_last=True`` leaves out is known to the row: a loader that loses one more is caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt import Batch, LakeDataset
from lakeckpt.core.changes import replan, start
from lakeckpt.core.identity import Identity
from lakeckpt.core.order import OrderSpec, Tail
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import ConfigError
from lakeckpt.testing import assert_exactly_once
from lakeckpt.testing.receipt_laws import dealt, most_dropped, planned_drop
from tests.data.reading import dataset_of
from tests.lakes import LakeSpec
from tests.testing.wrong_loaders import Wrapped, make_of

ROWS = 33
FEW = ((2, 0), (1, 0), (3, 0))
chains = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 4)), min_size=1)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return LakeSpec(files=((10, 7), (13, 3))).write(tmp_path / "lake")


@given(rows=st.integers(0, 120), chain=chains, tail=st.sampled_from(["drop", "short"]))
def test_the_plan_says_what_is_left_out_and_the_bound_holds_for_any_chain(
    rows: int, chain: list[tuple[int, int, int, int]], tail: Tail
) -> None:
    spec = OrderSpec(seed=1, shuffle=True, window=2)
    identity = Identity(table="t", selection="", rows=rows, spec=spec, tail=tail, endless=False)
    state: State | None = None
    seen: set[int] = set()
    for world_size, lanes_each, batch_size, steps in [*chain, (*chain[0][:3], 10**6)]:
        topology = {"num_lanes": lanes_each * world_size, "batch_size": batch_size, "world_size": world_size}
        state = start(identity, epoch=0, **topology) if state is None else replan(state, **topology)
        plan = Plan(state)
        assert plan.steps is not None
        stop = min(plan.steps, state.step + steps)
        for step in range(state.step, stop):
            for rank in range(state.segment.world_size):
                spans = plan.assignment(step, rank).receipt.spans
                seen.update(position for span in spans for position in range(span.start, span.stop))
        state = replace(state, step=max(state.step, stop))
    assert sorted(seen) == [row for low, high in dealt(plan) for row in range(low, high)]
    assert rows - len(seen) == planned_drop(plan) <= most_dropped(plan.state)
    assert most_dropped(plan.state) == 0 or tail == "drop"


def ids(item: Any) -> list[int]:
    return list(item["id"].tolist()) if item["id"].ndim else [int(item["id"])]


def halves(batch: Batch) -> dict[str, Any]:
    return {"id": batch["id"][::2]}


def without_one(batch: Batch) -> dict[str, Any]:
    return {"id": batch["id"][batch["id"] != 11]}


@pytest.mark.filterwarnings("ignore:the transform= of a LakeDataset got:UserWarning")
@pytest.mark.parametrize("loses", [halves, without_one])
@pytest.mark.parametrize("batch_size", [3, 4])
def test_a_transform_that_loses_rows_is_caught_though_some_may_be_dropped(
    loses: Any, batch_size: int, lake: Path
) -> None:
    make_loader = make_of(None, lake, transform=loses, drop_last=True, batch_size=batch_size)
    with pytest.raises(AssertionError, match=r"rows never consumed: .*may be dropped"):
        assert_exactly_once(make_loader, topologies=FEW, key=ids, expected=range(ROWS))


class _LosesItsFirstRow(LakeDataset):
    """No receipts: only numbers tell."""

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        first = next(items)
        if not self.row_wise:
            yield {"id": first["id"][1:]}
        yield from items


@pytest.mark.parametrize("batch_size", [3, None])
def test_without_receipts_a_lost_row_is_caught(batch_size: int | None, lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> LakeDataset:
        place = {"rank": rank, "world_size": world_size, "columns": ["id"]}
        return dataset_of(lake, _LosesItsFirstRow, batch_size=batch_size, shuffle=True, **place)

    with pytest.raises(AssertionError, match=r"[0-9]+ rows never consumed"):
        assert_exactly_once(make_loader, topologies=[(1, 0)], offsets=3, chains=0)


def test_without_receipts_nobody_knows_what_is_dropped(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> LakeDataset:
        return LakeDataset(lake, batch_size=4, drop_last=True, rank=rank, world_size=world_size)

    with pytest.raises(ConfigError, match="a LakeDataset has no last_receipt, and nobody knows"):
        assert_exactly_once(make_loader, topologies=[(1, 0)])


def only_the_first(batch: Batch) -> list[int]:
    receipt = batch.receipt
    return [0] if receipt is not None and receipt.micro_batch == 0 else []


class _EveryRankEndsAStepEarly(Wrapped):
    """True receipts, equal numbers of steps, and the last of them never given."""

    def __iter__(self) -> Iterator[Any]:
        steps = len(self.inner)
        for batch in super().__iter__():
            if batch.receipt.step + 1 < steps:
                yield batch


@pytest.mark.parametrize("tail", ["drop", "short"])
def test_steps_that_are_left_out_by_all_ranks_are_caught_whatever_keys_say(tail: str, lake: Path) -> None:
    make_loader = make_of(_EveryRankEndsAStepEarly, lake, tail=tail)
    with pytest.raises(AssertionError, match="rows never consumed"):
        assert_exactly_once(make_loader, topologies=[(2, 0)], chains=0)
    with pytest.raises(AssertionError, match=r"epoch 0 has ended, and its positions .* were never given"):
        assert_exactly_once(make_loader, topologies=[(2, 0)], chains=0, key=only_the_first, expected=[0])


def two_each(batch: Batch) -> dict[str, Any]:
    return {"id": batch["id"].repeat(2)}


@pytest.mark.filterwarnings("ignore:the transform= of a LakeDataset got:UserWarning")
def test_rows_that_may_be_dropped_have_one_key_each(lake: Path) -> None:
    twice = [*range(ROWS), *range(ROWS)]
    assert_exactly_once(make_of(None, lake, transform=two_each, batch_size=4), topologies=FEW, key=ids, expected=twice)
    make_loader = make_of(None, lake, transform=two_each, drop_last=True, batch_size=4)
    with pytest.raises(ConfigError, match=r"key= gave 8 keys for a batch of 4 rows.*one key for each row"):
        assert_exactly_once(make_loader, topologies=FEW, key=ids, expected=twice)


def test_row_by_row_a_run_without_a_restore_says_what_an_epoch_holds(lake: Path) -> None:
    assert_exactly_once(make_of(None, lake, batch_size=None), topologies=FEW, key=ids, offsets=4)


def test_a_plan_that_drops_more_than_tails_are_is_not_believed(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_loader = make_of(None, lake, batch_size=1, drop_last=True)
    assert_exactly_once(make_loader, topologies=[(2, 0)], chains=0, offsets=1)
    whole = Plan.steps.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Plan, "steps", property(lambda plan: whole(plan) // 2))
    with pytest.raises(AssertionError, match=r"rows never consumed: .* \(7 may be dropped\)"):
        assert_exactly_once(make_loader, topologies=[(2, 0)], chains=0, offsets=1)

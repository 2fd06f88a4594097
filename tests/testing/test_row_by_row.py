"""Row by row, ranks stay in step: `assert_exactly_once` catches those that do not, though every row counts once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import LakeDataset, Receipt
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Span
from lakeckpt.testing import Attempt, LakeSpec, assert_exactly_once, replay
from lakeckpt.testing.observed import Violation
from lakeckpt.testing.receipt_laws import check_receipts
from tests.testing.wrong_loaders import Wrapped, make_of

KEEPS_THE_LANES = [Attempt(topology=(2, 0), steps=10), Attempt(topology=(3, 0))]
"""Six lanes, of which a step of two ranks is no whole number of steps of three."""


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return LakeSpec(files=((60, 67),)).write(tmp_path / "lake")


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_ranks_that_get_unequal_numbers_of_rows_are_caught(
    tail: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_loader = make_of(None, lake, batch_size=None, block_size=10, shuffle=False, tail=tail)
    replay(make_loader, KEEPS_THE_LANES, key="id")
    # As `replan` was once: ranks out of step, each row dealt once, every receipt true.
    monkeypatch.setattr(Plan, "in_step_with", lambda plan, opened: True)
    with pytest.raises(AssertionError, match=r"not in step: they are at \(step, row\)|have ended and the others go on"):
        replay(make_loader, KEEPS_THE_LANES, key="id")


class _EndsEarlyRowByRow(LakeDataset):
    """Rank 1 is without its last ``few`` rows. No receipts, no states that would tell: the others' rows are short."""

    few = 1

    def __iter__(self) -> Iterator[Any]:
        rows = list(super().__iter__())
        yield from rows[: len(rows) - self.few] if self.topology[0] == 1 else rows


class _EndsTwoEarly(_EndsEarlyRowByRow):
    few = 2


@pytest.mark.parametrize(
    ("wrong", "tail", "match"),
    [
        (_EndsEarlyRowByRow, "drop", r"ranks \[1\] of 3 have ended and the others go on"),
        (_EndsTwoEarly, "short", r"ranks \[1\] of 3 have ended, and the others go on for more than one row"),
    ],
)
def test_without_receipts_ranks_that_end_early_are_caught(
    wrong: type[LakeDataset], tail: str, match: str, lake: Path
) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> LakeDataset:
        return wrong(lake, batch_size=None, rank=rank, world_size=world_size, tail=tail)

    with pytest.raises(AssertionError, match=match):
        assert_exactly_once(make_loader, topologies=[(3, 0)], chains=0, offsets=1)


class _RankOneIsARowAhead(Wrapped):
    """Gives the same rows, under true receipts, but rank 1 the second one first."""

    def __iter__(self) -> Iterator[Any]:
        rows = [(row, self.inner.last_receipt) for row in self.inner]
        if self.inner.topology[0] == 1:
            rows[:2] = reversed(rows[:2])
        for row, self.received in rows:
            yield row


def test_a_rank_that_is_at_another_row_is_caught(lake: Path) -> None:
    make_loader = make_of(_RankOneIsARowAhead, lake, batch_size=None, block_size=10)
    with pytest.raises(AssertionError, match=r"not in step: they are at \(step, row\) \[\(0, 0\), \(0, 1\)\]"):
        assert_exactly_once(make_loader, topologies=[(2, 0)], chains=0)


def test_receipts_of_single_rows_add_up_as_those_of_batches(lake: Path) -> None:
    dataset = LakeDataset(lake, batch_size=None, block_size=10, rank=0, world_size=2)
    first, second = (_receipt(rank) for rank in range(2))
    check_receipts([first, second], 2, dataset)
    check_receipts([first], 2, dataset)  # the last row of an epoch
    elsewhere: list[dict[str, Any]] = [{"row": 4}, {"step": 6}]
    for changes in elsewhere:
        with pytest.raises(Violation, match=r"they are at \(step, row\)"):
            check_receipts([first, replace(second, **changes)], 2, dataset)
    with pytest.raises(Violation, match="a step of 20 rows, of which receipts say"):
        check_receipts([first, replace(second, step_rows=30)], 2, dataset)


def _receipt(rank: int) -> Receipt:
    spans = (Span(epoch=0, start=10 * rank, stop=10 * rank + 10),)
    return Receipt(
        epoch=0, micro_batch=rank, lane=rank, step=5, rank=rank, world_size=2, spans=spans, step_rows=20, row=3
    )

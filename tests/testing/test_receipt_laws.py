"""What receipts of one step must add up to: each way to be untrue is caught by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import LakeDataset, LakeLoader, Receipt
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.testing.observed import Violation
from lakeckpt.testing.receipt_laws import TrueRows, check_receipts
from tests.data.reading import dataset_of
from tests.lakes import LakeSpec


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return LakeSpec(files=((9, 7), (4,))).write(tmp_path / "lake")


def loaders_of(lake: Path, **case: Any) -> list[LakeLoader]:
    case = {"batch_size": 4, "shuffle": True, **case}
    return [LakeLoader(dataset_of(lake, rank=rank, world_size=2, **case)) for rank in range(2)]


def first_step(loaders: list[LakeLoader]) -> list[Receipt]:
    return [next(iter(loader)).receipt for loader in loaders]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank": 0}, "rank 1 of 2 got a receipt of another"),
        ({"world_size": 3}, "rank 1 of 2 got a receipt of another"),
        ({"step": 1}, r"the ranks are at steps \[0, 1\]"),
        ({"step_rows": 9}, "a step of 8 rows, of which receipts say"),
        ({"spans": ()}, "a step of 4 rows"),
    ],
)
def test_receipts_that_do_not_add_up_are_caught(lake: Path, changes: dict[str, Any], match: str) -> None:
    loaders = loaders_of(lake)
    receipts = first_step(loaders)
    check_receipts(receipts, 2, loaders[0].dataset)
    with pytest.raises(Violation, match=match):
        check_receipts([receipts[0], replace(receipts[1], **changes)], 2, loaders[0].dataset)


def test_micro_batches_above_the_batch_size_or_short_in_a_stream_are_caught(lake: Path) -> None:
    receipts = first_step(loaders_of(lake))
    smaller = LakeDataset(lake, batch_size=3)
    with pytest.raises(Violation, match="a micro-batch of 4 rows is above the batch size 3"):
        check_receipts(receipts, 2, smaller)
    stream = LakeDataset(lake, batch_size=5, endless=True)
    with pytest.raises(Violation, match="of an endless stream is full"):
        check_receipts(receipts, 2, stream)


def test_rows_that_stand_elsewhere_than_their_receipt_says_are_caught(lake: Path) -> None:
    loaders = loaders_of(lake)
    plan = Plan(State.from_plain(loaders[0].state_dict()))
    batch = next(iter(loaders[0]))
    groups: list[list[Any]] = [list(range(9)), list(range(9, 16)), list(range(16, 20))]
    rows = TrueRows(loaders[0].dataset, groups)
    keys = batch["id"].tolist()
    rows.check(keys, batch.receipt, plan)
    with pytest.raises(Violation, match="it has 3 rows, not 4"):
        rows.check(keys[:3], batch.receipt, plan)
    with pytest.raises(Violation, match=f"row 1 is 99, not {keys[1]}"):
        rows.check([keys[0], 99, *keys[2:]], batch.receipt, plan)

"""`assert_exactly_once` counts sequences and tokens of packed loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import Batch, LakeLoader, open_table, pack
from lakeckpt.core import order
from lakeckpt.errors import ConfigError
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import dataset_of
from tests.testing.wrong_loaders import WRONG, Wrapped

LENGTHS = [[3, 0, 14, 1, 9, None, 2], [5, 12, 4]]
FEW = ((2, 0), (1, 0), (3, 0), (4, 0))
CASES: dict[str, dict[str, Any]] = {
    "an epoch": {},
    "in the order of the table, tokens beside documents": {"shuffle": False, "before": 1, "after": [2, 3]},
    "endless": {"endless": True},
    "what fills no batch is dropped": {"drop_last": True},
    "filtered": {"filters": [("long", "==", True)], "labels": True, "output": "numpy"},
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Documents of few different tokens, so that a token can be lost although its value is there."""
    for number, lengths in enumerate(LENGTHS):
        lists = [None if length is None else list(np.arange(length) % 3) for length in lengths]
        long = [(length or 0) > 3 for length in lengths]
        table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32())), "long": long})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    return tmp_path


def make_of(wrong: Callable[[LakeLoader], Any] | None, folder: Path, **fixed: Any) -> Callable[..., Any]:
    """A ``make_loader`` of packed loaders; ``wrong`` makes them wrong."""
    table = open_table(folder)
    packing = {name: fixed.pop(name) for name in ("before", "after", "labels") if name in fixed}

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> Any:
        arguments = {"batch_size": 2, "num_lanes": 6, "shuffle": True, "shuffle_window": 2, **fixed, **options}
        dataset = pack(dataset_of(table, rank=rank, world_size=world_size, **arguments), length=4, **packing)
        loader = LakeLoader(dataset, num_workers=num_workers)
        return loader if wrong is None else wrong(loader)

    return make_loader


@pytest.mark.parametrize("case", CASES)
@pytest.mark.soak
def test_a_right_packed_loader_passes(case: str, texts: Path) -> None:
    sizes = [*FEW, (2, 0, {"num_lanes": None, "batch_size": 3})]
    assert_exactly_once(make_of(None, texts, **CASES[case]), topologies=sizes, offsets=3, chains=4)


@pytest.mark.soak
@pytest.mark.parametrize("case", ["an epoch", "endless"])
@pytest.mark.soak
def test_a_right_packed_loader_passes_with_workers(case: str, texts: Path) -> None:
    topologies = [(1, 3), (4, 0), (2, 1), (3, 0)]
    assert_exactly_once(make_of(None, texts, **CASES[case], num_lanes=None), topologies=topologies, offsets=2, chains=2)


def test_batches_in_flight_in_workers_are_not_counted(texts: Path) -> None:
    assert_exactly_once(make_of(None, texts, num_lanes=None), topologies=[(1, 3), (2, 0)], offsets=1, chains=0)


class SplitsASequence(Wrapped):
    """Gives the last token of a sequence as the first one of the next sequence."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.received = self.inner.last_receipt
            tokens = batch["tokens"]
            yield Batch({**batch, "tokens": tokens.reshape(-1).roll(1).reshape(tokens.shape)}, batch.receipt)


class MasksAToken(Wrapped):
    """Gives a token as padding."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.received = self.inner.last_receipt
            batch["loss_mask"][:1, 0] = False
            yield batch


@pytest.mark.parametrize("wrong", [*WRONG, SplitsASequence, MasksAToken], ids=lambda wrong: wrong.__name__)
def test_a_wrong_packed_loader_is_caught(wrong: type[Wrapped], texts: Path) -> None:
    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        assert_exactly_once(make_of(wrong, texts, num_lanes=None), topologies=FEW, offsets=4, chains=2)


def test_an_order_that_loses_a_token_is_caught_although_receipts_are_right(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = order._fragments

    def wrong(*arguments: Any) -> tuple[order.Fragment, ...]:
        return tuple(
            order.Fragment(group=one.group, start=one.start - 1, stop=one.stop - 1) if one.start else one
            for one in right(*arguments)
        )

    monkeypatch.setattr(order, "_fragments", wrong)
    with pytest.raises(AssertionError, match=r"tokens consumed too often: Token\(file='.*never consumed: Token"):
        assert_exactly_once(make_of(None, texts), topologies=FEW, offsets=1, chains=0)


def tokens_of(batch: Any) -> list[int]:
    return batch["tokens"][batch["loss_mask"]].tolist()  # type: ignore[no-any-return]


def one_more(batch: Batch) -> Batch:
    batch["tokens"] += 1
    return batch


def test_the_tokens_of_a_transform_are_compared_with_a_run_without_a_restore(texts: Path) -> None:
    assert_exactly_once(make_of(None, texts, transform=one_more), topologies=FEW, offsets=2, chains=1, key=tokens_of)
    wrong = next(one for one in WRONG if one.__name__ == "ForgetsTheState")
    with pytest.raises(AssertionError, match="exactly-once does not hold"):
        assert_exactly_once(make_of(wrong, texts, transform=one_more), topologies=FEW, offsets=2, key=tokens_of)


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        ({}, {"key": "tokens"}, "tells rows apart, and this loader gives packed sequences"),
        ({"transform": one_more}, {}, "say which tokens an item holds by key=function"),
        ({"endless": True}, {"key": tokens_of}, "check the loader without key="),
        ({}, {"expected": [1, 2]}, "give expected= with key=function only"),
    ],
)
def test_what_says_nothing_of_tokens_is_refused(
    case: dict[str, Any], arguments: dict[str, Any], message: str, texts: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        assert_exactly_once(make_of(None, texts, **case), **arguments)


def test_a_packed_loader_without_receipts_is_refused(texts: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> Any:
        dataset = dataset_of(open_table(texts), batch_size=2, rank=rank, world_size=world_size)
        return pack(dataset, length=4)

    with pytest.raises(ConfigError, match="a LakeDataset has no last_receipt: check a LakeLoader"):
        assert_exactly_once(make_loader)

"""Batches of columns of fixed width are packed without being made, and arrive as those that are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, ReadOptions
from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.source import BatchSource
from lakeckpt.data.workers.packing import PlainPacking, pack
from lakeckpt.reading.columns.plain import PlainRows
from tests.data.reading import dataset_of, same
from tests.data.test_packing import arrived

ROWS, GROUP = 3000, 500
KINDS = [
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
]


def plain_table() -> dict[str, pa.Array]:
    generator = np.random.default_rng(1)
    columns = {kind: pa.array(generator.integers(0, 2, ROWS).astype(kind)) for kind in KINDS}
    columns["id"] = pa.array(np.arange(ROWS))
    columns["null"] = pa.array(np.arange(ROWS), mask=generator.random(ROWS) < 0.3)
    pairs = pa.array(generator.random(2 * ROWS, np.float32))
    columns["pair"] = pa.FixedSizeListArray.from_arrays(pairs, 2)
    return columns


@pytest.fixture(params=["plain", "ragged"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    """A table, and whether all of its columns are plain."""
    columns = plain_table()
    if request.param == "ragged":
        columns["text"] = pa.array(["x" * (row % 5) for row in range(ROWS)])
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=GROUP)
    return tmp_path, request.param == "plain"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """In this process, batches come as from workers wherever those need not make them. Which rows of windows did."""
    take, found = BatchSource.take, list[tuple[int, int]]()

    def taken(self: BatchSource, assignment: Assignment) -> tuple[Receipt, Any]:
        if (plain := self.take_plain(assignment)) is None:
            return take(self, assignment)
        rows, start, stop = plain
        found.append((start, stop))
        receipt = assignment.receipt
        return receipt, arrived(PlainPacking(rows, arrays=self.gives_arrays).pack(rows, start, stop), receipt)

    monkeypatch.setattr(BatchSource, "take", taken)
    return found


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [7, 64, 501])
def test_they_arrive_as_batches_that_were_made(
    lake: tuple[Path, bool], packed: list[tuple[int, int]], output: Any, batch_size: int, *, shuffle: bool
) -> None:
    folder, is_plain = lake
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "output": output, "nulls": "mask"}

    def batches() -> list[Any]:
        return list(LakeLoader(dataset_of(folder, **options)))

    some = batches()
    assert bool(packed) == (is_plain and (batch_size < GROUP or shuffle))
    packed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchSource, "take_plain", lambda *_: None)
        made = batches()
    assert not packed and len(some) == len(made)
    for one, other in zip(some, made, strict=True):
        assert same(one, other) and one.receipt == other.receipt
        assert pack(one, one.receipt).form == pack(other, other.receipt).form


def test_they_come_from_workers_as_from_none(lake: tuple[Path, bool]) -> None:
    folder, _ = lake
    options: dict[str, Any] = {"batch_size": 50, "num_lanes": 2, "nulls": "mask", "shuffle": True}
    one, other = (list(LakeLoader(dataset_of(folder, **options), num_workers=workers)) for workers in (0, 2))
    assert all(same(a, b) for a, b in zip(one, other, strict=True))
    other[0]["id"][:] = -1  # it is the loop's own
    assert not any((batch["id"] < 0).any() for batch in other[1:])


def test_what_a_transform_sees_is_made(lake: tuple[Path, bool], packed: list[tuple[int, int]]) -> None:
    folder, _ = lake
    seen = [
        batch["id"]
        for batch in LakeLoader(LakeDataset(folder, batch_size=50, options=ReadOptions(nulls="mask"), transform=dict))
    ]
    assert sum(map(len, seen)) == ROWS and not packed


def test_how_they_are_packed_does_not_keep_a_window_in_memory() -> None:
    rows = PlainRows.of({"a": np.arange(9)})
    assert rows is not None
    kept = weakref.WeakKeyDictionary({rows: PlainPacking(rows, arrays=False)})
    gone = weakref.ref(rows)
    assert kept[rows].pack(rows, 2, 5).sizes == [3]
    del rows
    gc.collect()
    assert gone() is None and not kept


@pytest.mark.parametrize(
    "odd",
    [
        np.arange(8)[::2],
        np.zeros((4, 0)),
        np.arange(4, dtype=">i4"),
        np.array(["a"] * 4),
        np.asfortranarray(np.zeros((4, 2))),
        {"x": np.arange(4)},
    ],
    ids=["strided", "empty", "big-endian", "text", "Fortran", "a struct"],
)
def test_what_is_more_than_runs_of_numbers_is_not_plain(odd: Any) -> None:
    assert PlainRows.of({"a": np.arange(4), "odd": odd}) is None

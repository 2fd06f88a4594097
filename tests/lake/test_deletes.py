"""Deleted rows do not exist: they are counted out of row groups, and survive every way of packing them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt import open_table
from lakeckpt.errors import WireDamaged
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.lake.table.version import TableVersion
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.wire.documents import from_plain, to_plain
from tests.lake.test_index import FILES, index_of

ROWS = st.one_of(st.sets(st.integers(0, 200), min_size=1), st.sets(st.integers(0, 2**40), min_size=1, max_size=9))


@given(deleted=st.dictionaries(st.integers(0, 5), ROWS, max_size=4))
def test_deletes_are_what_was_packed_and_come_back_from_the_wire(deleted: dict[int, set[int]]) -> None:
    deletes = Deletes.of({file: np.array([*rows, *rows], np.int64) for file, rows in deleted.items()})
    again: Deletes = from_plain(Deletes, to_plain(deletes), "deletes")
    for file in range(6):
        assert again.rows(file).tolist() == sorted(deleted.get(file, ()))
    assert again == deletes
    assert deletes.total == sum(map(len, deleted.values())) and bool(deletes) == bool(deleted)


@given(rows=st.sets(st.integers(0, 99), min_size=1), start=st.integers(0, 100), size=st.integers(0, 30))
def test_survivors_of_a_stretch_are_all_but_the_deleted(rows: set[int], start: int, size: int) -> None:
    left = Deletes.of({3: np.array(sorted(rows))}).surviving(3, start, start + size)
    wanted = [row not in rows for row in range(start, start + size)]
    assert (wanted if left is not None else [True] * size) == ([] if left is None and not size else wanted)
    assert left is None or left.tolist() == wanted


@pytest.mark.parametrize("every", [2, 100], ids=["bitmap", "ordinals"])
def test_survivors_of_a_stretch_cost_the_stretch_and_not_the_file(every: int) -> None:
    """What is allocated stands for the work: every step is numpy's, over arrays as long as what it looks at."""

    def allocated(deletes: Deletes, start: int) -> int:
        tracemalloc.start()
        try:
            left = deletes.surviving(0, start, start + 1000)
            assert left is not None and left.sum() == 1000 - 1000 // every
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for rows in (10**4, 10**6):
        deletes = Deletes.of({0: np.arange(0, rows, every)})
        for start in (0, rows // 2 - 500, rows - 1000):
            assert allocated(deletes, start) < 30_000


def test_survivors_at_the_borders_of_what_ordinals_hold_are_right() -> None:
    last = 2**32 - 1
    deletes = Deletes.of({0: np.array([1, last]), 1: np.array([1, last + 1])})
    for file, row in ((0, last), (1, last + 1)):
        left = deletes.surviving(file, row - 2, row + 2)
        assert left is not None and left.tolist() == [True, True, False, True]
        assert deletes.surviving(file, row + 1, row + 9) is None
        assert deletes.surviving(file, row - 9, row) is None


def test_a_million_deleted_rows_take_a_bit_each() -> None:
    deletes = Deletes.of({0: np.arange(0, 2_000_000, 2)})
    assert len(deletes.packed[0][2]) == 250_000


def with_deletes(rows: dict[int, list[int]]) -> TableIndex:
    return index_of(FILES, deletes=Deletes.of({file: np.array(r, np.int64) for file, r in rows.items()}))


def test_an_index_counts_deleted_rows_out_and_is_another_content() -> None:
    index = with_deletes({0: [0, 2, 3], 3: [5]})
    assert index.stored_rows.tolist() == [3, 0, 2, 0, 5, 1]
    assert index.group_rows.tolist() == [1, 0, 1, 0, 5, 0]
    assert index.num_rows == 7
    assert index.digest != index_of(FILES).digest != with_deletes({0: [0, 2, 4], 3: [5]}).digest
    again = TableIndex.loads(index.dumps())
    assert again == index and again.group_rows.tolist() == index.group_rows.tolist()
    left = index.surviving(2)
    assert left is not None and left.tolist() == [False, True]
    assert index.surviving(4) is None


@pytest.mark.parametrize("rows", [{0: [5]}, {1: [0]}, {4: [0]}])
def test_deletes_of_rows_that_are_not_there_are_refused(rows: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="deleted"):
        with_deletes(rows)


def test_a_version_is_named_and_comes_back_from_the_wire() -> None:
    version = TableVersion(format="delta", name="12", timestamp_ms=5, table_id="x")
    index = index_of(FILES, version=version)
    assert TableIndex.loads(index.dumps()).version == version
    assert str(version) == "Delta version 12"
    other = TableVersion(format="delta", name="13", timestamp_ms=6, table_id="x")
    assert index.digest == index_of(FILES, version=other).digest


def test_what_a_version_cannot_be_is_refused() -> None:
    for wrong in ({"format": "delta"}, {"format": "parquet", "name": "7"}):
        with pytest.raises(ValueError, match="format"):
            TableVersion(**wrong)  # type: ignore[arg-type]


def damaged(change: Callable[[dict[str, Any]], Any]) -> bytes:
    from lakeckpt.lake.table import index as module
    from lakeckpt.wire import envelope as codec

    index = with_deletes({0: [1]})
    value = codec.loads(index.dumps(), kind=module.KIND, supported=module.VERSION)
    change(value)
    return codec.dumps(value, kind=module.KIND, version=module.VERSION)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(deletes=[]),
        lambda v: v["deletes"].update(packed={0: [1, 1]}),
        lambda v: v["deletes"].update(packed={0: [1, 1, bytes(4)]}),
        lambda v: v["deletes"].update(packed={}),
        lambda v: v["version"].update(format="x"),
        lambda v: v["version"].update(name=7),
    ],
)
def test_changed_deletes_and_versions_are_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(WireDamaged):
        TableIndex.loads(damaged(change))


def test_a_decoder_reads_the_rows_that_exist(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10)}), tmp_path / "a.parquet", row_group_size=4)
    pinned = open_table(tmp_path)
    index = pinned.index
    fields = {name: getattr(index, name) for name in ("paths", "size_bytes", "etags", "mtime_ns", "footer_digests")}
    fields |= {name: getattr(index, name) for name in ("first_group", "stored_rows", "group_bytes", "partitions")}
    deletes = Deletes.of({0: np.array([0, 2, 4, 5, 6, 7, 9])})
    table = Table(
        uri=pinned.uri, storage=pinned.storage, index=TableIndex(**fields, schema=index.schema, deletes=deletes)
    )
    decoder = RowGroupDecoder(table)
    found = [decoder.decode(group, 0, int(rows))["x"].to_pylist() for group, rows in enumerate(table.index.group_rows)]
    assert found == [[1, 3], [], [8]]
    assert decoder.decode(0, 1, 2)["x"].to_pylist() == [3]
    with pytest.raises(ValueError, match="which has 2 rows"):
        decoder.decode(0, 0, 3)

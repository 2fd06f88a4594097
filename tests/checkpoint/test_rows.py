"""Positions become rows of files, as a set and in order, whatever windows and row groups they cross."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.consumed.rows import RowOrder, name_rows
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import LayoutKey
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.reading.filters.selection import RowSelection


def index_of(files: list[list[int]]) -> TableIndex:
    groups = [rows for file in files for rows in file]
    return TableIndex(
        paths=tuple(f"{number:03d}.parquet" for number in range(len(files))),
        size_bytes=np.full(len(files), 100),
        etags=(None,) * len(files),
        mtime_ns=np.full(len(files), -1),
        footer_digests=b"0" * 16 * len(files),
        first_group=np.concatenate([[0], np.cumsum([len(file) for file in files], dtype=np.int64)]),
        stored_rows=np.array(groups, np.int64),
        group_bytes=np.array(groups, np.int64),
        partitions=(),
        schema=pa.schema([("x", pa.int64())]),
    )


tables = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5)
pairs = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), max_size=6)


@given(files=tables, pieces=pairs, lanes=st.integers(1, 5), window=st.integers(1, 4), shuffle=st.booleans())
def test_the_set_of_rows_is_that_of_the_rows_in_order(
    files: list[list[int]], pieces: list[tuple[int, int]], lanes: int, window: int, shuffle: bool
) -> None:
    order = RowOrder(index_of(files))
    rows = order.index.num_rows
    asked = Intervals.of([(start, start + size) for start, size in pieces]).intersection(Intervals.whole(rows))
    spec = OrderSpec(seed=3, shuffle=shuffle, window=window if shuffle else 1)
    key = LayoutKey(epoch=2, num_lanes=lanes, rotation=lanes - 1)
    each = order.locate(spec, key, asked)
    assert len(each) == asked.size
    assert order.table_rows(spec, key, asked) == Intervals.of([(row, row + 1) for row in each.tolist()])
    assert order.table_rows(spec, key, Intervals.whole(rows)) == Intervals.whole(rows)


@given(files=tables, pieces=pairs)
def test_rows_are_named_by_file_and_row_group_in_the_order_of_the_table(
    files: list[list[int]], pieces: list[tuple[int, int]]
) -> None:
    order = RowOrder(index_of(files))
    asked = Intervals.of([(start, start + size) for start, size in pieces])
    asked = asked.intersection(Intervals.whole(order.index.num_rows))
    expected: dict[tuple[str, int], list[int]] = {}
    for start, stop in asked.pairs():
        for row in range(start, stop):
            file, group, inside = order.place(row)
            expected.setdefault((file, group), []).append(inside)
    named = name_rows(order, asked)
    found = {(one.file, one.row_group): [r for a, b in one.rows.pairs() for r in range(a, b)] for one in named}
    assert list(found.items()) == list(expected.items())
    for one in named:
        assert one.of == files[int(one.file[:3])][one.row_group] and one.rows.size <= one.of


def test_a_place_is_the_one_that_the_files_have() -> None:
    order = RowOrder(index_of([[3, 0, 2], [], [0, 4]]))
    assert [order.place(row) for row in range(9)] == [
        *(("000.parquet", 0, row) for row in range(3)),
        *(("000.parquet", 2, row) for row in range(2)),
        *(("002.parquet", 1, row) for row in range(4)),
    ]


@given(data=st.data(), files=tables)
def test_rows_are_named_as_the_file_stores_them_where_that_can_be_known(
    data: st.DataObject, files: list[list[int]]
) -> None:
    """Deleted rows are not counted; of a row group that a filter keeps in part, rows are counted among those kept."""
    stored = index_of(files)
    gone = {
        file: np.array(sorted(data.draw(st.sets(st.integers(0, sum(rows) - 1)))), np.int64)
        for file, rows in enumerate(files)
        if sum(rows)
    }
    index = replace(stored, deletes=Deletes.of(gone))
    kept = [data.draw(st.sampled_from([rows, rows // 2, 0])) for rows in index.group_rows.tolist()]
    counts = np.array(kept, np.int64)
    digests = np.minimum(counts, 1).astype(np.uint64)
    selection = RowSelection(
        table=index.digest, text="", expression="0" * 32, pyarrow="0", group_rows=counts, group_digests=digests
    )
    order = RowOrder(index, selection)
    assert order.num_rows == sum(kept)
    expected = []
    for group, rows in enumerate(kept):
        file, ordinal = index.group(group)
        before = sum(files[file][:ordinal])
        left = [row for row in range(files[file][ordinal]) if row + before not in set(gone.get(file, []))]
        known = rows == len(left)
        names = left if known else list(range(rows))
        expected += [(index.paths[file], ordinal, name, known, files[file][ordinal] if known else rows)
                     for name in names]  # fmt: skip
    assert [order.place(row) for row in range(order.num_rows)] == [one[:3] for one in expected]
    named = name_rows(order, Intervals.whole(order.num_rows))
    found = [
        (one.file, one.row_group, row, one.stored, one.of)
        for one in named
        for start, stop in one.rows.pairs()
        for row in range(start, stop)
    ]
    assert found == expected


def test_only_a_few_layouts_are_kept_and_each_is_right() -> None:
    order = RowOrder(index_of([[5] * 8]))
    spec = OrderSpec(seed=3, shuffle=True, window=2)
    keys = [LayoutKey(epoch=epoch, num_lanes=2, rotation=0) for epoch in range(9)]
    first = [order.layout(spec, key).order.tolist() for key in keys]
    assert [order.layout(spec, key).order.tolist() for key in keys] == first
    assert [order.layout(spec, key).epoch for key in keys] == list(range(9))

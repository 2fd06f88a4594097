"""Counting finds what pyarrow's filter keeps of each row group, and reads no more than it must."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import Table, open_table
from lakeckpt.errors import DataFileChanged, DataFileDamaged
from lakeckpt.lake.storage.base import ObjectInfo, Storage
from lakeckpt.reading.filters.count import count_rows, units_of
from lakeckpt.reading.filters.decoder import FilteredDecoder
from lakeckpt.reading.filters.row_filter import row_filter
from lakeckpt.reading.filters.selection import EVERY, NONE
from tests.examples import examples
from tests.reading.filters.filtering import expressions, kept_by_pyarrow, tables, with_deletes

f = pc.field


class Meter:
    """A storage that notes what is read of the one below: (path, start, stop)."""

    def __init__(self, below: Storage) -> None:
        self.below = below
        self.reads: list[tuple[str, int, int]] = []
        self.lock = threading.Lock()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self.below.list(prefix)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        data = self.below.read(path, start, stop, etag=etag)
        with self.lock:
            self.reads.append((path, start, start + len(data)))
        return data

    def put(self, path: str, chunks: Any) -> None:
        self.below.put(path, chunks)

    def put_new(self, path: str, chunks: Any) -> None:
        self.below.put_new(path, chunks)

    def delete(self, paths: Any) -> None:
        self.below.delete(paths)


def metered(table: Table) -> tuple[Table, Meter]:
    meter = Meter(table.storage)
    return Table(uri=table.uri, storage=meter, index=table.index), meter


def kept_by_hand(table: Table, whole: pa.Table, expression: pc.Expression, deleted: set[int]) -> list[list[int]]:
    """The ids that pyarrow's filter keeps of each row group, without the deleted ones."""
    starts = np.concatenate([[0], np.cumsum(table.index.stored_rows)]).tolist()
    return [
        [one for one in kept_by_pyarrow(whole.slice(a, b - a), expression)["id"].to_pylist() if one not in deleted]
        for a, b in itertools.pairwise(starts)
    ]


@settings(max_examples=examples(35))
@given(data=st.data(), group_rows=st.integers(1, 9), statistics=st.booleans())
def test_counts_and_rows_are_those_of_pyarrows_filter_without_deleted_rows(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, group_rows: int, statistics: bool
) -> None:
    whole = data.draw(tables())
    expression = data.draw(expressions(whole.schema))
    kept_by_pyarrow(whole, expression)
    deleted = data.draw(st.sets(st.integers(0, whole.num_rows - 1), max_size=8))
    folder = tmp_path_factory.mktemp("t")
    pq.write_table(whole, folder / "a.parquet", row_group_size=group_rows, write_statistics=statistics)
    table = with_deletes(open_table(folder), {0: sorted(deleted)})
    keep = row_filter(expression, table.schema)
    selection, decoded = count_rows(table, keep)
    wanted = kept_by_hand(table, whole, expression, deleted)
    assert selection.group_rows.tolist() == [len(one) for one in wanted]
    assert decoded <= len(wanted)
    decoder = FilteredDecoder(table, ["id"], keep, selection)
    found = [decoder.decode(group, 0, len(one)) for group, one in enumerate(wanted)]
    decoder.close()
    assert [one["id"].to_pylist() for one in found] == wanted
    assert all(one.schema.names == ["id"] for one in found)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """year=2023 … 2025, two files each, of three row groups of 100 rows; ``n`` rises, ``x`` does not."""
    folder = tmp_path_factory.mktemp("lake")
    done = 0
    for year in (2023, 2024, 2025):
        (folder / f"year={year}").mkdir()
        for part in range(2):
            n = np.arange(done, done + 300)
            columns = {"n": n, "x": n * 7919 % 1000, "text": [f"{i:0200}" for i in n]}
            path = folder / f"year={year}" / f"{part}.parquet"
            pq.write_table(pa.table(columns), path, row_group_size=100, compression="none", use_dictionary=False)
            done += 300
    return folder


@pytest.mark.parametrize(
    ("expression", "facts", "files"),
    [
        (f("year") == 2024, (12, 6, 0), 0),
        (f("year") > 3000, (18, 0, 0), 0),
        ((f("year") == 2024) & (f("n") < 650), (17, 0, 1), 2),
        (f("n") >= 1000, (10, 8, 0), 6),
        (f("n").is_null(), (18, 0, 0), 6),
        ((f("x") < 500) & (f("n") < 300), (15, 0, 3), 6),
        ((f("year") == 2023) | (f("n") == 1799), (11, 6, 1), 4),
    ],
    ids=str,
)
def test_row_groups_are_spared_by_partitions_then_by_statistics(
    lake: Path, expression: pc.Expression, facts: tuple[int, ...], files: int
) -> None:
    """Row groups of which no row stays, every row, and that were decoded; and files whose footers were read."""
    table, meter = metered(open_table(lake))
    keep = row_filter(expression, table.schema)
    selection, decoded = count_rows(table, keep)
    none, every = (selection.group_digests == NONE).sum(), (selection.group_digests == EVERY).sum()
    assert (none, every, decoded) == facts
    assert len({path for path, _, _ in meter.reads}) == files
    whole = pq.read_table(lake).cast(table.schema)
    assert selection.num_rows == whole.filter(expression).num_rows


def test_only_the_filters_columns_are_read_and_each_footer_once(lake: Path) -> None:
    table, meter = metered(open_table(lake))
    keep = row_filter((f("x") < 500) & (f("year") != 2024), table.schema)
    _, decoded = count_rows(table, keep)
    assert decoded == 12
    sizes = dict(zip(table.index.paths, table.index.size_bytes.tolist(), strict=True))
    footers = [path for path, _, stop in meter.reads if stop == sizes[path]]
    assert sorted(footers) == sorted(path for path in sizes if "2024" not in path), "one read of the end of each file"
    data = sum(stop - start for path, start, stop in meter.reads if stop != sizes[path])
    columns = 0
    for path in footers:
        metadata = pq.read_metadata(lake / path)
        columns += sum(metadata.row_group(g).column(1).total_compressed_size for g in range(3))
    assert columns <= data < 2 * columns, "the chunks of x, and none of the text beside it, which is 25 times as large"


def test_filtered_reading_reads_the_filters_columns_only_where_it_must_choose(lake: Path) -> None:
    table, meter = metered(open_table(lake))
    keep = row_filter(f("n") < 150, table.schema)
    selection, _ = count_rows(table, keep)
    assert selection.group_rows.tolist() == [100, 50, *[0] * 16]
    decoder = FilteredDecoder(table, ["x"], keep, selection)
    meter.reads.clear()
    assert decoder.decode(2, 0, 0).num_rows == 0 and not meter.reads
    whole = decoder.decode(0, 0, 100)
    assert whole.schema.names == ["x"]
    chunk = pq.read_metadata(lake / table.index.paths[0]).row_group(0).column(0)
    offset = chunk.data_page_offset
    assert not any(a <= offset < b < table.index.size_bytes[0] for _, a, b in meter.reads), "n is not read"
    assert decoder.decode(1, 10, 20)["x"].to_pylist() == [n * 7919 % 1000 for n in range(110, 120)]
    with pytest.raises(ValueError, match="keeps 50 rows"):
        decoder.decode(1, 0, 51)
    decoder.close()


def test_units_cover_each_file_in_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(40)}), tmp_path / "a.parquet", row_group_size=1)
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"a": range(3)}), tmp_path / "c.parquet", row_group_size=1)
    index = open_table(tmp_path).index
    units = units_of(index)
    assert [one for unit in units for one in unit] == list(range(len(index.group_rows)))
    assert max(map(len, units)) == 16
    assert all(index.group(unit[0])[0] == index.group(unit[-1])[0] for unit in units)


def test_each_unit_of_a_long_file_has_the_statistics_of_its_own_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(400)}), tmp_path / "a.parquet", row_group_size=10)
    pq.write_table(pa.table({"a": range(200, 600)}), tmp_path / "b.parquet", row_group_size=10)
    table = open_table(tmp_path)
    selection, decoded = count_rows(table, row_filter((f("a") >= 195) & (f("a") < 395), table.schema))
    assert selection.group_rows.tolist() == [*[0] * 19, 5, *[10] * 19, 5, *[10] * 19, 5, *[0] * 20]
    assert decoded == 3


def test_columns_that_a_file_lacks_are_null(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [3], "b": [4]}), tmp_path / "b.parquet")
    table = open_table(tmp_path)
    for expression, rows in ((f("b").is_null(), [2, 0]), (f("b") > 3, [0, 1]), (f("b") != 9, [0, 1])):
        selection, decoded = count_rows(table, row_filter(expression, table.schema))
        assert (selection.group_rows.tolist(), decoded) == (rows, 0), str(expression)


def test_a_table_whose_rows_were_written_again_is_refused_and_not_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [5, 1]}), tmp_path / "a.parquet")
    table = open_table(tmp_path)
    pq.write_table(pa.table({"a": [5, 4]}), tmp_path / "a.parquet")
    with pytest.raises(DataFileChanged):
        count_rows(table, row_filter(f("a") > 3, table.schema))


def test_rows_that_are_not_those_that_were_counted_are_refused(tmp_path: Path) -> None:
    """As if another release of pyarrow had counted them. They are told even where as many rows stay."""
    pq.write_table(pa.table({"a": [5, 1, 7]}), tmp_path / "a.parquet")
    table = open_table(tmp_path)
    keep = row_filter(f("a") > 3, table.schema)
    selection, _ = count_rows(table, row_filter(f("a") < 6, table.schema))
    decoder = FilteredDecoder(table, None, keep, selection)
    with pytest.raises(DataFileChanged, match=r"keeps 2 rows of row group 0 of 'a.parquet', which are not the 2 rows"):
        decoder.decode(0, 0, 1)
    selection, _ = count_rows(table, row_filter(f("a") > 6, table.schema))
    decoder = FilteredDecoder(table, None, keep, selection)
    with pytest.raises(DataFileChanged, match=r"keeps 2 rows of row group 0 of 'a.parquet', which are not the 1 rows"):
        decoder.decode(0, 0, 1)


def test_damage_that_counting_meets_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [5, 1, 7]}), path, write_page_checksum=True)
    table = open_table(tmp_path)
    data = bytearray(path.read_bytes())
    data[40] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataFileDamaged, match=r"a\.parquet"):
        count_rows(table, row_filter(f("a") > 5, table.schema))
    assert not [one for one in threading.enumerate() if one.name.startswith("lakeckpt-count")]


def test_a_selection_is_the_same_whether_statistics_settled_a_row_group_or_decoding_did(tmp_path: Path) -> None:
    """Two filters that keep the same rows are one selection; one that keeps as many other rows is another."""
    rows = pa.table({"a": range(40), "b": [i % 2 for i in range(40)]})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10)
    table = open_table(tmp_path)
    found = {
        name: count_rows(table, row_filter(expression, table.schema))
        for name, expression in {
            "by statistics": f("a") >= 20,
            "by decoding": f("a") * 2 >= 40,
            "other rows": f("a") * 2 < 40,
            "in part": (f("a") >= 20) & (f("b") == 1),
            "in other parts": (f("a") >= 20) & (f("b") == 0),
        }.items()
    }
    assert (found["by statistics"][1], found["by decoding"][1]) == (0, 4)
    assert found["by statistics"][0] == found["by decoding"][0]
    assert found["in part"][0].group_rows.tolist() == found["in other parts"][0].group_rows.tolist()
    assert len({one.digest for one, _ in found.values()}) == 4

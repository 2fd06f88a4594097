"""Files of other writers, and odd ones of pyarrow's: each is read as pyarrow reads it, or refused by name.

Public collections of such files are in ``tests/system/test_odd_files.py``.
"""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import duckdb
import fastparquet
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, open_table
from lakeckpt.errors import DataFileDamaged, LakeckptError, SchemaError, TableError
from lakeckpt.reading.windows.decode import RowGroupDecoder, select_columns
from tests.reading.cases import PYARROW
from tests.reading.crafted_files import lie, write_encrypted, write_two_level_list
from tests.reading.same_rows import held_to_pyarrow, read_by_row_groups

ROWS = 300
NOISE = np.random.default_rng(0)
MOMENT = datetime.datetime(2024, 2, 29, 23, 59, 59, 123456)


def with_nulls(values: list[Any]) -> list[Any]:
    return [None if number % 7 == 3 else value for number, value in enumerate(values)]


FLAT = pa.table(
    {
        "i8": pa.array(with_nulls((NOISE.integers(-128, 128, ROWS)).tolist()), pa.int8()),
        "u64": pa.array(NOISE.integers(0, 2**64 - 1, ROWS, dtype=np.uint64)),
        "i64": pa.array(np.cumsum(NOISE.integers(-5, 9, ROWS))),
        "f32": pa.array(NOISE.normal(size=ROWS).astype(np.float32)),
        "f64": pa.array(with_nulls([float("nan") if n % 5 == 0 else n / 3 for n in range(ROWS)])),
        "flag": pa.array(with_nulls([n % 3 == 0 for n in range(ROWS)])),
        "text": pa.array(with_nulls([f"prefix-{n // 4}-ä" for n in range(ROWS)])),
        "raw": pa.array([bytes([n % 256]) * (n % 9) for n in range(ROWS)]),
        "day": pa.array(with_nulls([MOMENT.date() + datetime.timedelta(n) for n in range(ROWS)])),
        "at": pa.array([MOMENT + datetime.timedelta(hours=n) for n in range(ROWS)], pa.timestamp("us")),
        "money": pa.array([decimal.Decimal(n * 37 - 999).scaleb(-2) for n in range(ROWS)], pa.decimal128(12, 2)),
        "fixed": pa.array([bytes([n % 256]) * 4 for n in range(ROWS)], pa.binary(4)),
    }
)
NESTED = pa.table(
    {
        "list": pa.array(with_nulls([[n, None, n + 1][: n % 4] for n in range(ROWS)])),
        "lists": pa.array([[["a"] * (n % 3), []] * (n % 2) for n in range(ROWS)], pa.list_(pa.list_(pa.string()))),
        "struct": pa.array(with_nulls([{"a": n, "b": {"c": [n] * (n % 3)}} for n in range(ROWS)])),
        "map": pa.array([[("k", n)] * (n % 2) for n in range(ROWS)], pa.map_(pa.string(), pa.int64())),
        "structs": pa.array(with_nulls([[{"x": n, "y": None}] * (n % 3) for n in range(ROWS)])),
    }
)
ENCODINGS = {
    "delta integers": ("i64", "DELTA_BINARY_PACKED"),
    "delta lengths": ("text", "DELTA_LENGTH_BYTE_ARRAY"),
    "delta bytes": ("raw", "DELTA_BYTE_ARRAY"),
    "split floats": ("f32", "BYTE_STREAM_SPLIT"),
    "split doubles": ("f64", "BYTE_STREAM_SPLIT"),
    "split integers": ("i64", "BYTE_STREAM_SPLIT"),
    "split fixed": ("fixed", "BYTE_STREAM_SPLIT"),
    "runs": ("flag", "RLE"),
    "delta fixed": ("fixed", "DELTA_BYTE_ARRAY"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"use_dictionary": False},
    "dictionaries": {"use_dictionary": True},
    "a dictionary that overflows into plain pages": {"dictionary_pagesize_limit": 64, "data_page_size": 64},
    "pages of version 2": {"data_page_version": "2.0"},
    "pages of version 2, uncompressed": {"data_page_version": "2.0", "compression": "none"},
    "format 1.0": {"version": "1.0"},
    "96-bit timestamps": {"use_deprecated_int96_timestamps": True},
    "many small pages": {"data_page_size": 1, "write_batch_size": 7, "write_page_index": True},
    "checksums": {"write_page_checksum": True, "data_page_version": "2.0"},
    "no stored schema": {"store_schema": False},
    "row groups of one row": {"row_group_size": 1},
    "integers for decimals": {"store_decimal_as_integer": True},
    **{compression: {"compression": compression} for compression in ("gzip", "brotli", "lz4", "zstd", "none")},
}


@pytest.mark.parametrize("which", ENCODINGS)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_every_encoding_is_read_as_pyarrow_reads_it(tmp_path: Path, which: str, version: str) -> None:
    column, encoding = ENCODINGS[which]
    path = tmp_path / "x.parquet"
    options = {"use_dictionary": False, "column_encoding": {column: encoding}, "data_page_version": version}
    pq.write_table(FLAT.select([column]), path, row_group_size=100, **options)
    assert encoding in pq.read_metadata(path).row_group(0).column(0).encodings
    assert held_to_pyarrow(path) == "read"


@pytest.mark.parametrize("which", LAYOUTS)
@pytest.mark.parametrize("nested", [False, True])
def test_every_layout_is_read_as_pyarrow_reads_it(tmp_path: Path, which: str, nested: bool) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(NESTED if nested else FLAT, path, **{"row_group_size": 100, **LAYOUTS[which]})
    assert held_to_pyarrow(path) == "read"


def test_lists_of_two_levels_are_read_as_pyarrow_reads_them(tmp_path: Path) -> None:
    values = [[1, 2], [], [3], list(range(9))]
    path = write_two_level_list(tmp_path / "x.parquet", values)
    assert "repeated int64 field_id=-1 element" in str(pq.ParquetFile(path).schema)
    assert held_to_pyarrow(path) == "read"
    assert read_by_row_groups(path).column("x").to_pylist() == values


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_files_without_rows_and_empty_row_groups_are_read(tmp_path: Path, groups: int) -> None:
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, FLAT.schema) as writer:
        for group in range(groups):
            writer.write_table(FLAT.slice(0, 5 * (group == 1)))
    assert held_to_pyarrow(path) == "read"


@pytest.mark.parametrize("options", [{}, {"data_page_size": 100}, {"compression": "lz4"}, {"row_group_size": 50}])
def test_polars_files_are_read_as_pyarrow_reads_them(tmp_path: Path, options: dict[str, Any]) -> None:
    frame = pl.from_arrow(pa.table({**_columns(FLAT, but="fixed"), **_columns(NESTED, but="map")}))
    frame = frame.with_columns(pl.col("text").cast(pl.Categorical).alias("category"))
    path = tmp_path / "x.parquet"
    frame.write_parquet(path, **options)
    assert held_to_pyarrow(path) == "read"


@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("compression", ["snappy", "zstd", "uncompressed", "lz4_raw"])
def test_duckdb_files_are_read_as_pyarrow_reads_them(tmp_path: Path, version: str, compression: str) -> None:
    path = tmp_path / "x.parquet"
    flat, nested = FLAT.drop_columns(["fixed"]), NESTED  # found by their names
    with duckdb.connect() as db:
        db.sql(
            f"copy (select *, uuid() as id, i64::hugeint as huge, 'red'::enum('red', 'blue') as colour, "
            f"interval 3 days as long from flat positional join nested) to '{path}' "
            f"(format parquet, parquet_version {version}, compression {compression}, row_group_size 2048)"
        )
    assert (len(flat), len(nested)) == (ROWS, ROWS)
    assert held_to_pyarrow(path) == "read"


@pytest.mark.parametrize("times", ["int64", "int96"])
@pytest.mark.parametrize("has_nulls", [True, False])
def test_fastparquet_files_are_read_as_pyarrow_reads_them(tmp_path: Path, times: str, has_nulls: bool) -> None:
    numbers = np.arange(ROWS)
    frame = pd.DataFrame(
        {
            "i32": numbers.astype(np.int32),
            "f64": numbers / 7,
            "flag": numbers % 2 == 0,
            "text": [f"t{n}" for n in numbers],
            "raw": [bytes([n % 256]) for n in numbers],
            "category": pd.Categorical([f"c{n % 5}" for n in numbers]),
            "at": pd.date_range("2024-01-01", periods=ROWS, freq="h"),
        }
    )
    path = tmp_path / "x.parquet"
    fastparquet.write(
        str(path),
        frame,
        times=times,
        has_nulls=has_nulls,
        row_group_offsets=[0, 100, 101],
        object_encoding={"text": "utf8", "raw": "bytes"},
        compression="GZIP",
    )
    assert held_to_pyarrow(path) == "read"


def _columns(table: pa.Table, *, but: str) -> dict[str, pa.ChunkedArray]:
    return {name: table.column(name) for name in table.column_names if name != but}


@pytest.mark.parametrize(
    "year",
    [
        pytest.param(1600, marks=pytest.mark.skipif(PYARROW < 23, reason="this pyarrow writes them wrongly")),
        9999,
    ],
)
@pytest.mark.parametrize("nested", ["", "list", "struct", "map"])
def test_96_bit_timestamps_that_nanoseconds_cannot_hold_are_refused(tmp_path: Path, year: int, nested: str) -> None:
    kind = pa.timestamp("us")
    types = {"list": pa.list_(kind), "struct": pa.struct([("a", kind)]), "map": pa.map_(pa.string(), kind)}
    around = {"list": lambda at: [at, None], "struct": lambda at: {"a": at}, "map": lambda at: [("k", at)]}
    values = [
        at if at is None or not nested else around[nested](at) for at in (MOMENT, None, MOMENT.replace(year, 1, 1))
    ]
    table = pa.table({"at": pa.array(values, types.get(nested, kind)), "n": range(3)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2, use_deprecated_int96_timestamps=True)
    decoder = RowGroupDecoder(open_table(tmp_path))
    assert decoder.decode(0, 0, 2).num_rows == 2
    with pytest.raises(SchemaError, match=r"'at' of row group 1 of the data file 'a\.parquet' holds 96-bit.*microsec"):
        decoder.decode(1, 0, 1)
    assert RowGroupDecoder(open_table(tmp_path), ["n"]).decode(1, 0, 1)["n"].to_pylist() == [2]
    with pytest.raises(SchemaError, match="96-bit"):
        list(LakeLoader(LakeDataset(tmp_path, batch_size=9, options=ReadOptions(nulls="mask"))))


def test_filters_do_not_take_timestamps_for_others(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([MOMENT, datetime.datetime(9999, 12, 31)], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(SchemaError, match="96-bit"):
        len(LakeLoader(LakeDataset(tmp_path, batch_size=9, filters=[("at", ">", MOMENT)])))


def test_codecs_that_pyarrow_lacks_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(50), "m": range(50)}), path, compression="snappy")
    lie(path, 1, 3, field=0x15)  # the codec of the first column
    dataset = LakeDataset(path, batch_size=9)
    with pytest.raises(TableError, match=r"'n' of row group 0 .*'a\.parquet' is .* with the codec LZO"):
        list(LakeLoader(dataset))
    assert sum(len(batch["m"]) for batch in LakeLoader(LakeDataset(path, batch_size=9, columns=["m"]))) == 50


def test_types_that_pyarrow_lacks_are_no_damage(tmp_path: Path) -> None:
    pl.DataFrame({"x": pl.Series([1, 2], dtype=pl.Int128)}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"'a\.parquet' has a footer that pyarrow .* cannot read .*64 bits"):
        open_table(tmp_path)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files_are_refused_by_name(tmp_path: Path, plaintext_footer: bool) -> None:
    path = write_encrypted(tmp_path / "x.parquet", FLAT, columns=["text"], plaintext_footer=plaintext_footer)
    with pytest.raises(DataFileDamaged, match=r"'x\.parquet' has (encrypted columns|an encrypted footer)"):
        open_table([path])


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b"PARE" * 5, b"hello, world", b"PAR1" + bytes(8) + b"PAR1", bytes(5000)]
)
def test_what_is_no_parquet_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(LakeckptError, match=r"x\.parquet"):
        read_by_row_groups(path)


def test_a_table_without_columns_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({}), path)
    table = open_table([path])
    with pytest.raises(SchemaError, match="the table has no columns: there is nothing to read"):
        RowGroupDecoder(table)
    with pytest.raises(SchemaError, match="the table has no columns"):
        select_columns(table.schema, None)

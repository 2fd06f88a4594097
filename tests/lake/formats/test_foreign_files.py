"""Files that other writers wrote, and a table took in: read as the format's own reader reads them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import convert_to_deltalake, write_deltalake
from deltalake.schema import Field, PrimitiveType, Schema

from tests.lake.formats.delta_tables import assert_all_versions
from tests.lake.formats.iceberg_tables import warehouse
from tests.lake.formats.rows import delivered, rows_of

ROWS = pa.table(
    {
        "id": pa.array([1, 2, None, 4], pa.int64()),
        "text": pa.array(["a", "", None, "ü" * 40], pa.string()),
        "price": pa.array([Decimal("1.25"), None, Decimal("-0.01"), Decimal("99999.99")], pa.decimal128(12, 2)),
        "day": pa.array([datetime.date(1969, 12, 31), None, datetime.date(2024, 2, 29), datetime.date(1, 1, 1)]),
        "at": pa.array([datetime.datetime(2024, 1, 1, 1, 2, 3, 456_789), None] * 2, pa.timestamp("us")),
        "real": pa.array([0.1, float("nan"), None, -0.0], pa.float64()),
        "flag": pa.array([True, None, False, True]),
        "tags": pa.array([[1, None], [], None, [2]], pa.list_(pa.int64())),
        "place": pa.array([{"x": 1, "y": "a"}, None, {"x": None, "y": None}, {"x": 2, "y": ""}],
                          pa.struct([("x", pa.int64()), ("y", pa.string())])),
    }
)  # fmt: skip


def by_polars(path: Path) -> None:
    frame = pl.from_arrow(ROWS)
    assert isinstance(frame, pl.DataFrame)
    frame.write_parquet(path, compression="zstd", row_group_size=3)


def by_duckdb(path: Path) -> None:
    connection = duckdb.connect()
    connection.register("rows", ROWS)
    connection.execute(f"COPY (SELECT * FROM rows) TO '{path}' (FORMAT parquet, CODEC 'gzip')")


def by_spark_of_old(path: Path) -> None:
    """96-bit timestamps, elements of lists under another name: pyiceberg takes such files into no table."""
    pq.write_table(
        ROWS, path, use_deprecated_int96_timestamps=True, use_compliant_nested_type=False, version="1.0", flavor="spark"
    )


def by_a_new_arrow(path: Path) -> None:
    """Texts of the large type, pages of version 2, newer encodings."""
    large = ROWS.set_column(1, "text", ROWS["text"].cast(pa.large_string()))
    pq.write_table(large, path, data_page_version="2.0", version="2.6", column_encoding={"id": "DELTA_BINARY_PACKED"},
                   use_dictionary=["text"])  # fmt: skip


WRITERS = [by_polars, by_duckdb, by_a_new_arrow]


@pytest.mark.parametrize("writer", WRITERS)
def test_an_iceberg_table_that_took_in_files(writer: Callable[[Path], None], tmp_path: Path) -> None:
    made = warehouse(tmp_path).create_table("db.t", ROWS.schema)
    made.append(ROWS)
    writer(tmp_path / "other.parquet")
    made.add_files([str(tmp_path / "other.parquet")])
    assert delivered(made) == rows_of(made.scan().to_arrow())
    assert sum(delivered(made).values()) == 8


@pytest.mark.parametrize("writer", [*WRITERS, by_spark_of_old])
def test_a_delta_table_that_files_were_made_into(writer: Callable[[Path], None], tmp_path: Path) -> None:
    root = tmp_path / "t"
    root.mkdir()
    writer(root / "0.parquet")
    convert_to_deltalake(str(root))
    write_deltalake(str(root), ROWS, mode="append")
    assert_all_versions(root)


def test_a_delta_table_of_hive_folders(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for folder in ("k=1", "k=2", "k=__HIVE_DEFAULT_PARTITION__"):
        (root / folder).mkdir(parents=True)
        by_polars(root / folder / "0.parquet")
    convert_to_deltalake(
        str(root), partition_by=Schema([Field("k", PrimitiveType("integer"))]), partition_strategy="hive"
    )
    assert_all_versions(root)

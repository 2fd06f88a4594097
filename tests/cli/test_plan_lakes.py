"""plan of tables with versions: what is told of each, whatever its files call the columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.types import LongType

from lakeckpt import open_table
from tests.lake.formats.delta_log import adds, commit, delete_rows, upgrade
from tests.lake.formats.iceberg_tables import warehouse

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Versions 0 (100 rows) and 1 (200 rows), mapped columns; deletion vectors that leave 90 of them at the end."""
    root = tmp_path / "delta"
    mapped = {"delta.columnMapping.mode": "name"}
    for start in (0, 100):
        rows = pa.table({"id": np.arange(start, start + 100), "text": [f"text {i}" * 9 for i in range(100)]})
        write_deltalake(str(root), rows, mode="append", configuration=mapped if not start else None)
    protocol = DeltaTable(str(root)).protocol()
    commit(root, [upgrade("deletionVectors", *(protocol.reader_features or ["columnMapping"]))])
    first, second = sorted(adds(root))
    delete_rows(root, {first: range(100), second: range(10)})
    return root


def test_bytes_are_those_of_the_columns_by_whatever_name_files_store_them(delta: Path, ask: Ask) -> None:
    status, plain = ask("plan", delta, "--version", 1, "--columns", "id")
    assert status == 0 and (plain["format"], plain["version"], plain["rows"]) == ("delta", "1", 200)
    (path, _) = delta.rglob("*.parquet")
    assert "id" not in pq.read_schema(path).names
    sizes = [pq.read_metadata(one).row_group(0).column(0).total_compressed_size for one in delta.rglob("*.parquet")]
    assert plain["decoded_bytes"] == 8 * 200 and plain["stored_bytes"] == sum(sizes)
    _, every = ask("plan", delta, "--version", 1)
    assert every["columns"] == ["id", "text"] and every["decoded_bytes"] > 8 * 200 + 200 * 50


def test_rows_that_are_deleted_are_told_and_row_groups_without_any_left_cost_nothing(
    delta: Path, ask: Ask, show: Show
) -> None:
    _, plain = ask("plan", delta, "--columns", "id", "--batch-size", 10)
    assert (plain["rows"], plain["deleted_rows"], plain["steps"]) == (90, 110, 9)
    assert plain["decoded_bytes"] == 8 * 100
    assert any(text.startswith("mostly deleted: 110 rows") for text in plain["warnings"])
    status, told = show("plan", delta)
    assert status == 0 and "Delta version 3, of 20" in told and "90; 110 more are deleted" in told


def test_versions_are_named_as_open_table_names_them(delta: Path, tmp_path: Path, ask: Ask) -> None:
    assert ask("plan", delta, "--version", 0)[1]["rows"] == 100
    assert ask("plan", delta)[1]["version"] == "3"
    assert ask("plan", delta, "--format", "iceberg")[1]["error"]["kind"] == "config"
    assert ask("plan", delta, "--version", "main")[0] == 2
    table = warehouse(tmp_path).create_table("db.t", pa.schema([("id", pa.int64())]))
    for rows in (10, 20):
        table.append(pa.table({"id": range(rows)}))
    metadata = table.metadata_location.removeprefix("file://")
    first = table.snapshots()[0].snapshot_id
    table.manage_snapshots().create_tag(first, "start").commit()
    tagged = table.refresh().metadata_location.removeprefix("file://")
    assert ask("plan", metadata)[1]["rows"] == 30
    for version in (first, "start"):
        status, plain = ask("plan", tagged, "--version", version)
        assert (status, plain["format"], plain["version"], plain["rows"]) == (0, "iceberg", str(first), 10)
        assert plain["version_ms"] == open_table(tagged, version=first).index.version.timestamp_ms


def test_nested_columns_and_those_that_files_lack_are_told_apart(tmp_path: Path, ask: Ask) -> None:
    table = warehouse(tmp_path).create_table("db.t", pa.schema([("a", pa.struct([("x", pa.int64())]))]))
    table.append(pa.table({"a": [{"x": 1}] * 100}))
    with table.update_schema() as change:
        change.add_column("b", LongType())
        change.rename_column("a", "c")
    table.append(pa.table({"c": [{"x": 1}] * 100, "b": pa.array(range(100), pa.int64())}))
    place = table.metadata_location.removeprefix("file://")
    _, b = ask("plan", place, "--columns", "b")
    _, c = ask("plan", place, "--columns", "c")
    _, both = ask("plan", place)
    assert both["stored_bytes"] == b["stored_bytes"] + c["stored_bytes"]
    assert (b["decoded_bytes"], c["decoded_bytes"]) == (1600, 1600)
    assert 0 < b["stored_bytes"] < c["stored_bytes"] + 1000

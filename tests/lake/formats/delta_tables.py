"""Delta tables for tests: written by deltalake, told from its log, read by its own reader and by us."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from lakeckpt import open_table
from lakeckpt.lake.table.index import TableIndex
from tests.lake.formats.delta_log import versions
from tests.lake.formats.rows import delivered_of, rows_of


def theirs(root: Path, version: int | None = None) -> Counter[Hashable]:
    """What deltalake's own scan (DataFusion over delta-kernel, which honours deletion vectors) finds."""
    table = DeltaTable(str(root), version=version)
    return rows_of(pa.table(QueryBuilder().register("t", table).execute("select * from t")))


def assert_all_versions(root: Path) -> None:
    for version in versions(root):
        table = open_table(root, version=version)
        assert (table.index.version.format, table.index.version.name) == ("delta", str(version))
        assert delivered_of(table) == theirs(root, version), f"version {version}"
        assert TableIndex.loads(table.index.dumps()) == table.index


def write(root: Path, table: pa.Table, **how: Any) -> None:
    write_deltalake(str(root), table, **how)


def of(start: int, count: int, **more: Any) -> pa.Table:
    ids = range(start, start + count)
    columns = {"id": pa.array(ids, pa.int64()), "p": pa.array([i % 3 or None for i in ids], pa.int32())}
    columns["s"] = pa.array([None if i % 5 == 4 else f"{i % 4} ü" for i in ids])
    return pa.table(columns | more)


def actions_of(root: Path) -> list[dict[str, Any]]:
    found = pa.table(DeltaTable(str(root)).get_add_actions())
    return found.select(["path", "num_records"]).to_pylist()

"""A filter keeps of every kind of table what the format's own reader, and then pyarrow's filter, keep."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.types import LongType, StringType

from lakeckpt import LakeDataset, LakeLoader, Table, open_table
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.filters.row_filter import row_filter
from tests.examples import examples
from tests.faults.fault_proxy import At, FaultProxy, HttpFault
from tests.lake.conftest import S3
from tests.lake.formats.delta_log import add_file, commit, delete_rows, upgrade
from tests.lake.formats.delta_tables import actions_of, of, write
from tests.lake.formats.iceberg_tables import commit as commit_iceberg
from tests.lake.formats.iceberg_tables import data_files, equality_deletes, position_deletes, warehouse
from tests.lake.formats.rows import rows_of
from tests.reading.filters.filtering import expressions, kept_by_pyarrow, tables

f = pc.field


def filtered(table: Table, expression: pc.Expression, *, ranks: int = 2) -> Counter[Hashable]:
    """What an epoch on so many ranks delivers; all in as many steps."""
    found: Counter[Hashable] = Counter()
    steps = set()
    for rank in range(ranks):
        dataset = LakeDataset(
            table, batch_size=3, filters=expression, output="arrow", shuffle=True, rank=rank, world_size=ranks
        )
        batches = list(LakeLoader(dataset))
        steps.add(len(batches))
        found += sum(map(rows_of, batches), Counter())
    assert len(steps) == 1
    return found


def decoded(table: Table, expression: pc.Expression) -> int:
    """How many row groups neither partition values nor statistics settle."""
    return count_rows(table, row_filter(expression, table.schema))[1]


# --- plain Parquet


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partitions year and country; ``n`` was widened, ``later`` came later, ``gone`` went; columns in any order."""
    folder = tmp_path_factory.mktemp("evolved")
    kinds = [pa.int8(), pa.int32(), pa.int64()]
    for at, (year, country) in enumerate(
        [(2023, "de"), (2023, "__HIVE_DEFAULT_PARTITION__"), (2024, "it"), (2024, "de")]
    ):
        kind = kinds[min(at, 2)]
        columns: dict[str, Any] = {"id": range(10 * at, 10 * at + 10)}
        columns["n"] = pa.array([None if i == 7 else i * (1 if at < 2 else 10**6) for i in range(10)], kind)
        if at >= 2:
            columns["later"] = [f"x{i % 3}" for i in range(10)]
        else:
            columns["gone"] = [float("nan") if i % 4 == 0 else i / 2 for i in range(10)]
        names = sorted(columns, reverse=bool(at % 2))
        path = folder / f"year={year}" / f"country={country}"
        path.mkdir(parents=True)
        pq.write_table(pa.table({name: columns[name] for name in names}), path / "0.parquet", row_group_size=4)
    return folder


EVOLVED: list[tuple[pc.Expression, int]] = [
    (f("year") == 2023, 0),
    ((f("year") == 2024) & (f("n") < 10), 2),
    (f("country") != "de", 0),
    (f("country").is_null(), 0),
    (f("country").isin(["it", None]), 0),
    (f("n") >= 10**6, 4),
    (f("n").is_null(), 4),
    (f("n") > 2**40, 0),
    (f("later") == "x1", 6),
    (f("later").is_null(), 0),
    (f("gone") > 2, 6),
    (~(f("gone") > 2), 6),
    ((f("later") == "x1") | (f("year") < 2024), 6),
    ((f("year") > 2023) & (f("country") == "de") & (f("id") < 33), 1),
    (f("id") * 2 == 24, 12),
]


@pytest.mark.parametrize(("expression", "groups"), EVOLVED, ids=lambda one: str(one))
def test_partitions_and_evolved_columns(evolved: Path, expression: pc.Expression, groups: int) -> None:
    table = open_table(evolved)
    partitioning = ds.partitioning(pa.schema([("year", pa.int64()), ("country", pa.string())]), flavor="hive")
    theirs = ds.dataset(evolved, schema=table.schema, partitioning=partitioning)
    kept = rows_of(theirs.to_table().filter(expression))
    assert filtered(table, expression) == kept
    if not expression.equals(~(f("gone") > 2)):
        # There pyarrow's dataset (26.0.1) drops NaN, which it keeps of the same rows in memory: it takes statistics,
        # which leave NaN out, for true of every row.
        assert rows_of(theirs.to_table(filter=expression)) == kept
    assert decoded(table, expression) == groups


@settings(max_examples=examples(8))
@given(data=st.data())
def test_random_tables_of_several_files_under_pyarrows_dataset(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    whole = data.draw(tables())
    expression = data.draw(expressions(whole.schema))
    kept_by_pyarrow(whole, expression)
    cut = data.draw(st.integers(0, whole.num_rows))
    for name, part in (("a", whole.slice(0, cut)), ("b", whole.slice(cut))):
        keep = [one for one in whole.schema.names if one == "id" or data.draw(st.integers(0, 3))]
        part = part.select(keep) if name == "a" else part
        (folder / f"k={name}").mkdir()
        pq.write_table(part, folder / f"k={name}" / "0.parquet", row_group_size=5)
    expression = (expression & (f("k") == "a")) | (expression & (f("k") != "a") & (f("id") > 3))
    table = open_table(folder)
    partitioning = ds.partitioning(pa.schema([("k", pa.string())]), flavor="hive")
    theirs = ds.dataset(folder, schema=table.schema, partitioning=partitioning)
    kept = rows_of(theirs.to_table().filter(expression))
    assert filtered(table, expression) == kept
    if not {"float", "double"} & set(whole.schema.names):  # of which datasets lose NaN
        assert rows_of(theirs.to_table(filter=expression)) == kept


# --- Delta


def delta(root: Path) -> None:
    """Typed partitions, and a column that came later."""
    fields = [("id", "long"), ("n", "long"), ("later", "string"), ("day", "date"), ("price", "decimal(9,2)")]
    schema = {
        "type": "struct",
        "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields],
    }
    metadata = {
        "id": "t",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": ["day", "price"],
        "configuration": {},
        "createdTime": 1,
    }
    root.mkdir()
    files = []
    for at, (day, price) in enumerate([("2024-01-01", "1.50"), ("2024-01-02", "-2.00"), ("2024-01-02", None)]):
        columns = {"id": range(10 * at, 10 * at + 10), "n": pa.array([*range(9), None], pa.int64())}
        if at:
            columns["later"] = pa.array([f"x{i % 4}" for i in range(10)])
        files.append(add_file(root, f"{at}.parquet", pa.table(columns), {"day": day, "price": price}))
    commit(root, [upgrade(), {"metaData": metadata}, *files])


DELTA: list[tuple[pc.Expression, int]] = [
    (f("day") == datetime.date(2024, 1, 1), 0),
    (f("price") < Decimal("0.00"), 0),
    (f("price") == Decimal("1.5"), 0),
    (f("price").is_null() & (f("id") >= 25), 1),
    (f("n") > 4, 3),
    (f("n") > 9, 0),
    (f("later").isin(["x0", "x3"]), 2),
    ((f("later") != "x0") & (f("price") <= Decimal("1.00")), 1),
    (~(f("later") == "x0") | (f("n") == 5), 3),
]


@pytest.mark.parametrize(("expression", "groups"), DELTA, ids=lambda one: str(one))
def test_delta_tables(tmp_path: Path, expression: pc.Expression, groups: int) -> None:
    delta(tmp_path / "t")
    table = open_table(tmp_path / "t")
    found = pa.table(QueryBuilder().register("t", DeltaTable(str(tmp_path / "t"))).execute("select * from t"))
    theirs = found.select(table.schema.names).cast(table.schema).filter(expression)
    assert theirs.num_rows or groups == 0
    assert filtered(table, expression) == rows_of(theirs)
    assert decoded(table, expression) == groups


@pytest.mark.parametrize("expression", [f("s") == "1 ü", f("p") < 2, (f("id") >= 40) & f("s").is_valid()], ids=str)
def test_rows_under_deletion_vectors_stay_away_whatever_the_filter(tmp_path: Path, expression: pc.Expression) -> None:
    root = tmp_path / "t"
    write(root, of(0, 90), partition_by=["p"], mode="append")
    commit(root, [upgrade("deletionVectors")])
    size = {one["path"]: one["num_records"] for one in actions_of(root)}
    first, second, third = sorted(size)
    delete_rows(root, {first: range(0, size[first], 2), second: range(size[second]), third: [0, 7]})
    table = open_table(root)
    found = pa.table(QueryBuilder().register("t", DeltaTable(str(root))).execute("select * from t"))
    theirs = found.select(table.schema.names).cast(table.schema).filter(expression)
    assert 0 < theirs.num_rows < 90 - len(range(0, size[first], 2)) - size[second] - 2
    assert filtered(table, expression) == rows_of(theirs)


# --- Iceberg


ICEBERG: list[pc.Expression] = [
    f("number") > 6,
    f("number").is_null(),
    f("extra") == "x",
    f("extra").is_null(),
    (f("extra") != "x") | (f("number") <= 6),
    (f("id") > 2) & (f("id") < 14),
]


@pytest.mark.parametrize("expression", ICEBERG, ids=str)
def test_iceberg_tables_that_evolved_and_have_deletes(tmp_path: Path, expression: pc.Expression) -> None:
    made = warehouse(tmp_path).create_table("db.t", pa.schema([("id", pa.int64()), ("n", pa.int32())]))
    made.append(pa.table({"id": range(10), "n": pa.array([5, 6, 7, None, 9] * 2, pa.int32())}))
    (old,) = data_files(made)
    with made.update_schema() as change:
        change.update_column("n", LongType())
        change.rename_column("n", "number")
        change.add_column("extra", StringType())
    extra = ["x", None, "y", "x", "z"]
    made.append(pa.table({"id": range(10, 15), "number": [5, 6, None, 7, 2**40], "extra": extra}))
    commit_iceberg(made, [position_deletes(made, [(old, row) for row in (0, 3, 6)])])
    theirs = made.scan().to_arrow()
    table = open_table(made)
    assert filtered(table, expression) == rows_of(theirs.cast(table.schema).filter(expression))
    # pyiceberg does not read equality deletes: by hand
    commit_iceberg(made, [equality_deletes(made, pa.table({"number": pa.array([7], pa.int64())}), [2])])
    left = theirs.filter(~f("number").isin([7])).cast(table.schema)
    assert filtered(open_table(made), expression) == rows_of(left.filter(expression))


# --- object stores


def test_a_copy_on_s3_has_the_same_selection_counted_through_faults(evolved: Path, s3: S3) -> None:
    for path in evolved.rglob("*.parquet"):
        s3.client.put_object(Bucket=s3.bucket, Key=f"lake/{path.relative_to(evolved)}", Body=path.read_bytes())
    here = open_table(evolved)
    expression = (f("later") == "x1") | (f("gone") > 2)
    with FaultProxy(s3.endpoint) as proxy:
        options = {**s3.options_at(proxy.url), "pause_s": 0.01}
        there = open_table(f"s3://{s3.bucket}/lake", storage_options=options)
        first = len(proxy.requests)
        proxy.faults = [At(first + 2, HttpFault.SLOW_DOWN), At(first + 4, HttpFault.TRUNCATED)]
        found, _ = count_rows(there, row_filter(expression, there.schema))
        assert len(proxy.injected) == 2
        assert filtered(there, expression) == filtered(here, expression)
    assert found == count_rows(here, row_filter(expression, here.schema))[0]

"""Delta: for every version, the rows that are delivered are those that deltalake's own reader finds."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import LakeDataset, LakeLoader, open_table
from lakeckpt.errors import ConfigError, DataFileChanged, SchemaError, TableFeatureUnsupported, TableNotFound
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.table import Table
from lakeckpt.testing import assert_exactly_once
from tests.lake.conftest import CANARY, S3
from tests.lake.delta_log import add_file, adds, commit, delete_rows, upgrade, versions, write_mapped

UTC = datetime.UTC


def bag(rows: list[dict[str, Any]]) -> Counter[str]:
    """Rows as a multiset; nan equals nan, and UTC is UTC by whichever class."""

    def plain(value: Any) -> Any:
        aware = isinstance(value, datetime.datetime) and value.tzinfo is not None
        return value.replace(tzinfo=UTC) if aware else value

    return Counter(repr(sorted((name, plain(value)) for name, value in row.items())) for row in rows)


def delivered(table: Table) -> Counter[str]:
    """All rows of an epoch, as a dataset delivers them."""
    dataset = LakeDataset(table, batch_size=7, shuffle=True, output="arrow", rank=0, world_size=1)
    return bag([row for batch in LakeLoader(dataset) for row in batch.to_pylist()])


def theirs(root: Path, version: int | None = None) -> Counter[str]:
    """What deltalake's own scan (DataFusion over delta-kernel, which honours deletion vectors) finds."""
    table = DeltaTable(str(root), version=version)
    return bag(pa.table(QueryBuilder().register("t", table).execute("select * from t")).to_pylist())


def assert_all_versions(root: Path) -> None:
    for version in versions(root):
        table = open_table(root, version=version)
        assert (table.index.version.format, table.index.version.name) == ("delta", str(version))
        assert delivered(table) == theirs(root, version), f"version {version}"
        assert TableIndex.loads(table.index.dumps()) == table.index


def write(root: Path, table: pa.Table, **how: Any) -> None:
    write_deltalake(str(root), table, **how)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake ü =x"


def of(start: int, count: int, **more: Any) -> pa.Table:
    ids = range(start, start + count)
    columns = {"id": pa.array(ids, pa.int64()), "p": pa.array([i % 3 or None for i in ids], pa.int32())}
    columns["s"] = pa.array([None if i % 5 == 4 else f"{i % 4} ü" for i in ids])
    return pa.table(columns | more)


ADDED: list[tuple[pa.DataType, Any]] = [
    (pa.float64(), 0.5),
    (pa.list_(pa.int32()), [1, None]),
    (pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": 1, "b": None}),
]


class History:
    """Operations on one table, each a version or more; deletion vectors come last (deltalake writes none)."""

    def __init__(self, root: Path) -> None:
        self.root, self.next = root, 0
        self._append()

    def _append(self, **more: Any) -> None:
        start, self.next = self.next, self.next + 6
        write(self.root, of(start, 6, **more), mode="append", partition_by=["p"], schema_mode="merge")

    def run(self, operation: str, amount: int) -> None:
        table = DeltaTable(str(self.root))
        if operation == "append":
            self._append()
        elif operation == "add column":
            kind, value = ADDED[amount % len(ADDED)]
            self._append(**{f"c{amount % len(ADDED)}": pa.array([None, *[value] * 5], kind)})
        elif operation == "delete":
            table.delete(f"id % 5 = {amount % 5}")
        elif operation == "update":
            table.update({"s": f"'{amount}'"}, predicate=f"id % 3 = {amount % 3}")
        elif operation == "merge":
            source = of(self.next - 3, 6).append_column("x", pa.array(range(6))).select(["id", "p", "s"])
            merge = table.merge(source, "t.id = u.id", source_alias="u", target_alias="t")
            merge.when_matched_update({"s": "u.s"}).when_not_matched_insert({"id": "u.id", "p": "u.p"}).execute()
        elif operation == "overwrite":
            start, self.next = self.next, self.next + 4
            ones = of(start, 4).set_column(1, "p", pa.array([1] * 4, pa.int32()))
            write(self.root, ones, mode="overwrite", predicate="p = 1", schema_mode="merge")
        elif operation == "compact":
            table.optimize.compact()
        elif operation == "z-order":
            table.optimize.z_order(["id"])
        elif operation == "checkpoint":
            table.create_checkpoint()
        elif operation == "restore" and table.version():
            table.restore(amount % table.version())


OPERATIONS = (
    *("append", "add column", "delete", "update", "merge", "overwrite", "compact", "z-order", "checkpoint", "restore"),
)
STEPS = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9))
VECTORS = st.tuples(st.sampled_from(["inline", "relative", "absolute"]), st.sets(st.integers(0, 5), min_size=1))


@settings(max_examples=12)
@given(steps=st.lists(STEPS, max_size=6), vectors=st.lists(VECTORS, max_size=2))
def test_every_version_of_any_history_is_what_deltalake_reads(
    steps: list[tuple[str, int]], vectors: list[tuple[Any, set[int]]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "t")
        for step in steps:
            history.run(*step)
        DeltaTable(str(history.root)).create_checkpoint()
        if vectors:
            commit(history.root, [upgrade("deletionVectors")])
        active = {path["path"]: path["num_records"] for path in actions_of(history.root)}
        for kind, rows in vectors:
            lost = {path: {row for row in rows if row < active[path]} for path in sorted(active)[: 1 + len(rows) % 2]}
            live_adds(history.root, {path: rows for path, rows in lost.items() if rows}, kind)
        assert_all_versions(history.root)


def actions_of(root: Path) -> list[dict[str, Any]]:
    found = pa.table(DeltaTable(str(root)).get_add_actions())
    return found.select(["path", "num_records"]).to_pylist()


def live_adds(root: Path, rows: dict[str, set[int]], kind: Any) -> None:
    known = adds(root)
    delete_rows(root, {path: found for path, found in rows.items() if path in known}, kind)


@pytest.mark.parametrize("kind", ["inline", "relative", "absolute"])
def test_rows_under_deletion_vectors_do_not_exist(root: Path, kind: Any) -> None:
    write(root, of(0, 90), partition_by=["s"], mode="append")
    plain = open_table(root)
    commit(root, [upgrade("deletionVectors")])
    first, second, *_ = sorted(adds(root))
    size = {row["path"]: row["num_records"] for row in actions_of(root)}
    delete_rows(root, {first: range(0, size[first], 2)}, kind)
    delete_rows(root, {first: range(size[first]), second: [0, size[second] - 1]}, kind)
    assert_all_versions(root)
    table = open_table(root)
    assert plain.num_rows == 90 and table.num_rows == 90 - size[first] - 2
    assert table.index.digest != plain.index.digest
    assert open_table(root, version=0).index.digest == plain.index.digest
    # A reader of another make, on the version before the columns' own features matter.
    assert polars_rows(root) == delivered(table)


def polars_rows(root: Path) -> Counter[str]:
    table = DeltaTable(str(root))
    frames = []
    kept = {
        name.rpartition("/")[2]: np.array(vector)
        for name, vector in (row.values() for row in pa.table(table.deletion_vectors()).to_pylist())
    }
    for action in pa.table(table.get_add_actions()).to_pylist():
        name = action["path"].rpartition("/")[2]
        (path,) = root.rglob(name)
        frame = pl.read_parquet(path, hive_partitioning=False)
        frame = frame.filter(pl.Series(kept[name])) if name in kept else frame
        frames += [row | action["partition"] for row in frame.to_dicts()]
    return bag([{name: row[name] for name in ("id", "p", "s")} for row in frames])


def test_every_row_that_exists_counts_once(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for start in (0, 40):
        write(root, of(start, 20), mode="append", partition_by=["p"])
    DeltaTable(str(root)).delete("id % 7 = 3")
    commit(root, [upgrade("deletionVectors")])
    sizes = [(row["path"], row["num_records"]) for row in actions_of(root)]
    delete_rows(root, {sizes[0][0]: range(sizes[0][1]), sizes[1][0]: [1], sizes[2][0]: [0, 2]})
    table = open_table(root)
    assert 0 < table.num_rows < 37

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> LakeLoader:
        dataset = LakeDataset(table, batch_size=3, shuffle=True, columns=["id", "p"], nulls="mask", rank=rank,
                              world_size=world_size, **options)  # fmt: skip
        return LakeLoader(dataset, num_workers=num_workers)

    expected = theirs(root)
    assert sum(expected.values()) == table.num_rows == len(delivered(table))
    assert_exactly_once(make_loader, topologies=[(1, 0), (2, 0), (3, 0)], offsets=4, key="id")


@pytest.mark.parametrize("how", [{"magic": 7}, {"broken": True}])
def test_a_damaged_deletion_vector_is_refused(root: Path, how: dict[str, Any]) -> None:
    write(root, of(0, 9))
    commit(root, [upgrade("deletionVectors")])
    delete_rows(root, {next(iter(adds(root))): [1, 2]}, **how)
    with pytest.raises(TableNotFound, match=r"deltalake cannot read its deletion vectors.*(magic|CRC32)"):
        open_table(root)


def test_a_missing_deletion_vector_is_refused(root: Path) -> None:
    write(root, of(0, 9))
    commit(root, [upgrade("deletionVectors")])
    delete_rows(root, {next(iter(adds(root))): [1, 2]})
    next(root.rglob("deletion_vector_*.bin")).unlink()
    with pytest.raises((TableNotFound, OSError), match="deletion"):
        open_table(root)


PARTITIONS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["a b", "c/d=e%20&ü", "1", None]),
    "day": (pa.date32(), [datetime.date(2024, 2, 29), datetime.date(1, 1, 1), None]),
    "at": (pa.timestamp("us", "UTC"), [datetime.datetime(2024, 1, 1, 1, 2, 3, 4, UTC), None]),
    "clock": (pa.timestamp("us"), [datetime.datetime(2024, 1, 1, 23, 59, 59, 999_999), None]),
    "price": (pa.decimal128(8, 3), [Decimal("1.500"), Decimal("99999.999"), None]),
    "flag": (pa.bool_(), [True, False, None]),
    "small": (pa.int8(), [-128, 127, None]),
    "real": (pa.float64(), [0.1, float("nan"), -1e30, None]),
    "single": (pa.float32(), [0.1, None]),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition_values_come_typed_from_the_log(root: Path, name: str) -> None:
    kind, values = PARTITIONS[name]
    write(root, pa.table({"id": list(range(len(values))), name: pa.array(values, kind)}), partition_by=[name])
    assert_all_versions(root)
    table = open_table(root)
    assert table.schema == pa.schema([("id", pa.int64()), (name, kind)])
    found = delivered(table)
    assert found == bag([{"id": i, name: pa.scalar(v, kind).as_py()} for i, v in enumerate(values)])


def test_an_empty_text_is_a_null_partition_as_the_protocol_says(root: Path) -> None:
    write(root, pa.table({"id": [1, 2], "s": ["", "x"]}), partition_by=["s"])
    assert delivered(open_table(root)) == bag([{"id": 1, "s": None}, {"id": 2, "s": "x"}])


def test_partitions_of_bytes_are_refused(root: Path) -> None:
    write(root, pa.table({"id": [1, 2], "s": [b"a\xff", b"x"]}), partition_by=["s"])
    with pytest.raises(TableFeatureUnsupported, match="partitioned by the bytes of 's'"):
        open_table(root)


def field(name: str, kind: Any, number: int) -> dict[str, Any]:
    physical = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
    return {"name": name, "type": kind, "nullable": True, "metadata": physical}


def struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


def arrow(number: int, kind: pa.DataType, name: str | None = None) -> pa.Field:
    return pa.field(name or f"col-{number}", kind, metadata={"PARQUET:field_id": str(number)})


MAPPED = [
    field("renamed user", "long", 1),
    field("day", "date", 2),
    field("address", struct(field("zip code", "string", 4), field("added", "integer", 5)), 3),
    field("tags", {"type": "array", "elementType": struct(field("key", "string", 7)), "containsNull": True}, 6),
    field(
        "by name",
        {"type": "map", "keyType": "string", "valueType": struct(field("v", "double", 9)), "valueContainsNull": True},
        8,
    ),
]


def mapped_file(number: int, first: str | None = None) -> pa.Table:
    """Stored: an older schema, in another order, with a column that was dropped."""
    fields = [
        arrow(8, pa.map_(pa.string(), pa.struct([arrow(9, pa.float64())]))),
        arrow(6, pa.list_(pa.struct([arrow(7, pa.string())]))),
        arrow(3, pa.struct([arrow(99, pa.int8(), "day"), arrow(4, pa.string())])),
        arrow(98, pa.string(), "renamed user"),
        arrow(1, pa.int64(), first),
    ]
    rows = [
        {
            fields[0].name: [("a", {"col-9": number / 2}), ("b", None)],
            fields[1].name: [{"col-7": f"k{number}"}, None],
            fields[2].name: {"day": 1, "col-4": str(number)},
            fields[3].name: "dropped",
            fields[4].name: number,
        },
        dict.fromkeys(field.name for field in fields),
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_found_by_physical_name_or_id(root: Path, mode: Any) -> None:
    files = [
        ("ab/1.parquet", mapped_file(1), {"col-2": "2024-01-31"}),
        ("cd/2.parquet", mapped_file(2), {"col-2": None}),
    ]
    write_mapped(root, mode, MAPPED, files)
    assert_all_versions(root)
    table = open_table(root)
    assert table.schema.names == ["renamed user", "day", "address", "tags", "by name"]
    one = {
        "renamed user": 1,
        "day": datetime.date(2024, 1, 31),
        "address": {"zip code": "1", "added": None},
        "tags": [{"key": "k1"}, None],
        "by name": [("a", {"v": 0.5}), ("b", None)],
    }
    assert bag([one]) <= delivered(table)
    assert delivered(table).total() == 4


def test_in_mode_id_a_file_is_read_by_ids_alone(root: Path) -> None:
    write_mapped(root, "id", MAPPED[:1], [("1.parquet", mapped_file(7, "another name"), {})])
    assert delivered(open_table(root)) == bag([{"renamed user": 7}, {"renamed user": None}])
    without = pa.table({"col-1": [1]})
    commit(root, [add_file(root, "2.parquet", without, {})])
    with pytest.raises(SchemaError, match=r"'2\.parquet' has no Parquet field ids"):
        delivered(open_table(root))


def test_a_table_whose_columns_deltalake_mapped_is_read(root: Path) -> None:
    write(root, of(0, 20), partition_by=["p"], configuration={"delta.columnMapping.mode": "name"})
    assert open_table(root).index.columns
    assert_all_versions(root)


def evolved(root: Path, kinds: list[tuple[str, pa.DataType, Any]], last: str, *features: str) -> None:
    """A table of a column ``x`` that was written in these types, and is of the last one by its schema."""
    schema = {"type": "struct", "fields": [{"name": "x", "type": last, "nullable": True, "metadata": {}}]}
    root.mkdir()
    metadata = {
        "id": "t",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": 1,
    }
    files = [add_file(root, path, pa.table({"x": pa.array([v, None], kind)}), {}) for path, kind, v in kinds]
    commit(root, [upgrade(*features), {"metaData": metadata}, *files])


WIDENED: list[tuple[str, list[tuple[str, pa.DataType, Any]], list[Any]]] = [
    ("long", [("0", pa.int8(), -5), ("1", pa.int16(), 300), ("2", pa.int32(), 2**31 - 1), ("3", pa.int64(), 2**63 - 1)],
     [-5, 300, 2**31 - 1, 2**63 - 1]),
    ("double", [("0", pa.float32(), 0.5), ("1", pa.int32(), 7), ("2", pa.float64(), 0.1)], [0.5, 7.0, 0.1]),
    ("decimal(20,4)", [("0", pa.decimal128(5, 2), Decimal("123.45")), ("1", pa.int32(), 3)],
     [Decimal("123.4500"), Decimal("3.0000")]),
    ("timestamp_ntz", [("0", pa.date32(), datetime.date(2024, 1, 2)),
                       ("1", pa.timestamp("us"), datetime.datetime(2024, 1, 2, 3))],
     [datetime.datetime(2024, 1, 2), datetime.datetime(2024, 1, 2, 3)]),
]  # fmt: skip


@pytest.mark.parametrize(("last", "files", "values"), WIDENED, ids=[last for last, *_ in WIDENED])
def test_files_from_before_a_column_was_widened_are_read_in_its_type(
    root: Path, last: str, files: list[Any], values: list[Any]
) -> None:
    evolved(root, files, last, "typeWidening", *(["timestampNtz"] if last == "timestamp_ntz" else []))
    assert delivered(open_table(root)) == bag([{"x": v} for v in [*values, *[None] * len(values)]])


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("us"), pa.timestamp("us", "UTC"), "int96"],
)
def test_timestamps_of_every_kind_of_file_are_read_in_the_tables_unit(root: Path, kind: Any) -> None:
    at = [datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999), None]
    evolved(root, [("0.parquet", pa.timestamp("us", "UTC"), at[0])], "timestamp")
    column = pa.array(at, pa.timestamp("us", "UTC") if kind == "int96" else kind)
    (root / "1.parquet").unlink(missing_ok=True)
    added = add_file(root, "1.parquet", pa.table({"x": column}), {})
    if kind == "int96":
        pq.write_table(pa.table({"x": column}), root / "1.parquet", use_deprecated_int96_timestamps=True)
        added["add"]["size"] = (root / "1.parquet").stat().st_size
    commit(root, [added])
    wanted = [value and value.replace(tzinfo=UTC) for value in [*at, at[0], None]]
    assert delivered(open_table(root)) == bag([{"x": value} for value in wanted])


@pytest.mark.parametrize("feature", ["variantType", "catalogManaged", "fromTheFuture"])
def test_features_that_we_do_not_know_are_refused_by_name(root: Path, feature: str) -> None:
    write(root, of(0, 3))
    commit(root, [upgrade(feature)])
    with pytest.raises(TableFeatureUnsupported, match=f"(?i){feature}|catalog-managed"):
        open_table(root)
    assert open_table(root, version=0).num_rows == 3


def test_versions_are_named_by_number_and_by_time(root: Path) -> None:
    for number in range(4):
        write(root, of(number, 1), mode="append")
        os.utime(root / "_delta_log" / f"{number:020}.json", (1000 * (number + 1),) * 2)

    def rows_at(second: float) -> int:
        return open_table(root, timestamp=datetime.datetime.fromtimestamp(second, UTC)).num_rows

    assert [rows_at(second) for second in (1000, 1999.999, 2000, 3500, 1e9)] == [1, 1, 2, 3, 4]
    assert open_table(root, timestamp="1970-01-01T01:33:20+01:00").index.version.name == "1"
    with pytest.raises(TableNotFound, match=r"no version as old as .*version 0"):
        rows_at(999)
    assert open_table(root).index.version.table_id == DeltaTable(str(root)).metadata().id
    for wrong, error in ((9, TableNotFound), (-1, ConfigError), ("1", ConfigError)):
        with pytest.raises(error, match=r"version.*[91]"):
            open_table(root, version=wrong)
    with pytest.raises(ConfigError, match="named by version or timestamp"):
        open_table(root, snapshot_id=1)


def test_times_are_those_of_the_commits_where_the_table_has_them(root: Path) -> None:
    write(root, of(0, 2))
    lines = (root / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    metadata = next(json.loads(line) for line in lines if "metaData" in line)
    metadata["metaData"]["configuration"] = {
        "delta.enableInCommitTimestamps": "true",
        "delta.inCommitTimestampEnablementVersion": "1",
        "delta.inCommitTimestampEnablementTimestamp": "5000000",
    }
    (path,) = adds(root)
    protocol = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["inCommitTimestamp"]}}
    for number, actions in ((1, [protocol, metadata]), (2, [{"remove": {"path": path, "dataChange": True}}])):
        info = {"commitInfo": {"inCommitTimestamp": 5_000_000 * number, "operation": "TEST"}}
        name = root / "_delta_log" / f"{number:020}.json"
        name.write_text("\n".join(map(json.dumps, [info, *actions])) + "\n")
        os.utime(name, (1, 1))
    os.utime(root / "_delta_log" / f"{0:020}.json", (1000, 1000))
    at = [open_table(root, timestamp=datetime.datetime.fromtimestamp(s, UTC)) for s in (1000, 4999, 5000, 9999, 10000)]
    assert [table.index.version.name for table in at] == ["0", "0", "1", "1", "2"]
    assert at[-1].index.version.timestamp_ms == 10_000_000 and at[-1].num_rows == 0


def test_a_vacuumed_version_is_refused_and_a_cleaned_log_is_read_from_its_checkpoint(root: Path) -> None:
    for number in range(3):
        write(root, of(number, 2), mode="append")
    table = DeltaTable(str(root))
    table.optimize.compact()
    table.create_checkpoint()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert delivered(open_table(root)) == theirs(root)
    with pytest.raises(DataFileChanged, match=r"Delta version 1 of .* cannot be read: its file '.*' is gone"):
        open_table(root, version=1)
    for number in range(3):
        (root / "_delta_log" / f"{number:020}.json").unlink()
    assert delivered(open_table(root)) == theirs(root)
    with pytest.raises(TableNotFound, match="deltalake cannot read its version 1"):
        open_table(root, version=1)


def test_files_of_a_shallow_clone_are_read_where_they_are(tmp_path: Path) -> None:
    source, clone = tmp_path / "a lake", tmp_path / "clone"
    write(source, of(0, 9), partition_by=["s"])
    log = (source / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    (clone / "_delta_log").mkdir(parents=True)
    kept = [line for line in log if '"add"' not in line]
    (clone / "_delta_log" / f"{0:020}.json").write_text("\n".join(kept) + "\n")
    commit(clone, [{"add": {**add, "path": f"{source.as_uri()}/{path}"}} for path, add in adds(source).items()])
    commit(clone, [upgrade("deletionVectors")])
    delete_rows(clone, {next(iter(adds(clone))): [0]}, "absolute")
    assert_all_versions(clone)
    assert open_table(clone).uri == str(source)


def test_a_table_without_rows_is_a_table(root: Path) -> None:
    DeltaTable.create(str(root), schema=pa.schema([("a", pa.int64()), ("p", pa.string())]), partition_by=["p"])
    table = open_table(root)
    assert table.num_rows == 0 and table.schema.names == ["a", "p"]
    assert delivered(table) == Counter()


def test_a_log_that_deltalake_cannot_read_is_said_to_be(root: Path) -> None:
    write(root, of(0, 3))
    path = root / "_delta_log" / f"{0:020}.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(TableNotFound, match=r"of the Delta table .*, deltalake cannot read"):
        open_table(root)
    shutil.rmtree(root / "_delta_log")
    assert open_table(root).index.version.format == "parquet"


def test_without_deltalake_the_error_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeckpt.lake.formats import pinned

    write(root, of(0, 3))
    find: Callable[[str], Any] = pinned.importlib.util.find_spec
    monkeypatch.setattr(pinned.importlib.util, "find_spec", lambda name: None if name == "deltalake" else find(name))
    with pytest.raises(ConfigError, match=r'pip install "lakeckpt\[delta\]"'):
        open_table(root)


def test_a_table_on_s3_is_read_with_the_options_of_its_storage(root: Path, s3: S3) -> None:
    write(root, of(0, 30), partition_by=["s"])
    commit(root, [upgrade("deletionVectors")])
    for number, path in enumerate(sorted(adds(root))[:2]):
        delete_rows(root, {path: [0]}, "relative" if number else "inline")
    for path in root.rglob("*.*"):
        if path.is_file():
            key = f"lake/t/{path.relative_to(root)}"
            s3.client.put_object(Bucket=s3.bucket, Key=key, Body=path.read_bytes())
    place = f"s3://{s3.bucket}/lake/t"
    table = open_table(place, storage_options=s3.options)
    assert delivered(table) == theirs(root) and table.index.digest == open_table(root).index.digest
    assert open_table(place, version=0, storage_options=s3.options).num_rows == 30
    assert table.index.etags[0] is not None
    with pytest.raises(TableNotFound) as refused:
        open_table(place, version=99, storage_options=s3.options)
    assert CANARY not in "".join(traceback.format_exception(refused.value)) + repr(table)

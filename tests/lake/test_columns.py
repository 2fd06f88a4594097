"""Files written under other schemas are read as the table's schema says, and an index keeps how."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.errors import ConfigError, DataFileChanged, SchemaError, WireDamaged
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.formats.pinned_files import PinnedFile, PinnedFiles
from lakeckpt.lake.formats.pinning import index_of_version, listed
from lakeckpt.lake.parquet.footer import summarize_all
from lakeckpt.lake.table.column_mapping import ColumnMapping, StoredField
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.listing import find_files
from lakeckpt.lake.table.partitions import STORED, coded
from lakeckpt.lake.table.table import Table
from lakeckpt.lake.table.version import TableVersion
from lakeckpt.reading.windows.decode import RowGroupDecoder

VERSION = TableVersion(format="iceberg", name="1")


def with_id(field: pa.Field, field_id: int) -> pa.Field:
    return field.with_metadata({"PARQUET:field_id": str(field_id)})


def opened(root: Path, schema: pa.Schema, files: list[PinnedFile] | None = None, **given: Any) -> Table:
    found = find_files(root, storage_options=None, threads=1)
    files = [PinnedFile(path=info.path) for info in found.files] if files is None else files
    pinned = PinnedFiles(version=VERSION, files=tuple(files), schema=schema, **given)
    found = listed(found, pinned, storage_options=None, threads=1)
    index = index_of_version(found.files, summarize_all(found.storage, found.files, threads=1, progress=None), pinned)
    again = TableIndex.loads(index.dumps())
    assert again == index and again.schema == index.schema and again.columns == index.columns
    return Table(uri=found.uri, storage=found.storage, index=again)


def rows(table: Table, columns: list[str] | None = None) -> list[dict[str, Any]]:
    decoder = RowGroupDecoder(table, columns)
    return [
        row
        for group, count in enumerate(table.index.group_rows)
        for row in decoder.decode(group, 0, int(count)).to_pylist()
    ]


def write(root: Path, name: str, fields: list[pa.Field], values: list[dict[str, Any]], **how: Any) -> None:
    pq.write_table(pa.Table.from_pylist(values, schema=pa.schema(fields)), root / name, **how)


def test_columns_are_found_by_field_id_whatever_they_were_called(tmp_path: Path) -> None:
    old = [with_id(pa.field("a", pa.int32()), 1), with_id(pa.field("b", pa.string()), 2)]
    new = [with_id(pa.field("a", pa.string()), 3), with_id(pa.field("c", pa.int64()), 1)]
    write(tmp_path, "0.parquet", old, [{"a": 1, "b": "x"}])
    write(tmp_path, "1.parquet", new, [{"a": "y", "c": 2}])
    mapping = ColumnMapping(fields={"a": StoredField(field_id=3), "c": StoredField(field_id=1)})
    table = opened(tmp_path, pa.schema([("c", pa.int64()), ("a", pa.string())]), columns=mapping)
    assert rows(table) == [{"c": 1, "a": None}, {"c": 2, "a": "y"}]
    assert rows(table, ["a"]) == [{"a": None}, {"a": "y"}]


def test_names_serve_files_without_field_ids_only(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", [pa.field("old", pa.int32())], [{"old": 1}])
    write(tmp_path, "1.parquet", [with_id(pa.field("old", pa.int32()), 9)], [{"old": 2}])
    mapping = ColumnMapping(fields={"x": StoredField(field_id=1, names=("older", "old"), default=7)})
    table = opened(tmp_path, pa.schema([("x", pa.int64())]), columns=mapping)
    assert rows(table) == [{"x": 1}, {"x": 7}]
    alone = ColumnMapping(fields={"x": StoredField(field_id=1)})
    with pytest.raises(SchemaError, match=r"'0\.parquet' has no Parquet field ids.*'x' by field id 1 alone"):
        rows(opened(tmp_path, pa.schema([("x", pa.int64())]), columns=alone))


def test_nested_fields_are_found_renamed_added_dropped_reordered_and_widened(tmp_path: Path) -> None:
    point = pa.struct([with_id(pa.field("dropped", pa.string()), 5), with_id(pa.field("lon", pa.float32()), 3)])
    stored = [
        with_id(pa.field("p", point), 1),
        with_id(pa.field("ps", pa.list_(with_id(pa.field("element", point), 6))), 2),
        with_id(pa.field("m", pa.map_(pa.string(), with_id(pa.field("value", point), 8))), 7),
    ]
    one = {"dropped": "d", "lon": 0.5}
    values = [
        {"p": one, "ps": [one, None], "m": [("k", one)]},
        {"p": None, "ps": None, "m": None},
        {"p": {"dropped": None, "lon": None}, "ps": [], "m": []},
    ]
    write(tmp_path, "0.parquet", stored, values)
    wanted = pa.struct([("added", pa.int32()), ("x", pa.float64()), ("zone", pa.string())])
    inner = StoredField(
        field_id=1,
        children=(StoredField(field_id=4), StoredField(field_id=3), StoredField(field_id=9, default="utc")),
    )
    element = StoredField(field_id=6, children=inner.children)
    fields = {
        "q": inner,
        "ps": StoredField(field_id=2, children=(element,)),
        "m": StoredField(field_id=7, children=(StoredField(field_id=70), element)),
    }
    schema = pa.schema([("m", pa.map_(pa.string(), wanted)), ("ps", pa.large_list(wanted)), ("q", wanted)])
    got = {"added": None, "x": 0.5, "zone": "utc"}
    empty = {"added": None, "x": None, "zone": "utc"}
    table = opened(tmp_path, schema, columns=ColumnMapping(fields=fields))
    assert rows(table) == [
        {"m": [("k", got)], "ps": [got, None], "q": got},
        {"m": None, "ps": None, "q": None},
        {"m": [], "ps": [], "q": empty},
    ]
    # A part of a row group is read from the same chunks at an offset.
    assert RowGroupDecoder(table).decode(0, 1, 3).to_pylist() == rows(table)[1:]


def test_a_required_column_that_a_file_lacks_is_refused_unless_it_has_a_default(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", [pa.field("a", pa.int32())], [{"a": 1}])
    schema = pa.schema([pa.field("b", pa.decimal128(6, 2), nullable=False)])
    with pytest.raises(SchemaError, match=r"'0\.parquet' lacks 'b', which must not be null"):
        rows(opened(tmp_path, schema))
    default = ColumnMapping(fields={"b": StoredField(names=("b",), default=Decimal("1.5"))})
    assert rows(opened(tmp_path, schema, columns=default)) == [{"b": Decimal("1.50")}]


def test_a_mapping_and_the_schema_are_part_of_the_content(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", [pa.field("a", pa.int32())], [{"a": 1}])
    by = {name: ColumnMapping(fields={"x": StoredField(names=(name,))}) for name in ("a", "b")}
    schema = pa.schema([("x", pa.int64())])
    tables = [opened(tmp_path, schema, columns=by["a"]), opened(tmp_path, schema, columns=by["b"])]
    tables += [opened(tmp_path, schema), opened(tmp_path, pa.schema([("x", pa.int32())]))]
    assert len({table.index.digest for table in tables}) == 4
    assert [rows(table) for table in tables] == [[{"x": 1}], [{"x": None}], [{"x": None}], [{"x": None}]]


UTC = datetime.UTC
TYPED: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [3, -1, None]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [datetime.date(2024, 2, 29), datetime.date(1, 1, 1)]),
    (pa.timestamp("us", "UTC"), [datetime.datetime(2024, 1, 1, 1, 2, 3, 4, UTC), None]),
    (pa.timestamp("us"), [datetime.datetime(9999, 1, 1)]),
    (pa.timestamp("ns"), [1]),
    (pa.decimal128(20, 4), [Decimal("-1234567890123.4567"), Decimal("0")]),
    (pa.float64(), [0.1, float("inf"), -0.0, 0.0]),
    (pa.binary(), [b"\xff\0", b""]),
    (pa.string(), ["ü", "", None]),
    (pa.time64("us"), [datetime.time(1, 2, 3)]),
]


@pytest.mark.parametrize(("kind", "values"), TYPED, ids=[str(kind) for kind, _ in TYPED])
def test_partition_columns_have_the_type_that_the_schema_says(
    tmp_path: Path, kind: pa.DataType, values: list[Any]
) -> None:
    files = []
    for i, value in enumerate(values):
        write(tmp_path, f"{i}.parquet", [pa.field("a", pa.int32())], [{"a": i}, {"a": -i}])
        files.append(PinnedFile(path=f"{i}.parquet", partition={"p": value}))
    schema = pa.schema([("p", kind), ("a", pa.int32())])
    table = opened(tmp_path, schema, files, partition_columns=("p",))
    assert table.schema == schema
    decoder = RowGroupDecoder(table, ["p"])
    found = pa.concat_tables([decoder.decode(group, 0, 2) for group in range(len(values))])
    assert found["p"].combine_chunks().equals(pa.array([value for value in values for _ in range(2)], kind))
    assert [table.index.partitions[0].value_of(file) for file in range(len(values))] == values
    if pa.types.is_floating(kind):
        assert np.signbit(found["p"].to_numpy()[::2]).tolist() == np.signbit(values).tolist()


def test_files_that_store_a_partition_column_are_read(tmp_path: Path) -> None:
    both = [pa.field("a", pa.int32()), pa.field("p", pa.int32())]
    write(tmp_path, "0.parquet", both, [{"a": 1, "p": 8}, {"a": 2, "p": 9}])
    write(tmp_path, "1.parquet", both[:1], [{"a": 3}])
    files = [PinnedFile(path="0.parquet"), PinnedFile(path="1.parquet", partition={"p": 5})]
    table = opened(tmp_path, pa.schema(both), files, partition_columns=("p",))
    assert rows(table, ["p"]) == [{"p": 8}, {"p": 9}, {"p": 5}]
    (column,) = table.index.partitions
    assert column.is_stored(0) and column.value_of(1) == 5 and column.codes.tolist() == [STORED, 0]
    assert column.field.nullable
    with pytest.raises(ValueError, match="file 0 stores the column 'p'"):
        column.value_of(0)


def test_each_value_is_kept_once_and_files_that_store_the_column_do_not_count() -> None:
    assert coded("p", pa.int32(), [2, None, 2, 1, 9], [False, False, False, False, True]).values == (1, 2, None)


def test_what_is_there_must_be_what_the_metadata_says(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", [pa.field("a", pa.int32())], [{"a": 1}])
    size = (tmp_path / "0.parquet").stat().st_size
    schema = pa.schema([("a", pa.int32())])
    assert rows(opened(tmp_path, schema, [PinnedFile(path="0.parquet", size_bytes=size, rows=1)])) == [{"a": 1}]
    wrong = {
        "is gone": PinnedFile(path="1.parquet"),
        f"has {size} bytes, not 5": PinnedFile(path="0.parquet", size_bytes=5),
        "holds 1 rows, but": PinnedFile(path="0.parquet", rows=2),
        "deletes row 1 of": PinnedFile(path="0.parquet", deleted=np.array([0, 1])),
    }
    for message, file in wrong.items():
        with pytest.raises(DataFileChanged, match=message):
            opened(tmp_path, schema, [file])
    gone = opened(tmp_path, schema, [PinnedFile(path="0.parquet", deleted=np.array([0]))])
    assert gone.num_rows == 0 and opened(tmp_path, schema, []).num_rows == 0


def test_a_changed_mapping_in_an_index_is_refused(tmp_path: Path) -> None:
    from lakeckpt.lake.table import index as module
    from lakeckpt.wire import envelope as codec

    write(tmp_path, "0.parquet", [pa.field("a", pa.int32())], [{"a": 1}])
    mapping = ColumnMapping(fields={"x": StoredField(names=("a",))})
    data = opened(tmp_path, pa.schema([("x", pa.int64())]), columns=mapping).index.dumps()
    value = codec.loads(data, kind=module.KIND, supported=module.VERSION)
    for columns in ([["x", [None, ["b"], [], None]]], [["y", [None, ["a"], [], None]]], [["x", [None, [], [], None]]]):
        value["columns"] = columns
        with pytest.raises(WireDamaged):
            TableIndex.loads(codec.dumps(value, kind=module.KIND, version=module.VERSION))


def test_versions_of_plain_files_and_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", [pa.field("a", pa.int32())], [{"a": 1}])
    with pytest.raises(ConfigError, match=r"is a Parquet table: plain files have no versions"):
        open_table(tmp_path, version=3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"version": True}, "expected int or str"),
        ({"format": "avro"}, "expected one of parquet, delta"),
        ({"format": "delta"}, "is a table in the format 'parquet'"),
    ]
    for given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            open_table(tmp_path, **given)

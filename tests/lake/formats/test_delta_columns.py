"""Columns of a Delta table: mapped, widened, added, of partitions; each as the table's schema says."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import open_table
from lakeckpt.errors import SchemaError, TableError
from tests.lake.formats.delta_log import add_file, commit, upgrade, write_mapped
from tests.lake.formats.delta_tables import assert_all_versions, of, write
from tests.lake.formats.rows import bag, delivered_of

UTC = datetime.UTC


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake ü =x"


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
    found = delivered_of(table)
    assert found == bag([{"id": i, name: pa.scalar(v, kind).as_py()} for i, v in enumerate(values)])


def test_an_empty_text_is_a_null_partition_as_the_protocol_says(root: Path) -> None:
    write(root, pa.table({"id": [1, 2], "s": ["", "x"]}), partition_by=["s"])
    assert delivered_of(open_table(root)) == bag([{"id": 1, "s": None}, {"id": 2, "s": "x"}])


def test_partitions_of_bytes_are_refused(root: Path) -> None:
    write(root, pa.table({"id": [1, 2], "s": [b"a\xff", b"x"]}), partition_by=["s"])
    with pytest.raises(TableError, match="partitioned by the bytes of 's'"):
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
    assert bag([one]) <= delivered_of(table)
    assert delivered_of(table).total() == 4


def test_in_mode_id_a_file_is_read_by_ids_alone(root: Path) -> None:
    write_mapped(root, "id", MAPPED[:1], [("1.parquet", mapped_file(7, "another name"), {})])
    assert delivered_of(open_table(root)) == bag([{"renamed user": 7}, {"renamed user": None}])
    without = pa.table({"col-1": [1]})
    commit(root, [add_file(root, "2.parquet", without, {})])
    with pytest.raises(SchemaError, match=r"'2\.parquet' has no Parquet field ids"):
        delivered_of(open_table(root))


@pytest.mark.skipif(version("deltalake") == "1.6.0", reason="this deltalake does not map columns")
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
    zoneless = ["timestampNtz"] if last == "timestamp_ntz" else []
    evolved(root, files, last, "typeWidening", *zoneless)
    assert delivered_of(open_table(root)) == bag([{"x": v} for v in [*values, *[None] * len(values)]])
    # deltalake refuses the feature's name; of the same files without it, it reads the same.
    evolved(root / "unnamed", files, last, *zoneless)
    assert_all_versions(root / "unnamed")


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
    assert delivered_of(open_table(root)) == bag([{"x": value} for value in wanted])

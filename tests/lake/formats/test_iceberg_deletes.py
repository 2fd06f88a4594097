"""What an Iceberg snapshot deletes is deleted: by position, by vector, by value; no more, no less, or it is refused.

pyiceberg's own reader is the reference where it follows the specification; where it does not (vectors that a snapshot
no longer lists, equality deletes), the rows that must be left are written down here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.types import LongType, NestedField, StringType, UUIDType

from lakeckpt import open_table
from lakeckpt.errors import DataFileDamaged, TableError, TableVersionGone
from lakeckpt.lake.formats.iceberg.plan import Entry as DeleteFile
from lakeckpt.lake.formats.iceberg.plan import PlannedFile
from lakeckpt.lake.formats.iceberg.position_deletes import deleted_rows
from tests.examples import examples
from tests.lake.formats.iceberg_tables import (
    Entry,
    at_version_3,
    commit,
    deletion_vectors,
    equality_deletes,
    parquet_bytes,
    position_deletes,
    vector_blob,
    warehouse,
    with_ids,
    write_bytes,
)
from tests.lake.formats.rows import delivered, rows_of

SCHEMA = pa.schema([("id", pa.int64()), ("p", pa.string()), ("v", pa.float64())])
ICEBERG_SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False), NestedField(2, "p", StringType(), required=False)
)


def numbered(start: int, stop: int, p: str = "a") -> pa.Table:
    rows = range(start, stop)
    return pa.table({"id": rows, "p": [p] * len(rows), "v": [float(i % 3) for i in rows]}, schema=SCHEMA)


def left(source: Any, **asked: Any) -> list[int]:
    return sorted(dict(row)["id"][1] for row in delivered(source, columns=["id"], **asked).elements())  # type: ignore[call-overload]


@pytest.fixture
def catalog(tmp_path: Path) -> SqlCatalog:
    return warehouse(tmp_path)


@pytest.fixture
def table(catalog: SqlCatalog) -> Table:
    """Two data files: ids 0 … 9 and 10 … 19; see `older` and `newer`."""
    made = catalog.create_table("db.t", SCHEMA)
    made.append(numbered(0, 10))
    made.append(numbered(10, 20))
    return made


def older(table: Table) -> str:
    return file_of(table, 0)


def newer(table: Table) -> str:
    return file_of(table, 10)


def file_of(table: Table, first: int) -> str:
    """The location of the data file whose first id is this."""
    for task in table.scan().plan_files():
        if struct.unpack("<q", task.file.lower_bounds[1])[0] == first:
            return task.file.file_path
    raise KeyError(first)


def test_position_deletes_of_several_files_and_commits_add_up(table: Table) -> None:
    first, second = older(table), newer(table)
    commit(table, [position_deletes(table, [(first, 0), (first, 9), (second, 5)])])
    commit(
        table, [position_deletes(table, [(first, 0), (first, 0), (first, 3)]), position_deletes(table, [(second, 0)])]
    )
    assert left(table) == [1, 2, 4, 5, 6, 7, 8, 11, 12, 13, 14, 16, 17, 18, 19]
    assert delivered(table) == rows_of(table.scan().to_arrow())
    assert open_table(table).index.deletes.total == 5


def test_deletes_of_files_that_the_snapshot_no_longer_has_delete_nothing(table: Table) -> None:
    commit(table, [position_deletes(table, [(older(table), 0), ("file:///gone.parquet", 1)])])
    table.delete("id < 10")
    assert left(table) == list(range(10, 20))


def test_a_delete_does_not_reach_rows_that_were_written_after_it(table: Table) -> None:
    newest = table.metadata.last_sequence_number
    old = position_deletes(table, [(older(table), 1), (newer(table), 1)], sequence=newest - 1)
    commit(table, [old])
    assert left(table) == [0, *range(2, 20)]  # the newer file was added after the deletes
    values = pa.table({"id": pa.array([2, 12], pa.int64())})
    commit(table, [equality_deletes(table, values, [1], sequence=newest)])
    assert left(table) == [0, *range(3, 20)]  # a file of the same sequence is not older


@pytest.fixture
def divided(catalog: SqlCatalog) -> Table:
    """Partitions p=a (ids 0, 1, 2) and p=b (ids 10, 11, 12)."""
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "p"), spec_id=0)
    made = catalog.create_table("db.divided", ICEBERG_SCHEMA, partition_spec=spec)
    made.append(pa.table({"id": [0, 1, 2, 10, 11, 12], "p": ["a"] * 3 + ["b"] * 3}))
    return made


def test_deletes_reach_their_own_partition_only(divided: Table) -> None:
    a, b = file_of(divided, 0), file_of(divided, 10)
    commit(divided, [position_deletes(divided, [(a, 0), (b, 0)], partition=("a",))])
    assert left(divided) == [1, 2, 10, 11, 12]
    values = pa.table({"id": pa.array([1, 11], pa.int64())})
    commit(divided, [equality_deletes(divided, values, [1], partition=("b",))])
    assert left(divided) == [1, 2, 10, 12]


def test_equality_deletes_without_a_partition_reach_all_and_those_of_old_partitionings_their_own(
    divided: Table,
) -> None:
    with divided.update_spec() as change:
        change.remove_field("p")
    divided.append(pa.table({"id": [20, 21], "p": ["a", "b"]}))
    values = pa.table({"id": pa.array([2, 12, 20], pa.int64())})
    commit(divided, [equality_deletes(divided, values, [1], spec_id=1)])
    assert left(divided) == [0, 1, 10, 11, 21]
    commit(divided, [equality_deletes(divided, pa.table({"id": pa.array([0, 10, 21])}), [1], partition=("a",))])
    assert left(divided) == [1, 10, 11, 21]


def test_a_partitioning_of_nothing_but_fields_that_were_removed_is_none(catalog: SqlCatalog) -> None:
    """In a table that was of version 1 a removed field stays, as void: its deletes by value are deletes everywhere."""
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "p"))
    table = catalog.create_table("db.old", ICEBERG_SCHEMA, partition_spec=spec, properties={"format-version": "1"})
    table.append(pa.table({"id": [1, 2, 3], "p": ["x", "x", "y"]}))
    with table.update_spec() as change:
        change.remove_field("p")
    with table.transaction() as change:
        change.upgrade_table_version(2)
    table = catalog.load_table("db.old")
    table.append(pa.table({"id": [4], "p": ["z"]}))
    values = pa.table({"id": pa.array([2, 4], pa.int64())})
    assert [type(one.transform) for one in table.spec().fields] == [VoidTransform]
    commit(table, [equality_deletes(table, values, [1], spec_id=table.spec().spec_id, partition=(None,))])
    assert left(catalog.load_table("db.old")) == [1, 3]


def test_equality_deletes_compare_uuids(catalog: SqlCatalog) -> None:
    kind = pa.binary(16)
    table = catalog.create_table("db.uuids", Schema(NestedField(1, "id", UUIDType(), required=False)))
    data = parquet_bytes(with_ids(pa.table({"id": pa.array([b"a" * 16, b"b" * 16, None], kind)}), [1]))
    location = write_bytes(table, "d.parquet", data)
    commit(table, [Entry(DataFileContent.DATA, location, FileFormat.PARQUET, 3, len(data))])
    commit(table, [equality_deletes(table, pa.table({"id": pa.array([b"b" * 16, None], kind)}), [1])])
    assert open_table(table).num_rows == 1


def test_deletion_vectors_are_honoured(table: Table) -> None:
    metadata = at_version_3(table, deletion_vectors(table, {older(table): [0, 1, 9], newer(table): range(10)}))
    assert left(metadata) == [2, 3, 4, 5, 6, 7, 8]
    assert delivered(metadata) == rows_of(StaticTable.from_metadata(metadata).scan().to_arrow())


def test_a_vector_stands_for_all_deletes_of_its_file(table: Table) -> None:
    commit(table, [position_deletes(table, [(older(table), 0), (newer(table), 0)])])
    metadata = at_version_3(table, deletion_vectors(table, {older(table): [0, 1]}))
    assert left(metadata) == [2, 3, 4, 5, 6, 7, 8, 9, *range(11, 20)]
    undone = at_version_3(table, deletion_vectors(table, {older(table): [1]}))
    assert left(undone) == [0, 2, 3, 4, 5, 6, 7, 8, 9, *range(11, 20)]


def test_vectors_that_lie_in_a_puffin_file_but_in_no_manifest_delete_nothing(table: Table) -> None:
    entries = deletion_vectors(table, {older(table): [0], newer(table): [0]})
    assert left(at_version_3(table, entries[:1])) == list(range(1, 20))


def test_two_vectors_of_a_file_and_vectors_of_nothing_are_refused(table: Table) -> None:
    one, two = (deletion_vectors(table, {older(table): [row]})[0] for row in (0, 1))
    with pytest.raises(TableError, match="has 2 deletion vectors"):
        open_table(at_version_3(table, [one, two]))
    for name in ("referenced_data_file", "content_offset", "content_size_in_bytes"):
        with pytest.raises(TableError, match="does not name its data file"):
            open_table(at_version_3(table, [replace(one, more={**one.more, name: None})]))


def change_file(location: str, change: Callable[[bytearray], None]) -> None:
    path = Path(location.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.__setitem__(4 + 8 + 20, data[4 + 8 + 20] ^ 1), "checksum"),
        (lambda data: data.__setitem__(8, 0), "holds no deletion vector"),
        (lambda data: data.__setitem__(4, 9), "holds no deletion vector"),
        (lambda data: data.__delitem__(slice(30, None)), "ends at byte"),
        (lambda data: data.__delitem__(slice(0, None)), "ends at byte"),
    ],
)
def test_damaged_vectors_are_named(table: Table, change: Callable[[bytearray], None], said: str) -> None:
    (entry,) = deletion_vectors(table, {older(table): [0, 5, 7]})
    metadata = at_version_3(table, [entry])
    change_file(entry.location, change)
    with pytest.raises(DataFileDamaged, match=said) as caught:
        open_table(metadata)
    assert caught.value.file == entry.location


def test_vectors_whose_bitmap_is_malformed_or_not_as_long_as_said_are_named(table: Table) -> None:
    import zlib

    (entry,) = deletion_vectors(table, {older(table): [0, 5, 7]})
    with pytest.raises(DataFileDamaged, match="deletes 3 rows at byte 4, but its manifest has 2"):
        open_table(at_version_3(table, [replace(entry, rows=2)]))
    inner = b"\xd1\xd3\x39\x64" + struct.pack("<Q", 7) + b"\xff" * 9
    blob = struct.pack(">I", len(inner)) + inner + struct.pack(">I", zlib.crc32(inner))
    location = write_bytes(table, "odd.puffin", blob)
    more = {**entry.more, "content_offset": 0, "content_size_in_bytes": len(blob)}
    with pytest.raises(DataFileDamaged, match="malformed deletion vector"):
        open_table(at_version_3(table, [replace(entry, location=location, more=more)]))
    Path(location.removeprefix("file://")).unlink()
    with pytest.raises(TableVersionGone, match="is gone"):
        open_table(at_version_3(table, [replace(entry, location=location, more=more)]))


class Bytes:
    """A FileIO of one file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def new_input(self, _: str) -> Bytes:
        return self

    def open(self) -> Any:
        import io

        return io.BytesIO(self.data)


@settings(max_examples=examples(30))
@given(rows=st.sets(st.integers(0, 2**34) | st.integers(0, 70_000), min_size=1, max_size=50), more=st.integers(0, 99))
def test_any_vector_is_read_back(rows: set[int], more: int) -> None:
    blob = vector_blob(sorted(rows))
    file = DataFile.from_args(
        _table_format_version=3,
        file_path="x",
        file_format=FileFormat.PUFFIN,
        record_count=len(rows),
        content_offset=more,
        content_size_in_bytes=len(blob),
    )
    vector = DeleteFile(sequence=1, partition=(0, ()), file=file)
    planned = PlannedFile(location="f", size_bytes=1, rows=2**40, vector=vector, file=None)  # type: ignore[arg-type]
    io: Any = Bytes(bytes(more) + blob + b"rest")
    assert deleted_rows([planned], io, threads=1)["f"].tolist() == sorted(rows)


def odd_positions(table: Table, listed: pa.Table, count: int) -> Entry:
    data = parquet_bytes(listed)
    location = write_bytes(table, "odd.parquet", data)
    return Entry(DataFileContent.POSITION_DELETES, location, FileFormat.PARQUET, count, len(data))


def test_position_deletes_that_do_not_add_up_are_named(table: Table) -> None:
    file = older(table)
    good = {"file_path": [file, newer(table)], "pos": pa.array([1, 2], pa.int64())}
    wrong: Sequence[tuple[pa.Table, int, str]] = [
        (pa.table(good), 3, "lists 2 rows, but its manifest has 3"),
        (pa.table({**good, "pos": pa.array([1, None], pa.int64())}), 2, "holds nulls"),
        (pa.table({**good, "file_path": [file, None]}), 2, "holds nulls"),
        (pa.table({"file_path": [file]}), 1, "no column 'pos'"),
        (pa.table({**good, "pos": ["x", "y"]}), 2, "cannot be read as position deletes"),
        (pa.table({**good, "pos": [10, 0]}), 2, f"deletes row 10 of '{file}', which has 10 rows"),
        (pa.table({**good, "pos": [-1, 0]}), 2, "deletes row -1"),
    ]
    before = table.current_snapshot().snapshot_id  # type: ignore[union-attr]
    for listed, count, said in wrong:
        commit(table, [odd_positions(table, listed, count)])
        with pytest.raises(DataFileDamaged, match=said):
            open_table(table)
        table.manage_snapshots().rollback_to_snapshot(before).commit()
    commit(table, [odd_positions(table, pa.table(good), 2)])  # columns are told by name where they have no field ids
    assert left(table) == [0, *range(2, 12), *range(13, 20)]


def test_a_delete_file_that_is_gone_or_cut_is_named(table: Table) -> None:
    entry = position_deletes(table, [(older(table), 1)])
    commit(table, [entry])
    change_file(entry.location, lambda data: data.__delitem__(slice(-9, None)))
    with pytest.raises(DataFileDamaged, match="cannot be read as position deletes") as caught:
        open_table(table)
    assert caught.value.file == entry.location
    Path(entry.location.removeprefix("file://")).unlink()
    with pytest.raises(TableVersionGone, match="is gone"):
        open_table(table)


@pytest.mark.parametrize("content", [DataFileContent.POSITION_DELETES, DataFileContent.EQUALITY_DELETES])
@pytest.mark.parametrize("kind", [FileFormat.ORC, FileFormat.AVRO])
def test_deletes_in_other_formats_are_refused(table: Table, content: DataFileContent, kind: FileFormat) -> None:
    more = {"equality_ids": [1]} if content == DataFileContent.EQUALITY_DELETES else {}
    commit(table, [Entry(content, f"{table.location()}/data/x", kind, 1, 9, more=more)])
    with pytest.raises(TableError, match=f"is {kind.value}: only Parquet"):
        open_table(table)


def test_equality_deletes_compare_all_their_columns_and_null_equals_null(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.eq", SCHEMA)
    nan, negative = float("nan"), -0.0
    values = [0.0, negative, nan, None, 1.0, 1.0, None, 1.0]
    made.append(pa.table({"id": range(8), "p": ["x", "x", "x", "x", "x", "y", None, None], "v": values}, schema=SCHEMA))

    def after(rows: list[dict[str, Any]], ids: list[int]) -> list[int]:
        kinds = {"p": pa.string(), "v": pa.float64()}
        names = list(rows[0])
        listed = pa.table({name: pa.array([row[name] for row in rows], kinds[name]) for name in names})
        made.manage_snapshots().rollback_to_snapshot(made.history()[0].snapshot_id).commit()
        commit(made, [equality_deletes(made, listed, ids)])
        return left(made)

    assert after([{"v": 0.0}], [3]) == [1, 2, 3, 4, 5, 6, 7]
    assert after([{"v": nan}, {"v": negative}], [3]) == [0, 3, 4, 5, 6, 7]
    assert after([{"v": None}], [3]) == [0, 1, 2, 4, 5, 7]
    assert after([{"p": "x", "v": 1.0}, {"p": None, "v": None}], [2, 3]) == [0, 1, 2, 3, 5, 7]
    assert after([{"p": "x", "v": 7.0}, {"p": "y", "v": 0.0}], [2, 3]) == list(range(8))


def test_equality_deletes_follow_columns_that_were_renamed_added_widened_and_dropped(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.eq", pa.schema([("id", pa.int64()), ("n", pa.int32())]))
    made.append(pa.table({"id": range(4), "n": pa.array([5, 6, 7, 8], pa.int32())}))
    with made.update_schema() as change:
        change.update_column("n", LongType())
        change.rename_column("n", "number")
        change.add_column("extra", StringType())
    made.append(pa.table({"id": [4, 5], "number": [5, 6], "extra": ["x", None]}))
    commit(made, [equality_deletes(made, pa.table({"number": pa.array([5], pa.int64())}), [2])])
    assert left(made) == [1, 2, 3, 5]
    nulls = pa.table({"extra": pa.array([None], pa.string()), "number": pa.array([6], pa.int64())})
    commit(made, [equality_deletes(made, nulls, [3, 2])])
    assert left(made) == [2, 3]
    commit(made, [equality_deletes(made, pa.table({"n": pa.array([7], pa.int32())}), [2])])
    with made.update_schema() as change:
        change.delete_column("number")
    assert left(made) == [3]


def test_equality_and_position_deletes_of_a_file_add_up(table: Table) -> None:
    commit(
        table,
        [
            position_deletes(table, [(older(table), 0), (newer(table), 9)]),
            equality_deletes(table, pa.table({"v": [1.0]}), [3]),
        ],
    )
    assert left(table) == [i for i in range(20) if i % 3 != 1 and i not in (0, 19)]


def test_equality_deletes_that_cannot_be_compared_are_refused(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.eq", pa.schema([("id", pa.int64()), ("s", pa.struct([("a", pa.int64())]))]))
    made.append(pa.table({"id": [1], "s": [{"a": 1}]}))
    values = pa.table({"x": pa.array([1], pa.int64())})
    before = made.current_snapshot().snapshot_id  # type: ignore[union-attr]
    for ids, said in (
        ([3], "field 3, which is in no|field 3, which is nested"),
        ([2], "nested"),
        ([77], "in no schema"),
    ):
        commit(made, [equality_deletes(made, values, ids)])
        with pytest.raises(TableError, match=said):
            open_table(made)
        made.manage_snapshots().rollback_to_snapshot(before).commit()
    commit(made, [equality_deletes(made, values, [1], more={"equality_ids": []})])
    with pytest.raises(TableError, match="does not name the columns"):
        open_table(made)


def test_damaged_equality_deletes_are_named(table: Table) -> None:
    entry = equality_deletes(table, pa.table({"v": [1.0]}), [3])
    commit(table, [replace(entry, rows=2)])
    with pytest.raises(DataFileDamaged, match="holds 1 rows, but its manifest has 2"):
        open_table(table)
    change_file(entry.location, lambda data: data.__delitem__(slice(-9, None)))
    with pytest.raises(DataFileDamaged, match="cannot be read for the table's equality deletes") as caught:
        open_table(table)
    assert caught.value.file == entry.location


def test_many_deletes_are_packed(table: Table) -> None:
    table.append(numbered(1000, 9000))
    file = file_of(table, 1000)
    gone = np.random.default_rng(0).choice(8000, 5000, replace=False)
    commit(table, [position_deletes(table, [(file, int(row)) for row in sorted(gone)])])
    opened = open_table(table)
    assert opened.num_rows == 20 + 3000
    assert len(opened.index.deletes.packed) == 1 and len(next(iter(opened.index.deletes.packed.values()))[2]) <= 1000

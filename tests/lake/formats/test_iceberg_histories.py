"""Over random histories of an Iceberg table, every snapshot delivers the rows that pyiceberg's own reader reads."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from lakeckpt import open_table
from tests.examples import examples
from tests.lake.formats.iceberg_tables import Entry, at_version_3, commit, deletion_vectors, position_deletes, warehouse
from tests.lake.formats.rows import delivered, rows_of

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "n", IntegerType(), required=False),
    NestedField(3, "p", StringType(), required=False),
)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("by position"), st.integers(0, 2**30)),
        st.tuples(st.sampled_from(["delete", "overwrite", "upsert"]), st.integers(0, 20)),
        st.tuples(st.sampled_from(["partition", "rename", "widen", "add", "drop"]), st.just(0)),
    ),
    min_size=2,
    max_size=7,
)


class History:
    """A table, and what is done to it; ids are given once."""

    def __init__(self, folder: Path) -> None:
        self.table: Table = warehouse(folder).create_table("db.t", SCHEMA)
        self.ids, self.names = itertools.count(), itertools.count()

    def rows(self, count: int, start: int | None = None) -> pa.Table:
        made = list(itertools.islice(self.ids if start is None else itertools.count(start), count))
        schema = self.table.schema().as_arrow()
        values = {"id": made, "p": [("a", "b", None)[i % 3] for i in made]}
        columns = [
            pa.array([str(i) if pa.types.is_large_string(f.type) else i for i in made], f.type)
            if f.name not in values
            else pa.array(values[f.name], f.type)
            for f in schema
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def act(self, what: str, number: int) -> None:
        match what:
            case "append":
                self.table.append(self.rows(number))
            case "by position":
                if entries := self.deletes(number, vectors=False):
                    commit(self.table, entries)
            case "delete":
                self.table.delete(f"id >= {number} and id < {number + 4}")
            case "overwrite":
                self.table.overwrite(self.rows(3), overwrite_filter=f"id == {number}")
            case "upsert":
                try:
                    self.table.upsert(self.rows(4, start=number), join_cols=["id"])
                except ValueError as error:  # pyiceberg cannot where a column was renamed since
                    if "field names are not matching" not in str(error):
                        raise
            case "partition":
                with self.table.update_spec() as spec:
                    if self.table.spec().fields:
                        spec.remove_field(self.table.spec().fields[0].name)
                    else:
                        spec.add_identity("p")
            case _:
                self.evolve(what)

    def evolve(self, what: str) -> None:
        names = [one.name for one in self.table.schema().fields if one.field_id not in (1, 3)]
        with self.table.update_schema() as change:
            if what == "add":
                change.add_column(f"c{next(self.names)}", StringType() if next(self.names) % 3 else IntegerType())
            elif names and what == "rename":
                change.rename_column(names[0], f"r{next(self.names)}")
            elif names and what == "drop":
                change.delete_column(names[0])
            elif names and what == "widen" and isinstance(self.table.schema().find_type(names[0]), IntegerType):
                change.update_column(names[0], LongType())
                change.move_first(names[0])

    def deletes(self, bits: int, *, vectors: bool) -> list[Entry]:
        """Deletes of some rows of some files: row i of a file is deleted where bit i (rotated by the file) is set."""
        found: list[Entry] = []
        for place, task in enumerate(self.table.scan().plan_files()):
            file = task.file
            gone = [row for row in range(file.record_count) if bits >> ((row * 3 + place * 5) % 30) & 1]
            if not gone or place % 3 == 2:
                continue
            home = {"spec_id": file.spec_id, "partition": tuple(file.partition[i] for i in range(len(file.partition)))}
            if vectors:
                found += deletion_vectors(self.table, {file.file_path: gone}, **home)
            else:
                found.append(position_deletes(self.table, [(file.file_path, row) for row in gone], **home))
        return found


@pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
@settings(
    max_examples=examples(6), phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
@given(acts=ACTS, bits=st.integers(0, 2**30))
def test_every_snapshot_delivers_what_pyiceberg_reads(acts: list[tuple[str, int]], bits: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        history.act("append", 8)
        for what, number in acts:
            history.act(what, number)
        table = history.table
        assert delivered(table) == rows_of(table.scan().to_arrow())
        for snapshot in table.snapshots():
            number = snapshot.snapshot_id
            assert delivered(table, version=number) == rows_of(table.scan(snapshot_id=number).to_arrow())
        entries = history.deletes(bits, vectors=True)
        if entries:
            metadata = at_version_3(table, entries)
            total = sum(entry.rows for entry in entries)
            assert open_table(metadata).index.deletes.total >= total
            # In pyiceberg, vectors and the position deletes that they stand for add up.
            if not open_table(table).index.deletes:
                assert delivered(metadata) == rows_of(StaticTable.from_metadata(metadata).scan().to_arrow())

"""Columns of a Delta table that were added, renamed, dropped, moved and widened, in every version of any history."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import open_table
from tests.examples import examples
from tests.lake.formats.delta_log import add_file, adds, commit, delete_rows, upgrade, versions, write_mapped
from tests.lake.formats.delta_tables import assert_all_versions

Mode = Literal["name", "id"]
TYPES: dict[str, pa.DataType] = {
    "integer": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "double": pa.float64(),
    "date": pa.date32(),
    "boolean": pa.bool_(),
}


class Evolving:
    """A table with mapped columns and a partition column; what it is now, and what is done to it."""

    def __init__(self, root: Path, mode: Mode) -> None:
        self.root, self.mode, self.made, self.has_vectors = root, mode, 0, False
        self.fields = [self._field("long"), self._field("string"), self._field("integer")]
        self.partition = self._field("string")
        write_mapped(root, mode, [*self.fields, self.partition], [self._file(), self._file()])

    def _field(self, kind: str) -> dict[str, Any]:
        self.made += 1
        number = self.made
        physical = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
        return {"name": f"n{number}", "type": kind, "nullable": True, "metadata": physical}

    def _file(self) -> tuple[str, pa.Table, dict[str, str | None]]:
        self.made += 1
        columns, fields = [], []
        for one in self.fields:
            number, kind = one["metadata"]["delta.columnMapping.id"], TYPES[one["type"]]
            values = [None if (row + number) % 4 == 3 else self.made * 10 + row for row in range(5)]
            made = [str(v) if v is not None and pa.types.is_string(kind) else v for v in values]
            made = [v > 20 if v is not None and pa.types.is_boolean(kind) else v for v in made]
            columns.append(pa.array(made, kind))
            fields.append(pa.field(f"col-{number}", kind, metadata={"PARQUET:field_id": str(number)}))
        table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
        physical = self.partition["metadata"]["delta.columnMapping.physicalName"]
        return f"{self.made}.parquet", table, {physical: [None, "a b", "c/d%=ü"][self.made % 3]}

    def run(self, operation: str, place: int) -> None:
        if operation == "write":
            commit(self.root, [add_file(self.root, *self._file())])
            return
        if operation == "delete":
            self._delete(place)
            return
        one = self.fields[place % len(self.fields)]
        if operation == "rename":
            self.made += 1
            one["name"] = f"n{self.made}"
        elif operation == "drop" and len(self.fields) > 1:
            self.fields.remove(one)
        elif operation == "add":
            self.fields.insert(place % 2, self._field(sorted(TYPES)[place % len(TYPES)]))
        elif operation == "move":
            self.fields.reverse()
        elif operation == "widen" and one["type"] == "integer":
            one["type"] = "long"
        commit(self.root, [self._metadata()])

    def _metadata(self) -> dict[str, Any]:
        first = (self.root / "_delta_log" / f"{0:020}.json").read_text().splitlines()
        told = next(json.loads(line) for line in first if "metaData" in line)
        told["metaData"]["schemaString"] = json.dumps({"type": "struct", "fields": [*self.fields, self.partition]})
        told["metaData"]["partitionColumns"] = [self.partition["name"]]
        return told

    def _delete(self, place: int) -> None:
        if not self.has_vectors:
            self.has_vectors = bool(commit(self.root, [upgrade("deletionVectors", "columnMapping")]))
        path = sorted(adds(self.root))[place % len(adds(self.root))]
        delete_rows(self.root, {path: {place % 5, (place * 3) % 5}})


OPERATIONS = ("write", "rename", "drop", "add", "move", "widen", "delete")
STEPS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), min_size=1, max_size=7)


@settings(max_examples=examples(12))
@given(mode=st.sampled_from(["name", "id"]), steps=STEPS)
def test_every_version_of_any_evolution_is_what_deltalake_reads(mode: Mode, steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = Evolving(Path(folder, "t"), mode)
        for step in steps:
            table.run(*step)
        assert_all_versions(table.root)


@pytest.mark.parametrize("mode", ["name", "id"])
def test_a_column_that_was_dropped_and_added_again_under_its_name_is_another_one(mode: Mode, tmp_path: Path) -> None:
    table = Evolving(tmp_path / "t", mode)
    dropped = table.fields[0]["name"]
    table.run("drop", 0)
    table.fields.append({**table._field("long"), "name": dropped})
    commit(table.root, [table._metadata()])
    table.run("write", 0)
    assert_all_versions(table.root)
    first, last = (open_table(table.root, version=version) for version in (0, versions(table.root)[-1]))
    assert first.schema.names[0] == dropped == last.schema.names[-2]

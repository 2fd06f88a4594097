"""Iceberg tables are opened by catalog, by metadata and by folder, at any snapshot, branch, tag and time."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from lakeckpt import LakeDataset, LakeLoader, open_table
from lakeckpt.errors import (
    ConfigError,
    DataFileChanged,
    TableError,
    TableNotFound,
    TableVersionGone,
)
from lakeckpt.lake.formats.iceberg.io import StorageIO
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.testing import assert_exactly_once
from tests.lake.formats.iceberg_tables import (
    Entry,
    commit,
    data_files,
    position_deletes,
    warehouse,
    write_metadata,
)
from tests.lake.formats.rows import delivered, rows_of

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])


def some_rows(start: int, stop: int) -> pa.Table:
    return pa.table({"id": range(start, stop), "text": [f"t{i % 3}" for i in range(start, stop)]}, schema=SCHEMA)


@pytest.fixture
def catalog(tmp_path: Path) -> SqlCatalog:
    return warehouse(tmp_path / "w")


@pytest.fixture
def table(catalog: SqlCatalog) -> Table:
    """Three snapshots: 12 rows, then 4 deleted, then 5 added; a tag on the first, a branch on the second."""
    made = catalog.create_table("db.events", SCHEMA)
    made.append(some_rows(0, 12))
    (file,) = data_files(made)
    commit(made, [position_deletes(made, [(file, row) for row in (0, 3, 4, 11)])])
    made.append(some_rows(20, 25))
    first, second, _ = [entry.snapshot_id for entry in made.history()]
    made.manage_snapshots().create_tag(first, "release-1").create_branch(second, "audit").commit()
    return made


def ids(source: Any, **asked: Any) -> list[int]:
    return sorted(dict(row)["id"][1] for row in delivered(source, **asked).elements())  # type: ignore[call-overload]


def test_every_snapshot_has_the_rows_that_pyiceberg_reads(table: Table) -> None:
    for snapshot in table.snapshots():
        number = snapshot.snapshot_id
        assert delivered(table, version=number) == rows_of(table.scan(snapshot_id=number).to_arrow())
    assert delivered(table) == rows_of(table.scan().to_arrow())


def test_a_table_is_found_by_catalog_by_metadata_and_by_folder(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeckpt.lake.formats.iceberg.source.load_catalog", lambda name: {"prod": table.catalog}[name])
    folder = Path(table.location().removeprefix("file://"))
    metadata = Path(table.metadata_location.removeprefix("file://"))
    opened = [
        open_table(one) for one in (table, "iceberg://prod/db.events", metadata, str(metadata), f"file://{metadata}")
    ]
    opened += [open_table(folder), open_table(f"{folder}/"), open_table(folder, format="iceberg")]
    assert {one.uri for one in opened} == {str(folder)}
    assert len({one.index.digest for one in opened}) == 1
    version = opened[0].index.version
    assert (version.format, version.name) == ("iceberg", str(table.current_snapshot().snapshot_id))  # type: ignore[union-attr]
    assert version.timestamp_ms == table.history()[-1].timestamp_ms
    assert version.table_id == str(table.metadata.table_uuid)


def test_a_catalog_is_set_up_as_pyiceberg_wants_it(
    table: Table, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = f"catalog:\n  test:\n    type: sql\n    uri: sqlite:///{tmp_path}/w/catalog.db\n"
    (tmp_path / ".pyiceberg.yaml").write_text(config)
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    from pyiceberg.utils.config import Config

    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    closed: list[SqlCatalog] = []
    close = SqlCatalog.close
    monkeypatch.setattr(SqlCatalog, "close", lambda self: (closed.append(self), close(self)))
    assert open_table("iceberg://test/db.events").index.version.table_id == str(table.metadata.table_uuid)
    assert len(closed) == 1, "the connection of the catalog stays open"


def test_a_snapshot_is_named_by_id_branch_and_tag(table: Table) -> None:
    first = table.history()[0]
    kept = [1, 2, 5, 6, 7, 8, 9, 10]
    assert ids(table, version=str(first.snapshot_id)) == list(range(12))
    assert ids(table, version=first.snapshot_id) == list(range(12))
    assert ids(table, version="release-1") == list(range(12))
    assert ids(table, version="audit") == kept
    assert ids(table, version="main") == ids(table) == [*kept, *range(20, 25)]


def test_a_snapshot_that_is_not_there_is_refused_and_those_there_are_offered(table: Table) -> None:
    with pytest.raises(TableNotFound, match="id '7' names: it has the branches and tags 'audit', 'main'"):
        open_table(table, version=7)
    with pytest.raises(TableNotFound, match="'release-9'"):
        open_table(table, version="release-9")
    with pytest.raises(ConfigError, match="expected int or str"):
        open_table(table, version=True)


def test_rows_count_exactly_once_over_a_table_with_deletes(table: Table) -> None:
    opened = open_table(table)

    def loader(rank: int, world_size: int, num_workers: int) -> LakeLoader:
        dataset = LakeDataset(opened, batch_size=3, shuffle=True, seed=5, rank=rank, world_size=world_size)
        return LakeLoader(dataset, num_workers=num_workers)

    rows = [dict(row) for row in rows_of(table.scan().to_arrow()).elements()]  # type: ignore[call-overload]
    expected = [row["id"][1] for row in rows]
    assert_exactly_once(loader, topologies=[(1, 0), (2, 0), (3, 0)], key="id", expected=expected)


def test_an_opened_version_is_carried_to_other_processes_and_read_back(table: Table) -> None:
    opened = open_table(table, version="audit")
    again = pickle.loads(pickle.dumps(opened))
    assert again.index == opened.index and again.index.version == opened.index.version
    assert TableIndex.loads(opened.index.dumps()).deletes.rows(0).tolist() == [0, 3, 4, 11]


def test_a_table_without_a_snapshot_has_no_rows(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.empty", SCHEMA)
    opened = open_table(made)
    assert (opened.num_rows, opened.schema.names) == (0, ["id", "text"])
    assert opened.index.version.name == "-1"
    assert not delivered(made)


def test_all_rows_deleted_is_a_table_without_rows(table: Table) -> None:
    entries = [position_deletes(table, [(file, row) for file in data_files(table) for row in range(5)])]
    rest = commit(table, entries)
    assert delivered(rest) == rows_of(rest.scan().to_arrow())
    rest.delete("id >= 0")
    assert not delivered(rest) and open_table(rest).num_rows == 0


def folder_of(table: Table) -> Path:
    return Path(table.location().removeprefix("file://"))


def test_a_folder_is_read_at_its_highest_version(table: Table) -> None:
    folder = folder_of(table)
    assert ids(folder) == ids(table)
    hadoop = folder / "metadata"
    versions = sorted(hadoop.glob("0000?-*.metadata.json"))
    for number, path in enumerate(versions):
        path.rename(hadoop / f"v{number + 9}.metadata.json")  # v10 comes after v9
    (hadoop / "version-hint.text").write_text("9")  # a writer that died had committed later ones
    assert ids(folder) == ids(table)
    for number in (8, 7):  # those that made the tags, and that added rows
        (hadoop / f"v{len(versions) + number}.metadata.json").unlink()
    assert ids(folder) == ids(table, version="audit")


def test_a_folder_whose_newest_version_is_in_doubt_is_refused(table: Table) -> None:
    newest = max((folder_of(table) / "metadata").glob("*.metadata.json"))
    shutil.copy(
        newest, newest.with_name(newest.name.split("-")[0] + "-11111111-1111-1111-1111-111111111111.metadata.json")
    )
    with pytest.raises(ConfigError, match="more than one metadata file of version"):
        open_table(folder_of(table))
    assert ids(newest) == ids(table)


@pytest.mark.parametrize("name", ["90001-x.gz.metadata.json", "90001-x.metadata.json.gz"])
def test_compressed_metadata_is_read_and_damaged_metadata_refused(table: Table, name: str) -> None:
    metadata = Path(table.metadata_location.removeprefix("file://"))
    packed = metadata.with_name(name)
    packed.write_bytes(gzip.compress(metadata.read_bytes()))
    assert ids(packed) == ids(table)
    packed.write_bytes(gzip.compress(metadata.read_bytes())[:-9])
    with pytest.raises(TableError, match="cannot be read"):
        open_table(packed)
    metadata.write_bytes(metadata.read_bytes()[:-9])
    with pytest.raises(TableError, match="cannot be read"):
        open_table(metadata)
    with pytest.raises(TableNotFound, match="no Iceberg metadata file"):
        open_table(metadata.with_name("90002-x.metadata.json"))


def test_names_that_no_catalog_has_are_refused(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeckpt.lake.formats.iceberg.source.load_catalog", lambda name: {"prod": table.catalog}[name])
    with pytest.raises(TableNotFound, match=r"no table 'db\.nothing'"):
        open_table("iceberg://prod/db.nothing")
    with pytest.raises(ConfigError, match="'elsewhere' cannot be loaded"):
        open_table("iceberg://elsewhere/db.events")
    for wrong in ("iceberg://prod", "iceberg:///db.events", "iceberg://prod/events", "iceberg://prod/db/events"):
        with pytest.raises(ConfigError, match="is named like"):
            open_table(wrong)
    with pytest.raises(ConfigError, match="format='delta'"):
        open_table(table, format="delta")


def test_metadata_of_a_snapshot_that_is_gone_is_named(table: Table) -> None:
    for path in (folder_of(table) / "metadata").glob("*-m0.avro"):
        path.unlink()
    for source in (table, table.metadata_location):
        with pytest.raises(TableVersionGone, match=r"metadata of snapshot .* is gone"):
            open_table(source)


def test_a_data_file_that_is_gone_or_was_written_again_is_named(table: Table) -> None:
    path = Path(data_files(table)[0].removeprefix("file://"))
    kept = path.read_bytes()
    path.write_bytes(kept + b"more")
    with pytest.raises(DataFileChanged, match="bytes, not"):
        open_table(table)
    path.unlink()
    with pytest.raises(TableVersionGone, match="is gone"):
        open_table(table)


def test_files_outside_of_the_table_are_read_and_files_of_several_stores_are_not(
    catalog: SqlCatalog, tmp_path: Path
) -> None:
    made = catalog.create_table("db.far", SCHEMA, properties={"write.data.path": f"file://{tmp_path}/far/away"})
    made.append(some_rows(0, 5))
    assert open_table(made).uri == str(tmp_path / "far/away")
    catalog.create_table("db.near", SCHEMA).append(some_rows(5, 9))
    made.add_files(data_files(catalog.load_table("db.near")))
    opened = open_table(made)
    assert opened.uri == str(tmp_path) and all(not path.startswith("/") for path in opened.index.paths)
    assert delivered(made) == rows_of(made.scan().to_arrow())
    elsewhere = [made.scan().plan_files()[0].file]  # type: ignore[index]
    entry = Entry(elsewhere[0].content, "s3://bucket/x.parquet", elsewhere[0].file_format, 3, 99)
    commit(made, [entry])
    with pytest.raises(ConfigError, match="one store, not in file, s3"):
        open_table(made)


def test_an_object_is_read_as_a_file_is(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3
    (tmp_path / "object").write_bytes(content)
    object_ = StorageIO().new_input(f"file://{tmp_path}/object")
    assert object_.exists() and len(object_) == len(content)
    with object_.open() as stream, (tmp_path / "object").open("rb") as file:
        for step in (
            lambda one: one.read(5),
            lambda one: one.read(5),
            lambda one: one.seek(-10, 2),
            lambda one: one.read(4),
            lambda one: one.seek(2, 1),
            lambda one: one.read(),
            lambda one: one.read(1),
            lambda one: one.seek(700),
            lambda one: one.read(),
            lambda one: one.tell(),
        ):
            assert step(stream) == step(file)
    assert not StorageIO().new_input(f"{tmp_path}/other").exists()


def test_a_file_listed_twice_is_refused(table: Table) -> None:
    table.add_files(data_files(table)[:1], check_duplicate_files=False)
    with pytest.raises(TableError, match="twice"):
        open_table(table)


def test_what_cannot_be_read_exactly_is_refused_by_name(table: Table) -> None:
    from pyiceberg.manifest import DataFileContent, FileFormat

    known = [(FileFormat.ORC, {}, "is ORC"), (FileFormat.AVRO, {}, "is AVRO")]
    known.append((FileFormat.PARQUET, {"key_metadata": b"k"}, "is encrypted"))
    before = table.metadata
    for kind, more, said in known:
        entry = Entry(DataFileContent.DATA, f"{table.location()}/data/x", kind, 3, 99, more=more)
        commit(table, [entry])
        with pytest.raises(TableError, match=said):
            open_table(table)
        table.manage_snapshots().rollback_to_snapshot(before.current_snapshot_id).commit()
    told = json.loads(table.metadata.model_dump_json())
    told["properties"]["encryption.key-id"] = "k1"
    with pytest.raises(TableError, match="is encrypted"):
        open_table(write_metadata(table, told))

"""What newer versions of a table have added: runs of appends, and named errors for anything else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import EqualTo, LessThan

from lakeckpt import LakeDataset, open_table
from lakeckpt.errors import ConfigError, TableError, TableRewritten, TableVersionGone
from lakeckpt.lake.formats import appends
from lakeckpt.lake.formats.appends import runs_of_appends
from lakeckpt.lake.formats.pinned_files import Change, ChangeKind
from lakeckpt.lake.parquet.footer import FileSummary
from lakeckpt.lake.storage.base import ObjectInfo, Storage
from lakeckpt.lake.table.joined import Added
from lakeckpt.lake.table.table import Table
from tests.data.growing import follower
from tests.data.reading import flat, some
from tests.lake.conftest import S3
from tests.lake.formats.delta_log import commit
from tests.lake.formats.hudi_tables import Crafted
from tests.lake.formats.iceberg_tables import warehouse

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("p", pa.int32())])


def rows(start: int, stop: int) -> pa.Table:
    return pa.table({"id": range(start, stop), "p": [0] * (stop - start)}, schema=SCHEMA)


def append(root: Path, start: int, stop: int) -> None:
    write_deltalake(str(root), rows(start, stop), mode="append", partition_by=["p"])


def added(table: Table, *, ignore_deletes: bool = False) -> Added:
    assert table.added is not None
    return table.added(table.index, ignore_deletes)


def counts(found: Added) -> list[int]:
    return [index.num_rows for index in found.indexes]


# --- the runs of appends


def changes(*kinds: ChangeKind) -> Sequence[Change]:
    return [Change(version=str(number), kind=kind) for number, kind in enumerate(kinds, 1)]


def test_runs_of_appends_end_before_what_is_no_append() -> None:
    later = changes("append", "append", "compact", "compact", "append", "compact")
    assert list(runs_of_appends(later, "0", "t", ignore_deletes=False)) == [("0", "2"), ("4", "5")]
    assert list(runs_of_appends(changes("compact"), "0", "t", ignore_deletes=False)) == []
    assert list(runs_of_appends(changes("delete", "append"), "0", "t", ignore_deletes=True)) == [("1", "2")]


@pytest.mark.parametrize(("kind", "ignores"), [("delete", False), ("rewrite", False), ("rewrite", True)])
def test_versions_that_remove_or_replace_rows_are_refused_by_name(kind: ChangeKind, ignores: bool) -> None:
    with pytest.raises(TableRewritten, match="version 2 of 't'"):
        list(runs_of_appends(changes("append", kind), "0", "t", ignore_deletes=ignores))


# --- Delta


@pytest.fixture
def root(tmp_path: Path) -> Path:
    append(tmp_path / "t", 0, 10)
    return tmp_path / "t"


def test_delta_appends_are_found_before_and_after_compactions(root: Path) -> None:
    table = open_table(root)
    assert added(table) == Added(indexes=(), version=added(table).version)
    append(root, 10, 14)
    append(root, 14, 17)
    DeltaTable(root).optimize.compact()
    append(root, 17, 19)
    found = added(table)
    assert counts(found) == [7, 2]
    assert [len(index.paths) for index in found.indexes] == [2, 1]
    assert found.version.name == "4"


def test_delta_versions_that_delete_whole_files_are_refused_or_ignored(root: Path) -> None:
    table = open_table(root)
    write_deltalake(str(root), rows(10, 13).set_column(1, "p", pa.array([7] * 3, pa.int32())), mode="append")
    DeltaTable(root).delete("p = 7")
    append(root, 13, 18)
    with pytest.raises(TableRewritten, match=r"version 2 of .* deletes rows"):
        added(table)
    assert counts(added(table, ignore_deletes=True)) == [3, 5]  # rows that were appended are read, though deleted since


@pytest.mark.parametrize("ignores", [False, True])
def test_delta_versions_that_write_rows_again_are_refused(root: Path, ignores: bool) -> None:
    table = open_table(root)
    DeltaTable(root).update({"p": "1"}, predicate="id = 3")
    with pytest.raises(TableRewritten, match=r"version 1 of .* writes rows again"):
        added(table, ignore_deletes=ignores)


def test_a_delta_table_that_was_restored_to_an_older_version_is_refused(root: Path) -> None:
    table = open_table(root)
    DeltaTable(root).delete("p = 0")
    DeltaTable(root).restore(0)  # it adds the deleted file again
    with pytest.raises(TableRewritten, match=r"version 2 of .* writes rows again"):
        added(table, ignore_deletes=True)


def test_a_delta_log_that_has_expired_is_refused_by_name(root: Path) -> None:
    table = open_table(root)
    append(root, 10, 14)
    append(root, 14, 17)
    DeltaTable(root).create_checkpoint()
    for number in (0, 1):
        (root / "_delta_log" / f"{number:020}.json").unlink()
    with pytest.raises(TableVersionGone, match=r"version 1 of the Delta table .* not in the log any more"):
        added(table)
    (root / "_delta_log" / f"{1:020}.json").write_text("")
    with pytest.raises(TableVersionGone, match=r"what was added to .* since version 0 is not known"):
        added(table)


def test_a_table_that_was_made_anew_is_refused(root: Path, tmp_path: Path) -> None:
    table = open_table(root)
    append(tmp_path / "other", 0, 3)
    append(tmp_path / "other", 3, 5)
    root.rename(tmp_path / "gone")
    (tmp_path / "other").rename(root)
    with pytest.raises(TableError, match="dropped and made anew"):
        added(table)


def test_commits_that_add_no_rows_add_nothing(root: Path) -> None:
    table = open_table(root)
    commit(root, [{"txn": {"appId": "a", "version": 1, "lastUpdated": 0}}])
    assert counts(added(table)) == []


def test_a_delta_table_is_followed_with_its_compactions(root: Path) -> None:
    loader = follower(root, columns=["id"])
    found = flat(some(loader, 2))
    append(root, 10, 13)
    DeltaTable(root).optimize.compact()
    append(root, 13, 20)
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number == 1:
            append(root, 20, 31)
    assert sorted(found) == list(range(31))


def test_a_delta_table_on_s3_is_followed_with_the_options_of_its_storage(root: Path, s3: S3) -> None:
    def upload() -> None:
        for path in (one for one in root.rglob("*.*") if one.is_file()):
            s3.client.put_object(Bucket=s3.bucket, Key=f"lake/t/{path.relative_to(root)}", Body=path.read_bytes())

    upload()
    table = open_table(f"s3://{s3.bucket}/lake/t", storage_options=s3.options)
    append(root, 10, 17)
    upload()
    assert counts(added(table)) == [7]


# --- Iceberg


@pytest.fixture
def catalog(tmp_path: Path) -> SqlCatalog:
    return warehouse(tmp_path / "w")


def test_iceberg_appends_are_found_and_other_snapshots_are_refused_or_ignored(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.t", SCHEMA)
    made.append(rows(0, 10))
    table = open_table(made)
    assert counts(added(table)) == []
    made.append(rows(10, 14))
    made.append(rows(14, 17))
    found = added(table)
    assert (counts(found), [len(one.paths) for one in found.indexes]) == ([7], [2])
    assert found.version.name == str(made.refresh().current_snapshot().snapshot_id)  # type: ignore[union-attr]
    made.delete(LessThan("id", 10))  # all rows of one file
    made.append(rows(17, 18))
    with pytest.raises(TableRewritten, match="deletes rows"):
        added(table)
    assert counts(added(table, ignore_deletes=True)) == [7, 1]
    made.delete(EqualTo("id", 15))  # copies the other rows
    with pytest.raises(TableRewritten, match="writes rows again"):
        added(table, ignore_deletes=True)


def test_an_iceberg_table_is_followed_from_before_its_first_snapshot(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.t", SCHEMA)
    loader = follower(made, columns=["id"])  # type: ignore[arg-type]
    assert flat(loader) == []
    made.append(rows(0, 10))
    found = flat(some(loader, 2))
    made.append(rows(10, 15))
    assert sorted(found + flat(loader)) == list(range(15))


def test_an_iceberg_snapshot_that_is_no_ancestor_is_refused_by_name(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.t", SCHEMA)
    made.append(rows(0, 10))
    first = made.current_snapshot()
    made.append(rows(10, 14))
    table = open_table(made)
    assert first is not None
    made.manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
    made.append(rows(14, 17))
    with pytest.raises(TableVersionGone, match="is no ancestor of its current one"):
        added(table)


# --- what is not followed


def test_hudi_tables_and_named_versions_are_not_followed(tmp_path: Path, root: Path) -> None:
    Crafted(tmp_path / "h").commit("20240101120000000", {("", "f1-0"): pa.table({"id": range(3)})})
    with pytest.raises(ConfigError, match="follow= cannot be: writers of Hudi tables"):
        follower(tmp_path / "h")
    with pytest.raises(ConfigError, match="follow= cannot be: a version was named"):
        LakeDataset(open_table(root, version=0), batch_size=2, follow=True)
    made = warehouse(tmp_path / "w").create_table("db.t", SCHEMA)
    with pytest.raises(ConfigError, match="or a metadata file"):
        follower(made.metadata_location)  # type: ignore[arg-type]


def test_only_the_footers_of_added_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    for number in range(4):
        pq.write_table(rows(number, number + 1), lake / f"{number}.parquet")
    table = open_table(lake)
    pq.write_table(rows(4, 5), lake / "00.parquet")
    read, real = list[str](), appends.summarize_all

    def noted(store: Storage, files: Sequence[ObjectInfo], **how: Any) -> list[FileSummary]:
        read.extend(one.path for one in files)
        return real(store, files, **how)

    monkeypatch.setattr(appends, "summarize_all", noted)
    assert counts(added(table)) == [1]
    assert read == ["00.parquet"]

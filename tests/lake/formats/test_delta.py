"""Which version of a Delta table is opened, where its files lie, and what is refused by name."""

from __future__ import annotations

import datetime
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from lakeckpt import open_table
from lakeckpt.errors import ConfigError, TableError, TableNotFound, TableVersionGone
from tests.lake.conftest import CANARY, S3
from tests.lake.formats.delta_log import adds, commit, delete_rows, upgrade
from tests.lake.formats.delta_tables import assert_all_versions, of, theirs, write
from tests.lake.formats.rows import delivered_of

UTC = datetime.UTC


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake ü =x"


@pytest.mark.parametrize("feature", ["variantType", "catalogManaged", "fromTheFuture"])
def test_features_that_we_do_not_know_are_refused_by_name(root: Path, feature: str) -> None:
    write(root, of(0, 3))
    commit(root, [upgrade(feature)])
    with pytest.raises(TableError, match=f"(?i){feature}|catalog-managed"):
        open_table(root)
    assert open_table(root, version=0).num_rows == 3


def test_versions_are_named_by_number(root: Path) -> None:
    for number in range(4):
        write(root, of(number, 1), mode="append")
    assert [open_table(root, version=number).num_rows for number in range(4)] == [1, 2, 3, 4]
    assert open_table(root).index.version.table_id == DeltaTable(str(root)).metadata().id
    for wrong, error in ((9, TableNotFound), (-1, ConfigError), ("1", ConfigError)):
        with pytest.raises(error, match=r"version.*[91]"):
            open_table(root, version=wrong)


def test_a_version_has_the_time_that_its_commit_states(root: Path) -> None:
    write(root, of(0, 3))
    assert commit(root, [upgrade("deletionVectors")]) == 1
    assert open_table(root).index.version.timestamp_ms == 1_700_000_000_001
    log = root / "_delta_log" / f"{1:020}.json"
    log.write_text(log.read_text().replace('"timestamp"', '"inCommitTimestamp": 5, "timestamp"'))
    assert open_table(root).index.version.timestamp_ms == 5


def test_a_vacuumed_version_is_refused_and_a_cleaned_log_is_read_from_its_checkpoint(root: Path) -> None:
    for number in range(3):
        write(root, of(number, 2), mode="append")
    table = DeltaTable(str(root))
    table.optimize.compact()
    table.create_checkpoint()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert delivered_of(open_table(root)) == theirs(root)
    with pytest.raises(TableVersionGone, match=r"Delta version 1 of .* cannot be read: its file '.*' is gone"):
        open_table(root, version=1)
    for number in range(3):
        (root / "_delta_log" / f"{number:020}.json").unlink()
    assert delivered_of(open_table(root)) == theirs(root)
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
    assert delivered_of(table) == Counter()


def test_a_log_that_deltalake_cannot_read_is_said_to_be(root: Path) -> None:
    write(root, of(0, 3))
    path = root / "_delta_log" / f"{0:020}.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(TableNotFound, match=r"of the Delta table .*, deltalake cannot read"):
        open_table(root)
    shutil.rmtree(root / "_delta_log")
    assert open_table(root).index.version.format == "parquet"


def test_without_deltalake_the_error_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeckpt.lake.formats import library as pinned

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
    assert delivered_of(table) == theirs(root) and table.index.digest == open_table(root).index.digest
    assert open_table(place, version=0, storage_options=s3.options).num_rows == 30
    assert table.index.etags[0] is not None
    with pytest.raises(TableNotFound) as refused:
        open_table(place, version=99, storage_options=s3.options)
    assert CANARY not in "".join(traceback.format_exception(refused.value)) + repr(table)

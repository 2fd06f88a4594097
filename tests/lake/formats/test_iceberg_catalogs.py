"""Tables on S3 by SQL, REST and Glue catalogs: what a catalog knows of the store is used, and shown nowhere."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.glue import GlueCatalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from lakeckpt import open_table
from lakeckpt.errors import ConfigError, StorageError, TableNotFound
from tests.lake.conftest import CANARY, S3
from tests.lake.formats.iceberg_tables import warehouse
from tests.lake.formats.rest_catalog import serving
from tests.lake.formats.rows import delivered, delivered_of, rows_of

ROWS = pa.table({"id": pa.array(range(7), pa.int64()), "text": ["a b", None] * 3 + ["ü"]})


def store_of(s3: S3) -> dict[str, str]:
    return {
        "s3.endpoint": s3.endpoint,
        "s3.region": "us-east-1",
        "s3.access-key-id": "test-key",
        "s3.secret-access-key": CANARY,
    }


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")


@pytest.fixture
def sql(tmp_path: Path, s3: S3) -> SqlCatalog:
    return warehouse(tmp_path, warehouse=f"s3://{s3.bucket}/lake", **store_of(s3))


@pytest.fixture(params=["sql", "rest", "glue"])
def catalog(request: pytest.FixtureRequest, sql: SqlCatalog, s3: S3) -> Iterator[Catalog]:
    if request.param == "sql":
        yield sql
    elif request.param == "rest":
        with serving(sql, store_of(s3)) as url:
            yield RestCatalog("rest", uri=url)
    else:
        account = {"glue.access-key-id": "test-key", "glue.secret-access-key": CANARY, "glue.region": "us-east-1"}
        place = {"glue.endpoint": s3.endpoint, "warehouse": f"s3://{s3.bucket}/lake"}
        yield GlueCatalog("glue", None, **account, **place, **store_of(s3))


@pytest.fixture
def table(catalog: Catalog, sql: SqlCatalog, s3: S3) -> Table:
    """Two snapshots: all rows, then one row less."""
    maker = sql if isinstance(catalog, RestCatalog) else catalog
    namespace = f"n{s3.bucket[-12:]}"
    maker.create_namespace(namespace)
    made = maker.create_table(f"{namespace}.t", ROWS.schema)
    made.append(ROWS)
    made.delete("id == 3")
    return catalog.load_table(f"{namespace}.t")


def test_every_snapshot_is_read_with_what_the_catalog_knows(
    table: Table, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeckpt.lake.formats.iceberg.source.load_catalog", lambda name: {"prod": catalog}[name])
    assert [sum(delivered(table, version=one.snapshot_id).values()) for one in table.snapshots()] == [7, 6]
    for snapshot in table.snapshots():
        number = snapshot.snapshot_id
        assert delivered(table, version=number) == rows_of(table.scan(snapshot_id=number).to_arrow())
    opened = open_table(f"iceberg://prod/{'.'.join(table.name())}")
    assert opened.index.digest == open_table(table).index.digest and opened.index.etags[0] is not None
    assert CANARY.encode() not in pickle.dumps(opened.index) and CANARY not in repr(opened)
    with pytest.raises(TableNotFound) as refused:
        open_table("iceberg://prod/db.nothing")
    assert CANARY not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("catalog", ["sql"], indirect=True)
def test_a_metadata_file_on_s3_is_read_with_options_of_the_callers(table: Table, s3: S3) -> None:
    opened = open_table(table.metadata_location, storage_options=s3.options)
    assert delivered_of(opened) == rows_of(table.scan().to_arrow())
    with pytest.raises((ConfigError, StorageError)):
        open_table(table.metadata_location)


@pytest.mark.parametrize("catalog", ["rest"], indirect=True)
def test_options_of_the_callers_go_before_the_catalogs(table: Table, s3: S3) -> None:
    assert open_table(table, storage_options=s3.options).num_rows == 6
    with pytest.raises(StorageError):
        open_table(table, storage_options={**s3.options_at("http://127.0.0.1:1"), "total_s": 0.2})


@pytest.mark.parametrize("catalog", ["rest"], indirect=True)
def test_a_version_is_read_by_a_tag_that_a_server_keeps(table: Table) -> None:
    pinned = open_table(table, version=table.snapshots()[0].snapshot_id)
    table.manage_snapshots().create_tag(int(pinned.index.version.name), "run-7").commit()
    assert sum(delivered(table, version="run-7").values()) == 7


def test_files_below_an_empty_folder_name_are_refused_and_never_taken_for_others(tmp_path: Path, s3: S3) -> None:
    writes_such_keys = {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"}
    sql = warehouse(tmp_path, **store_of(s3), **writes_such_keys)
    there = {"write.data.path": f"s3://{s3.bucket}/lake/db/t//data"}
    made = sql.create_table("db.t", ROWS.schema, location=f"s3://{s3.bucket}/lake/db/t", properties=there)
    made.append(ROWS)
    with pytest.raises(ConfigError, match="empty folder name"):
        open_table(sql.load_table("db.t"))

"""A pinned version is kept alive by a tag: expired without it, released at a good end, never by accident."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table
from pyiceberg.table.update.snapshot import ManageSnapshots

from lakeckpt import keep_version, open_table
from lakeckpt.errors import ConfigError, TableError, TableNotFound
from tests.lake.formats.iceberg_tables import warehouse
from tests.lake.formats.rows import delivered

DAY_MS = 24 * 60 * 60 * 1000
FOREVER = datetime.datetime(2999, 1, 1)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    made = warehouse(tmp_path).create_table("db.events", pa.schema([("id", pa.int64())]))
    made.append(pa.table({"id": [1, 2]}))
    return made


def age_ms(table: Table, name: str) -> int | None:
    return table.refresh().metadata.refs[name].max_ref_age_ms


def test_a_version_that_is_kept_outlives_the_expiry_of_snapshots_and_no_other_does(table: Table) -> None:
    pinned = open_table(table)
    with keep_version(pinned, table, name="run-7"):
        table.overwrite(pa.table({"id": [3]}))
        table.append(pa.table({"id": [4]}))
        ids = [snapshot.snapshot_id for snapshot in table.snapshots()]
        table.maintenance.expire_snapshots().older_than(FOREVER).commit()
        left = [snapshot.snapshot_id for snapshot in table.refresh().snapshots()]
        assert left == [ids[0], ids[-1]]
        assert sum(delivered(table, version="run-7").values()) == 2
        assert delivered(table, version=pinned.index.version.name) == delivered(table, version="run-7")
    assert "run-7" not in table.refresh().metadata.refs
    table.maintenance.expire_snapshots().older_than(FOREVER).commit()
    with pytest.raises(TableNotFound, match="no snapshot"):
        open_table(table.refresh(), version=pinned.index.version.name)


def test_the_age_of_a_tag_counts_from_its_snapshot_so_it_lasts_from_now(table: Table) -> None:
    pinned = open_table(table)
    made_ms = pinned.index.version.timestamp_ms
    assert made_ms is not None
    now = (made_ms + 90 * DAY_MS) / 1000
    keep_version(pinned, table, name="run", keep_for=datetime.timedelta(days=5), clock=lambda: now)
    assert age_ms(table, "run") == 95 * DAY_MS
    keep_version(pinned, table, name="run", keep_for=datetime.timedelta(days=5), clock=lambda: now + 86400)
    assert age_ms(table, "run") == 96 * DAY_MS
    keep_version(pinned, table, name="run", keep_for=None)
    assert age_ms(table, "run") is None


def test_a_block_left_by_an_exception_keeps_its_version(table: Table) -> None:
    pinned = open_table(table)
    with pytest.raises(RuntimeError, match="crash"), keep_version(pinned, table, name="run") as kept:
        raise RuntimeError("crash")
    assert "run" in table.refresh().metadata.refs
    kept.release()
    kept.release()
    assert "run" not in table.refresh().metadata.refs and "released" in repr(kept)


def test_a_tag_that_somebody_moved_is_left_alone(table: Table) -> None:
    kept = keep_version(open_table(table), table, name="run")
    table.append(pa.table({"id": [3]}))
    moved = table.current_snapshot().snapshot_id  # type: ignore[union-attr]
    table.manage_snapshots().create_tag(moved, "run").commit()
    kept.release()
    assert table.refresh().metadata.refs["run"].snapshot_id == moved
    with pytest.raises(ConfigError, match="the name 'run' is a tag of snapshot"):
        keep_version(open_table(table, snapshot_id=table.snapshots()[0].snapshot_id), table, name="run")
    with pytest.raises(ConfigError, match="the name 'main' is a branch"):
        keep_version(open_table(table), table, name="main")


def test_commits_that_others_overtake_are_tried_again(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, stale = open_table(table), table.catalog.load_table("db.events")
    table.append(pa.table({"id": [3]}))
    keep_version(pinned, stale, name="run")
    assert "run" in table.refresh().metadata.refs
    commit, left = ManageSnapshots.commit, [3]

    def overtaken(self: ManageSnapshots) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise CommitFailedException("another commit came first")
        commit(self)

    monkeypatch.setattr(ManageSnapshots, "commit", overtaken)
    keep_version(pinned, table, name="run-2")
    assert "run-2" in table.refresh().metadata.refs
    left[0] = 99
    with pytest.raises(TableError, match="overtaken"):
        keep_version(pinned, table, name="run-3")


def test_what_cannot_be_kept_says_what_to_set_instead(table: Table, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="plain Parquet files have no versions"):
        keep_version(open_table(tmp_path / "x.parquet"), table, name="run")
    pinned = open_table(table)
    with pytest.raises(ConfigError, match="opened without a catalog"):
        keep_version(pinned, table.metadata_location, name="run")
    for wrong in ("", "a/b", "x y"):
        with pytest.raises(ConfigError, match="a tag's name"):
            keep_version(pinned, table, name=wrong)
    with pytest.raises(ConfigError, match="positive"):
        keep_version(pinned, table, name="run", keep_for=datetime.timedelta(0))


def test_a_snapshot_that_is_gone_and_another_table_are_refused(table: Table) -> None:
    pinned = open_table(table)
    table.overwrite(pa.table({"id": [3]}))
    table.maintenance.expire_snapshots().older_than(FOREVER).commit()
    with pytest.raises(TableNotFound, match="expired already"):
        keep_version(pinned, table, name="run")
    other = table.catalog.create_table("db.other", pa.schema([("id", pa.int64())]))
    with pytest.raises(ConfigError, match="is another table"):
        keep_version(pinned, other, name="run")

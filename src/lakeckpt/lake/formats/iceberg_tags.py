"""How is a snapshot of an Iceberg table tagged, and the tag removed, while others commit to the table?

A commit that another writer overtook is tried again on the table as it is then; pyiceberg does that for data only. A
tag's age counts from its *snapshot's* time, not from when it was made: so a tag that shall last until some time is
given the age that its snapshot has then.
"""

from __future__ import annotations

from collections.abc import Callable

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.update.snapshot import ManageSnapshots

from lakeckpt.errors import ConfigError, TableError, TableNotFound
from lakeckpt.lake.formats.iceberg_source import load
from lakeckpt.lake.version import TableVersion

__all__ = ["put", "remove"]

MAX_ATTEMPTS = 8


def put(source: object, *, name: str, version: TableVersion, until_ms: int | None) -> None:
    """Tag the snapshot ``version``, or set its tag's age anew; ``until_ms``: milliseconds since 1970, None: for ever.

    `ConfigError` where the name belongs to another snapshot or a branch, `TableNotFound` where the snapshot is gone.
    """
    snapshot_id = int(version.name)

    def tagged(table: Table) -> ManageSnapshots | None:
        if version.table_id not in (None, str(table.metadata.table_uuid)):
            raise ConfigError(
                f"{_name(table)!r} is another table (or was made anew): it has the id {table.metadata.table_uuid}"
            )
        snapshot = table.metadata.snapshot_by_id(snapshot_id)
        if snapshot is None:
            raise TableNotFound(
                f"the table {_name(table)!r} has no snapshot {snapshot_id}: it was expired already, or the table is "
                "without one yet. Open a version that is there"
            )
        _check_ref(table.metadata.refs.get(name), name, snapshot_id)
        age_ms = None if until_ms is None else max(1, until_ms - snapshot.timestamp_ms)
        return table.manage_snapshots().create_tag(snapshot_id, name, max_ref_age_ms=age_ms)

    _commit(source, tagged, f"the tag {name!r} could not be written")


def remove(source: object, *, name: str, snapshot_id: int) -> None:
    """Remove the tag where it still names this snapshot."""

    def untagged(table: Table) -> ManageSnapshots | None:
        ref = table.metadata.refs.get(name)
        if ref is None or ref.snapshot_ref_type != SnapshotRefType.TAG or ref.snapshot_id != snapshot_id:
            return None
        return table.manage_snapshots().remove_tag(name)

    _commit(source, untagged, f"the tag {name!r} could not be removed")


def _check_ref(ref: SnapshotRef | None, name: str, snapshot_id: int) -> None:
    if ref is not None and (ref.snapshot_ref_type != SnapshotRefType.TAG or ref.snapshot_id != snapshot_id):
        raise ConfigError(
            f"the name {name!r} is a {ref.snapshot_ref_type.value} of snapshot {ref.snapshot_id}: choose another name"
        )


def _commit(source: object, change: Callable[[Table], ManageSnapshots | None], failed: str) -> None:
    table = load(source, storage_options=None)
    if isinstance(table, StaticTable):
        raise ConfigError(
            f"{_name(table)!r} was opened without a catalog, and tags are committed by one: pass iceberg://catalog/"
            "namespace.table, or a table that its catalog loaded"
        )
    for attempt in range(1, MAX_ATTEMPTS + 1):
        table.refresh()
        pending = change(table)
        if pending is None:
            return
        try:
            pending.commit()
            return
        except CommitFailedException as error:
            if attempt == MAX_ATTEMPTS:
                raise TableError(f"{failed}: {attempt} commits were overtaken by others. Try again") from error
        except CommitStateUnknownException as error:
            if attempt == MAX_ATTEMPTS:
                raise TableError(f"{failed}: the catalog did not say whether it was. Try again") from error


def _name(table: Table) -> str:
    return ".".join(table.name())

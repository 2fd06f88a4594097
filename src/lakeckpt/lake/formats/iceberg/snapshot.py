"""This module pins a snapshot of an Iceberg table: its data files, deleted rows and schema.

pyiceberg reads metadata, catalogs, manifests and types. The specification of the format decides which deletes apply to
which file (`lakeckpt.lake.formats.iceberg.plan`), and which rows they name. Paths are relative to the location of the
table if all data files lie in it, else to the deepest folder that holds them all. Files in several buckets or stores
are refused. The module opens no data file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot

from lakeckpt.errors import LakeckptError, TableError, TableVersionGone, one_line
from lakeckpt.lake.formats.iceberg.equality_deletes import rows_deleted_by_value
from lakeckpt.lake.formats.iceberg.io import StorageIO, plain_location, storage_options_of
from lakeckpt.lake.formats.iceberg.plan import PlannedFile, plan_files
from lakeckpt.lake.formats.iceberg.position_deletes import deleted_rows
from lakeckpt.lake.formats.iceberg.schema import arrow_schema, arrow_value, column_mapping
from lakeckpt.lake.formats.iceberg.source import Chosen, choose_snapshot, load
from lakeckpt.lake.formats.pinned_files import Change, ChangeKind, PinnedFile, PinnedFiles
from lakeckpt.lake.storage.base import redact_uri
from lakeckpt.lake.table.deletes import Int64Array
from lakeckpt.lake.table.listing import common_root, paths_below
from lakeckpt.lake.table.version import TableVersion

__all__ = ["changes", "pin"]

_NO_SNAPSHOT = "-1"
"""The format's own name for the version of a table that has no snapshot yet."""
_KINDS: dict[Operation, ChangeKind] = {
    Operation.APPEND: "append",
    Operation.REPLACE: "compact",
    Operation.DELETE: "delete",
}


def pin(
    source: object, *, version: int | str | None, storage_options: Mapping[str, Any] | None, threads: int
) -> PinnedFiles:
    """Return what the snapshot ``version`` of the table at ``source`` consists of; see `load` for what that may be.

    `TableNotFound`, `ConfigError`, `TableError` (it cannot be read exactly), `DataFileDamaged` (metadata
    or delete files that are gone or malformed), `StorageError`.
    """
    table = load(source, storage_options=storage_options)
    chosen = choose_snapshot(table, version)
    _refuse_unreadable(table)
    planned = _planned(table, chosen, threads)
    deleted = _deleted(table, planned, threads)
    places = [plain_location(one.location) for one in planned]
    root = _root(table, places)
    columns = {one.field_id: one for one in chosen.schema.fields}
    options = storage_options
    if options is None and not isinstance(table.io, StorageIO):
        options = storage_options_of(table.io.properties, root)
    files = tuple(
        PinnedFile(
            path=path,
            size_bytes=one.size_bytes,
            rows=one.rows,
            partition={
                columns[field_id].name: arrow_value(value, columns[field_id].field_type)
                for field_id, value in one.constants.items()
                if field_id in columns
            },
            deleted=deleted.get(one.location),
        )
        for one, path in zip(planned, paths_below(root, places), strict=True)
    )
    constant = {name for file in files for name in file.partition}
    return PinnedFiles(
        version=_version(table, chosen),
        files=files,
        schema=arrow_schema(chosen.schema),
        partition_columns=tuple(one.name for one in chosen.schema.fields if one.name in constant),
        columns=column_mapping(chosen.schema, table.metadata.name_mapping()),
        root=root,
        storage_options=options,
        constants_where_absent=True,
    )


def changes(source: object, *, since: str, storage_options: Mapping[str, Any] | None, threads: int) -> list[Change]:
    """Return the snapshots after ``since`` (`library.changes`): the ancestors of the current one."""
    table = load(source, storage_options=storage_options)
    snapshot, found = table.metadata.current_snapshot(), []
    while snapshot is not None and str(snapshot.snapshot_id) != since:
        found.append(Change(version=str(snapshot.snapshot_id), kind=_kind(snapshot)))
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.metadata.snapshot_by_id(parent)
        if snapshot is None and (parent is not None or since != _NO_SNAPSHOT):
            raise TableVersionGone(
                f"snapshot {since} of the Iceberg table {_name(table)!r} is no ancestor of its current one that the "
                "metadata know: it was expired, or the table was rolled back. The files that were added since are not "
                "known; expire fewer snapshots, or begin a new run"
            )
    return found[::-1]


def _kind(snapshot: Snapshot) -> ChangeKind:
    return "rewrite" if snapshot.summary is None else _KINDS.get(snapshot.summary.operation, "rewrite")


def _version(table: Table, chosen: Chosen) -> TableVersion:
    snapshot = chosen.snapshot
    return TableVersion(
        format="iceberg",
        name=_NO_SNAPSHOT if snapshot is None else str(snapshot.snapshot_id),
        timestamp_ms=None if snapshot is None else snapshot.timestamp_ms,
        table_id=str(table.metadata.table_uuid),
    )


def _planned(table: Table, chosen: Chosen, threads: int) -> list[PlannedFile]:
    if chosen.snapshot is None:
        return []
    try:
        manifests = chosen.snapshot.manifests(table.io)
        return plan_files(manifests, table.io, table.metadata.specs(), threads=threads)
    except FileNotFoundError as error:
        raise TableVersionGone(
            f"metadata of snapshot {chosen.snapshot.snapshot_id} of {_name(table)!r} is gone ({error}): the snapshot "
            "was expired, or its files were removed. Open a snapshot that is there",
            files=(),
        ) from error
    except LakeckptError:
        raise
    except Exception as error:  # whatever damaged Avro and the stores' clients make pyiceberg raise
        what = one_line(f"{type(error).__name__}: {error}")
        raise TableError(
            f"metadata of snapshot {chosen.snapshot.snapshot_id} of {_name(table)!r} cannot be read ({what}): restore "
            "them from a good copy, or open another snapshot"
        ) from error


def _deleted(table: Table, planned: Sequence[PlannedFile], threads: int) -> dict[str, Int64Array]:
    """Return for each data file, by location, its deleted rows."""
    deleted = deleted_rows(planned, table.io, threads=threads)
    if any(one.equalities for one in planned):
        for location, rows in rows_deleted_by_value(planned, table.metadata, table.io, threads=threads).items():
            deleted[location] = np.union1d(deleted.get(location, rows), rows)
    return deleted


def _root(table: Table, places: Sequence[str]) -> str:
    """Return the table's location if all files lie in it, else the deepest folder that holds them.

    Some writers turn a location that ends with a slash into ``s3://lake/t//data/…``: files of ``s3://lake/t//data``.
    """
    location = plain_location(table.location()).rstrip("/")
    if all(place.startswith(location + "/") and "//" not in place[len(location) :] for place in places):
        return location
    return common_root(places)


def _refuse_unreadable(table: Table) -> None:
    for name in table.metadata.properties:
        if name.startswith("encryption."):
            raise TableError(
                f"the table {_name(table)!r} is encrypted (it has the property {name!r}): encrypted Iceberg tables are "
                "not read. Copy the rows to a table without encryption"
            )


def _name(table: Table) -> str:
    return redact_uri(plain_location(table.location()))

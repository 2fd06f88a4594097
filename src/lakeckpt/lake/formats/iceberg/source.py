"""This module finds the Iceberg table and the snapshot that the user named.

`load` finds the metadata of the table: through a catalog (``iceberg://catalog/namespace.table``, the catalog by
pyiceberg's own configuration), from a `pyiceberg.table.Table` that the user loaded, or without a catalog from a
metadata file or the folder of the table. In a folder, the newest metadata file is the one with the highest version
number. A folder does not know what its catalog committed, so two files of that number are refused. `choose_snapshot`
picks the snapshot. The module reads metadata only.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.snapshots import Snapshot

from lakeckpt.errors import ConfigError, LakeckptError, ObjectMissing, TableError, TableNotFound, one_line
from lakeckpt.lake.formats.iceberg.io import StorageIO
from lakeckpt.lake.storage.base import redact_uri, split_uri
from lakeckpt.lake.storage.open import open_for_table
from lakeckpt.lake.table.listing import METADATA_FILES

__all__ = ["SCHEME", "Chosen", "choose_snapshot", "load"]

SCHEME = "iceberg"
MAX_METADATA_BYTES = 2**30
_METADATA = re.compile(r"(?:v(?P<v>\d+)|(?P<n>\d+)-[\w-]+)(?:\.gz)?\.metadata\.json(?:\.gz)?")
_FORM = 'an Iceberg table of a catalog is named like "iceberg://catalog/namespace.table"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A snapshot of a table (None: it has none yet, and no rows) and the schema that it is read with."""

    snapshot: Snapshot | None
    schema: Schema


def load(source: object, *, storage_options: Mapping[str, Any] | None) -> Table:
    """Return the table by its current metadata. `TableNotFound`, `ConfigError`, `TableError`, `StorageError`."""
    if isinstance(source, Table):
        return source
    if not isinstance(source, str):
        raise ConfigError(f"an Iceberg table is a path, a URL or a pyiceberg table, not {type(source).__name__}")
    if split_uri(source)[0] == SCHEME:
        return _of_catalog(source)
    location = source if source.endswith(METADATA_FILES) else _newest_metadata(source.rstrip("/"), storage_options)
    return _of_metadata(location, storage_options)


def choose_snapshot(table: Table, version: int | str | None) -> Chosen:
    """Return the snapshot that ``version`` names: a branch, a tag, or else the id of a snapshot.

    None names the current snapshot, which is read with the table's schema. A snapshot that is named is read with the
    schema that it was written with, as pyiceberg does. `TableNotFound` if there is no such snapshot.
    """
    metadata = table.metadata
    if version is None:
        return Chosen(snapshot=metadata.current_snapshot(), schema=metadata.schema())
    text = str(version)
    snapshot = metadata.snapshot_by_name(text)
    if snapshot is None and re.fullmatch(r"-?\d+", text):
        snapshot = metadata.snapshot_by_id(int(text))
    if snapshot is None:
        raise TableNotFound(
            f"the Iceberg table {redact_uri(table.location())!r} has no snapshot that the branch, tag or id {text!r} "
            f"names: {_offer(table)}"
        )
    schema = metadata.schema() if snapshot.schema_id is None else metadata.schema_by_id(snapshot.schema_id)
    if schema is None:
        raise TableError(
            f"snapshot {snapshot.snapshot_id} of {redact_uri(table.location())!r} was written with schema "
            f"{snapshot.schema_id}, which the table's metadata no longer hold: open another snapshot"
        )
    return Chosen(snapshot=snapshot, schema=schema)


def _offer(table: Table) -> str:
    refs = sorted(table.metadata.refs)
    ids = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
    some = f"{', '.join(map(str, ids[-5:]))}{' and older ones' if len(ids) > 5 else ''}"
    return f"it has the branches and tags {', '.join(map(repr, refs)) or 'none'} and the snapshots {some or 'none'}"


def _of_catalog(source: str) -> Table:
    name, _, identifier = source[len(f"{SCHEME}://") :].partition("/")
    if not name or "." not in identifier or "/" in identifier:
        raise ConfigError(f"{_FORM}, not {source!r}")
    try:
        catalog = load_catalog(name)
    except Exception as error:  # pyiceberg raises ValueError, ImportError and what the catalogs' clients raise
        raise ConfigError(
            f"the catalog {name!r} cannot be loaded ({type(error).__name__}): set it up as pyiceberg wants it "
            f"(.pyiceberg.yaml, or PYICEBERG_CATALOG__{name.upper()}__URI), or pass a table that pyiceberg loaded"
        ) from error
    try:
        return catalog.load_table(identifier)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise TableNotFound(f"the catalog {name!r} has no table {identifier!r}: check its name") from error
    except Exception as error:
        raise TableError(
            f"the catalog {name!r} could not load the table {identifier!r} ({type(error).__name__}): check that it can "
            "be reached, and its credentials"
        ) from error
    finally:
        catalog.close()


def _newest_metadata(folder: str, storage_options: Mapping[str, Any] | None) -> str:
    """Return the metadata file of a table's folder that holds its newest version."""
    storage = open_for_table(folder, storage_options=storage_options)
    versions: dict[int, list[str]] = {}
    for info in storage.list("metadata"):
        name = info.path.partition("/")[2]
        if (match := _METADATA.fullmatch(name)) is not None:
            versions.setdefault(int(match["v"] or match["n"]), []).append(name)
    if not versions:
        raise TableNotFound(
            f"there is no Iceberg table at {redact_uri(folder)!r}: its folder metadata/ holds no metadata"
        )
    newest = max(versions)
    if len(versions[newest]) > 1:
        raise ConfigError(
            f"{redact_uri(folder)!r} has more than one metadata file of version {newest} "
            f"({', '.join(map(repr, versions[newest][:3]))}): only its catalog knows which was committed. Open the "
            "table through the catalog, or pass the metadata file"
        )
    return f"{folder}/metadata/{versions[newest][0]}"


def _of_metadata(location: str, storage_options: Mapping[str, Any] | None) -> Table:
    io = StorageIO(storage_options)
    named = redact_uri(location)
    try:
        data = io.new_input(location).read(0, MAX_METADATA_BYTES)
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        metadata = TableMetadataUtil.parse_raw(text.decode())
    except ObjectMissing as error:
        raise TableNotFound(f"there is no Iceberg metadata file {named!r}: check the path") from error
    except LakeckptError:
        raise
    except Exception as error:  # pydantic, gzip and text decoding: whatever damaged metadata make them raise
        raise TableError(
            f"the Iceberg metadata {named!r} cannot be read ({one_line(error)}): restore it from a good copy"
        ) from error
    return StaticTable(
        identifier=("static-table", location),
        metadata=metadata,
        metadata_location=location,
        io=io,
        catalog=NoopCatalog("static-table"),
    )

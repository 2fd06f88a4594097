"""This module pins a version of a Delta table.

deltalake replays the log (commits, checkpoints, compacted logs) and reads the deletion vectors. It returns the files of
one version, their partition values, and the rows that are left of each. The schema holds the physical name or field id
by which files store each column. A version is named by its number.

Refused by name, because they could not be read exactly: reader features that are not in `READER_FEATURES`, and
partition columns of bytes, whose escapes deltalake does not undo. The module opens no data file. The threads that read
commits have ended when it returns.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError, TableNotFoundError

from lakeckpt.errors import (
    ConfigError,
    DataFileDamaged,
    ObjectMissing,
    StorageError,
    TableError,
    TableNotFound,
    TableVersionGone,
)
from lakeckpt.lake.formats.clients import asking, is_of_the_store, object_store_options
from lakeckpt.lake.formats.pinned_files import Change, ChangeKind, PinnedFile, PinnedFiles
from lakeckpt.lake.parquet.footer import Int64Array
from lakeckpt.lake.storage.base import Storage, redact_uri, split_uri
from lakeckpt.lake.table.column_mapping import ColumnMapping, StoredField
from lakeckpt.lake.table.listing import common_root, open_root, paths_below
from lakeckpt.lake.table.version import TableVersion

__all__ = ["READER_FEATURES", "changes", "pin"]

READER_FEATURES = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""The features that a table may need of its readers: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#table-features."""
MAX_READER_VERSION = 3
_LOG = "_delta_log"
_VECTORS = "its deletion vectors"
_COMMIT_HEAD_BYTES = 64 * 1024
_ID, _PHYSICAL = "delta.columnMapping.id", "delta.columnMapping.physicalName"


def pin(
    place: str, *, version: int | str | None, storage_options: Mapping[str, Any] | None, threads: int
) -> PinnedFiles:
    """Return what a version of the table at ``place`` consists of (`library.pin`)."""
    uri, storage = redact_uri(place), open_root(place, storage_options)
    if isinstance(version, str) or (version is not None and version < 0):
        raise ConfigError(f"version={version!r}: versions of the Delta table {uri!r} are numbers from 0")
    options = object_store_options(place, storage_options)
    table = _opened(place, version, options, uri)
    return _pinned(table, place, storage, uri)


def changes(place: str, *, since: str, storage_options: Mapping[str, Any] | None, threads: int) -> list[Change]:
    """Return the versions after ``since`` (`library.changes`), by the commits in the log."""
    uri, storage = redact_uri(place), open_root(place, storage_options)
    newest = _opened(place, None, object_store_options(place, storage_options), uri).version()
    later = range(int(since) + 1, newest + 1)
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(later)))) as pool:
        kinds = list(pool.map(partial(_kind, storage, uri), later))
    return [Change(version=str(number), kind=kind) for number, kind in zip(later, kinds, strict=True)]


def _kind(storage: Storage, uri: str, number: int) -> ChangeKind:
    """Return what a commit did, by its actions: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#actions."""
    try:
        lines = storage.read(f"{_LOG}/{number:020}.json").splitlines()
    except ObjectMissing as error:
        raise TableVersionGone(
            f"version {number} of the Delta table {uri!r} is not in the log any more, so that what it added is not "
            "known: keep the log for as long as a run may stand still (delta.logRetentionDuration), or begin a new run"
        ) from error
    actions = [action for line in lines if line.strip() for action in json.loads(line).items()]
    added = {action["path"] for name, action in actions if name == "add" and action.get("dataChange", True)}
    removed = {action["path"] for name, action in actions if name == "remove" and action.get("dataChange", True)}
    if any(name == "commitInfo" and action.get("operation") == "RESTORE" for name, action in actions):
        return "rewrite"  # it may add files again
    if added or removed:
        return "append" if not removed else "delete" if added <= removed else "rewrite"
    return "compact" if any(name in ("add", "remove") for name, _ in actions) else "append"


def _opened(place: str, version: int | None, options: dict[str, str], uri: str) -> DeltaTable:
    what = "its newest version" if version is None else f"its version {version}"
    with _asking(uri, what):
        table = DeltaTable(place, version=version, storage_options=options or None)
        protocol = table.protocol()
    needed = set(protocol.reader_features or ())
    if protocol.min_reader_version > MAX_READER_VERSION:
        needed.add(f"reader version {protocol.min_reader_version}")
    unknown = sorted(needed - READER_FEATURES)
    if unknown:
        raise TableError(
            f"the Delta table {uri!r} needs readers that know {', '.join(unknown)}: we do not, and would misread it. "
            f"Known are {', '.join(sorted(READER_FEATURES))}; drop the feature, or make a plain copy"
        )
    return table


def _pinned(table: DeltaTable, place: str, storage: Storage, uri: str) -> PinnedFiles:
    with _asking(uri, "its files and schema"):
        metadata, protocol, number = table.metadata(), table.protocol(), table.version()
        actions = pa.table(table.get_add_actions())
        fields = json.loads(table.schema().to_json())["fields"]
        schema = pa.schema(table.schema().to_arrow())
        base = table.table_uri
    mapped = protocol.min_reader_version == 2 or "columnMapping" in (protocol.reader_features or ())
    mode = metadata.configuration.get("delta.columnMapping.mode", "none") if mapped else "none"
    partitions = tuple(name for name in schema.names if name in set(metadata.partition_columns))
    for name in partitions:
        if pa.types.is_binary(schema.field(name).type) or pa.types.is_large_binary(schema.field(name).type):
            raise TableError(
                f"the Delta table {uri!r} is partitioned by the bytes of {name!r}, which deltalake gives in escaped "
                "form: partition it by text, or make a plain copy"
            )
    paths = actions["path"].to_pylist()
    root, relative = _rooted(place, paths)
    values = actions["partition"].to_pylist() if partitions else [{}] * len(paths)
    deleted: dict[int, Int64Array] = {}
    if "deletionVectors" in (protocol.reader_features or ()):
        deleted = _deleted(table, {_location(path, _decoded(base)): i for i, path in enumerate(paths)}, uri)
    files = tuple(
        PinnedFile(
            path=relative[i],
            size_bytes=size,
            rows=rows,
            partition={name: values[i][name] for name in partitions},
            deleted=deleted.get(i),
        )
        for i, (size, rows) in enumerate(
            zip(actions["size_bytes"].to_pylist(), actions["num_records"].to_pylist(), strict=True)
        )
    )
    return PinnedFiles(
        version=TableVersion(
            format="delta", name=str(number), timestamp_ms=_committed_ms(storage, number), table_id=str(metadata.id)
        ),
        files=files,
        schema=schema,
        partition_columns=partitions,
        columns=_mapping(fields, mode, set(partitions)),
        root=root,
    )


def _deleted(table: DeltaTable, files: Mapping[str, int], uri: str) -> dict[int, Int64Array]:
    """Return the deleted rows of each file that has any, by the file's place in ``files``."""
    found: dict[int, Int64Array] = {}
    with _asking(uri, _VECTORS):
        for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
            names, vectors = batch.column("filepath").to_pylist(), batch.column("selection_vector")
            for place, name in enumerate(names):
                file = files.get(_decoded(name))
                if file is None:
                    raise TableError(
                        f"deltalake lists deleted rows of {redact_uri(name)!r}, which is no file of the Delta table "
                        f"{uri!r}: they cannot be honoured, so nothing is read; please report this"
                    )
                kept = vectors[place].values.to_numpy(zero_copy_only=False)
                found[file] = np.flatnonzero(~kept).astype(np.int64)
    return found


def _rooted(place: str, paths: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the folder that holds all files (None: the table's own), and their paths. Clones name files elsewhere."""
    if not any("://" in path for path in paths):
        return None, [unquote(path) for path in paths]
    places = [_location(path, place + "/") for path in paths]
    root = common_root(places)
    return root, paths_below(root, places)


def _location(path: str, base: str) -> str:
    """Return where a path of the log lies: in ``base``, which ends with a slash, unless it is a URL itself."""
    return _decoded(path) if "://" in path else base + unquote(path)


def _decoded(url: str) -> str:
    """Return a URL without percent-encoding, as we write them; of local files the path."""
    scheme, rest = split_uri(url)
    return rest if scheme == "file" else f"{scheme}://{unquote(rest)}"


def _mapping(fields: Sequence[Mapping[str, Any]], mode: str, partitions: set[str]) -> ColumnMapping:
    if mode not in ("name", "id"):
        return ColumnMapping()
    return ColumnMapping(fields={f["name"]: _stored(f, mode) for f in fields if f["name"] not in partitions})


def _stored(field: Mapping[str, Any], mode: str) -> StoredField:
    children = _stored_below(field["type"], mode)
    if mode == "id":
        return StoredField(field_id=int(field["metadata"][_ID]), children=children)
    return StoredField(names=(field["metadata"][_PHYSICAL],), children=children)


def _stored_below(kind: Any, mode: str) -> tuple[StoredField, ...]:
    """Return the stored fields below a type of the Delta schema; elements, keys and values are identified by place."""
    if not isinstance(kind, dict):
        return ()
    if kind["type"] == "struct":
        return tuple(_stored(field, mode) for field in kind["fields"])
    below = [kind["elementType"]] if kind["type"] == "array" else [kind["keyType"], kind["valueType"]]
    return tuple(StoredField(names=("-",), children=_stored_below(one, mode)) for one in below)


def _committed_ms(storage: Storage, number: int) -> int | None:
    """Return the time in the first lines of a commit; None if the commit is gone or has none."""
    try:
        head = storage.read(f"{_LOG}/{number:020}.json", 0, _COMMIT_HEAD_BYTES)
    except ObjectMissing:
        return None
    for line in head.split(b"\n")[:8]:
        with contextlib.suppress(ValueError, AttributeError):
            info = json.loads(line).get("commitInfo")
            if isinstance(info, dict):
                found = info.get("inCommitTimestamp", info.get("timestamp"))
                return found if type(found) is int else None
    return None


def _asking(uri: str, what: str) -> AbstractContextManager[None]:
    """Turn what deltalake raises into our errors."""
    return asking(partial(_explained, uri, what))


def _explained(uri: str, what: str, error: BaseException, text: str) -> Exception:
    where = f"of the Delta table {uri!r}, deltalake cannot read {what} ({text})"
    if isinstance(error, DeltaProtocolError) or "nsupported" in text or "catalog-managed" in text:
        return TableError(f"{where}: drop the feature that it names, or make a plain copy")
    if isinstance(error, TableNotFoundError):
        return TableNotFound(f"{where}: check the path and the credentials")
    if is_of_the_store(error, text):
        return StorageError(f"{where}: check the store and the credentials, then try again")
    if what == _VECTORS:
        if "not found" in text.lower():
            return TableVersionGone(
                f"{where}: one is gone; vacuum takes those of old versions. Open a version whose files are there"
            )
        if "Deletion Vector" in text:
            return DataFileDamaged(f"{where}: one is damaged; restore it, or open a version without it")
    return TableNotFound(
        f"{where}: it is not in the log any more or not yet, or the log is damaged; open another version"
    )

"""This module makes the index of a table from listed files, their footers, and a format's metadata.

`listed` looks up what the store has for the files of a version. `index_of_version` compares sizes, row counts and
deleted rows with the format's metadata. `index_of` makes the index of plain Parquet files. The module reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.errors import DataFileChanged, SchemaError, TableVersionGone
from lakeckpt.lake.formats.pinned_files import PinnedFile, PinnedFiles
from lakeckpt.lake.parquet.footer import FileSummary
from lakeckpt.lake.storage.base import ObjectInfo, check_key, redact_uri
from lakeckpt.lake.table.column_mapping import resolve
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.listing import Found, list_exactly, open_root
from lakeckpt.lake.table.partitions import coded, partition_columns, partition_names
from lakeckpt.lake.table.schema import plain_schema, table_schema

__all__ = ["file_columns", "index_of", "index_of_version", "listed"]

_NONE = np.zeros(0, np.int64)


def listed(
    found: Found | None, pinned: PinnedFiles, *, storage_options: Mapping[str, Any] | None, threads: int
) -> Found:
    """Return a version's files, sorted, as the store lists them. `TableVersionGone`, `DataFileChanged`: they differ."""
    if found is None or pinned.root not in (None, found.place):
        assert pinned.root is not None, "a table that was not found by its folder names its root"
        options = storage_options if pinned.storage_options is None else pinned.storage_options
        found = Found(storage=open_root(pinned.root, options), uri=redact_uri(pinned.root), files=())
    storage, uri = found.storage, found.uri
    known = {info.path: info for info in found.files}
    for file in pinned.files:
        check_key(file.path)
    missing = [file.path for file in pinned.files if file.path not in known]
    if missing:  # written since the listing, or gone
        known |= list_exactly(storage, missing, threads=threads)
    wrong = [text for file in pinned.files if (text := _difference(file, known.get(file.path)))]
    if wrong:
        some = "; ".join(wrong[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        gone = tuple(file.path for file in pinned.files if file.path not in known)
        text = (
            f"{pinned.version} of {uri!r} cannot be read: {some}. Files of old versions go when the table is vacuumed "
            "or expired: open a version whose files are there, or restore them"
        )
        raise TableVersionGone(text, files=gone) if gone else DataFileChanged(text)
    files = tuple(sorted((known[file.path] for file in pinned.files), key=lambda info: info.path))
    return replace(found, files=files)


def index_of(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary]) -> TableIndex:
    """Return the index of plain Parquet files: the schema from their footers, partitions from their paths."""
    paths = tuple(info.path for info in files)
    partitions = partition_columns(paths)
    for name in (one.name for one in partitions):
        for path, summary in zip(paths, summaries, strict=True):
            if summary.schema.get_field_index(name) >= 0 and name not in partition_names(path):
                raise SchemaError(
                    f"{path!r} has a column {name!r} of its own and lies in no folder {name}=…, as other files do: "
                    "move it into one, or read the files as two tables"
                )
    schema = table_schema([(path, s.schema) for path, s in zip(paths, summaries, strict=True)], partitions)
    return TableIndex(**file_columns(files, summaries), partitions=partitions, schema=schema)


def index_of_version(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary], pinned: PinnedFiles) -> TableIndex:
    """Return the index of a version, with the schema, partitions and deleted rows of the format's metadata."""
    by_path = {file.path: file for file in pinned.files}
    in_order = [by_path[info.path] for info in files]
    for file, summary in zip(in_order, summaries, strict=True):
        _check_rows(file, int(summary.group_rows.sum()), pinned)
    schema = plain_schema(pinned.schema)
    partitions = tuple(
        coded(
            name,
            schema.field(name).type,
            [file.partition.get(name) for file in in_order],
            [
                _is_stored(name, schema.field(name), file, summary, pinned)
                for file, summary in zip(in_order, summaries, strict=True)
            ],
        )
        for name in pinned.partition_columns
    )
    deleted = {i: file.deleted for i, file in enumerate(in_order) if file.deleted is not None}
    return TableIndex(
        **file_columns(files, summaries),
        partitions=partitions,
        schema=schema,
        version=pinned.version,
        deletes=Deletes.of(deleted),
        columns=pinned.columns,
    )


def _is_stored(name: str, field: pa.Field, file: PinnedFile, summary: FileSummary, pinned: PinnedFiles) -> bool:
    """Return whether a file is read by its own column ``name``, not by the partition's value."""
    if name not in file.partition or not pinned.constants_where_absent:
        return name not in file.partition
    column = pa.schema([field.with_nullable(True)])
    return resolve(column, [name], pinned.columns, summary.schema, file.path)[name].index is not None


def file_columns(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary]) -> dict[str, Any]:
    """Return the columns of an index that files and their footers give."""
    per_file = [len(summary.group_rows) for summary in summaries]
    return {
        "paths": tuple(info.path for info in files),
        "size_bytes": np.array([info.size_bytes for info in files], dtype=np.int64),
        "etags": tuple(info.etag for info in files),
        "mtime_ns": np.array([-1 if info.mtime_ns is None else info.mtime_ns for info in files], dtype=np.int64),
        "footer_digests": b"".join(summary.digest for summary in summaries),
        "first_group": np.concatenate([[0], np.cumsum(per_file, dtype=np.int64)]),
        "stored_rows": np.concatenate([_NONE, *(summary.group_rows for summary in summaries)]),
        "group_bytes": np.concatenate([_NONE, *(summary.group_bytes for summary in summaries)]),
    }


def _difference(file: PinnedFile, info: ObjectInfo | None) -> str | None:
    if info is None:
        return f"its file {file.path!r} is gone"
    if file.size_bytes is not None and info.size_bytes != file.size_bytes:
        return f"its file {file.path!r} has {info.size_bytes} bytes, not {file.size_bytes}"
    return None


def _check_rows(file: PinnedFile, stored: int, pinned: PinnedFiles) -> None:
    if file.rows is not None and file.rows != stored:
        raise DataFileChanged(
            f"{file.path!r} holds {stored} rows, but {pinned.version} of the table has {file.rows}: "
            "the file was written again, or the table's metadata is wrong; restore the file"
        )
    if file.deleted is not None and len(file.deleted):
        last = int(file.deleted.max())
        if last >= stored or int(file.deleted.min()) < 0:
            raise DataFileChanged(
                f"{pinned.version} of the table deletes row {last} of {file.path!r}, which holds {stored} rows: "
                "the file was written again, or the table's metadata is wrong; restore the file"
            )

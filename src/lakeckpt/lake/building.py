"""Which index do listed files, their footers and a format's metadata make together?

`listed` looks up what the store has for the files of a version; `index_of_version` compares sizes, row counts and
deleted rows with it, and `index_of` does without, for plain Parquet. Opens and reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lakeckpt.errors import DataFileChanged
from lakeckpt.lake.deletes import Deletes
from lakeckpt.lake.footer import FileSummary
from lakeckpt.lake.formats.pinned import PinnedFile, PinnedFiles
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.listing import Found, list_exactly, open_root
from lakeckpt.lake.partitions import coded, partition_columns
from lakeckpt.lake.schema import plain_schema, table_schema
from lakeckpt.lake.storage import ObjectInfo, check_key, redact_uri

__all__ = ["index_of", "index_of_version", "listed"]

_NONE = np.zeros(0, np.int64)


def listed(found: Found, pinned: PinnedFiles, *, storage_options: Mapping[str, Any] | None, threads: int) -> Found:
    """The files of a version, sorted, as the store lists them now. `DataFileChanged` where it has others, or none."""
    known = {info.path: info for info in found.files}
    storage, uri = found.storage, found.uri
    if pinned.root is not None:
        storage, uri, known = open_root(pinned.root, storage_options), redact_uri(pinned.root), {}
    for file in pinned.files:
        check_key(file.path)
    missing = [file.path for file in pinned.files if file.path not in known]
    if missing:  # written since the listing, or gone
        known |= list_exactly(storage, missing, threads=threads)
    wrong = [text for file in pinned.files if (text := _difference(file, known.get(file.path)))]
    if wrong:
        some = "; ".join(wrong[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise DataFileChanged(
            f"{pinned.version} of {uri!r} cannot be read: {some}. Files of old versions go when the table is vacuumed "
            "or expired: open a version whose files are there, or restore them"
        )
    files = tuple(sorted((known[file.path] for file in pinned.files), key=lambda info: info.path))
    return replace(found, storage=storage, uri=uri, files=files)


def index_of(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary]) -> TableIndex:
    """The index of plain Parquet files: the schema from their footers, partitions from their paths."""
    paths = tuple(info.path for info in files)
    partitions = partition_columns(paths)
    schema = table_schema([(path, s.schema) for path, s in zip(paths, summaries, strict=True)], partitions)
    return TableIndex(**_listing(files, summaries), partitions=partitions, schema=schema)


def index_of_version(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary], pinned: PinnedFiles) -> TableIndex:
    """The index of a version: its schema, partitions, columns and deleted rows as the format's metadata says."""
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
            [name not in file.partition for file in in_order],
        )
        for name in pinned.partition_columns
    )
    deleted = {i: file.deleted for i, file in enumerate(in_order) if file.deleted is not None}
    return TableIndex(
        **_listing(files, summaries),
        partitions=partitions,
        schema=schema,
        version=pinned.version,
        deletes=Deletes.of(deleted),
        columns=pinned.columns,
    )


def _listing(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary]) -> dict[str, Any]:
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
            f"{file.path!r} holds {stored} rows, but {pinned.version} of the table says {file.rows}: "
            "the file was written again, or the table's metadata is wrong; restore the file"
        )
    if file.deleted is not None and len(file.deleted):
        last = int(file.deleted.max())
        if last >= stored or int(file.deleted.min()) < 0:
            raise DataFileChanged(
                f"{pinned.version} of the table deletes row {last} of {file.path!r}, which holds {stored} rows: "
                "the file was written again, or the table's metadata is wrong; restore the file"
            )

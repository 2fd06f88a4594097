"""What does the footer of a Parquet file say, and is it the footer that was pinned?

The tail of each file is read once (64 KiB, twice only where the footer is larger), many files at a time in threads, and
parsed alone: the rest of the file is not touched. `summarize` keeps only what a table's index needs. A file that is
empty, cut, encrypted or no Parquet at all is refused as `DataFileDamaged`, by name.

Threads live in `summarize_all` only: it starts and joins them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import DataFileDamaged, ObjectChanged, ObjectMissing, SchemaError
from lakeckpt.lake.column_chunks import encrypted_columns
from lakeckpt.lake.storage import ObjectInfo, Storage

__all__ = [
    "DIGEST_BYTES",
    "FileSummary",
    "Footer",
    "Int64Array",
    "Progress",
    "head_of",
    "read_footer",
    "summarize",
    "summarize_all",
]

Int64Array = np.ndarray[tuple[int], np.dtype[np.int64]]
Progress = Callable[[int, int], None]
DIGEST_BYTES = 16
TAIL_BYTES = 64 * 1024
MAX_FOOTER_BYTES = 512 * 1024 * 1024
_FILES_PER_JOB = 16
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_REPAIR = "restore it from a good copy, write it again, or leave it out of the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """A parsed footer and its bytes (without the length and magic that follow); ``digest`` is their BLAKE2b-128."""

    metadata: pq.FileMetaData
    encoded: bytes = field(repr=False)
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileSummary:
    """What a table's index keeps of a file: rows and uncompressed bytes of each row group (int64), and the schema."""

    digest: bytes
    schema: pa.Schema
    group_rows: Int64Array
    group_bytes: Int64Array


def read_footer(storage: Storage, path: str, size_bytes: int, etag: str | None = None) -> Footer:
    """Read and parse the footer of a file whose listed size is ``size_bytes``. `DataFileDamaged`, `StorageError`.

    `SchemaError` where pyarrow knows of its types and cannot read them. `ObjectMissing` where there is no such file,
    `ObjectChanged` where it has another ETag than ``etag``, which a listing gave.
    """
    if size_bytes < 12:
        _check_head(storage, path, size_bytes, etag)
        what = "is empty (0 bytes)" if size_bytes == 0 else f"has only {size_bytes} bytes"
        raise _damaged(path, f"{what}, too few for a Parquet file: {_REPAIR}")
    tail = _read_exactly(storage, path, max(0, size_bytes - TAIL_BYTES), size_bytes, etag)
    if tail[-4:] == _ENCRYPTED:
        raise _damaged(path, "has an encrypted footer, which cannot be read: decrypt it, or leave it out of the table")
    if tail[-4:] != _MAGIC:
        _check_head(storage, path, size_bytes, etag)
        raise _damaged(path, f"has {size_bytes} bytes and does not end as Parquet does (truncated): {_REPAIR}")
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length > min(size_bytes - 12, MAX_FOOTER_BYTES):
        raise _damaged(path, f"claims a footer of {length} bytes in a file of {size_bytes}: {_REPAIR}")
    if length + 8 > len(tail):
        tail = _read_exactly(storage, path, size_bytes - length - 8, size_bytes, etag)
    body = tail[-8 - length : -8]
    try:
        metadata = pq.read_metadata(pa.BufferReader(b"".join((_MAGIC, body, tail[-8:]))))
    except pa.ArrowNotImplementedError as error:
        raise SchemaError(
            f"{path!r} has a footer that pyarrow {pa.__version__} cannot read ({_one_line(error)}): write the file "
            "again with types that it knows, or leave it out of the table"
        ) from error
    except Exception as error:  # of damaged bytes pyarrow says anything, UnicodeDecodeError and MemoryError included
        raise _damaged(path, f"has a footer that cannot be parsed ({_one_line(error)}): {_REPAIR}") from error
    _check_columns(path, metadata, body)
    return Footer(metadata=metadata, encoded=body, digest=blake2b(body, digest_size=DIGEST_BYTES).digest())


def head_of(storage: Storage, path: str, size_bytes: int, etag: str | None = None) -> bytes:
    """The first bytes of a file, if it does not begin as Parquet files do; else none."""
    head = _read_exactly(storage, path, 0, min(size_bytes, 8), etag)
    return b"" if head[:4] in (_MAGIC, _ENCRYPTED) else head


def _check_head(storage: Storage, path: str, size_bytes: int, etag: str | None) -> None:
    head = head_of(storage, path, size_bytes, etag)
    if head:
        raise _damaged(
            path,
            f"is no Parquet file: it has {size_bytes} bytes and begins with {head!r}: leave it out of the table "
            "(name the Parquet files by a glob or a list), or restore it if it was overwritten",
        )


def _check_columns(path: str, metadata: pq.FileMetaData, body: bytes) -> None:
    """Refuse what pyarrow would end the process for, when it is asked about a column chunk."""
    try:
        encrypted = encrypted_columns(body, metadata.num_columns)
    except ValueError as error:
        raise _damaged(path, f"has a footer that is malformed ({error}): {_REPAIR}") from error
    if encrypted:
        names = ", ".join(repr(metadata.schema.column(leaf).path) for leaf in encrypted[:5])
        raise _damaged(
            path,
            f"has encrypted columns ({names}{', …' if len(encrypted) > 5 else ''}), which cannot be read: decrypt it, "
            "or leave it out of the table",
        )
    for ordinal in range(metadata.num_row_groups):
        found = metadata.row_group(ordinal).num_columns
        if found != metadata.num_columns:
            what = f"has {found} column chunks in row group {ordinal}, and {metadata.num_columns} columns"
            raise _damaged(path, f"{what}: {_REPAIR}", ordinal)


def summarize(storage: Storage, path: str, size_bytes: int, etag: str | None = None) -> FileSummary:
    """Read a footer, check that its parts agree, and keep what an index needs.

    Column chunks are not looked at: ``RowGroupMetaData.column`` ends the process (an exception of C++ that pyarrow does
    not catch) where a footer is damaged in certain ways. Where a footer lies about them, decoding says so.
    """
    try:
        footer = read_footer(storage, path, size_bytes, etag)
    except ObjectMissing as error:
        raise _damaged(path, "was listed, but is not there any more: open the table again") from error
    except ObjectChanged as error:
        raise _damaged(path, f"was written again since it was listed ({error}): open the table again") from error
    metadata = footer.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    group_rows = np.array([group.num_rows for group in groups], dtype=np.int64)
    group_bytes = np.array([group.total_byte_size for group in groups], dtype=np.int64)
    for ordinal in np.flatnonzero(group_rows < 0).tolist():
        raise _damaged(path, f"has row group {ordinal} with {group_rows[ordinal]} rows: {_REPAIR}", ordinal)
    if int(group_rows.sum()) != metadata.num_rows:
        raise _damaged(
            path, f"has {group_rows.sum()} rows in its row groups, but claims {metadata.num_rows}: {_REPAIR}"
        )
    return FileSummary(
        digest=footer.digest,
        schema=_arrow_schema(path, metadata),
        group_rows=group_rows,
        group_bytes=np.maximum(group_bytes, 0),
    )


def summarize_all(
    storage: Storage, files: Sequence[ObjectInfo], *, threads: int, progress: Progress | None
) -> list[FileSummary]:
    """Summaries of all files, in their order, read by ``threads`` threads; ``progress(done, total)`` as they arrive."""
    found: list[FileSummary] = []
    schemas: dict[pa.Schema, pa.Schema] = {}  # one object for all files that have the same one
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(files))), thread_name_prefix="lakeckpt-footer") as pool:
        # Several files a job where there are many: to hand a result to this thread costs as much as to parse a footer.
        size = max(1, min(_FILES_PER_JOB, len(files) // (4 * threads)))
        runs = [files[at : at + size] for at in range(0, len(files), size)]
        jobs = [pool.submit(_summarized, storage, run) for run in runs]
        try:
            for job in jobs:
                for summary in job.result():
                    found.append(replace(summary, schema=schemas.setdefault(summary.schema, summary.schema)))
                    if progress is not None:
                        progress(len(found), len(files))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _summarized(storage: Storage, files: Sequence[ObjectInfo]) -> list[FileSummary]:
    return [summarize(storage, file.path, file.size_bytes, file.etag) for file in files]


def _read_exactly(storage: Storage, path: str, start: int, stop: int, etag: str | None) -> bytes:
    data = storage.read(path, start, stop, etag=etag)
    if len(data) != stop - start:
        raise _damaged(path, f"was listed with {stop} bytes, but ends before (being rewritten?): open the table again")
    return data


def _arrow_schema(path: str, metadata: pq.FileMetaData) -> pa.Schema:
    try:
        schema = metadata.schema.to_arrow_schema().remove_metadata()
        names = schema.names
    except Exception as error:
        raise SchemaError(f"{path!r} has a schema that pyarrow cannot read ({_one_line(error)})") from error
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SchemaError(f"{path!r} has more than one column named {', '.join(map(repr, twice))}: rename them")
    return schema


def _damaged(path: str, what: str, row_group: int | None = None) -> DataFileDamaged:
    return DataFileDamaged(f"the data file {path!r} {what}", file=path, row_group=row_group)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

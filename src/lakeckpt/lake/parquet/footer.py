"""This module reads the footers of Parquet files.

It reads the tail of each file once (64 KiB; a second time only if the footer is larger) and parses it alone. It
refuses, as `DataFileDamaged` with the file's name, a file that is empty, cut, encrypted or not Parquet. `summarize`
keeps only what a table's index needs. The module never asks pyarrow about a column chunk, because pyarrow ends the
process for some column chunks of a footer that was damaged before it was pinned.

`summarize_all` starts and joins threads, so that many footers are read in parallel. No other function starts threads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import DataFileDamaged, ObjectChanged, ObjectMissing, SchemaError, one_line
from lakeckpt.lake.storage.base import ObjectInfo, Storage

__all__ = [
    "DIGEST_BYTES",
    "FileSummary",
    "Footer",
    "Int64Array",
    "Progress",
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
_SIGNATURE_BYTES = 28
"""In a file with encrypted columns, a signature of so many bytes follows an unencrypted footer."""
_REPAIR = "restore it from a good copy, write it again, or leave it out of the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """A parsed footer; ``digest`` is the BLAKE2b-128 of its bytes, without the length and magic that follow."""

    metadata: pq.FileMetaData
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileSummary:
    """The part of a footer that an index keeps: rows and uncompressed bytes of each row group (int64), schema."""

    digest: bytes
    schema: pa.Schema
    group_rows: Int64Array
    group_bytes: Int64Array


def read_footer(storage: Storage, path: str, size_bytes: int, etag: str | None = None) -> Footer:
    """Read and parse the footer of a file whose listed size is ``size_bytes``.

    Raises `DataFileDamaged`, `StorageError`, `SchemaError` if pyarrow cannot read the types, `ObjectMissing` if
    there is no such file, and `ObjectChanged` if its ETag is not ``etag``, which a listing gave.
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
            f"{path!r} has a footer that pyarrow {pa.__version__} cannot read ({one_line(error)}): write the file "
            "again with types that it knows, or leave it out of the table"
        ) from error
    except Exception as error:  # for damaged bytes pyarrow raises anything, UnicodeDecodeError and MemoryError included
        raise _damaged(path, f"has a footer that cannot be parsed ({one_line(error)}): {_REPAIR}") from error
    if length - metadata.serialized_size == _SIGNATURE_BYTES:
        what = "has encrypted columns, which cannot be read: decrypt it, or leave it out of the table"
        raise _damaged(path, what)
    return Footer(metadata=metadata, digest=blake2b(body, digest_size=DIGEST_BYTES).digest())


def _check_head(storage: Storage, path: str, size_bytes: int, etag: str | None) -> None:
    head = _read_exactly(storage, path, 0, min(size_bytes, 8), etag)
    if head and head[:4] not in (_MAGIC, _ENCRYPTED):
        raise _damaged(
            path,
            f"is no Parquet file: it has {size_bytes} bytes and begins with {head!r}: leave it out of the table "
            "(name the Parquet files by a glob or a list), or restore it if it was overwritten. lakeckpt reads Parquet "
            "only: pyarrow.dataset reads CSV and JSON, and its write_dataset writes Parquet",
        )


def summarize(storage: Storage, path: str, size_bytes: int, etag: str | None = None) -> FileSummary:
    """Read a footer, check that its numbers agree, and return what an index needs.

    Raises as `read_footer`, and `DataFileDamaged` if the file is gone or was written again since it was listed.
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
    for ordinal, group in enumerate(groups):
        if group.num_rows < 0 or group.num_columns != metadata.num_columns:
            what = (
                f"has row group {ordinal} with {group.num_rows} rows and {group.num_columns} of {metadata.num_columns}"
            )
            raise _damaged(path, f"{what} columns: {_REPAIR}", ordinal)
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
    """Return the summaries of all files, in their order, read by ``threads`` threads.

    ``progress(done, total)`` is called as they arrive. Raises as `summarize`.
    """
    found: list[FileSummary] = []
    schemas: dict[pa.Schema, pa.Schema] = {}  # one object for all files that have the same one
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(files))), thread_name_prefix="lakeckpt-footer") as pool:
        # Many files share one job: to pass a result to this thread costs as much as to parse a footer.
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
        raise SchemaError(f"{path!r} has a schema that pyarrow cannot read ({one_line(error)})") from error
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SchemaError(f"{path!r} has more than one column named {', '.join(map(repr, twice))}: rename them")
    return schema


def _damaged(path: str, what: str, row_group: int | None = None) -> DataFileDamaged:
    return DataFileDamaged(f"the data file {path!r} {what}", file=path, row_group=row_group)

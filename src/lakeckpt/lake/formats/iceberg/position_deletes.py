"""This module reads which rows of each data file the position deletes and deletion vectors of an Iceberg snapshot name.

`deleted_rows` reads the position delete files (Parquet) and deletion vectors (Puffin) of a plan, each once, in
parallel, and returns ordinals by data file. It checks the length, magic, checksum and number of rows of a vector, the
number of rows that a position delete file lists, and that no row beyond the end of a file is named. A delete that does
not fit is refused as damage, by name: a delete that is not understood is never ignored. The threads are joined.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import FileFormat
from pyroaring import BitMap64

from lakeckpt.errors import DataFileDamaged, LakeckptError, TableError, TableVersionGone, one_line
from lakeckpt.lake.formats.iceberg.plan import Entry, PlannedFile
from lakeckpt.lake.table.deletes import Int64Array

__all__ = ["deleted_rows", "read_location"]

_COLUMNS = ["file_path", "pos"]
"""The columns of a position delete file, which the specification names."""
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"


def deleted_rows(planned: Sequence[PlannedFile], io: FileIO, *, threads: int) -> dict[str, Int64Array]:
    """Return by location of data files their deleted rows, ascending, each once (int64); no rows: no entry.

    `DataFileDamaged` names the delete file that cannot be read or does not fit its data file, `TableVersionGone` the
    one that is gone.
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    files: dict[str, Entry] = {}
    for one in planned:
        for delete in one.positions:
            wanted[delete.location].add(one.location)
            files[delete.location] = delete
    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="lakeckpt-deletes") as pool:
        reads = {location: pool.submit(_positions, files[location], wanted[location], io) for location in files}
        vectors = {one.location: pool.submit(_vector, one.vector, io) for one in planned if one.vector is not None}
        listed = {location: future.result() for location, future in reads.items()}
        found: dict[str, Int64Array] = {location: future.result() for location, future in vectors.items()}
    for one in planned:
        parts = [part for delete in one.positions if (part := listed[delete.location].get(one.location)) is not None]
        if parts:
            found[one.location] = np.unique(np.concatenate(parts))
        rows = found.get(one.location)
        if rows is not None and len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= one.rows):
            outside = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            by = one.vector or one.positions[0]
            raise _damaged(by.location, f"deletes row {outside} of {one.location!r}, which has {one.rows} rows")
    return {location: rows for location, rows in found.items() if len(rows)}


def read_location(io: FileIO, location: str, start: int = 0, size_bytes: int | None = None) -> bytes:
    """Return bytes of a file that a snapshot names. `TableVersionGone`, `DataFileDamaged` (shorter) or `TableError`."""
    try:
        with io.new_input(location).open() as stream:
            if start:
                stream.seek(start)
            data = bytes(stream.read() if size_bytes is None else stream.read(size_bytes))
    except FileNotFoundError as error:
        raise TableVersionGone(
            f"the delete file {location!r} is gone: the snapshot was expired, or its files were removed. Open a "
            "snapshot that is there, or restore the file",
            files=(location,),
        ) from error
    except LakeckptError:
        raise
    except Exception as error:  # the store's client may raise anything
        raise TableError(f"{location!r} could not be read ({one_line(error)})") from error
    if size_bytes is not None and len(data) != size_bytes:
        raise _damaged(location, f"ends at byte {start + len(data)}, not at {start + size_bytes}")
    return data


def _vector(vector: Entry, io: FileIO) -> Int64Array:
    """Return the rows of a deletion vector: length, magic, 64-bit Roaring bitmap in its portable form, CRC-32."""
    start, size = vector.get("content_offset"), vector.get("content_size_in_bytes")
    if start < 0 or size < 12:
        raise _damaged(vector.location, f"cannot hold a deletion vector of {size} bytes at byte {start}")
    blob = read_location(io, vector.location, start, size)
    inner, length = blob[4:-4], int.from_bytes(blob[:4], "big")
    if length != len(inner) or inner[:4] != _VECTOR_MAGIC:
        raise _damaged(vector.location, f"holds no deletion vector at byte {start}")
    if zlib.crc32(inner) != int.from_bytes(blob[-4:], "big"):
        raise _damaged(
            vector.location, f"has a deletion vector at byte {start} whose checksum is not that of its bytes"
        )
    try:
        rows = np.array(BitMap64.deserialize(inner[4:]).to_array(), dtype=np.uint64).astype(np.int64)
    except (ValueError, IndexError) as error:
        raise _damaged(vector.location, f"has a malformed deletion vector at byte {start} ({error})") from error
    if len(rows) != vector.count:
        raise _damaged(
            vector.location, f"deletes {len(rows)} rows at byte {start}, but its manifest has {vector.count}"
        )
    return rows


def _positions(delete: Entry, wanted: set[str], io: FileIO) -> dict[str, Int64Array]:
    """Return what a position delete file lists of the data files ``wanted``."""
    if delete.file.file_format != FileFormat.PARQUET:
        raise TableError(
            f"the position delete file {delete.location!r} is {delete.file.file_format.value}: only Parquet and Puffin "
            "are read here. Compact the table (rewrite_position_delete_files or rewrite_data_files)"
        )
    data = read_location(io, delete.location)
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            missing = [name for name in _COLUMNS if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"no column {missing[0]!r}")
            # This thread decodes: pyarrow's own threads may release Python's bytes while the interpreter is ending.
            table = file.read(columns=_COLUMNS, use_threads=False)
        paths = table.column(_COLUMNS[0]).cast(pa.large_string()).combine_chunks().dictionary_encode()
        positions = table.column(_COLUMNS[1]).cast(pa.int64()).combine_chunks()
        if paths.null_count or positions.null_count:
            raise ValueError("it holds nulls")
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        raise _damaged(delete.location, f"cannot be read as position deletes ({one_line(error)})") from error
    if len(positions) != delete.count:
        raise _damaged(delete.location, f"lists {len(positions)} rows, but its manifest has {delete.count}")
    return _grouped(paths, np.asarray(positions.to_numpy(zero_copy_only=False), np.int64), wanted)


def _grouped(paths: pa.DictionaryArray, positions: Int64Array, wanted: set[str]) -> dict[str, Int64Array]:
    codes = np.asarray(paths.indices.to_numpy(zero_copy_only=False))
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(paths.dictionary)))
    starts = np.concatenate([[0], ends[:-1]])
    return {
        path: positions[order[start:end]]
        for path, start, end in zip(paths.dictionary.to_pylist(), starts, ends, strict=True)
        if path in wanted
    }


def _damaged(location: str, what: str) -> DataFileDamaged:
    return DataFileDamaged(
        f"the delete file {location!r} {what}: restore it from a good copy, or compact the table", file=location
    )

"""This module keeps the footers of a table that were read beside a run, so that they need not be read again.

`cached_summaries` reads and writes one document for each table (``footers/<digest of the table's place>.lkc``): the
index of the files, and their schemas. A file that is listed with the same path, size and ETag has the footer that it
had; if a store has no ETags, the modification time decides. All other footers are read, and the document is
replaced. So a table that grew costs its new files, and a table that did not grow costs a listing.

A document that is damaged, or of another kind, is ignored. Opening a file compares its footer with the pinned digest
in any case. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from lakeckpt.errors import StorageError, WireError
from lakeckpt.lake.formats.pinning import file_columns
from lakeckpt.lake.parquet.footer import DIGEST_BYTES, FileSummary, Progress, summarize_all
from lakeckpt.lake.storage.base import ObjectInfo, Storage, describe
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Known", "cached_summaries", "dump_footers", "load_footers"]

KIND, VERSION = "footers", (1, 0)

Known = dict[str, tuple[ObjectInfo, FileSummary]]
"""By path: a file as it was listed, and the summary of its footer."""


def cached_summaries(
    cache: Storage | None,
    storage: Storage,
    files: Sequence[ObjectInfo],
    *,
    threads: int,
    progress: Progress | None,
) -> list[FileSummary]:
    """Return the summaries of ``files`` of ``storage``, in their order. Those that ``cache`` has are not read again.

    Raises as `summarize_all`. A cache that cannot be written to is done without, with a warning.
    """
    if cache is None:
        return summarize_all(storage, files, threads=threads, progress=progress)
    # Paths are below a table's root: two tables of one run may have a file of one path, size and time.
    place = f"footers/{blake2b(describe(storage).encode(), digest_size=DIGEST_BYTES).hexdigest()}.lkc"
    known = _cached(cache, place)
    missing = [info for info in files if not _is_known(known, info)]
    read = dict(
        zip(
            (info.path for info in missing),
            summarize_all(storage, missing, threads=threads, progress=progress),
            strict=True,
        )
    )
    summaries = [read[info.path] if info.path in read else known[info.path][1] for info in files]
    if missing:
        try:
            cache.put(place, [dump_footers(files, summaries)])
        except StorageError as error:
            warnings.warn(f"the footers that were read could not be kept: {error}", RuntimeWarning, stacklevel=3)
    return summaries


def _cached(cache: Storage, place: str) -> Known:
    """Return the footers that ``cache`` has at ``place``; none if there is no document that can be read."""
    with contextlib.suppress(StorageError, WireError):
        return load_footers(cache.read(place))
    return {}


def dump_footers(files: Sequence[ObjectInfo], summaries: Sequence[FileSummary]) -> bytes:
    """Return the document of ``files``, sorted by path, and the summaries of their footers."""
    schemas = {id(one.schema): one.schema for one in summaries}  # most files share one object
    places = {key: place for place, key in enumerate(schemas)}
    value = {
        "index": TableIndex(**file_columns(files, summaries), partitions=(), schema=pa.schema([])).dumps(),
        "schemas": [schema.serialize().to_pybytes() for schema in schemas.values()],
        "schema_codes": np.array([places[id(one.schema)] for one in summaries], np.int64),
    }
    return dumps(value, kind=KIND, version=VERSION)


def load_footers(data: bytes) -> Known:
    """Return what `dump_footers` wrote. `WireError` if it is damaged, newer, or something else."""
    value = loads(data, kind=KIND, supported=VERSION)
    index, codes = TableIndex.loads(value["index"]), value["schema_codes"].tolist()
    schemas = [pa.ipc.read_schema(pa.py_buffer(one)) for one in value["schemas"]]
    found = {}
    for place, code in enumerate(codes):
        file, groups = index.file(place), slice(*index.first_group[place : place + 2].tolist())
        summary = FileSummary(
            digest=index.footer_digest(place),
            schema=schemas[code],
            group_rows=index.stored_rows[groups],
            group_bytes=index.group_bytes[groups],
        )
        found[file.path] = file, summary
    return found


def _is_known(known: Known, info: ObjectInfo) -> bool:
    """Return whether a file is certainly the one that was listed before."""
    before = known[info.path][0] if info.path in known else None
    if before is None or before.size_bytes != info.size_bytes:
        return False
    if before.etag is not None or info.etag is not None:
        return before.etag == info.etag
    return before.mtime_ns is not None and before.mtime_ns == info.mtime_ns

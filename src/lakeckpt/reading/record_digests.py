"""How are digests of a table's column chunks recorded?  Every row group is read and decoded once, and its bytes hashed.

Decoding comes first, so that what is damaged already (as far as anybody can tell) is refused, not blessed. Files are
shared out to threads, which are started and joined here; each holds one row group at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import numpy as np

from lakeckpt.errors import ConfigError
from lakeckpt.lake.chunk_digests import ChunkDigests, Uint64Array, digests_path
from lakeckpt.lake.storage import open_storage, split_uri
from lakeckpt.lake.table import Table
from lakeckpt.reading.decode import RowGroupDecoder

__all__ = ["record_digests"]


def record_digests(
    table: Table,
    place: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    threads: int = 4,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """Record digests of the column chunks of ``columns`` (None: all) at ``place``, such as that of a run.

    Returns ``table`` with them: whatever reads it compares every column chunk before it is decoded, and a difference is
    `DataFileDamaged`. Later, ``open_table(…, digests=place)`` does the same. All of ``columns`` is read and decoded
    once, by ``threads`` threads; ``progress(files done, files)`` is called as they go on.

    ``storage_options`` go to the fsspec filesystem of ``place``, where it is not local.

    Raises `DataFileDamaged` for what cannot be decoded now, and what else reading raises; then nothing is recorded.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    bare = replace(table, digests=None, digests_place=None)
    files = len(table.index.paths)
    found: list[Uint64Array | None] = [None] * files
    with ThreadPoolExecutor(max_workers=max(1, min(threads, files)), thread_name_prefix="lakeckpt-digest") as pool:
        futures = {pool.submit(_of_file, bare, columns, ordinal): ordinal for ordinal in range(files)}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                found[futures[future]] = future.result()
                if progress is not None:
                    progress(done, files)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    each = [one for one in found if one is not None]
    digests = ChunkDigests(
        table=table.index.digest,
        groups=np.array([one.shape[0] for one in each], np.int64),
        leaves=np.array([one.shape[1] for one in each], np.int64),
        digests=np.concatenate([np.zeros(0, np.uint64), *(one.reshape(-1) for one in each)]),
    )
    is_local = split_uri(os.fspath(place))[0] == "file"
    storage = open_storage(place, storage_options=None if is_local else storage_options)
    storage.put(digests_path(digests.table), [digests.dumps()])
    return replace(table, digests=digests, digests_place=storage)


def _of_file(table: Table, columns: Sequence[str] | None, ordinal: int) -> Uint64Array:
    decoder = RowGroupDecoder(table, columns, open_files=1, use_threads=False)
    try:
        return decoder.digests(ordinal)
    finally:
        decoder.close()

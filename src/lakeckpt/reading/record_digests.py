"""How are digests of a table's column chunks recorded?  Every row group is read and decoded once, and its bytes hashed.

Decoding comes first, so that what is damaged already (as far as anybody can tell) is refused, not blessed; where
digests of this version were recorded before, they tell, and stay: new ones are added to them, and replace none. Files
are shared out to threads, which are started and joined here; each holds one row group at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import numpy as np

from lakeckpt.errors import ConfigError, WireDamaged
from lakeckpt.lake.chunk_digests import ChunkDigests, Uint64Array, digests_path, load_digests
from lakeckpt.lake.storage import Storage, describe, open_storage, split_uri
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

    Digests of the same version that are at ``place`` already are compared with what is read now, and kept, those of
    other columns too. Where bytes are to be recorded that differ from them, remove the file below ``digests/`` there.

    ``storage_options`` go to the fsspec filesystem of ``place``, where it is not local.

    Raises `DataFileDamaged` for what cannot be decoded now or has not the digest that was recorded before, `WireError`
    where the digests there cannot be read, and what else reading raises; then nothing is recorded.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    is_local = split_uri(os.fspath(place))[0] == "file"
    storage = open_storage(place, storage_options=None if is_local else storage_options)
    compared = replace(table, digests=_recorded(storage, table), digests_place=None)
    files = len(table.index.paths)
    found: list[Uint64Array | None] = [None] * files
    with ThreadPoolExecutor(max_workers=max(1, min(threads, files)), thread_name_prefix="lakeckpt-digest") as pool:
        futures = {pool.submit(_of_file, compared, columns, ordinal): ordinal for ordinal in range(files)}
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
    if (there := _recorded(storage, table)) is not None:  # again: others may have recorded other columns meanwhile
        digests = there.joined(digests)
    storage.put(digests_path(digests.table), [digests.dumps()])
    return replace(table, digests=digests, digests_place=storage)


def _recorded(storage: Storage, table: Table) -> ChunkDigests | None:
    """What was recorded of this version at the place before; None: nothing."""
    path = digests_path(table.index.digest)
    try:
        return load_digests(storage, table.index.digest, np.diff(table.index.first_group))
    except ConfigError:
        return None
    except WireDamaged as error:
        raise WireDamaged(
            f"{path!r} in {describe(storage)} cannot be read, so that it cannot tell whether the table is as it was: "
            f"{error}. Restore it, or remove it if you know that the table is good"
        ) from error


def _of_file(table: Table, columns: Sequence[str] | None, ordinal: int) -> Uint64Array:
    decoder = RowGroupDecoder(table, columns, open_files=1, use_threads=False)
    try:
        return decoder.digests(ordinal)
    finally:
        decoder.close()

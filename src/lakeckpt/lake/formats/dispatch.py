"""This module opens tables: it finds the format of a table, asks the format what a version consists of, and pins that.

`open_table` lists the files, asks the module of the format (`pin`), reads all footers in parallel, and makes the index.
Plain Parquet has no format: the listing itself is the version. The library of a format is imported only if a table
has that format. No row is decoded. The threads that read footers and listings are joined before `open_table` returns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

from lakeckpt.errors import ConfigError
from lakeckpt.lake.formats.appends import added_files, added_versions
from lakeckpt.lake.formats.footer_cache import cached_summaries
from lakeckpt.lake.formats.library import is_of_catalog, pin, refreshed
from lakeckpt.lake.formats.pinned_files import CatalogTable, PinnedFiles
from lakeckpt.lake.formats.pinning import index_of, index_of_version, listed
from lakeckpt.lake.parquet.footer import Progress
from lakeckpt.lake.storage.base import Storage, split_uri
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.open import FILESYSTEM, open_storage, with_filesystem
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.listing import METADATA_FILES, Found, Source, find_files
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.lake.table.version import TableFormat

__all__ = ["open_table"]


def open_table(
    source: Source | CatalogTable,
    *,
    version: int | str | None = None,
    format: TableFormat | None = None,
    storage_options: Mapping[str, Any] | None = None,
    footer_cache: str | os.PathLike[str] | None = None,
    exclude: Sequence[tuple[str, int]] = (),
    filesystem: Any = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Table:
    """Open the table at ``source`` and pin the files, the deleted rows and the schema that its version consists of.

    ``source`` is the folder of a Delta, Iceberg or Hudi table, recognised by what lies in it (``format`` decides if
    it is several); or plain Parquet: a folder (searched at any depth; ``key=value`` folders become columns), a glob,
    one file, or a list of files. Local, in an object store (``storage_options``: docs/how-to/s3.md), or in any
    ``filesystem`` of fsspec, by a URL of it: that reads plain Parquet and Iceberg tables. For other URLs that fsspec
    knows, it makes the filesystem of ``storage_options``.

    The version is the newest, or the one named by ``version`` (Delta: a number; Hudi: an instant; Iceberg: a tag, a
    branch or the id of a snapshot). The library of the format says which version was current at a time.

    Footers are read by ``threads`` threads (None: 16 for local folders, else 48), and ``progress(files_done, files)``
    called as they arrive. ``footer_cache`` is a place, such as that of a run, where they are kept (``footers/``): for
    files that are still listed with the same path, size and ETag (or time), nothing is read again.

    ``exclude`` are row groups that are not read: ``[(path, ordinal), …]``, as `DataFileDamaged` names them. They are a
    selection: another ``exclude`` is another index. If `CheckpointManager.restore` comes to the middle of an epoch
    that was begun with another ``exclude``, the rest of the epoch goes on with this one, and the audit lists the rows.
    A warning names a file that the version does not have; it excludes nothing.

    Raises `TableNotFound` (nothing there, no Parquet file, no such version), `TableError` (the version
    cannot be read exactly), `DataFileDamaged` (a file that is no readable Parquet), `DataFileChanged` (a file is not as
    in the format's metadata), `SchemaError` (a type that is not supported), `StorageError` (the store failed) and
    `ConfigError`.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    threads = threads or THREADS_REMOTE
    storage_options = with_filesystem(storage_options, filesystem)
    if format is not None and format not in get_args(TableFormat):
        raise ConfigError(f"format={format!r}: expected one of {', '.join(get_args(TableFormat))}")
    excluded = _row_groups(exclude)
    found: Found | None = None
    pinned: PinnedFiles | None = None
    kind: TableFormat = "iceberg"
    place: object = source
    if not is_of_catalog(source):
        found = find_files(cast(Source, source), storage_options=storage_options, threads=threads, kind=format)
        kind, place = found.format, found.place
    elif format not in (None, kind):
        raise ConfigError(f"format={format!r} was given, but the table is an Iceberg catalog's")
    _check_version(version, found)
    if found is None or kind != "parquet":
        pinned = pin(kind, place, version=version, storage_options=storage_options, threads=threads)
        found = listed(found, pinned, storage_options=storage_options, threads=threads)
    if isinstance(found.storage, LocalStorage):
        threads = min(threads, THREADS_LOCAL)
    cache = None if footer_cache is None else _open_cache(footer_cache, storage_options)
    summaries = cached_summaries(cache, found.storage, found.files, threads=threads, progress=progress)
    index = index_of(found.files, summaries) if pinned is None else index_of_version(found.files, summaries, pinned)
    index = index.excluding(excluded)
    _warn_of_unknown(excluded, index)
    again = partial(
        _reopened,
        source,
        format=format,
        storage_options=None if filesystem is not None else storage_options,
        filesystem=filesystem,
        footer_cache=footer_cache,
        exclude=excluded,
        threads=threads,
    )
    of: dict[str, Any] = {"uri": found.uri, "storage_options": storage_options, "threads": threads}
    is_plain = kind == "parquet"
    added = partial(added_files, cast(Source, source), **of) if is_plain else partial(added_versions, kind, place, **of)
    named = version is not None
    is_fixed = kind == "hudi" or (isinstance(place, str) and place.endswith(METADATA_FILES))
    return Table(
        uri=found.uri,
        storage=found.storage,
        index=index,
        reopen=None if named else again,
        added=None if named or is_fixed else added,
        named=named,
        exclude=excluded,
    )


def _check_version(version: object, found: Found | None) -> None:
    """Raise `ConfigError` if ``version`` cannot name a version of the table that was found."""
    if version is None:
        return
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise ConfigError(f"version={version!r}: expected int or str")
    if found is not None and found.format == "parquet":
        raise ConfigError(
            f"version={version!r} was given, but {found.uri!r} is a Parquet table: plain files have no versions, leave "
            "it out"
        )


def _row_groups(exclude: object) -> tuple[tuple[str, int], ...]:
    """Return ``exclude`` as pairs; `ConfigError` if it holds anything else."""
    pairs = [tuple(one) if isinstance(one, (tuple, list)) else one for one in cast(Sequence[Any], exclude)]
    for one in pairs:
        if not isinstance(one, tuple) or [type(value) for value in one] != [str, int]:
            raise ConfigError(f"exclude= is a list of (path of a data file, ordinal of a row group), got {one!r:.200}")
    return tuple(dict.fromkeys(pairs))


def _warn_of_unknown(exclude: tuple[tuple[str, int], ...], index: TableIndex) -> None:
    unknown = sorted({path for path, _ in exclude}.difference(index.paths))
    if unknown:
        warnings.warn(
            f"exclude= names {unknown[0]!r}, which {index.version} of the table does not have: nothing of it is "
            "excluded. Paths are relative to the table, as errors name them",
            UserWarning,
            stacklevel=3,
        )


def _reopened(source: Source | CatalogTable, **options: Any) -> Table:
    return open_table(refreshed(source), **options)


def _open_cache(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Storage:
    own = split_uri(os.fspath(place))[0] == "file" or FILESYSTEM in (storage_options or {})
    return open_storage(place, storage_options=None if own else storage_options)

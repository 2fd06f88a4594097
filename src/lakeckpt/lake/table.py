"""What is a table, once opened: a storage, and an index that pins which files and row groups it consists of.

`open_table` finds the format, asks its module what the version consists of, reads all footers in parallel and pins
them. From then on, files are named by their
ordinal in the index and row groups by theirs in the table. Opening a file compares its size, and `Table.footer` its
footer's digest, with what was pinned; `Table.verify` compares the whole listing. Decodes no rows.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import (
    ConfigError,
    DataFileChanged,
    DataFileDamaged,
    LakeckptError,
    ObjectChanged,
    ObjectMissing,
    TableNotFound,
    TableVersionGone,
)
from lakeckpt.lake.building import index_of, index_of_version, listed
from lakeckpt.lake.chunk_digests import ChunkDigests, load_digests
from lakeckpt.lake.footer import Footer, Progress, head_of, read_footer
from lakeckpt.lake.formats.pinned import CatalogTable, PinnedFiles, is_of_catalog, pin
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.listing import Found, Source, find_files, list_exactly, no_parquet
from lakeckpt.lake.local import LocalStorage
from lakeckpt.lake.range_file import RangeFile
from lakeckpt.lake.ranges import ADVICE, KEEP, LocalBytes, PinnedBytes, StoredBytes, changed, gone, some
from lakeckpt.lake.saved_footers import cached_summaries
from lakeckpt.lake.storage import ObjectInfo, Storage, open_storage, split_uri
from lakeckpt.lake.version import TableFormat, VersionAsked

__all__ = ["Table", "open_table"]

THREADS_LOCAL, THREADS_REMOTE = 16, 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """A pinned table. ``uri`` names its root, without credentials. Can be pickled, and used by several threads."""

    uri: str
    storage: Storage
    index: TableIndex
    reopen: Callable[[], Table] | None = field(default=None, repr=False)
    """Opens what is the newest version now; None where a version was named, and in other processes."""
    named: bool = False
    """Whether a version was named when it was opened."""
    digests: ChunkDigests | None = field(default=None, repr=False)
    """What the bytes of column chunks are compared with when they are read, beside the checksums of pages."""
    digests_place: Storage | None = field(default=None, repr=False)
    """Where digests of this version and of others were recorded."""

    def __reduce__(self) -> tuple[Any, ...]:
        # How to open it again holds credentials.
        return (_table, (self.uri, self.storage, self.index, self.named, self.digests, self.digests_place))

    def __repr__(self) -> str:
        return f"Table({self.uri!r}, files={len(self.index.paths)}, rows={self.num_rows})"

    @property
    def schema(self) -> pa.Schema:
        """The schema of the whole table (of plain Parquet, partition columns last); dictionaries are told as their
        values."""
        return self.index.schema

    @property
    def num_rows(self) -> int:
        return self.index.num_rows

    def open_file(self, ordinal: int) -> pa.NativeFile:
        """Open a file of the index for random access; the caller closes it.

        `TableVersionGone` if it is gone, `DataFileChanged` if its size changed.
        """
        file = self.index.files[ordinal]
        if isinstance(self.storage, LocalStorage):
            try:
                opened = pa.OSFile(self.storage.local_path(file.path))
            except (ObjectMissing, FileNotFoundError) as error:
                raise gone(self.uri, file.path) from error
            if opened.size() != file.size_bytes:
                size = opened.size()
                opened.close()
                raise changed(self.uri, [f"{file.path!r} has {size} bytes, not {file.size_bytes}"])
            return opened
        return pa.PythonFile(RangeFile(self.storage, self.uri, file), mode="r")

    def open_bytes(self, ordinal: int) -> PinnedBytes:
        """Open a file of the index to read ranges of it, several at once; the caller closes it. As `open_file`."""
        if isinstance(self.storage, LocalStorage):
            return LocalBytes(self.open_file(ordinal))
        return StoredBytes(self.storage, self.uri, self.index.files[ordinal])

    def footer(self, ordinal: int) -> pq.FileMetaData:
        """Read the footer of a file of the index again. `TableVersionGone`, `DataFileChanged`: not the pinned one."""
        return self.whole_footer(ordinal).metadata

    def at(self, index: TableIndex) -> Table:
        """The version of the same table that ``index`` pins; `ConfigError` where its digests were to be compared, and
        none were recorded."""
        digests = None
        if self.digests_place is not None:
            digests = load_digests(self.digests_place, index.whole.digest, np.diff(index.first_group))
        return replace(self, index=index, digests=digests)

    def whole_footer(self, ordinal: int) -> Footer:
        """As `footer`, with the footer's bytes."""
        file = self.index.files[ordinal]
        try:
            footer = read_footer(self.storage, file.path, file.size_bytes, file.etag)
        except ObjectMissing as error:
            raise gone(self.uri, file.path) from error
        except ObjectChanged as error:
            raise changed(self.uri, [f"{file.path!r} was written again (its ETag is not {file.etag})"]) from error
        except DataFileDamaged as error:
            raise changed(
                self.uri, [f"{file.path!r} no longer ends as it did: it was cut, or written again"]
            ) from error
        if footer.digest != file.footer_digest:
            raise changed(self.uri, [f"{file.path!r} has another footer: it was written again"])
        return footer

    def verify(self, *, threads: int = 16) -> None:
        """Compare the pinned listing with the storage as it is now.

        `DataFileChanged` lists the files that differ; where any is gone, it is a `TableVersionGone`. Sizes and ETags
        decide; a file of the same size that has no ETag and another modification time has its footer
        read again. Files that were added since are no part of the pinned table, and no difference.
        """
        now = list_exactly(self.storage, self.index.paths, threads=threads)
        gone = tuple(path for path in self.index.paths if path not in now)
        differences: list[str] = []
        for ordinal, path in enumerate(self.index.paths):
            difference = self._difference(ordinal, path, now.get(path))
            if difference:
                differences.append(difference)
        if gone:
            raise _gone(self, gone, differences)
        if differences:
            raise changed(self.uri, differences)

    def _difference(self, ordinal: int, path: str, info: ObjectInfo | None) -> str | None:
        file = self.index.files[ordinal]
        if info is None:
            return f"{path!r} is gone"
        if info.size_bytes != file.size_bytes:
            return f"{path!r} has {info.size_bytes} bytes, not {file.size_bytes}"
        if info.etag != file.etag and info.etag is not None and file.etag is not None:
            return f"{path!r} has the ETag {info.etag}, not {file.etag}"
        if (info.etag is None or file.etag is None) and info.mtime_ns != file.mtime_ns:
            try:
                self.footer(ordinal)
            except DataFileChanged:
                return f"{path!r} was written again"
        return None


def open_table(
    source: Source | CatalogTable,
    *,
    version: int | str | None = None,
    snapshot_id: int | None = None,
    timestamp: datetime.datetime | str | None = None,
    format: TableFormat | None = None,
    storage_options: Mapping[str, Any] | None = None,
    footer_cache: str | os.PathLike[str] | None = None,
    digests: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Table:
    """Open the table at ``source`` and pin the files, the deleted rows and the schema that its version consists of.

    ``source`` is the folder of a Delta, Iceberg or Hudi table, told apart by what lies in it (``format`` decides where
    it is several); or plain Parquet: a folder (searched at any depth; ``key=value`` folders become columns), a glob,
    one file, or a list of files. Local, or at any URL that fsspec knows; ``storage_options`` go to the fsspec
    filesystem, and those that a format's library has under another name, to it.

    The version is the newest, or the one named by ``version`` (Delta: a number; Hudi: an instant; Iceberg: a tag or a
    branch), by ``snapshot_id`` (Iceberg), or the one that was current at ``timestamp`` (a datetime, or ISO 8601 text,
    with a time zone).

    Footers are read by ``threads`` threads (None: 16 for local folders, else 64), and ``progress(files_done, files)``
    called as they arrive. ``footer_cache`` is a place, such as that of a run, where they are kept (``footers/``): for
    files that are still listed with the same path, size and ETag (or time), nothing is read again. ``digests`` is a
    place where `lakeckpt.record_digests` has recorded those of this version: all that is read is compared with them.

    Raises `TableNotFound` (nothing there, no Parquet file, no such version), `TableFeatureUnsupported` (the version
    cannot be read exactly), `DataFileDamaged` (a file that is no readable Parquet), `DataFileChanged` (a file is not as
    the format's metadata says), `SchemaError` (files that disagree), `StorageError` (the store failed) and
    `ConfigError`.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    threads = threads or THREADS_REMOTE
    if format is not None and format not in get_args(TableFormat):
        raise ConfigError(f"format={format!r}: expected one of {', '.join(get_args(TableFormat))}")
    asked = VersionAsked.of(version, snapshot_id, timestamp)
    found: Found | None = None
    pinned: PinnedFiles | None = None
    kind: TableFormat = "iceberg"
    place: object = source
    if not is_of_catalog(source):
        found = find_files(cast(Source, source), storage_options=storage_options, threads=threads, kind=format)
        kind, place = found.format, found.place
        asked.check(kind, found.uri)
    elif format not in (None, kind):
        raise ConfigError(f"format={format!r} was given, but the table is an Iceberg catalog's")
    if found is None or kind != "parquet":
        pinned = pin(kind, place, asked=asked, storage_options=storage_options, threads=threads)
        found = listed(found, pinned, storage_options=storage_options, threads=threads)
    if isinstance(found.storage, LocalStorage):
        threads = min(threads, THREADS_LOCAL)
    cache = None if footer_cache is None else _open_cache(footer_cache, storage_options)
    try:
        summaries = cached_summaries(cache, found.storage, found.files, threads=threads, progress=progress)
    except DataFileDamaged as error:
        nothing = _no_parquet(found, error.file) if pinned is None else None
        if nothing is not None:
            raise nothing from error
        raise
    index = index_of(found.files, summaries) if pinned is None else index_of_version(found.files, summaries, pinned)
    again = partial(
        _reopened,
        source,
        format=format,
        storage_options=storage_options,
        footer_cache=footer_cache,
        digests=digests,
        threads=threads,
    )
    named = bool(asked.given)
    table = Table(uri=found.uri, storage=found.storage, index=index, reopen=None if named else again, named=named)
    if digests is None:
        return table
    return replace(table, digests_place=_open_cache(digests, storage_options)).at(index)


def _table(
    uri: str,
    storage: Storage,
    index: TableIndex,
    named: bool,
    digests: ChunkDigests | None,
    digests_place: Storage | None,
) -> Table:
    return Table(uri=uri, storage=storage, index=index, named=named, digests=digests, digests_place=digests_place)


def _no_parquet(found: Found, path: str) -> TableNotFound | None:
    """The error where nothing that was named is Parquet, as the file ``path`` is not; None where that is damaged, or
    Parquet files are beside it."""
    info = next(info for info in found.files if info.path == path)
    try:
        head = head_of(found.storage, path, info.size_bytes, info.etag)
    except LakeckptError:
        return None
    return no_parquet(found.uri, found.files, path, head)


def _reopened(source: Source | CatalogTable, **options: Any) -> Table:
    if is_of_catalog(source) and not isinstance(source, str):
        with contextlib.suppress(NotImplementedError):  # of a metadata file, which does not change
            source = cast(CatalogTable, source).refresh()
    return open_table(source, **options)


def _open_cache(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Storage:
    is_local = split_uri(os.fspath(place))[0] == "file"
    return open_storage(place, storage_options=None if is_local else storage_options)


def _gone(table: Table, paths: tuple[str, ...], differences: Sequence[str]) -> TableVersionGone:
    version = table.index.version
    pinned = "it was pinned" if version.format == "parquet" else f"it was pinned at {version}"
    return TableVersionGone(
        f"the table {table.uri!r} is not as {pinned}: {some(differences)}; {len(paths)} of its "
        f"{len(table.index.paths)} files are gone (vacuumed, expired, or written again under other names). {ADVICE}. "
        f"{KEEP}",
        files=paths,
    )

"""This module holds an opened table: a storage, and an index that pins which files and row groups the table has.

Files are named by their ordinal in the index, row groups by theirs in the table. Opening a file compares its size, and
`Table.footer` its footer's digest, with what was pinned. `Table.verify` compares the whole listing. The module decodes
no rows and starts no threads. `lakeckpt.lake.formats.dispatch` opens tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import (
    DataFileChanged,
    DataFileDamaged,
    ObjectChanged,
    ObjectMissing,
    TableVersionGone,
)
from lakeckpt.lake.parquet.footer import read_footer
from lakeckpt.lake.parquet.ranges import ADVICE, KEEP, changed, gone, some
from lakeckpt.lake.storage.base import ObjectInfo, Storage
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.joined import Added
from lakeckpt.lake.table.listing import list_exactly

__all__ = ["Table"]

THREADS_LOCAL, THREADS_REMOTE = 16, 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """A pinned table. ``uri`` names its root, without credentials. Can be pickled, and used by several threads."""

    uri: str
    storage: Storage
    index: TableIndex
    reopen: Callable[[], Table] | None = field(default=None, repr=False)
    """Opens the newest version; None if a version was named, and in other processes."""
    added: Callable[[TableIndex, bool], Added] | None = field(default=None, repr=False)
    """``added(index, ignore_deletes)`` finds the files that were added since the version of ``index``
    (`lakeckpt.lake.formats.appends`). None under the conditions of ``reopen``, for Hudi tables, and if a metadata file
    of Iceberg was opened."""
    named: bool = False
    """True if a version was named when the table was opened."""
    exclude: tuple[tuple[str, int], ...] = ()
    """The row groups (path, ordinal in the file) that are not read, in any version."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields: dict[str, Any] = {
            "storage": self.storage,
            "index": self.index,
            "named": self.named,
            "exclude": self.exclude,
        }
        return (partial(Table, uri=self.uri, **fields), ())  # how to open it again holds credentials

    def __repr__(self) -> str:
        return f"Table({self.uri!r}, files={len(self.index.paths)}, rows={self.num_rows})"

    @property
    def schema(self) -> pa.Schema:
        """The schema of the whole table (of plain Parquet, partition columns last). A dictionary column has the type of
        its values."""
        return self.index.schema

    @property
    def num_rows(self) -> int:
        return self.index.num_rows

    def open_file(self, ordinal: int) -> FileIO:
        """Open a local file of the index. `TableVersionGone` if it is gone, `DataFileChanged` if its size changed."""
        file = self.index.file(ordinal)
        assert isinstance(self.storage, LocalStorage)
        try:
            opened = FileIO(self.storage.local_path(file.path))
        except (ObjectMissing, FileNotFoundError) as error:
            raise gone(self.uri, file.path) from error
        if (size := os.fstat(opened.fileno()).st_size) != file.size_bytes:
            opened.close()
            raise changed(self.uri, [f"{file.path!r} has {size} bytes, not {file.size_bytes}"])
        return opened

    def at(self, index: TableIndex) -> Table:
        """Return the version of the same table that ``index`` pins."""
        return replace(self, index=index)

    def footer(self, ordinal: int) -> pq.FileMetaData:
        """Read the footer of a file of the index again. `TableVersionGone`, `DataFileChanged`: not the pinned one."""
        file = self.index.file(ordinal)
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
        if footer.digest != self.index.footer_digest(ordinal):
            raise changed(self.uri, [f"{file.path!r} has another footer: it was written again"])
        return footer.metadata

    def verify(self, *, threads: int = 16) -> None:
        """Compare the pinned listing with the storage as it is now.

        `DataFileChanged` lists the files that differ; if any is gone, it is a `TableVersionGone`. Sizes and ETags
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
        file = self.index.file(ordinal)
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


def _gone(table: Table, paths: tuple[str, ...], differences: Sequence[str]) -> TableVersionGone:
    version = table.index.version
    pinned = "it was pinned" if version.format == "parquet" else f"it was pinned at {version}"
    return TableVersionGone(
        f"the table {table.uri!r} is not as {pinned}: {some(differences)}; {len(paths)} of its "
        f"{len(table.index.paths)} files are gone (vacuumed, expired, or written again under other names). {ADVICE}. "
        f"{KEEP}",
        files=paths,
    )

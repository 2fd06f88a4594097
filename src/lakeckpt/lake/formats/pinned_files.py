"""This module holds the contents of one version of a table, by the metadata of its format.

The module of each format returns `PinnedFiles`: the files, the rows of each that are deleted, the values of its
partition columns, and by what it stores its columns. All of this comes from the format's metadata, never from names of
folders. `lakeckpt.lake.formats.pinning` adds what only the store and the footers know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa

from lakeckpt.lake.parquet.footer import Int64Array
from lakeckpt.lake.table.column_mapping import ColumnMapping
from lakeckpt.lake.table.scalars import Value
from lakeckpt.lake.table.version import TableVersion

__all__ = ["CatalogTable", "Change", "ChangeKind", "PinnedFile", "PinnedFiles"]


ChangeKind = Literal["append", "compact", "delete", "rewrite"]
"""The change from one version to the next: it added rows (or none); wrote the same rows to other files; removed rows;
or anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A version of a table, and what it did to the version before."""

    version: str
    kind: ChangeKind


class CatalogTable(Protocol):
    """The table that pyiceberg's ``catalog.load_table`` returns."""

    @property
    def metadata(self) -> Any:
        """The table's metadata as they were loaded."""

    def location(self) -> str:
        """Return the table's folder."""
        ...

    def refresh(self) -> CatalogTable:
        """Return the table as it is now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PinnedFile:
    """A data file of a version: ``path`` relative to the root, decoded, as the storage names it.

    ``size_bytes`` and ``rows`` (stored ones) are as the format's metadata has them, None if it has not; both are
    compared with what is there. ``partition``: the value of each partition column that this file does not store itself,
    by the table's name for the column. ``deleted``: the stored rows that do not exist, counted from the start of the
    file (int64, any order).
    """

    path: str
    size_bytes: int | None = None
    rows: int | None = None
    partition: Mapping[str, Value] = field(default_factory=dict)
    deleted: Int64Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PinnedFiles:
    """A version of a table. ``files`` in any order, each path once; ``schema`` is the table's, without metadata.

    ``partition_columns``: the columns that some file has as a constant, in the order of ``schema``. ``root``: the URI
    that paths are relative to, None for the place that was opened; files must lie below it.
    ``storage_options`` replace the caller's, if its catalog knows how to open the root; they hold secrets.
    ``constants_where_absent``: a file that has a partition column of its own is read by that, whatever `PinnedFile`
    has for it; else the value of `PinnedFile` holds.
    """

    version: TableVersion
    files: tuple[PinnedFile, ...]
    schema: pa.Schema
    partition_columns: tuple[str, ...] = ()
    columns: ColumnMapping = field(default_factory=ColumnMapping)
    root: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    constants_where_absent: bool = False

    def __post_init__(self) -> None:
        missing = [name for name in self.partition_columns if name not in self.schema.names]
        if missing:
            raise ValueError(f"the partition columns {missing} are no columns of {self.schema.names}")
        paths = {file.path for file in self.files}
        if len(paths) != len(self.files):
            raise ValueError("a version of a table names a file twice")

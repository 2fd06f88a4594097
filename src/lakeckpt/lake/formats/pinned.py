"""What does a table format say that one version of a table consists of?

The one shape in which each format's module answers, and `pin`, which asks the module of a format. Which file has which
rows deleted, which values its partition columns have and by what it stores its columns: from the format's metadata,
never from names of folders. Row groups, footers and ETags are not known yet: `lakeckpt.lake.table` adds them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from lakeckpt.errors import ConfigError
from lakeckpt.lake.columns import ColumnMapping
from lakeckpt.lake.footer import Int64Array
from lakeckpt.lake.values import Value
from lakeckpt.lake.version import TableFormat, TableVersion, VersionAsked

__all__ = ["CatalogTable", "PinnedFile", "PinnedFiles", "is_of_catalog", "need", "pin"]

_LIBRARIES = {"delta": "deltalake", "iceberg": "pyiceberg", "hudi": "hudi"}


class CatalogTable(Protocol):
    """What pyiceberg's ``catalog.load_table`` returns."""

    @property
    def metadata(self) -> Any:
        """The table's metadata as they were loaded."""

    def location(self) -> str:
        """The table's folder."""
        ...

    def refresh(self) -> CatalogTable:
        """The table as it is now."""
        ...


def is_of_catalog(source: object) -> bool:
    """Whether a catalog says where the table is: ``iceberg://catalog/namespace.table``, or a table of pyiceberg's."""
    return (isinstance(source, str) and source.startswith("iceberg://")) or (
        type(source).__module__.partition(".")[0] == "pyiceberg" and not isinstance(source, str)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PinnedFile:
    """A data file of a version: ``path`` relative to the root, decoded, as the storage names it.

    ``size_bytes`` and ``rows`` (stored ones) are as the format's metadata has them, None where it has not; both are
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
    ``storage_options`` replace the caller's, where its catalog knows how to open the root; they hold secrets.
    ``constants_where_absent``: a file that has a partition column of its own is read by that, whatever `PinnedFile`
    says of it; else what `PinnedFile` says holds.
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


def pin(
    kind: TableFormat, place: object, *, asked: VersionAsked, storage_options: Mapping[str, Any] | None, threads: int
) -> PinnedFiles:
    """What the version ``asked`` for of the table at ``place`` consists of: a URI, or a table of pyiceberg's.

    `ConfigError` where the format's library is not installed or has no such version, `TableFeatureUnsupported` where
    the table needs what cannot be read exactly.
    """
    if kind == "iceberg":
        need(kind)
        from lakeckpt.lake.formats import iceberg

        return iceberg.pin(place, asked=asked, storage_options=storage_options, threads=threads)
    if kind == "delta":
        need(kind)
        from lakeckpt.lake.formats import delta

        return delta.pin(str(place), asked=asked, storage_options=storage_options, threads=threads)
    need("hudi")
    from lakeckpt.lake.formats import hudi

    return hudi.pin(str(place), asked=asked, storage_options=storage_options, threads=threads)


def need(kind: str) -> None:
    """`ConfigError` that names what to install, where the library of a format is not there."""
    library = _LIBRARIES[kind]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f'tables in the format {kind} are read by {library}, which is not installed: pip install "lakeckpt[{kind}]"'
        )

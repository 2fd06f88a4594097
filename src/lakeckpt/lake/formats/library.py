"""This module asks the library of a table's format what a version consists of, and what kinds of versions followed it.

The library is imported if a table has its format, and not before. The module reads no data file.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.formats.pinned_files import Change, PinnedFiles
from lakeckpt.lake.table.version import TableFormat

__all__ = ["changes", "is_of_catalog", "pin", "refreshed"]

_FORMATS = {
    "delta": ("deltalake", "lakeckpt.lake.formats.delta"),
    "iceberg": ("pyiceberg", "lakeckpt.lake.formats.iceberg.snapshot"),
    "hudi": ("hudi", "lakeckpt.lake.formats.hudi"),
}
"""The library of each format, and the module that asks the library. Both are imported when a table has the format."""


def pin(
    kind: TableFormat,
    place: object,
    *,
    version: int | str | None,
    storage_options: Mapping[str, Any] | None,
    threads: int,
) -> PinnedFiles:
    """Return what a version (None: the newest) of the table at ``place`` consists of: a URI, or a table of pyiceberg's.

    `ConfigError` if the format's library is not installed or has no such version, `TableError` if
    the table needs what cannot be read exactly.
    """
    pinned: PinnedFiles = _module(kind).pin(place, version=version, storage_options=storage_options, threads=threads)
    return pinned


def changes(
    kind: TableFormat, place: object, *, since: str, storage_options: Mapping[str, Any] | None, threads: int
) -> list[Change]:
    """Return the versions of the table at ``place`` that came after version ``since``, oldest first.

    `TableVersionGone` if they are not known any more. Hudi tables have none: their writers write files again as rows
    come.
    """
    found: list[Change] = _module(kind).changes(place, since=since, storage_options=storage_options, threads=threads)
    return found


def is_of_catalog(source: object) -> bool:
    """Return whether a catalog knows the table: ``iceberg://catalog/namespace.table``, or a table of pyiceberg's."""
    return (isinstance(source, str) and source.startswith("iceberg://")) or (
        type(source).__module__.partition(".")[0] == "pyiceberg" and not isinstance(source, str)
    )


def refreshed(source: Any) -> Any:
    """Return a table of pyiceberg's as it is now; anything else as it is."""
    if is_of_catalog(source) and not isinstance(source, str):
        with contextlib.suppress(NotImplementedError):  # of a metadata file, which does not change
            return source.refresh()
    return source


def _module(kind: TableFormat) -> Any:
    library, module = _FORMATS[kind]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f'tables in the format {kind} are read by {library}, which is not installed: pip install "lakeckpt[{kind}]"'
        )
    return importlib.import_module(module)

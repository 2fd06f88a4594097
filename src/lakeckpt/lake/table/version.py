"""This module names the version of a table that was pinned.

Plain Parquet has no versions: its version is the listing itself. The index holds the files of a version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PLAIN", "TableFormat", "TableVersion"]

TableFormat = Literal["parquet", "delta", "iceberg", "hudi"]
_NAMES = {"parquet": "Parquet", "delta": "Delta", "iceberg": "Iceberg", "hudi": "Hudi"}
_CALLED = {"parquet": "listing", "delta": "version", "iceberg": "snapshot", "hudi": "instant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVersion:
    """``name`` is what the format calls the version (Delta: "12"; Iceberg: a snapshot id; Hudi: an instant; plain
    Parquet: ""), ``timestamp_ms`` when it was made (milliseconds since 1970, UTC), ``table_id`` the format's own
    identity of the table. None: unknown."""

    format: TableFormat
    name: str = ""
    timestamp_ms: int | None = None
    table_id: str | None = None

    def __post_init__(self) -> None:
        if (self.format == "parquet") != (not self.name):
            raise ValueError(f"a version of a table in the format {self.format} cannot be named {self.name!r}")

    def __str__(self) -> str:
        called = f"{_NAMES[self.format]} {_CALLED[self.format]}"
        return f"{called} {self.name}" if self.name else called


PLAIN = TableVersion(format="parquet")

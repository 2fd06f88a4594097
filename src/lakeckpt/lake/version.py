"""Which version of which kind of table was pinned?  A value that an index holds, and messages can name.

Plain Parquet has no versions: its version is the listing itself. It never decides anything: what a version consists of
is in the index beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["PLAIN", "TableFormat", "TableVersion"]

TableFormat = Literal["parquet", "delta", "iceberg", "hudi"]
_FORMATS: tuple[str, ...] = get_args(TableFormat)
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
        if self.format not in _FORMATS:
            raise ValueError(f"a table's format is one of {', '.join(_FORMATS)}, got {self.format!r}")
        if (self.format == "parquet") != (not self.name):
            raise ValueError(f"a version of a table in the format {self.format} cannot be named {self.name!r}")

    def __str__(self) -> str:
        called = f"{_NAMES[self.format]} {_CALLED[self.format]}"
        return f"{called} {self.name}" if self.name else called

    def to_plain(self) -> dict[str, object]:
        """Values that the wire can carry."""
        return {"format": self.format, "name": self.name, "timestamp_ms": self.timestamp_ms, "table_id": self.table_id}

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> TableVersion:
        """What `to_plain` gave; ``ValueError``, ``TypeError`` or ``KeyError`` where it is something else."""
        kind, name, when, table = (plain[key] for key in ("format", "name", "timestamp_ms", "table_id"))
        if not isinstance(name, str) or not isinstance(when, int | None) or not isinstance(table, str | None):
            raise TypeError(f"not a table version: {dict(plain)!r}")
        return cls(format=kind, name=name, timestamp_ms=when, table_id=table)  # type: ignore[arg-type]


PLAIN = TableVersion(format="parquet")

"""This module names versions of tables: the version that was asked for, and the version that was pinned.

Plain Parquet has no versions: its version is the listing itself. The index holds the files of a version.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal

from lakeckpt.errors import ConfigError

__all__ = ["PLAIN", "TableFormat", "TableVersion", "VersionAsked"]

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

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "parquet": (),
    "delta": ("version", "timestamp"),
    "iceberg": ("version", "snapshot_id", "timestamp"),
    "hudi": ("version", "timestamp"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAsked:
    """The version that a caller names, in at most one way; nothing named: the newest.

    ``version``: a number (Delta), a tag or branch (Iceberg), an instant (Hudi). ``timestamp`` is aware and in UTC.
    `ConfigError` for what cannot be meant.
    """

    version: int | str | None = None
    snapshot_id: int | None = None
    timestamp: datetime.datetime | None = None

    def __post_init__(self) -> None:
        given = self.given
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} were given: one of them names a version of a table")
        for name, value, kinds in (("version", self.version, (int, str)), ("snapshot_id", self.snapshot_id, (int,))):
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise ConfigError(f"{name}={value!r}: expected {' or '.join(kind.__name__ for kind in kinds)}")

    @classmethod
    def of(
        cls, version: int | str | None, snapshot_id: int | None, timestamp: datetime.datetime | str | None
    ) -> VersionAsked:
        """Check the arguments of `open_table`; a timestamp is a datetime or ISO 8601 text, with a time zone."""
        when = timestamp
        if isinstance(when, str):
            try:
                when = datetime.datetime.fromisoformat(when)
            except ValueError:
                raise ConfigError(
                    f"timestamp={timestamp!r} is no time in ISO 8601, such as 2026-01-31T12:00:00Z"
                ) from None
        if when is not None:
            if not isinstance(when, datetime.datetime):
                raise ConfigError(f"timestamp={timestamp!r}: expected a datetime or text in ISO 8601")
            if when.tzinfo is None:
                raise ConfigError(f"timestamp={timestamp!r} has no time zone: write +00:00 or Z for UTC")
            when = when.astimezone(datetime.UTC)
        return cls(version=version, snapshot_id=snapshot_id, timestamp=when)

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the arguments that were given."""
        return tuple(name for name in ("version", "snapshot_id", "timestamp") if getattr(self, name) is not None)

    def check(self, kind: TableFormat, uri: str) -> None:
        """Raise `ConfigError` where tables in this format have no such versions."""
        for name in self.given:
            if name not in _ARGUMENTS[kind]:
                takes = " or ".join(_ARGUMENTS[kind])
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} was given, but {uri!r} is a {_NAMES[kind]} table: "
                    + (f"its versions are named by {takes}" if takes else "plain files have no versions, leave it out")
                )

"""How does a pinned version stay alive while a run, or its next attempt, needs it?

`keep_version` tags the pinned snapshot of an Iceberg table: engines that expire snapshots keep what a tag names.
`KeptVersion.release` removes the tag. No other format that we read has such a protection: there, `keep_version` refuses
and says what to set instead (docs/how-to/keep-a-version.md). Files removed by hand are beyond any tag.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from types import TracebackType

from lakeckpt.errors import ConfigError
from lakeckpt.lake.formats.pinned import need
from lakeckpt.lake.table import Table
from lakeckpt.lake.version import TableVersion

__all__ = ["KeptVersion", "keep_version"]

_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
_INSTEAD = {
    "parquet": "plain Parquet files have no versions: write new files instead of changing those that a run reads",
    "delta": "set delta.deletedFileRetentionDuration and delta.logRetentionDuration to more than the run takes, "
    "and let no VACUUM use less",
    "hudi": "set hoodie.clean.commits.retained (or hoodie.clean.hours.retained) so that the cleaner keeps the instant",
}


class KeptVersion:
    """A version that stays alive until `release`: a tag of an Iceberg table. Made by `keep_version`.

    As a context manager it is released when the block ends well. A block that an exception leaves keeps it: the run
    will be restored, and needs the version then; the tag's age ends it if nobody comes back.
    """

    def __init__(self, *, source: object, version: TableVersion, name: str) -> None:
        self.version, self.name = version, name
        self._source: object | None = source

    def __repr__(self) -> str:
        return f"KeptVersion({self.name!r}, {str(self.version)!r}{'' if self._source is not None else ', released'})"

    def release(self) -> None:
        """Remove the tag, unless it was moved to another snapshot meanwhile. Nothing happens the second time."""
        if self._source is None:
            return
        from lakeckpt.lake.formats import iceberg_tags

        iceberg_tags.remove(self._source, name=self.name, snapshot_id=int(self.version.name))
        self._source = None

    def __enter__(self) -> KeptVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.release()


def keep_version(
    table: Table,
    source: object,
    *,
    name: str,
    keep_for: datetime.timedelta | None = datetime.timedelta(days=30),
    clock: Callable[[], float] = time.time,
) -> KeptVersion:
    """Keep the version that ``table`` pins from being expired: tag its Iceberg snapshot ``name``.

    ``source`` is where tags are written: ``iceberg://catalog/namespace.table`` or a pyiceberg table that its catalog
    loaded. The tag may be expired ``keep_for`` from now (by ``clock``, seconds since 1970), None: never; calling again
    with the same name, as a restored run does, sets that anew. Only one process of a job need call it.

    Raises `ConfigError` where the format has nothing of the kind (it says what to set instead), the name is taken by
    another snapshot, or the table was opened without a catalog; `TableNotFound` where the snapshot is gone already.
    """
    version = table.index.version
    if version.format != "iceberg":
        raise ConfigError(f"{version} of {table.uri!r} cannot be kept by a tag: {_INSTEAD[version.format]}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: a tag's name is of letters, digits, '.', '_' and '-', 200 at most")
    if keep_for is not None and keep_for <= datetime.timedelta(0):
        raise ConfigError(f"keep_for={keep_for}: expected a positive time, or None")
    need("iceberg")
    from lakeckpt.lake.formats import iceberg_tags

    now_ms = int(clock() * 1000)
    until_ms = None if keep_for is None else now_ms + max(1, int(keep_for.total_seconds() * 1000))
    iceberg_tags.put(source, name=name, version=version, until_ms=until_ms)
    return KeptVersion(source=source, version=version, name=name)

"""What are the rows [start, stop) of those that a filter keeps of a row group?

`FilteredDecoder` decodes as `RowGroupDecoder` does, and counts the rows that the filter keeps. Of a row group of which
it keeps all, only the columns asked for are read; of any other, the filter's as well, which are dropped once it has
been evaluated. The rows that it keeps must be as many as were counted: positions rest on the counts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from lakeckpt.errors import DataFileChanged
from lakeckpt.lake.filters import RowFilter
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.table import Table
from lakeckpt.reading.decode import DEFAULT_AHEAD_BYTES, RowGroupDecoder, select_columns

__all__ = ["FilteredDecoder", "KeptRows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """A filter, and how many rows it was counted to keep of each row group of the table."""

    filter: RowFilter
    counts: RowSelection


class FilteredDecoder(RowGroupDecoder):
    """Decodes the rows of ``table`` that ``kept`` keeps. Threads may share it."""

    def __init__(
        self,
        table: Table,
        columns: Sequence[str] | None,
        kept: KeptRows,
        *,
        ahead_bytes: int = DEFAULT_AHEAD_BYTES,
    ) -> None:
        super().__init__(table, columns, ahead_bytes=ahead_bytes // 2)
        self._kept = kept
        names = list(dict.fromkeys([*select_columns(table.schema, columns).names, *kept.filter.columns]))
        self._wide = RowGroupDecoder(table, names, ahead_bytes=ahead_bytes // 2)

    def decode(self, group: int, start: int, stop: int) -> pa.Table:
        """Return rows [start, stop) of those of row group ``group`` that the filter keeps.

        Raises as `RowGroupDecoder.decode`; `DataFileChanged` where the filter keeps other rows than were counted, too.
        """
        existing = int(self.table.index.group_rows[group])
        counted = int(self._kept.counts.group_rows[group])
        if not 0 <= start <= stop <= counted:
            raise ValueError(f"rows [{start}, {stop}) of row group {group}, of which the filter keeps {counted} rows")
        if counted == 0:
            return self.schema.empty_table()
        if counted == existing:
            return super().decode(group, start, stop)
        table = self._wide.decode(group, 0, existing)
        mask = self._kept.filter.mask(table)
        found = table.select(self.schema.names).filter(mask)
        if found.num_rows != counted:
            ordinal, inside = self.table.index.group(group)
            raise DataFileChanged(
                f"the filter {self._kept.filter} keeps {found.num_rows} rows of row group {inside} of "
                f"{self.table.index.paths[ordinal]!r}, and {counted} were counted: the file is another one, or this "
                f"pyarrow ({pa.__version__}) evaluates the filter otherwise than the one that counted. Put the file "
                "back, read with that release, or begin anew with a new count"
            )
        return found.slice(start, stop - start)

    def announce(self, groups: Iterable[int]) -> None:
        """See `RowGroupDecoder.announce`."""
        groups = [group for group in groups if self._kept.counts.group_rows[group]]
        whole = [self._kept.counts.group_rows[group] == self.table.index.group_rows[group] for group in groups]
        super().announce(itertools.compress(groups, whole))
        self._wide.announce(itertools.compress(groups, map(operator.not_, whole)))

    @property
    def has_room(self) -> bool:
        """See `RowGroupDecoder.has_room`."""
        return super().has_room and self._wide.has_room

    def forget(self) -> None:
        """Let go of what was announced and not decoded."""
        super().forget()
        self._wide.forget()

    def close(self) -> None:
        """Close the files that are open and `forget`; a later `decode` opens them again."""
        super().close()
        self._wide.close()

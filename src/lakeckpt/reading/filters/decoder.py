"""This module decodes the rows that a filter keeps of a row group.

`FilteredDecoder` decodes as `RowGroupDecoder` does, and its row numbers count the rows that stay. If every row of a row
group stays, it reads only the columns asked for. Else it also reads the filter's columns, evaluates the filter, and
drops them. The rows that stay must be those that were counted, by their digest: positions rest on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lakeckpt.errors import DataFileChanged
from lakeckpt.lake.parquet.prefetch import AheadBytes
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection, digested
from lakeckpt.reading.windows.decode import DEFAULT_AHEAD_BYTES, RowGroupDecoder, select_columns

__all__ = ["FilteredDecoder"]


class FilteredDecoder(RowGroupDecoder):
    """Decodes the rows of ``table`` that ``keep`` keeps, as ``counts`` has counted them. Threads may share it."""

    def __init__(
        self,
        table: Table,
        columns: Sequence[str] | None,
        keep: RowFilter,
        counts: RowSelection,
        *,
        ahead_bytes: int | AheadBytes = DEFAULT_AHEAD_BYTES,
    ) -> None:
        super().__init__(table, columns, ahead_bytes=ahead_bytes)
        self._keep, self._counts = keep, counts
        names = dict.fromkeys([*self.schema.names, *keep.columns])
        self._every_column = select_columns(table.schema, list(names))

    def decode(self, group: int, start: int, stop: int) -> pa.Table:
        """Return rows [start, stop) of those of row group ``group`` that the filter keeps.

        Raises as `RowGroupDecoder.decode`, and `DataFileChanged` if the filter keeps other rows than were counted.
        """
        existing = int(self.table.index.group_rows[group])
        counted = int(self._counts.group_rows[group])
        if not 0 <= start <= stop <= counted:
            raise ValueError(f"rows [{start}, {stop}) of row group {group}, of which the filter keeps {counted} rows")
        if counted == 0:
            return self.schema.empty_table()
        table = self._existing(group)
        if counted < existing:
            mask = self._keep.mask(table)
            self._check(group, counted, mask)
            table = table.select(self.schema.names).filter(mask)
        return table.slice(start, stop - start)

    def _wanted(self, group: int) -> pa.Schema:
        is_whole = self._counts.group_rows[group] == self.table.index.group_rows[group]
        return self.schema if is_whole else self._every_column

    def _is_fetched(self, group: int) -> bool:
        return bool(self._counts.group_rows[group]) and super()._is_fetched(group)

    def _check(self, group: int, counted: int, mask: pa.ChunkedArray) -> None:
        """Raise `DataFileChanged` if the rows that stay are not those that were counted."""
        found, digest = digested(mask)
        if (found, digest) == (counted, int(self._counts.group_digests[group])):
            return
        ordinal, inside = self.table.index.group(group)
        raise DataFileChanged(
            f"the filter {self._keep} keeps {found} rows of row group {inside} of "
            f"{self.table.index.paths[ordinal]!r}, which are not the {counted} rows that were counted: the file was "
            f"changed, or this pyarrow ({pa.__version__}) evaluates the filter otherwise than the one that counted "
            f"({self._counts.pyarrow}). Restore the file, read with that release, or begin a new run"
        )

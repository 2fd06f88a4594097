"""This module decodes the rows of a window, in the order of their positions.

`WindowDecoder.decode` is a pure function of a layout and one of its windows. It decodes the fragments (in part threads,
side by side) and turns them into columns. If the window is shuffled, it gathers each column in the order of
positions. A later cut of the window is a view, made in a microsecond a column.

Columns are gathered one after another, and the source of each is released at once: of a window of many columns, one is
held twice at a time. A null where none is allowed is an error of its whole window, which names the file and the row
group. The decoder keeps no rows, but the memory of one window that nobody looks at any more waits to be used for a
later window.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.core.order import Fragment, Window
from lakeckpt.errors import DataFileDamaged, NullValueError
from lakeckpt.reading.columns.convert import Nulls, convert_parts
from lakeckpt.reading.columns.forms import join, narrowed
from lakeckpt.reading.columns.gather import column_bytes, gather, join_rows
from lakeckpt.reading.columns.ragged import Column
from lakeckpt.reading.columns.recycled import recycled_memory
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads

__all__ = ["DecodedWindow", "WindowDecoder"]

Array: TypeAlias = npt.NDArray[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedWindow:
    """The rows of a window in the order of positions: as columns, or as an Arrow table."""

    columns: Mapping[str, Column[Array]] | None
    table: pa.Table | None
    size_bytes: int


class WindowDecoder:
    """Decodes windows of a table; several threads may at once.

    The ``threads`` share ``decoder``. ``nulls`` as for `convert`; None: windows are Arrow tables.
    """

    def __init__(self, decoder: RowGroupDecoder, *, nulls: Nulls | None, threads: Threads) -> None:
        self.rows = decoder
        self._nulls = nulls
        self._threads = threads
        self._memory = recycled_memory()
        self.room_bytes: float = math.inf
        """The most memory that may wait to be used for a later window, beside the windows that are held."""
        self.schema: pa.Schema = decoder.schema

    def decode(self, window: Window) -> DecodedWindow:
        """Return the rows of ``window``, in memory of their own.

        Raises as `RowGroupDecoder.decode`, and `NullValueError` (file, row group and column named) for a null that
        ``nulls`` does not allow.
        """
        self._memory.limit_bytes = int(max(0, min(self._memory.largest_bytes, self.room_bytes)))
        # One row group keeps one thread busy. While several are decoded, the next window must not take the threads.
        with self._threads.decoding if len(window.fragments) > 1 else contextlib.nullcontext():
            tables = self._threads.map(self._fragment, window.fragments) or [self.schema.empty_table()]
        _check_rows(window.whole, tables)
        order = window.whole.permutation()
        if window.outer is not None:
            rows = np.arange(window.outer.rows) if order is None else order
            order = rows[window.start - window.outer.start : window.stop - window.outer.start]
        if self._nulls is None:
            return _as_table(_ordered(tables, order, self.schema))
        parts = [self._columns(window, place, table, self._nulls) for place, table in enumerate(tables)]
        held = sum(int(table.get_total_buffer_size()) for table in tables) if order is None else 0
        tables.clear()

        def whole(name: str) -> Column[Array]:
            mine = [part for one in parts for part in one.pop(name)]
            return join_rows(mine) if order is None else gather(mine, order, self._memory.new)

        names = list(parts[0])
        columns = dict(zip(names, self._threads.map(whole, names), strict=True))
        size = max(held, column_bytes(columns))
        self._memory.largest_bytes = max(self._memory.largest_bytes, size)
        return DecodedWindow(columns=columns, table=None, size_bytes=size)

    def groups(self, window: Window) -> list[int]:
        """Return the row groups that are read for ``window``."""
        return [part.group for part in window.fragments]

    def kept_bytes(self) -> int:
        """Return 0: the memory that waits is not this decoder's alone, and `room_bytes` bounds it."""
        return 0

    def release(self) -> None:
        """Keep the memory of one window, and release what comes back later."""
        self._memory.rest()

    def _fragment(self, part: Fragment) -> pa.Table:
        return self.rows.decode(part.group, part.start, part.stop)

    def _columns(self, window: Window, place: int, table: pa.Table, nulls: Nulls) -> dict[str, list[Column[Array]]]:
        """Return ``table``, which holds fragment ``place`` of ``window``, as columns in parts."""
        try:
            return convert_parts(table, nulls=nulls)
        except NullValueError as error:
            index = self.rows.table.index
            file, inside = index.group(window.fragments[place].group)
            path = index.paths[file]
            raise NullValueError(
                f"{error} (row group {inside} of the data file {path!r})",
                file=path,
                row_group=inside,
                column=error.column,
            ) from error


def _check_rows(window: Window, tables: Sequence[pa.Table]) -> None:
    """Raise `DataFileDamaged` for another number of rows than the window has: gathering checks no bounds."""
    came = sum(table.num_rows for table in tables)
    if came != window.rows:
        groups = ", ".join(str(part.group) for part in window.fragments)
        raise DataFileDamaged(
            f"row groups {groups} of the table gave {came} rows where {window.rows} were expected: a data file is "
            "damaged, or was replaced. Write it again, or open the table version that the run began with"
        )


def _as_table(table: pa.Table) -> DecodedWindow:
    return DecodedWindow(columns=None, table=table, size_bytes=int(table.get_total_buffer_size()))


def _ordered(tables: list[pa.Table], rows: Int64Array | None, schema: pa.Schema) -> pa.Table:
    """Return the rows of ``tables``, one after another, or in the order of ``rows``. ``tables`` are used up."""
    if rows is None:
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    indices = pa.array(rows)
    sources = [table.columns for table in tables]
    tables.clear()
    columns = []
    for place, field in enumerate(schema):
        chunks = [chunk for source in sources for chunk in source[place].chunks]
        for source in sources:
            source[place] = None  # so that the window is never held twice
        block = join(pa.chunked_array(chunks, field.type))
        chunks.clear()
        columns.append(narrowed(pc.take(block, indices, boundscheck=False), field.type))
    return pa.Table.from_arrays(columns, schema=schema)

"""What does a window hold, row after row in the order of its positions?  Decoded, converted and permuted, once.

`WindowDecoder.decode` is a pure function of a layout and one of its windows: the fragments are decoded (in part
threads, side by side), turned into columns, and where the window is shuffled each column is gathered in the order of
positions. Whatever is served of it afterwards is a cut: views, made in a microsecond a column.

Column after column is gathered and its source let go of, so that of a window of many columns one is held twice at a
time. Where nulls are found that must not be, the window stays an Arrow table, so that the micro-batch which holds one
is converted by itself and raises. What is damaged is missing, to be raised or skipped when the window is needed, and
what stands where is told by running counts.

It remembers nothing of what it decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.core.hashing import Means
from lakeckpt.core.order import EpochLayout, Fragment, Window
from lakeckpt.errors import DataFileDamaged, NullValueError
from lakeckpt.reading.arrays import join, narrowed
from lakeckpt.reading.convert import Nulls, convert_parts
from lakeckpt.reading.decode import RowGroupDecoder
from lakeckpt.reading.gather import Pieces, column_bytes, gather, laid_out
from lakeckpt.reading.plain import PlainRows
from lakeckpt.reading.ragged import Column
from lakeckpt.reading.recycled import Recycled
from lakeckpt.reading.skipping import Skipper
from lakeckpt.reading.threads import Threads

__all__ = ["DecodedWindow", "Gap", "WindowDecoder"]

Array: TypeAlias = npt.NDArray[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]

Damage: TypeAlias = tuple[tuple[Fragment, DataFileDamaged], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Rows of row group ``group`` that are missing in a window."""

    group: int
    before: Int64Array
    """int64, shape (rows of the window + 1,): how many of them stand before each position, less the window's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedWindow:
    """The rows of a window in the order of positions: as columns, or as an Arrow table."""

    columns: Mapping[str, Column[Array] | Pieces] | None
    table: pa.Table | None
    size_bytes: int
    plain: PlainRows | None = None
    """Where the columns lie, if all of them are plain."""
    came: Int64Array | None = None
    """int64, shape (rows of the window + 1,): how many rows came before each position; None: all of them."""
    gaps: tuple[Gap, ...] = ()
    damage: Damage = ()
    """What was tried and is damaged: to be raised, or gone around, when the window is needed."""

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return which rows of the columns stand at offsets [start, stop) of the window."""
        return (start, stop) if self.came is None else (int(self.came[start]), int(self.came[stop]))


class WindowDecoder:
    """Decodes windows of a table; several threads may at once.

    ``decoder`` is shared by the ``threads``. ``nulls`` as for `convert`; None: windows are Arrow tables. What
    ``skipper`` knows is not tried.
    """

    def __init__(
        self,
        decoder: RowGroupDecoder,
        *,
        nulls: Nulls | None,
        skipper: Skipper | None,
        threads: Threads,
    ) -> None:
        self._decoder = decoder
        self._nulls = nulls
        self._skipper = skipper
        self._threads = threads
        memory = self._memory = Recycled()
        self._means = Means(new=lambda count: memory.new((count,), np.dtype(np.uint64)), counted=_counted)
        self.schema: pa.Schema = decoder.schema

    def announce(self, window: Window) -> None:
        """Say that ``window`` will be decoded, after those that were announced before: stores are asked for it."""
        self._decoder.announce([part.group for part in window.fragments])

    @property
    def has_room(self) -> bool:
        """Whether stores would be asked now for windows that are announced."""
        return self._decoder.has_room

    def decode(self, layout: EpochLayout, window: Window) -> DecodedWindow:
        """Return the rows of ``window``, in memory of their own. Raises as `RowGroupDecoder.decode`, save damage."""
        # One row group may keep one thread busy alone; of several, the next window is not to take the threads.
        with self._threads.decoding if len(window.fragments) > 1 else contextlib.nullcontext():
            found = self._fragments(layout, window)
        tables = [None if isinstance(one, DataFileDamaged) else one for one in found]
        damage = tuple(
            (part, one) for part, one in zip(window.fragments, found, strict=True) if isinstance(one, DataFileDamaged)
        )
        came, gaps, kept = _around(window, tables, self._means)
        present = [table for table in tables if table is not None] or [self.schema.empty_table()]
        tables.clear()
        found.clear()
        if self._nulls is None:
            return _as_table(_ordered(present, kept, self.schema), came, gaps, damage)
        nulls = self._nulls
        try:
            parts = [convert_parts(table, nulls=nulls) for table in present]
        except NullValueError:
            return _as_table(_ordered(present, kept, self.schema), came, gaps, damage)
        held = sum(int(table.get_total_buffer_size()) for table in present) if kept is None else 0
        present.clear()

        def whole(name: str) -> Column[Array] | Pieces:
            mine = [part for one in parts for part in one.pop(name)]
            return laid_out(mine) if kept is None else gather(mine, kept, self._memory.new)

        names = list(parts[0])
        columns = dict(zip(names, self._threads.map(whole, names), strict=True))
        size = max(held, column_bytes(columns))
        self._memory.limit_bytes = max(self._memory.limit_bytes, size)
        return DecodedWindow(
            columns=columns,
            table=None,
            size_bytes=size,
            plain=PlainRows.of(columns),
            came=came,
            gaps=gaps,
            damage=damage,
        )

    def close(self, *, gives_back: bool) -> None:
        """Close the files that are open; a later `decode` opens them again. ``gives_back``: what Arrow keeps, too."""
        self._decoder.close()
        if gives_back:
            self._memory.forget()
            pa.default_memory_pool().release_unused()

    def _fragments(self, layout: EpochLayout, window: Window) -> list[pa.Table | DataFileDamaged | None]:
        """The fragments of a window, or what is wrong with them; None for those that are known to be skipped."""
        skipper = self._skipper

        def decoded(part: Fragment) -> pa.Table | DataFileDamaged | None:
            if skipper is not None and skipper.knows(layout, window, part):
                return None
            return self._fragment(part)

        return self._threads.map(decoded, window.fragments)

    def _fragment(self, part: Fragment) -> pa.Table | DataFileDamaged:
        try:
            return self._decoder.decode(part.group, part.start, part.stop)
        except DataFileDamaged as error:
            return error


def _around(
    window: Window, tables: list[pa.Table | None], means: Means
) -> tuple[Int64Array | None, tuple[Gap, ...], Int64Array | None]:
    """How many rows came before each position, the gaps, and the order (None: as they are) of the rows that came."""
    order = window.permutation(means)
    missing = [part for part, table in zip(window.fragments, tables, strict=True) if table is None]
    came = sum(table.num_rows for table in tables if table is not None)
    absent_rows = sum(part.rows for part in missing)
    if came + absent_rows != window.rows:  # rows are gathered without bounds checks
        groups = ", ".join(str(part.group) for part in window.fragments)
        raise DataFileDamaged(
            f"row groups {groups} of the table gave {came} rows where {window.rows - absent_rows} were expected: a "
            "data file is damaged, or was replaced. Write it again, or open the table version that the run began with"
        )
    if not missing:
        return None, (), order
    rows = np.arange(window.rows) if order is None else order
    absent, shift = np.zeros(window.rows, bool), np.zeros(window.rows, np.int64)
    gaps, offset = [], 0
    for part, table in zip(window.fragments, tables, strict=True):
        if table is None:
            mine = (offset <= rows) & (rows < offset + part.rows)
            gaps.append(Gap(group=part.group, before=_before(mine)))
            absent |= mine
            shift[rows >= offset + part.rows] += part.rows
        offset += part.rows
    return _before(~absent), tuple(gaps), None if order is None else (order - shift)[~absent]


def _counted(digits: npt.NDArray[np.uint16]) -> Int64Array:
    """As `Means.counted`, in half of numpy's time: in memory that Arrow has, and with one table of all digits."""
    places: Int64Array = pc.array_sort_indices(pa.array(digits)).to_numpy().view(np.int64)
    return places


def _before(marked: npt.NDArray[np.bool_]) -> Int64Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(marked, dtype=np.int64)])


def _as_table(table: pa.Table, came: Int64Array | None, gaps: tuple[Gap, ...], damage: Damage) -> DecodedWindow:
    size = int(table.get_total_buffer_size())
    return DecodedWindow(columns=None, table=table, size_bytes=size, came=came, gaps=gaps, damage=damage)


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

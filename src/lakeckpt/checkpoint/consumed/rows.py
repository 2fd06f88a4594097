"""This module names the rows of files that stand at positions of an epoch, from the order and the footer index.

The rows of a table are numbered by *table rows*: row group after row group, in the order of the index. If all positions
of a window are asked for, the window's fragments are the result; only a part of a window needs a permutation. Without
shuffling, positions are table rows. Rows that the pinned version deletes are not counted. If a filter selects rows,
only the selected rows are counted.

Positions of packed sequences are not taken to table rows: the documents of a sequence depend on their lengths, which
only the table has. `RowOrder.tokens_of` names the tokens of the windows that hold the sequences.

The module never reads storage, never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lakeckpt.cached import cached_property
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.core.plan import LayoutKey
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.reading.filters.selection import RowSelection

__all__ = ["GroupRows", "RowOrder", "name_rows", "order_name"]

Int64Array = npt.NDArray[np.int64]
_LAYOUTS = 4
_KEPT = " (counted among the rows that the filter keeps)"


def order_name(identity: Identity) -> str:
    """Return a name for the orders of one table and selection."""
    return f"{identity.table}/{identity.selection}" if identity.selection else identity.table


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """Rows of one row group."""

    file: str
    """Path of the file, relative to the table."""
    row_group: int
    """Its ordinal in the file."""
    rows: Intervals
    """Row numbers from the start of the row group; if not ``stored``, among the rows that the filter keeps."""
    of: int
    """The number of rows in the row group, counted in the same way."""
    stored: bool = True
    """True if rows are counted as the file stores them. If a filter keeps only some rows of a row group, the index does
    not hold which ones, and rows are counted among those that it keeps."""
    tokens: bool = False
    """True if tokens of packed documents are counted instead of rows."""

    @property
    def how_counted(self) -> str:
        """A remark for people on how the rows are counted; empty if they are counted as the file stores them."""
        return "" if self.stored and not self.tokens else " (tokens of the window)" if self.tokens else _KEPT

    def to_plain(self) -> dict[str, object]:
        """Return JSON-able values; ``ranges`` are half-open."""
        return {
            "file": self.file,
            "row_group": self.row_group,
            "rows": self.rows.size,
            "of": self.of,
            "ranges": [list(pair) for pair in self.rows.pairs()],
            "counted": "tokens" if self.tokens else "stored" if self.stored else "selected",
        }


class RowOrder:
    """The orders of a pinned table's rows, of all epochs and layouts. It caches the last few layouts.

    With a ``selection``, they are orders of the rows that it keeps. ``ValueError`` if it belongs to another table.
    """

    def __init__(self, index: TableIndex, selection: RowSelection | None = None) -> None:
        self.index = index
        if selection is not None:
            selection.check(table=index.digest, existing=index.group_rows)
        self.selection = selection
        self.group_rows: Int64Array = (index if selection is None else selection).group_rows
        """int64, shape (row groups,): the rows of each row group that have positions; packed: the tokens."""
        self.unit = 1 if selection is None else selection.unit
        """Tokens of a packed sequence; 1: positions are rows."""
        self.starts: Int64Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.group_rows, dtype=np.int64)])
        self._layout = lru_cache(maxsize=_LAYOUTS)(self._built)

    @property
    def unit_name(self) -> str:
        """The name of a position's unit, for people."""
        return "row" if self.unit == 1 else "sequence"

    def layout(self, spec: OrderSpec, key: LayoutKey, endless: bool = False) -> EpochLayout:
        """Return the layout of an epoch; ``endless`` matters for packed sequences alone."""
        return self._layout(spec, key, endless)

    def _built(self, spec: OrderSpec, key: LayoutKey, endless: bool) -> EpochLayout:
        return key.layout(spec, self.group_rows, self.unit, endless=endless)

    def tokens_of(self, layout: EpochLayout, positions: Intervals) -> list[GroupRows]:
        """Return the tokens of all windows that hold the packed sequences at ``positions``, row group by row group."""
        windows = {one.start: one for low, high in positions.pairs() for one in layout.windows(low, high)}
        found: dict[int, list[tuple[int, int]]] = {}
        for one in (part for window in windows.values() for part in window.fragments):
            found.setdefault(one.group, []).append((one.start, one.stop))
        return [
            GroupRows(
                file=self.index.paths[self.index.group(group)[0]],
                row_group=self.index.group(group)[1],
                rows=Intervals.of(sorted(ranges)),
                of=int(self.group_rows[group]),
                tokens=True,
            )
            for group, ranges in sorted(found.items())
        ]

    def table_rows(self, spec: OrderSpec, key: LayoutKey, positions: Intervals) -> Intervals:
        """Return the table rows that stand at ``positions``, as a set."""
        if not spec.shuffle or not positions:
            return positions
        layout = self.layout(spec, key)
        found, at, position = [], 0, int(positions.starts[0])
        while at < len(positions):
            window = layout.window_at(position)
            upto = int(np.searchsorted(positions.starts, window.stop))
            lows = np.maximum(positions.starts[at:upto], window.start)
            highs = np.minimum(positions.stops[at:upto], window.stop)
            found.append(self._of_window(window, lows, highs))
            at = upto - 1 if positions.stops[upto - 1] > window.stop else upto
            position = window.stop if at < upto else int(positions.starts[min(at, len(positions) - 1)])
        return Intervals.empty().union(*found)

    def _of_window(self, window: Window, lows: Int64Array, highs: Int64Array) -> Intervals:
        firsts = np.array([self.starts[one.group] + one.start for one in window.fragments], np.int64)
        sizes = np.array([one.rows for one in window.fragments], np.int64)
        permuted = None if int((highs - lows).sum()) == window.rows else window.permutation()
        if permuted is None:
            return Intervals.of(zip(firsts.tolist(), (firsts + sizes).tolist(), strict=True))
        offsets = np.concatenate(
            [permuted[low - window.start : high - window.start] for low, high in zip(lows, highs, strict=True)]
        )
        ends = np.cumsum(sizes)
        which = np.searchsorted(ends, offsets, side="right")
        return _runs(np.sort(offsets - (ends - sizes)[which] + firsts[which]))

    def locate(self, spec: OrderSpec, key: LayoutKey, positions: Intervals) -> Int64Array:
        """Return the table rows at ``positions``, in the order of positions: int64, shape (positions.size,)."""
        each = [np.arange(start, stop) for start, stop in positions.pairs()]
        asked = np.concatenate([np.zeros(0, np.int64), *each])
        if not spec.shuffle:
            return asked
        groups, rows = self.layout(spec, key).locate(asked)
        return np.asarray(self.starts[groups] + rows, np.int64)

    @cached_property
    def excluded(self) -> list[tuple[str, int, int]]:
        """See `TableIndex.rows_excluded`."""
        return self.index.rows_excluded()

    @property
    def num_rows(self) -> int:
        """The positions of an epoch: rows, or packed sequences."""
        return -(-int(self.starts[-1]) // self.unit)

    def place(self, table_row: int) -> tuple[str, int, int]:
        """Return (file, row group in the file, row in the row group) of a table row, as `GroupRows` counts it."""
        group = int(np.searchsorted(self.starts, table_row, side="right")) - 1
        file, ordinal = self.index.group(group)
        row = table_row - int(self.starts[group])
        return self.index.paths[file], ordinal, int(self.named(group, Intervals.of([(row, row + 1)])).rows.starts[0])

    def is_stored(self, table_row: int) -> bool:
        """Return whether `place` counts the row as the file stores it, and not among the rows that a filter keeps."""
        group = int(np.searchsorted(self.starts, table_row, side="right")) - 1
        return int(self.group_rows[group]) == int(self.index.group_rows[group])

    def named(self, group: int, inside: Intervals) -> GroupRows:
        """Return rows ``inside`` a row group with their numbers in the file, if the index holds these numbers."""
        file, ordinal = self.index.group(group)
        of = int(self.group_rows[group])
        is_stored = of == int(self.index.group_rows[group])
        left = self.index.surviving(group) if is_stored else None
        if left is not None and inside:
            rows = np.flatnonzero(left)
            inside = _runs(np.concatenate([rows[start:stop] for start, stop in inside.pairs()]))
            of = len(left)
        return GroupRows(file=self.index.paths[file], row_group=ordinal, rows=inside, of=of, stored=is_stored)


def _runs(ascending: Int64Array) -> Intervals:
    """Return distinct numbers in ascending order as intervals."""
    breaks = np.flatnonzero(np.diff(ascending) != 1)
    firsts = np.concatenate([np.zeros(1, np.int64), breaks + 1])
    lasts = np.concatenate([breaks, np.array([len(ascending) - 1], np.int64)])
    return Intervals(ascending[firsts], ascending[lasts] + 1)


def name_rows(order: RowOrder, rows: Intervals) -> Sequence[GroupRows]:
    """Return table rows by file and row group, in the order of the table."""
    named: list[GroupRows] = []
    at = int(rows.starts[0]) if rows else -1
    while at >= 0:
        group = int(np.searchsorted(order.starts, at, side="right")) - 1
        start, stop = int(order.starts[group]), int(order.starts[group + 1])
        low, high = int(np.searchsorted(rows.stops, start, side="right")), int(np.searchsorted(rows.starts, stop))
        lows, highs = np.maximum(rows.starts[low:high], start), np.minimum(rows.stops[low:high], stop)
        named.append(order.named(group, Intervals(lows - start, highs - start)))
        after = int(np.searchsorted(rows.stops, stop, side="right"))
        at = max(int(rows.starts[after]), stop) if after < len(rows) else -1
    return named

"""Which rows of which files stand at these positions?  From the order and the footer index, without reading the table.

The rows of a table are numbered by *table rows*: row group after row group, in the order of the index. A window whose
positions are all asked for gives its fragments as they are; only a window that is asked for in part costs a
permutation. Unshuffled, positions are table rows. Rows that the pinned version deletes are not counted; where a filter
selects rows, only those that it keeps are.

Never reads storage. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.core.plan import LayoutKey
from lakeckpt.core.state import Identity
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.selection import RowSelection

__all__ = ["GroupRows", "Order", "name_rows", "order_name"]

Int64Array = npt.NDArray[np.int64]
_LAYOUTS = 4


def order_name(identity: Identity) -> str:
    """What tells the orders of one table and selection from others'."""
    return f"{identity.table}/{identity.selection}" if identity.selection else identity.table


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """Rows of one row group."""

    file: str
    """Path of the file, relative to the table."""
    row_group: int
    """Its ordinal in the file."""
    rows: Intervals
    """Rows, counted from the start of the row group; where not ``stored``, among those that the filter keeps."""
    of: int
    """How many rows are counted so."""
    stored: bool = True
    """Whether rows are counted as the file stores them. Which rows a filter keeps of a row group only the table says,
    unless it keeps all."""

    def to_plain(self) -> dict[str, object]:
        """JSON-able values; ``ranges`` are half-open."""
        return {
            "file": self.file,
            "row_group": self.row_group,
            "rows": self.rows.size,
            "of": self.of,
            "ranges": [list(pair) for pair in self.rows.pairs()],
            "counted": "stored" if self.stored else "selected",
        }


class Order:
    """The orders of a pinned table's rows, of all epochs and layouts. Keeps the few layouts asked for last.

    With a ``selection``, of the rows that it keeps. ``ValueError`` where it is of another table.
    """

    def __init__(self, index: TableIndex, selection: RowSelection | None = None) -> None:
        self.index = index
        if selection is not None:
            selection.check(table=index.digest, existing=index.group_rows)
        self.group_rows: Int64Array = (index if selection is None else selection).group_rows
        self.starts: Int64Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.group_rows, dtype=np.int64)])
        self._layouts: dict[tuple[OrderSpec, LayoutKey], EpochLayout] = {}

    def layout(self, spec: OrderSpec, key: LayoutKey) -> EpochLayout:
        """The layout of an epoch."""
        found = self._layouts.pop((spec, key), None)
        if found is None:
            found = EpochLayout.build(self.group_rows, spec, key.epoch, key.num_lanes, key.rotation)
            while len(self._layouts) >= _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        self._layouts[spec, key] = found
        return found

    def table_rows(self, spec: OrderSpec, key: LayoutKey, positions: Intervals) -> Intervals:
        """The table rows that stand at ``positions``, as a set."""
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
        """The table rows that stand at ``positions``, in the order of positions: int64, shape (positions.size,)."""
        each = [np.arange(start, stop) for start, stop in positions.pairs()]
        asked = np.concatenate([np.zeros(0, np.int64), *each])
        if not spec.shuffle:
            return asked
        groups, rows = self.layout(spec, key).locate(asked)
        return np.asarray(self.starts[groups] + rows, np.int64)

    def at_group(self, spec: OrderSpec, key: LayoutKey, positions: Intervals, group: int) -> Intervals:
        """Those of ``positions`` at which rows of row group ``group`` stand."""
        layout = self.layout(spec, key)
        found = []
        for start, stop in positions.pairs():
            for window in layout.windows(start, stop):
                rows = window.permutation()
                rows = np.arange(window.rows) if rows is None else rows
                begin = 0
                for fragment in window.fragments:
                    if fragment.group == group:
                        at = window.start + np.flatnonzero((begin <= rows) & (rows < begin + fragment.rows))
                        at = at[(start <= at) & (at < stop)]
                        found += [_runs(at)] if len(at) else []
                    begin += fragment.rows
        return Intervals.empty().union(*found)

    @property
    def num_rows(self) -> int:
        """The rows of an epoch."""
        return int(self.starts[-1])

    def place(self, table_row: int) -> tuple[str, int, int]:
        """(file, row group in the file, row in the row group) of a table row; the row as `GroupRows` counts it."""
        group = int(np.searchsorted(self.starts, table_row, side="right")) - 1
        file, ordinal = self.index.group(group)
        row = table_row - int(self.starts[group])
        return self.index.paths[file], ordinal, int(self.named(group, Intervals.of([(row, row + 1)])).rows.starts[0])

    def named(self, group: int, inside: Intervals) -> GroupRows:
        """Rows of a row group, counted among those that have positions, as the file stores them where that is known."""
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
    """Distinct numbers in ascending order, as intervals."""
    breaks = np.flatnonzero(np.diff(ascending) != 1)
    firsts = np.concatenate([np.zeros(1, np.int64), breaks + 1])
    lasts = np.concatenate([breaks, np.array([len(ascending) - 1], np.int64)])
    return Intervals(ascending[firsts], ascending[lasts] + 1)


def name_rows(order: Order, rows: Intervals, *, most: int) -> Sequence[GroupRows]:
    """Table rows by file and row group, in the order of the table; the first ``most`` row groups of them."""
    named: list[GroupRows] = []
    at = int(rows.starts[0]) if rows else -1
    while rows and at >= 0 and len(named) < most:
        group = int(np.searchsorted(order.starts, at, side="right")) - 1
        start, stop = int(order.starts[group]), int(order.starts[group + 1])
        low, high = int(np.searchsorted(rows.stops, start, side="right")), int(np.searchsorted(rows.starts, stop))
        lows, highs = np.maximum(rows.starts[low:high], start), np.minimum(rows.stops[low:high], stop)
        named.append(order.named(group, Intervals(lows - start, highs - start)))
        after = int(np.searchsorted(rows.stops, stop, side="right"))
        at = max(int(rows.starts[after]), stop) if after < len(rows) else -1
    return named

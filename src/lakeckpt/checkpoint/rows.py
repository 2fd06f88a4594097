"""Which rows of which files stand at these positions?  From the order and the footer index, without reading the table.

The rows of a table are numbered by *table rows*: row group after row group, in the order of the index. A window whose
positions are all asked for gives its fragments as they are; only a window that is asked for in part costs a
permutation. Unshuffled, positions are table rows.

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
from lakeckpt.lake.index import TableIndex

__all__ = ["GroupRows", "Order", "name_rows"]

Int64Array = npt.NDArray[np.int64]
_LAYOUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """Rows of one row group."""

    file: str
    """Path of the file, relative to the table."""
    row_group: int
    """Its ordinal in the file."""
    rows: Intervals
    """Rows, counted from the start of the row group."""
    of: int
    """How many rows the row group has."""

    def to_plain(self) -> dict[str, object]:
        """JSON-able values; ``ranges`` are half-open."""
        return {
            "file": self.file,
            "row_group": self.row_group,
            "rows": self.rows.size,
            "of": self.of,
            "ranges": [list(pair) for pair in self.rows.pairs()],
        }


class Order:
    """The orders of a pinned table's rows, of all epochs and layouts. Keeps the few layouts asked for last."""

    def __init__(self, index: TableIndex) -> None:
        self.index = index
        self.starts: Int64Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(index.group_rows, dtype=np.int64)])
        self._layouts: dict[tuple[OrderSpec, LayoutKey], EpochLayout] = {}

    def layout(self, spec: OrderSpec, key: LayoutKey) -> EpochLayout:
        """The layout of an epoch."""
        found = self._layouts.pop((spec, key), None)
        if found is None:
            found = EpochLayout.build(self.index.group_rows, spec, key.epoch, key.num_lanes, key.rotation)
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

    def place(self, table_row: int) -> tuple[str, int, int]:
        """(file, row group in the file, row in the row group) of a table row."""
        group = int(np.searchsorted(self.starts, table_row, side="right")) - 1
        file, ordinal = self.index.group(group)
        return self.index.paths[file], ordinal, table_row - int(self.starts[group])


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
        file, ordinal = order.index.group(group)
        inside = Intervals(lows - start, highs - start)
        named.append(GroupRows(file=order.index.paths[file], row_group=ordinal, rows=inside, of=stop - start))
        after = int(np.searchsorted(rows.stops, stop, side="right"))
        at = max(int(rows.starts[after]), stop) if after < len(rows) else -1
    return named

"""This module lays out the order of an epoch: a pure function of the row counts of a table, a seed and a layout.

An epoch's order is laid out in four steps, none of which keeps state:

1. the non-empty row groups are put in the order of a keyed hash (unshuffled: in table order);
2. the rows, row group after row group, are numbered by *positions* 0 … rows - 1;
3. positions are cut into ``num_lanes`` contiguous lanes, equal to within one row; ``rotation`` is the lane that is the
   first to get one of the extra rows (0 unless a stream is endless);
4. within a lane, every ``window`` consecutive row groups (or the parts of them inside the lane) form a *window*, and
   the rows of a window are permuted by a keyed hash (unshuffled: left as they are). A window of more than 2^27 rows is
   cut into windows of 2^27.

So a place in the order is a number, and any window can be read again and entered in its middle.

A *packed* order has a ``unit`` of several tokens: the row groups are measured in tokens, and a position is a sequence
of ``unit`` consecutive tokens. Lanes consist of whole sequences. A window consists of the sequences that begin in its
row groups, so its last fragment may reach into later row groups. The last sequence of an epoch may be shorter; that of
an endless stream goes on with the first tokens of the next epoch, whose first sequence begins after them.

It never reads a row, and never depends on ranks, loader workers or time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import MAX_PERMUTED, derive_key, hash64, permutation

__all__ = ["EpochLayout", "Fragment", "OrderSpec", "Tail", "Window", "lane_bounds"]

Int64Array = npt.NDArray[np.int64]
Tail = Literal["short", "drop", "carry"]
"""What the end of an epoch does with rows that fill no micro-batch (`lakeckpt.core.lanes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec:
    """The user's choices about the order: part of every reader state."""

    seed: int
    shuffle: bool
    window: int
    """Row groups per window; 1 if nothing is shuffled."""

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if self.window < 1:
            raise ValueError(f"a window holds at least one row group, got {self.window}")
        if not self.shuffle and self.window != 1:
            raise ValueError(f"an unshuffled order has windows of one row group, got {self.window}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Rows [start, stop) of row group ``group`` (its ordinal in the table); in a packed order, tokens."""

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Positions [start, stop) of an epoch: the rows of ``fragments``, permuted together."""

    start: int
    stop: int
    fragments: tuple[Fragment, ...]
    key: tuple[int, int] | None
    """The key of the permutation; None: rows stand in the fragments' order."""
    outer: Window | None = None
    """The whole window, if this is a part of one: fragments and key are those of the whole."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    @property
    def whole(self) -> Window:
        """The window that this is a part of, or the window itself."""
        return self.outer or self

    def part(self, position: int, parts: int) -> Window:
        """Return the one of ``parts`` equal parts that holds ``position``; the window itself if it is the only one."""
        size = -(-self.rows // parts)
        start = position - (position - self.start) % size
        return self if parts == 1 else replace(self, start=start, stop=min(start + size, self.stop), outer=self)

    def permutation(self) -> Int64Array | None:
        """Return, for each position less ``start``, the row of the concatenated fragments (int64, shape (rows,)).

        None if the rows stand in the fragments' order.
        """
        return None if self.key is None else permutation(self.key, self.rows)


def lane_bounds(rows: int, num_lanes: int, rotation: int = 0) -> Int64Array:
    """Return where lanes begin and end: int64, shape (num_lanes + 1,), from 0 to ``rows``.

    Each lane has ``rows // num_lanes`` rows; the ``rows % num_lanes`` extra rows go one each to the lanes
    ``(rotation + i) % num_lanes``.

    >>> lane_bounds(10, 4).tolist(), lane_bounds(10, 4, rotation=3).tolist()
    ([0, 3, 6, 8, 10], [0, 3, 5, 7, 10])
    """
    share, extra = divmod(rows, num_lanes)
    sizes = np.full(num_lanes, share, np.int64)
    sizes[(rotation + np.arange(extra)) % num_lanes] += 1
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _ordered(group_rows: Int64Array, spec: OrderSpec, epoch: int) -> tuple[Int64Array, Int64Array]:
    """Return the non-empty row groups in the order of ``epoch``, and where each begins, and the end."""
    order = np.flatnonzero(group_rows)
    if spec.shuffle:
        key = derive_key("row groups", spec.seed, epoch)
        order = order[np.argsort(hash64(key, order.astype(np.uint64)))]
    return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(group_rows[order], dtype=np.int64)])


def _fragments(order: Int64Array, begins: Int64Array, first: int, start: int, stop: int) -> tuple[Fragment, ...]:
    """Return rows (packed: tokens) [start, stop) of an epoch, which begin in the ``first`` of ``order`` or later."""
    fragments = []
    for place in range(first, min(int(np.searchsorted(begins, stop, side="left")), len(order))):
        begin, end = int(begins[place]), int(begins[place + 1])
        low, high = max(begin, start), min(end, stop)
        if low < high:
            fragments.append(Fragment(group=int(order[place]), start=low - begin, stop=high - begin))
    return tuple(fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLayout:
    """The order of one epoch: see the module. Make it with `build`."""

    spec: OrderSpec
    epoch: int
    num_lanes: int
    rotation: int
    order: Int64Array = field(repr=False, compare=False)
    """int64, shape (g,): the non-empty row groups in this epoch's order."""
    begins: Int64Array = field(repr=False, compare=False)
    """int64, shape (g + 1,): the row (packed: the token) at which each of ``order`` begins, and the end."""
    lane_bounds: Int64Array = field(repr=False, compare=False)
    """int64, shape (num_lanes + 1,)."""
    unit: int = 1
    """Tokens of a position in a packed order; 1: a position is a row."""
    first: int = 0
    """The token at which position 0 begins."""
    following: tuple[Int64Array, Int64Array] | None = field(default=None, repr=False, compare=False)
    """`order` and `begins` of the next epoch, if the last position goes on there; None: it is shorter."""

    @classmethod
    def build(
        cls,
        group_rows: Int64Array,
        spec: OrderSpec,
        epoch: int,
        num_lanes: int,
        rotation: int = 0,
        *,
        unit: int = 1,
        endless: bool = False,
        phase: int = 0,
    ) -> EpochLayout:
        """Lay out ``epoch`` over row groups of ``group_rows`` rows each (int64, shape (row groups,)).

        With a ``unit``, ``group_rows`` counts tokens; ``endless``: its last position goes on in the next epoch, and the
        positions of epoch 0 begin at token ``phase``.
        """
        if epoch < 0 or not 0 <= rotation < num_lanes:
            raise ValueError(f"no such layout: epoch {epoch}, {num_lanes} lanes, rotation {rotation}")
        order, begins = _ordered(group_rows, spec, epoch)
        every = int(begins[-1])
        goes_on = endless and unit > 1
        first = (phase - epoch * every) % unit if goes_on else 0
        return cls(
            spec=spec,
            epoch=epoch,
            num_lanes=num_lanes,
            rotation=rotation,
            order=order,
            begins=begins,
            lane_bounds=lane_bounds(-(-(every - first) // unit), num_lanes, rotation),
            unit=unit,
            first=first,
            following=_ordered(group_rows, spec, epoch + 1) if goes_on else None,
        )

    @property
    def rows(self) -> int:
        """The number of positions of the epoch: rows, or packed sequences."""
        return int(self.lane_bounds[-1])

    @property
    def identity(self) -> tuple[OrderSpec, int, int, int]:
        """A key that differs between different layouts of one table."""
        return (self.spec, self.epoch, self.num_lanes, self.rotation)

    def window_at(self, position: int) -> Window:
        """Return the window that holds ``position``."""
        if not 0 <= position < self.rows:
            raise ValueError(f"position {position} lies outside of an epoch of {self.rows} rows")
        unit, origin, every = self.unit, self.first, int(self.begins[-1])
        lane = int(np.searchsorted(self.lane_bounds, position, side="right")) - 1
        lane_start, lane_stop = (min(origin + int(one) * unit, every) for one in self.lane_bounds[lane : lane + 2])
        base = int(np.searchsorted(self.begins, lane_start, side="right")) - 1
        place = int(np.searchsorted(self.begins, origin + position * unit, side="right")) - 1
        first = base + (place - base) // self.spec.window * self.spec.window
        last = min(first + self.spec.window, len(self.order))
        low, high = max(lane_start, int(self.begins[first])), min(lane_stop, int(self.begins[last]))
        start, stop = -(-(low - origin) // unit), -(-(high - origin) // unit)
        start += (position - start) // MAX_PERMUTED * MAX_PERMUTED
        stop = min(stop, start + MAX_PERMUTED)
        key = derive_key("rows", self.spec.seed, self.epoch, start) if self.spec.shuffle else None
        fragments = _fragments(self.order, self.begins, first, origin + start * unit, origin + stop * unit)
        if self.following is not None and origin + stop * unit > every:
            fragments += _fragments(*self.following, 0, 0, origin + stop * unit - every)
        return Window(start=start, stop=stop, fragments=fragments, key=key)

    def windows(self, start: int, stop: int) -> list[Window]:
        """Return the windows that hold positions [start, stop), in their order."""
        found = []
        while start < stop:
            found.append(self.window_at(start))
            start = found[-1].stop
        return found

    def holding(self, groups: Collection[int]) -> list[tuple[int, int]]:
        """Return the positions [start, stop) of all windows that hold rows (packed: tokens) of row groups ``groups``.

        Windows may be named twice.
        """
        unit, origin = self.unit, self.first
        found = []
        for at in np.flatnonzero(np.isin(self.order, list(groups))).tolist():
            low, high = (int(one) - origin for one in self.begins[at : at + 2])
            found += self.windows(max(low // unit, 0), min(-(-high // unit), self.rows))
        if self.following is not None and self.rows:
            last = self.window_at(self.rows - 1)
            found += [last] if any(part.group in groups for part in last.fragments) else []
        return [(window.start, window.stop) for window in found]

    def taken_before(self, groups: Collection[int]) -> int:
        """Return how many tokens, those of ``groups`` left out, the last position of the epoch before takes."""
        taken = _fragments(self.order, self.begins, 0, 0, self.first)
        return sum(part.rows for part in taken if part.group not in groups)

    def locate(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the row group and the row in it of each of ``positions`` (int64, shape (n,) each).

        Costs one permutation for each window touched.
        """
        groups, rows = np.empty_like(positions), np.empty_like(positions)
        ascending = np.argsort(positions, kind="stable")
        ordered = positions[ascending]
        done = 0
        while done < len(positions):
            window = self.window_at(int(ordered[done]))
            upto = int(np.searchsorted(ordered, window.stop, side="left"))
            here = ascending[done:upto]
            offsets = ordered[done:upto] - window.start
            permuted = window.permutation()
            offsets = offsets if permuted is None else permuted[offsets]
            ends = np.cumsum([fragment.rows for fragment in window.fragments])
            which = np.searchsorted(ends, offsets, side="right")
            firsts = np.array([f.start for f in window.fragments], np.int64) - np.concatenate([[0], ends[:-1]])
            groups[here] = np.array([f.group for f in window.fragments], np.int64)[which]
            rows[here] = firsts[which] + offsets
            done = upto
        return groups, rows

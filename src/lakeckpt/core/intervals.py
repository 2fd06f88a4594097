"""This module holds sets of positions as sorted, disjoint, half-open intervals, with the algebra that plans need.

Every operation takes time in the number n of intervals (n, or n log n), never in the number of positions. A set never
holds single positions and never changes in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["Intervals"]

Int64Array = npt.NDArray[np.int64]


class Intervals:
    """An immutable set of non-negative integers: sorted half-open intervals ``[start, stop)`` that do not touch.

    >>> a = Intervals.of([(0, 4), (8, 10)])
    >>> a.size, a.complement(12).pairs()
    (6, [(4, 8), (10, 12)])
    >>> a.take(3, 5)
    [(3, 4), (8, 9)]
    """

    __slots__ = ("_before", "starts", "stops")

    starts: Int64Array
    """int64, shape (k,): the first position of each interval."""
    stops: Int64Array
    """int64, shape (k,): one past the last position of each interval."""

    def __init__(self, starts: Int64Array, stops: Int64Array) -> None:
        if starts.shape != stops.shape or starts.ndim != 1:
            raise ValueError(f"starts and stops must be two lists of one length, got {starts.shape} and {stops.shape}")
        if len(starts) and (starts[0] < 0 or (starts >= stops).any() or (starts[1:] <= stops[:-1]).any()):
            raise ValueError("intervals must be non-negative, non-empty, sorted, and must not touch")
        starts.flags.writeable = False
        stops.flags.writeable = False
        self.starts = starts
        self.stops = stops
        self._before: Int64Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts, dtype=np.int64)])

    @classmethod
    def empty(cls) -> Intervals:
        """Return the empty set."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @classmethod
    def whole(cls, rows: int) -> Intervals:
        """Return all of 0 … ``rows`` - 1."""
        return cls.of([(0, rows)])

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Intervals:
        """Return the union of ``pairs`` (start, stop); they may be empty, touch or overlap, in any order."""
        array = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        if (array[:, 0] > array[:, 1]).any():
            bad = array[array[:, 0] > array[:, 1]][0]
            raise ValueError(f"an interval ends before it starts: [{bad[0]}, {bad[1]})")
        return cls._joined(array[:, 0], array[:, 1])

    @classmethod
    def _joined(cls, starts: Int64Array, stops: Int64Array) -> Intervals:
        kept = starts < stops
        starts, stops = starts[kept], stops[kept]
        if not len(starts):
            return cls.empty()
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        opens = np.concatenate([[True], starts[1:] > stops[:-1]])
        closes = np.concatenate([opens[1:], [True]])
        return cls(starts[opens].copy(), stops[closes].copy())

    def pairs(self) -> list[tuple[int, int]]:
        """Return the intervals as a list of (start, stop)."""
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    def to_plain(self) -> list[int]:
        """Return the gap before each interval and its length, one after the other: numbers that stay small.

        >>> Intervals.of([(0, 5), (7, 1000)]).to_plain()
        [0, 5, 2, 993]
        """
        edges = np.stack([self.starts, self.stops], axis=1).reshape(-1)
        found: list[int] = np.diff(edges, prepend=0).tolist()
        return found

    @classmethod
    def from_plain(cls, value: object) -> Intervals:
        """Return what `to_plain` made ``value`` of; ValueError if ``value`` is not such a value."""
        if not isinstance(value, (list, tuple)) or len(value) % 2 or not all(type(one) is int for one in value):
            raise ValueError(f"intervals are a list of gaps and lengths, got {value!r:.80}")
        if sum(map(abs, value)) >= 1 << 63:
            raise ValueError("intervals of 64 bits have a sum of gaps and lengths below 2**63")
        edges = np.cumsum(np.array(value, dtype=np.int64)).reshape(-1, 2)
        return cls(edges[:, 0].copy(), edges[:, 1].copy())

    @property
    def size(self) -> int:
        """The number of positions."""
        return int(self._before[-1])

    def __len__(self) -> int:
        """Return the number of intervals."""
        return len(self.starts)

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.stops, other.stops)

    def __hash__(self) -> int:
        return hash((self.starts.tobytes(), self.stops.tobytes()))

    def __repr__(self) -> str:
        shown = ", ".join(f"[{a}, {b})" for a, b in self.pairs()[:8])
        more = f", … {len(self) - 8} more" if len(self) > 8 else ""
        return f"Intervals({shown}{more})"

    def __reduce__(self) -> tuple[object, ...]:
        return (Intervals, (self.starts.copy(), self.stops.copy()))

    def union(self, *others: Intervals) -> Intervals:
        """Return what is in this set or in any of ``others``."""
        every = (self, *others)
        return Intervals._joined(
            np.concatenate([one.starts for one in every]), np.concatenate([one.stops for one in every])
        )

    def complement(self, rows: int) -> Intervals:
        """Return what of 0 … ``rows`` - 1 is not in this set."""
        if self and self.stops[-1] > rows:
            raise ValueError(f"positions up to {self.stops[-1]} lie outside of {rows} rows")
        starts = np.concatenate([np.zeros(1, np.int64), self.stops])
        stops = np.concatenate([self.starts, np.array([rows], np.int64)])
        return Intervals._joined(starts, stops)

    def intersection(self, other: Intervals) -> Intervals:
        """Return what is in both sets."""
        if not self or not other:
            return Intervals.empty()
        # In a sorted union of disjoint families, a stretch is common where one interval of each is open.
        edges = np.concatenate([self.starts, other.starts, self.stops, other.stops])
        change = np.concatenate([np.ones(len(self) + len(other), np.int64), -np.ones(len(self) + len(other), np.int64)])
        order = np.lexsort((-change, edges))
        edges, depth = edges[order], np.cumsum(change[order])
        common = np.flatnonzero(depth[:-1] == 2)
        return Intervals._joined(edges[common], edges[common + 1])

    def difference(self, other: Intervals) -> Intervals:
        """Return what is in this set and not in ``other``."""
        if not self or not other:
            return self
        rows = int(max(self.stops[-1], other.stops[-1]))
        return self.intersection(other.complement(rows))

    def take(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ``start``-th to ``stop``-th (exclusive) positions of the set, ascending, as (start, stop).

        It is cheap enough for every micro-batch; `select` takes many ranges at once.
        """
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"places [{start}, {stop}) outside of a set of {self.size}")
        which = int(np.searchsorted(self._before, start, side="right")) - 1
        found = []
        while start < stop:
            end = min(stop, int(self._before[which + 1]))
            shift = int(self.starts[which]) - int(self._before[which])
            found.append((start + shift, end + shift))
            start, which = end, which + 1
        return found

    def select(self, starts: Int64Array, stops: Int64Array) -> Intervals:
        """Return the ``starts[i]``-th to ``stops[i]``-th (exclusive) positions of the set, for all i.

        Places are counted in ascending order of positions. ``starts`` and ``stops`` are int64 of one shape (n,), the
        ranges sorted and disjoint; they may be empty and may touch.
        """
        if len(starts) and not (starts[0] >= 0 and (starts <= stops).all() and stops[-1] <= self.size):
            raise ValueError(f"places {list(zip(starts, stops, strict=True))[:4]} … outside of a set of {self.size}")
        kept = starts < stops
        starts, stops = starts[kept], stops[kept]
        if not len(starts):
            return Intervals.empty()
        # Cut the places where a range or an interval begins: each piece then lies inside one interval.
        edges = np.unique(np.concatenate([starts, stops, self._before]))
        begins, ends = edges[:-1], edges[1:]
        inside = np.searchsorted(starts, begins, side="right") - 1
        wanted = (inside >= 0) & (begins < stops[np.maximum(inside, 0)])
        begins, ends = begins[wanted], ends[wanted]
        which = np.searchsorted(self._before, begins, side="right") - 1
        shift = self.starts[which] - self._before[which]
        return Intervals._joined(begins + shift, ends + shift)

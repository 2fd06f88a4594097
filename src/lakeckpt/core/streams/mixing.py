"""This module says which source each row of a weighted mixture comes from: a pure function of weights, seed and place.

Weights are fractions of 65,536, and one period of a mixture is tabled. Sources get their rows one by one, so that after
any n rows each source has had its share of them to within one row. That is the chairman assignment problem (Tijdeman,
Discrete Mathematics 32, 1980): the i-th row of a source of weight w must stand among the rows from i / w to (i + 1) / w
of the mixture, and serving the earliest deadline first always finds such places (Liu and Layland, Journal of the ACM
20, 1973).

Lanes must not all turn to a rare source in the same step. So there are several tables, and lane l uses table l modulo
8. In each table a keyed hash says how long before its deadline a row is due.

The module keeps tables of recent weights in a cache. It reads nothing, and starts no threads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import derive_key, hash64
from lakeckpt.wire.documents import Count, as_row

__all__ = ["MAX_SOURCES", "SCALE", "Share", "fractions"]

Int64Array = npt.NDArray[np.int64]

SCALE = 1 << 16
"""Weights are fractions of it."""
MAX_SOURCES = 1 << 10
"""The most sources of a mixture."""
_TABLES = 8
_HASTE = (8, 6, 4, 2, 1, 0)
"""A row is due up to so many eighths of the time that it may wait before its deadline. The first number is taken with
which no row comes too late."""


def fractions(weights: Mapping[str, float]) -> dict[str, int]:
    """Return ``weights``, which need not add up to 1, as fractions of `SCALE` that do. None above 0 becomes 0.

    `ValueError` for weights that are negative, not finite, or all 0.

    >>> fractions({"web": 0.7, "code": 0.3})
    {'web': 45875, 'code': 19661}
    """
    given = {name: float(weight) for name, weight in weights.items()}
    wrong = {name: weight for name, weight in given.items() if not 0 <= weight < math.inf}
    if wrong or not any(given.values()):
        raise ValueError(f"weights are numbers from 0 on, and not all 0, got {wrong or given}")
    total = math.fsum(given.values())
    exact = {name: weight / total * SCALE for name, weight in given.items()}
    found = {name: max(round(one), 1) if given[name] else 0 for name, one in exact.items()}
    while (left := SCALE - sum(found.values())) != 0:
        sign = 1 if left > 0 else -1
        changes = [name for name in found if given[name] and found[name] + sign >= 1]
        found[max(changes, key=lambda one: (sign * (exact[one] - found[one]), one))] += sign
    return found


@as_row
@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one source in a mixture, in one segment."""

    source: Count
    """The number of the source."""
    weights: tuple[int, ...]
    """The weights of all sources: fractions of `SCALE` that add up to it."""
    seed: int
    whole: bool = False
    """Whether a micro-batch is of one source. False: sources alternate row by row."""
    carried: tuple[int, ...] = ()
    """For each source, the rows that a lane had too many when the segment began, times `SCALE`; empty: none."""

    def __post_init__(self) -> None:
        if sum(self.weights) != SCALE or min(self.weights) < 0 or not 0 <= self.source < len(self.weights):
            raise ValueError(f"{self.weights} are not weights of source {self.source} that add up to {SCALE}")
        if self.carried and len(self.carried) != len(self.weights):
            raise ValueError(f"{len(self.weights)} sources, and {len(self.carried)} counts that are carried over")

    def before(self, lanes: Int64Array, turns: Int64Array, batch_size: int) -> Int64Array:
        """Return how many rows of the source each of ``lanes`` has in its first ``turns`` micro-batches.

        int64, of one shape, (lanes,).
        """
        places = turns if self.whole else turns * batch_size
        found, tables = np.empty_like(places), lanes % _TABLES
        for number in np.unique(tables).tolist():
            chosen = tables == number
            found[chosen] = self._table(number).count(self.source, places[chosen])
        return found * batch_size if self.whole else found

    def before_one(self, lane: int, turn: int, batch_size: int) -> int:
        """Return `before` of one lane."""
        count = self._table(lane % _TABLES).count
        return batch_size * int(count(self.source, turn)) if self.whole else int(count(self.source, turn * batch_size))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, tuple(getattr(self, one.name) for one in fields(self))  # without the tables

    def sources(self, lane: int, turn: int, batch_size: int) -> npt.NDArray[np.uint16]:
        """Return the source of each row of micro-batch ``turn`` of ``lane``: uint16, shape (batch_size,)."""
        source = self._table(lane % _TABLES).source
        if self.whole:
            return np.full(batch_size, source[turn % len(source)])
        first = turn * batch_size % len(source)
        if first + batch_size <= len(source):
            return source[first : first + batch_size]
        return source[(first + np.arange(batch_size)) % len(source)]

    def excess(self, turns: Int64Array, batch_size: int) -> int:
        """Return how many rows of the source all lanes together had too many, times `SCALE`, after ``turns`` (int64,
        shape (lanes,)) micro-batches each, counted in micro-batches where they are ``whole``."""
        unit = 1 if self.whole else batch_size
        counts = int(self.before(np.arange(len(turns)), turns, unit).sum())
        carried = self.carried[self.source] * len(turns) if self.carried else 0
        return carried + counts * SCALE - self.weights[self.source] * int(turns.sum()) * unit

    @cached_property
    def _tables(self) -> dict[int, _Table]:
        return {}

    def _table(self, number: int) -> _Table:
        if number not in self._tables:
            self._tables[number] = _table(self.weights, self.carried, self.seed, number)
        return self._tables[number]


def _made(*values: Any) -> Share:
    return Share(**dict(zip([one.name for one in fields(Share)], values, strict=True)))


@dataclass(frozen=True, slots=True)
class _Table:
    """One period of a mixture."""

    source: npt.NDArray[np.uint16]
    """The source of each row."""
    rows: tuple[Int64Array, ...]
    """For each source, where its rows stand, in ascending order."""

    def count(self, source: int, places: Int64Array | int) -> Int64Array:
        """Return how many rows of ``source`` stand before each of ``places``, counted on over periods."""
        rows = self.rows[source]
        periods, inside = divmod(places, len(self.source))
        return periods * len(rows) + np.searchsorted(rows, inside)


@lru_cache(maxsize=256)
def _table(weights: tuple[int, ...], carried: tuple[int, ...], seed: int, number: int) -> _Table:
    divisor = math.gcd(*weights)
    key, period = derive_key("mixture", seed, number), SCALE // divisor
    words = (hash64(key, np.arange(period, dtype=np.uint64)) >> np.uint64(32)).tolist()
    # Of rows that are due at the same place, the first source's comes first: in each table it is another source.
    order = np.argsort(hash64(key, np.arange(len(weights), dtype=np.uint64) + np.uint64(SCALE)))
    each = [weights[one] // divisor for one in order]
    held = [carried[one] if carried else 0 for one in order]
    for eighths in _HASTE:
        assignment = _Assignment(each, held, [one * eighths for one in words])
        found = assignment.sources(enough=not eighths)
        if len(found) == period:
            break
    source = order[found].astype(np.uint16)
    return _Table(source, tuple(np.flatnonzero(source == one) for one in range(len(weights))))


class _Assignment:
    """The sources of the rows of one period. Each source has its weight of rows in it.

    ``carried`` as in `Share`. ``haste`` (a number for each row, below 2^35) says how much before its deadline a row is
    due: a fraction of the time that it may wait, in units of 2^35.
    """

    def __init__(self, weights: Sequence[int], carried: Sequence[int], haste: Sequence[int]) -> None:
        self.is_exact = True
        """Whether every row so far stands where it may."""
        self._weights, self._carried, self._haste = weights, carried, haste
        self._period = sum(weights)
        self._count = [0] * len(weights)
        self._coming: list[tuple[int, int, int, int]] = []
        """(first place where the row may stand, where it is due, deadline, source)."""
        self._there: list[tuple[int, int, int]] = []
        """The same without the first place, of rows that may stand at the place at hand."""

    def sources(self, *, enough: bool) -> list[int]:
        """Return the source of each row, up to one that may not stand where it does; all, with ``enough``."""
        found: list[int] = []
        for source, weight in enumerate(self._weights):
            if weight:
                self._enter(source, 0)
        for place in range(self._period):
            source = self._source_at(place)
            if not (self.is_exact or enough):
                break
            found.append(source)
            self._count[source] += 1
            if self._count[source] < self._weights[source]:
                self._enter(source, place + 1)
        return found

    def _enter(self, source: int, place: int) -> None:
        """Enter the next row of ``source``, which may stand at ``place`` or later."""
        weight, count = self._weights[source] * SCALE, self._count[source] * SCALE + self._carried[source]
        first = max(place, count * self._period // weight)
        deadline = -(-(count + SCALE) * self._period // weight)
        due = deadline - (max(0, deadline - 1 - first) * self._haste[place] >> 35)
        heapq.heappush(self._coming, (first, due, deadline, source))

    def _source_at(self, place: int) -> int:
        """Return the source of the row at ``place``: of the rows that may stand there, the one that is due first."""
        coming, there = self._coming, self._there
        while coming and coming[0][0] <= place:
            heapq.heappush(there, heapq.heappop(coming)[1:])
        self.is_exact &= bool(there)
        deadline, source = (heapq.heappop(there) if there else heapq.heappop(coming))[-2:]
        self.is_exact &= deadline > place
        return source

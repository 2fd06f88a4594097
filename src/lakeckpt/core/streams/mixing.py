"""This module defines the weights of a mixture, and the share of one source in each micro-batch of a segment.

The source of a row of a lane is a pure function of weights, seed and place
(`lakeckpt.core.streams.turns.Turns`). The module reads nothing, and starts no threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.cached import cached_property
from lakeckpt.core.streams.turns import CARRIED, MOST_ROWS_OFF, Turns
from lakeckpt.wire.documents import Count, as_row

__all__ = ["MAX_SOURCES", "Share", "fractions"]

Int64Array = npt.NDArray[np.int64]

MAX_SOURCES = 1 << 10
"""The most sources of a mixture."""
_SCALES = tuple(1 << bits for bits in range(16, 32))
"""The sums that weights may have."""
_LEAST = 50
"""The least weight above 0: a smaller one would be off by more than 1 %."""

_MOST_PLACES = 1 << 61
"""No lane has more rows."""


def fractions(weights: Mapping[str, float]) -> dict[str, int]:
    """Return ``weights`` as integers that add up to a power of 2, from 2^16 to 2^31. None is off by more than 1 %.

    `ValueError` for weights that are negative, not finite, all 0, or above 0 and too small a part of the sum.

    >>> fractions({"web": 0.7, "code": 0.3, "books": 0})
    {'web': 45875, 'code': 19661, 'books': 0}
    """
    given = {name: float(weight) for name, weight in weights.items()}
    wrong = {name: weight for name, weight in given.items() if not 0 <= weight < math.inf}
    if wrong or not any(given.values()):
        raise ValueError(f"weights are numbers from 0 on, and not all 0, got {wrong or given}")
    largest = max(given.values())
    total = math.fsum(weight / largest for weight in given.values())
    for scale in _SCALES:
        found = {name: round(weight / largest / total * scale) for name, weight in given.items()}
        small = {name: weight for name, weight in given.items() if weight and found[name] < _LEAST}
        if not small:
            break
    else:
        raise ValueError(
            f"weights are 0, or at least 1 / {scale // _LEAST:,} of their sum, got {small} of "
            f"{math.fsum(given.values())}. Give these sources more, or 0"
        )
    found[max(found, key=lambda name: found[name])] += scale - sum(found.values())
    return found


@as_row
@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one source in a mixture, in one segment."""

    source: Count
    """The number of the source."""
    weights: tuple[int, ...]
    """The weights of all sources: integers, as `fractions` returns them."""
    seed: int
    whole: bool = False
    """True if a micro-batch is of one source. False: sources alternate row by row."""
    carried: tuple[int, ...] = ()
    """For each source, the rows that a lane had too many when the segment began, in parts of
    `lakeckpt.core.streams.turns.CARRIED`; empty: none."""

    def __post_init__(self) -> None:
        if sum(self.weights) not in _SCALES or min(self.weights) < 0 or not 0 <= self.source < len(self.weights):
            raise ValueError(f"{self.weights} are not weights of source {self.source} that add up to a power of 2")
        if self.carried and len(self.carried) != len(self.weights):
            raise ValueError(f"{len(self.weights)} sources, and {len(self.carried)} counts that are carried over")

    def before(self, lanes: Int64Array, turns: Int64Array, batch_size: int) -> Int64Array:
        """Return how many rows of the source each of ``lanes`` has in its first ``turns`` micro-batches.

        int64, of one shape, (lanes,).
        """
        if self.whole:
            return batch_size * self._turns.before(self.source, lanes, turns)
        return self._turns.before(self.source, lanes, turns * batch_size)

    def before_one(self, lane: int, turn: int, batch_size: int) -> int:
        """Return `before` of one lane."""
        if self.whole:
            return batch_size * self._turns.before(self.source, lane, turn)
        return self._turns.before(self.source, lane, turn * batch_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, tuple(getattr(self, one.name) for one in fields(self))  # without the rows that were made

    def sources(self, lane: int, turn: int, batch_size: int, count: int = 1) -> npt.NDArray[np.uint16]:
        """Return the source of each row of ``count`` micro-batches of ``lane``, from ``turn`` on: uint16, 1-D."""
        if self.whole:
            return np.repeat(self._turns.sources(lane, turn, turn + count), batch_size)
        return self._turns.sources(lane, turn * batch_size, (turn + count) * batch_size)

    def excess(self, turns: Int64Array, batch_size: int) -> int:
        """Return how many rows of the source all lanes together had too many after ``turns`` (int64, shape (lanes,))
        micro-batches each, in parts of `CARRIED`; counted in micro-batches if they are ``whole``."""
        unit = 1 if self.whole else batch_size
        counts = int(self.before(np.arange(len(turns)), turns, unit).sum())
        carried = self.carried[self.source] * len(turns) if self.carried else 0
        scale = sum(self.weights)
        return carried + (counts * scale - self.weights[self.source] * int(turns.sum()) * unit) * CARRIED // scale

    def turns_around(self, rows: int, batch_size: int) -> tuple[int, int]:
        """Return two numbers of micro-batches. In the first a lane surely has at most ``rows`` rows of the source, in
        the second more (or as many micro-batches as there ever are)."""
        weight = self.weights[self.source]
        rows, unit = (rows // batch_size, 1) if self.whole else (rows, batch_size)
        off = 2 * MOST_ROWS_OFF + 1 + sum(map(abs, self.carried)) // CARRIED
        low, high = ((rows + more) * sum(self.weights) // (weight * unit) for more in (-off, off))
        return min(max(0, low), _MOST_PLACES // unit), min(high + 1, _MOST_PLACES // unit)

    @cached_property
    def _turns(self) -> Turns:
        return _turns(self.weights, self.carried, self.seed)


def _made(*values: Any) -> Share:
    return Share(**dict(zip([one.name for one in fields(Share)], values, strict=True)))


@lru_cache(maxsize=64)
def _turns(weights: tuple[int, ...], carried: tuple[int, ...], seed: int) -> Turns:
    return Turns(weights, carried, seed)

"""This module deals what is left of an epoch to lanes, as micro-batches.

A `Rest` holds the positions that are not consumed yet. A *deal* begins at micro-batch ``first`` with a rest and deals
it to ``num_lanes`` lanes in turn: micro-batch m is the next ``batch_size`` rows of lane m mod num_lanes. A topology
change that keeps the lanes goes on with the same deal. Any other change (a re-cut) deals what is left of one deal anew.
Positions are divided, never permuted again: an epoch that has begun keeps the layout (lanes and windows) that it began
with.

`EpochDeal` deals one epoch: lane k holds the k-th equal share of the rest, in the order of positions. All lanes give
the same number T of micro-batches, although they differ by a row (q or q + 1 rows, of micro-batches of B):

=========  ==========================================  ==========================================================
tail       T                                           rows
=========  ==========================================  ==========================================================
``short``  ceil(rows of the longest lane / B)          B each; the last two share what remains, and the first of them
                                                       gets the odd row; no row is dropped
``drop``   floor(q / B)                                B each; up to B of each lane are dropped
``carry``  floor(q / B)                                B each; up to B of each lane are left, for the next tranche of a
                                                       table that grows
=========  ==========================================  ==========================================================

`lakeckpt.core.streams.stream` deals epochs without end. A deal knows neither ranks nor steps: `lakeckpt.core.plan`
gives its micro-batches to ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lakeckpt.cached import cached_property
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import Tail, lane_bounds
from lakeckpt.core.receipts import Span
from lakeckpt.wire.documents import Count, Positive, as_row

__all__ = ["Begun", "EpochDeal", "Left", "Rest", "inside", "micro_batches", "rows_before", "spans_of", "turns"]

Int64Array = npt.NDArray[np.int64]


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The rest of an epoch that has begun, and the layout that it began with."""

    epoch: Count
    num_lanes: Count
    rotation: Count
    positions: Intervals
    order: Identity | None = None
    """The order that it began with, if epochs that begin later have another one; None: it is that of the state."""

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.num_lanes < 1 or not 0 <= self.rotation < self.num_lanes:
            raise ValueError(f"epoch {self.epoch} cannot have {self.num_lanes} lanes rotated by {self.rotation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """All positions that are not consumed: parts of epochs that have begun, and every epoch from ``next_epoch`` on."""

    begun: tuple[Left, ...]
    next_epoch: Count

    def __post_init__(self) -> None:
        epochs = [left.epoch for left in self.begun]
        if epochs != sorted(set(epochs)) or (epochs and epochs[-1] >= self.next_epoch):
            raise ValueError(f"epochs {epochs} before {self.next_epoch} are not in order")

    def of(self, epoch: int, rows: int) -> Intervals:
        """Return what is left of ``epoch``, which has ``rows`` rows."""
        if epoch >= self.next_epoch:
            return Intervals.whole(rows)
        return next((left.positions for left in self.begun if left.epoch == epoch), Intervals.empty())


@as_row
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Begun:
    """A position of which ``offset`` items, but not all, are consumed."""

    epoch: Count
    position: Count
    offset: Positive
    source: Count | None = None
    """The number of the source of a mixture; None: there is one."""


def inside(rest: Rest, identity: Identity, begun: tuple[Begun, ...]) -> tuple[Begun, ...]:
    """Return those of ``begun`` whose positions are in ``rest``."""
    kept = []
    for epoch in dict.fromkeys(one.epoch for one in begun):
        left, here = rest.of(epoch, identity.rows_of(epoch)), [one for one in begun if one.epoch == epoch]
        at = np.searchsorted(left.starts, [one.position for one in here], side="right") - 1
        kept += [one for one, which in zip(here, at, strict=True) if which >= 0 and one.position < left.stops[which]]
    return tuple(kept)


def turns(done: int, num_lanes: int) -> Int64Array:
    """Return how many of the first ``done`` micro-batches each lane gives: int64, shape (num_lanes,)."""
    each, over = divmod(done, num_lanes)
    return each + (np.arange(num_lanes) < over).astype(np.int64)


def micro_batches(rows: int, num_lanes: int, batch_size: int, tail: Tail) -> int:
    """Return T: how many micro-batches each lane gives, if ``num_lanes`` lanes share ``rows`` rows.

    >>> micro_batches(41, 4, 5, "short"), micro_batches(41, 4, 5, "drop")
    (3, 2)
    """
    if tail != "short":
        return rows // num_lanes // batch_size
    longest = -(-rows // num_lanes)
    return -(-longest // batch_size)


def rows_before(limit: Int64Array, count: int, batch_size: int, turns: Int64Array) -> Int64Array:
    """Return how many rows a lane gives in its first ``turns`` of ``count`` micro-batches.

    ``limit`` (the rows that the lane gives) and ``turns`` are int64 of one shape.

    >>> [int(rows_before(np.array([11]), 3, 5, np.array([turn]))[0]) for turn in range(4)]
    [0, 5, 8, 11]
    """
    full = np.minimum(turns, max(count - 2, 0)) * batch_size
    shared = limit - max(count - 2, 0) * batch_size
    middle = full + (shared + 1) // 2 if count >= 2 else full
    return np.where(turns >= count, limit, np.where(turns == count - 1, middle, full))


def spans_of(epoch: int, positions: Iterable[tuple[int, int]]) -> list[Span]:
    """Return ``positions`` of ``epoch``, given as (start, stop), as spans."""
    return [Span(epoch=epoch, start=start, stop=stop) for start, stop in positions]


@dataclass(frozen=True, kw_only=True)
class EpochDeal:
    """One epoch, or what is left of it: see the module. Micro-batches below ``first`` are not part of it."""

    first: int
    """The first micro-batch, which is from lane 0."""
    num_lanes: int
    batch_size: int
    tail: Tail
    left: Left
    count: int = field(init=False)
    """Micro-batches of each lane."""

    def __post_init__(self) -> None:
        size = self.left.positions.size
        object.__setattr__(self, "count", micro_batches(size, self.num_lanes, self.batch_size, self.tail))

    @cached_property
    def bounds(self) -> Int64Array:
        """Where lanes begin and end among what is left: int64, shape (num_lanes + 1,)."""
        return lane_bounds(self.left.positions.size, self.num_lanes)

    @cached_property
    def limits(self) -> Int64Array:
        """How many rows each lane gives: int64, shape (num_lanes,)."""
        rows = np.diff(self.bounds)
        return np.minimum(rows, self.count * self.batch_size) if self.tail != "short" else rows

    def _before(self, turns: Int64Array) -> Int64Array:
        """Return how many rows each lane gives in its first ``turns`` micro-batches: int64, shape (num_lanes,)."""
        return rows_before(self.limits, self.count, self.batch_size, turns)

    @cached_property
    def end(self) -> int:
        """``first`` plus the number of micro-batches of this deal. Trailing micro-batches without a row do not
        count."""
        if not self.count:
            return self.first
        before = self._before(np.full(self.num_lanes, self.count - 1))
        last_turn = np.flatnonzero(self.limits > before)
        # Lanes with a row in the last turn come first: the first lanes have the extra rows.
        return self.first + (self.count - 1) * self.num_lanes + len(last_turn)

    def spans(self, micro_batch: int) -> list[Span]:
        """Return the positions of ``micro_batch``, in the order of its rows."""
        turn, lane = divmod(micro_batch - self.first, self.num_lanes)
        start = self._begins[lane]
        if turn < self.count - 2:  # nearly all are
            low = start + turn * self.batch_size
            if self._shift is not None:
                low += self._shift
                return [Span(epoch=self.left.epoch, start=low, stop=low + self.batch_size)]
            return spans_of(self.left.epoch, self.left.positions.take(low, low + self.batch_size))
        return self.lane_spans(lane, self.done(lane, turn), self.done(lane, turn + 1))

    def done(self, lane: int, turn: int) -> int:
        """Return how many positions ``lane`` gives in its first ``turn`` micro-batches."""
        return int(rows_before(self.limits[lane : lane + 1], self.count, self.batch_size, np.array([turn]))[0])

    def lane_spans(self, lane: int, start: int, stop: int) -> list[Span]:
        """Return the ``start``-th to ``stop``-th (exclusive) positions of ``lane``."""
        begin = self._begins[lane]
        return spans_of(self.left.epoch, self.left.positions.take(begin + start, begin + stop))

    @cached_property
    def _begins(self) -> list[int]:
        """Where lanes begin, as plain numbers: `spans` is called for every micro-batch."""
        found: list[int] = self.bounds.tolist()
        return found

    @cached_property
    def _shift(self) -> int | None:
        """Where what is left begins, if it is one interval; else None."""
        return int(self.left.positions.starts[0]) if len(self.left.positions) == 1 else None

    def rows_of(self, start: int, stop: int) -> int:
        """Return how many rows micro-batches ``start`` … ``stop`` - 1 have together."""
        if (stop - 1 - self.first) // self.num_lanes < self.count - 2:
            return (stop - start) * self.batch_size
        turn, lane = np.divmod(np.arange(start, stop) - self.first, self.num_lanes)
        limits = self.limits[lane]
        before = rows_before(limits, self.count, self.batch_size, turn)
        return int((rows_before(limits, self.count, self.batch_size, turn + 1) - before).sum())

    def rest(self, micro_batch: int) -> Rest:
        """Return what is left when every micro-batch below ``micro_batch`` has been consumed."""
        return self.rest_of(self._before(turns(micro_batch - self.first, self.num_lanes)))

    def rest_of(self, done: Int64Array) -> Rest:
        """Return what is left when each lane has given its first ``done`` rows: int64, shape (num_lanes,)."""
        positions = self.left.positions.select(self.bounds[:-1] + done, self.bounds[1:])
        left = Left(
            epoch=self.left.epoch,
            positions=positions,
            num_lanes=self.left.num_lanes,
            rotation=self.left.rotation,
            order=self.left.order,
        )
        return Rest(begun=(left,), next_epoch=self.left.epoch + 1)

    def layout(self, epoch: int) -> tuple[int, int]:
        """Return the lanes and the rotation of the layout of ``epoch``."""
        if epoch != self.left.epoch:
            raise ValueError(f"epoch {epoch} is not dealt here, epoch {self.left.epoch} is")
        return self.left.num_lanes, self.left.rotation

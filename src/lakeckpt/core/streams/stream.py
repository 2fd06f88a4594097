"""This module deals the epochs of an endless stream to lanes, as micro-batches.

Lane k of an endless stream holds its share of every epoch, one after the other: micro-batches run over epoch borders
and are always full. The extra rows of uneven shares rotate over the lanes (epoch e gives its ``rem`` extra rows to the
lanes (e * rem + i) mod num_lanes), so that lanes never drift more than one row apart, and where a lane stands after any
number of epochs is a closed formula.

As a source of a mixture, a stream has only its share of each micro-batch (`lakeckpt.core.streams.mixing.Share`), and
a lane may have more rows than another.

A *unit* is the part of one epoch that a stream deals: first the rests of epochs that had begun when the deal was made,
then whole epochs. The module never keeps state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lakeckpt.cached import cached_property
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest, spans_of, turns
from lakeckpt.core.order import lane_bounds
from lakeckpt.core.receipts import Span
from lakeckpt.core.streams.mixing import Share

__all__ = ["StreamDeal"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """The part of one epoch that a stream deals."""

    epoch: int
    positions: Intervals
    bounds: Int64Array
    """Where lanes begin and end among ``positions``: int64, shape (num_lanes + 1,)."""
    before: Int64Array
    """Rows that each lane has in earlier units: int64, shape (num_lanes,)."""


class _Stretch(NamedTuple):
    """The part of a unit that a lane has."""

    number: int
    """The number of the unit."""
    unit: _Unit
    low: int
    high: int
    """The rows of the lane that are of the unit, counted over all units."""
    shift: int | None
    """The difference of a row's position and its number; None if the positions are of several intervals."""


def _stretch_of(unit: _Unit, index: int, lane: int) -> _Stretch:
    begin, end, low = int(unit.bounds[lane]), int(unit.bounds[lane + 1]), int(unit.before[lane])
    shift = int(unit.positions.starts[0]) + begin - low if len(unit.positions) == 1 else None
    return _Stretch(index, unit, low, low + end - begin, shift)


@dataclass(frozen=True, kw_only=True)
class StreamDeal:
    """A deal as `lakeckpt.core.lanes.EpochDeal`, of epochs without end: see the module."""

    first: int
    num_lanes: int
    batch_size: int
    rows: int
    """Rows of a whole epoch, at least 1; in a packed order, tokens, at least ``unit``."""
    start: Rest
    unit: int = 1
    """Tokens of a position in a packed order: the epochs together are cut into positions. 1: a position is a row."""
    phase: int = 0
    """The token of epoch 0 at which its first position begins, in a packed order."""
    share: Share | None = None
    """The share of the stream in each micro-batch of a mixture; None: micro-batches are full."""

    def __post_init__(self) -> None:
        if self.rows < self.unit:
            raise ValueError("an endless stream needs a table of at least one row, or of one packed sequence")

    @property
    def end(self) -> None:
        """None: the stream does not end."""
        return None

    @cached_property
    def _begun(self) -> tuple[_Unit, ...]:
        units, before, extras = [], np.zeros(self.num_lanes, np.int64), 0
        for left in self.start.begun:
            bounds = lane_bounds(left.positions.size, self.num_lanes, extras % self.num_lanes)
            units.append(_Unit(epoch=left.epoch, positions=left.positions, bounds=bounds, before=before))
            before = before + np.diff(bounds)
            extras += left.positions.size % self.num_lanes
        return tuple(units)

    @cached_property
    def _offset(self) -> int:
        """The lane to which the first whole epoch gives its first extra row."""
        return sum(left.positions.size % self.num_lanes for left in self.start.begun) % self.num_lanes

    def _positions(self, whole: int) -> int:
        """Return how many positions the first ``whole`` whole epochs have."""
        first, rows, unit, phase = self.start.next_epoch, self.rows, self.unit, self.phase
        return -(-((first + whole) * rows - phase) // unit) - -(-(first * rows - phase) // unit)

    def _rotation(self, whole: int) -> int:
        return (self._offset + self._positions(whole)) % self.num_lanes

    def _before(self, whole: int) -> Int64Array:
        """Positions that each lane has before the ``whole``-th whole epoch."""
        # They fall one by one on the lanes offset, offset + 1, …, modulo the number of lanes.
        share, extra = divmod(self._positions(whole), self.num_lanes)
        falls = (np.arange(self.num_lanes) - self._offset) % self.num_lanes < extra
        begun = self._begun[-1].before + np.diff(self._begun[-1].bounds) if self._begun else 0
        return np.asarray(begun + share + falls, np.int64)

    def _unit(self, index: int) -> _Unit:
        whole = index - len(self._begun)
        if whole < 0:
            return self._begun[index]
        positions = self._positions(whole + 1) - self._positions(whole)
        return _Unit(
            epoch=self.start.next_epoch + whole,
            positions=Intervals.whole(positions),
            bounds=lane_bounds(positions, self.num_lanes, self._rotation(whole)),
            before=self._before(whole),
        )

    def _unit_of(self, lane: int, offset: int) -> int:
        """Return the unit in which ``lane`` has its row ``offset``."""
        for index, unit in enumerate(self._begun):
            if offset < int(unit.before[lane] + unit.bounds[lane + 1] - unit.bounds[lane]):
                return index
        ahead = offset - int(self._before(0)[lane])
        # A near guess: of each epoch a lane has its positions / num_lanes.
        whole = max(0, ahead * self.num_lanes * self.unit // self.rows - 1)
        while whole and self._before(whole)[lane] > offset:
            whole -= 1
        while self._before(whole + 1)[lane] <= offset:
            whole += 1
        return len(self._begun) + whole

    @cached_property
    def _recent(self) -> dict[int, _Stretch]:
        """Lane → the unit that it was in last: the next micro-batch nearly always begins there."""
        return {}

    def _known_unit_of(self, lane: int, offset: int) -> int:
        """Return `_unit_of`, which costs more if the lane has left the unit that it was in."""
        recent = self._recent.get(lane)
        if recent is None or not recent.low <= offset < recent.high:
            index = self._unit_of(lane, offset)
            recent = self._recent[lane] = _stretch_of(self._unit(index), index, lane)
        return recent.number

    def _pieces(self, lane: int, start: int, stop: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        index = self._known_unit_of(lane, start)
        while start < stop:
            recent = self._recent[lane]
            unit = recent.unit if recent.number == index else self._unit(index)
            low, high = int(unit.bounds[lane]), int(unit.bounds[lane + 1])
            begin = low + start - int(unit.before[lane])
            upto = min(high, low + stop - int(unit.before[lane]))
            if begin < upto:
                yield unit.epoch, unit.positions.take(begin, upto)
                start += upto - begin
            index += 1

    def spans(self, micro_batch: int) -> list[Span]:
        """See `lakeckpt.core.lanes.EpochDeal`."""
        turn, lane = divmod(micro_batch - self.first, self.num_lanes)
        return self.lane_spans(lane, self.done(lane, turn), self.done(lane, turn + 1))

    def done(self, lane: int, turn: int) -> int:
        """See `lakeckpt.core.lanes.EpochDeal`."""
        return turn * self.batch_size if self.share is None else self.share.before_one(lane, turn, self.batch_size)

    def lane_spans(self, lane: int, start: int, stop: int) -> list[Span]:
        """Return the ``start``-th to ``stop``-th (exclusive) positions of ``lane``, over epoch borders."""
        recent = self._recent.get(lane)
        if recent is not None and recent.low <= start < stop <= recent.high and recent.shift is not None:
            return [Span(epoch=recent.unit.epoch, start=start + recent.shift, stop=stop + recent.shift)]
        pieces = self._pieces(lane, start, stop) if start < stop else ()
        return [span for epoch, positions in pieces for span in spans_of(epoch, positions)]

    def rows_of(self, start: int, stop: int) -> int:
        """See `lakeckpt.core.lanes.EpochDeal`."""
        if self.share is None:
            return (stop - start) * self.batch_size
        turn, lane = np.divmod(np.arange(start, stop) - self.first, self.num_lanes)
        if stop - start == 1:
            before = (self.share.before_one(int(lane[0]), int(turn[0]) + more, self.batch_size) for more in (1, 0))
            return next(before) - next(before)
        return int((self._before_turns(lane, turn + 1) - self._before_turns(lane, turn)).sum())

    def _before_turns(self, lanes: Int64Array, turns: Int64Array) -> Int64Array:
        """Return how many positions each of ``lanes`` gives in its first ``turns`` micro-batches."""
        if self.share is None:
            return turns * self.batch_size
        return self.share.before(lanes, turns, self.batch_size)

    def end_of(self, epoch: int) -> int | None:
        """Return the first micro-batch that has positions of a later epoch than ``epoch``; None if there is none."""
        if self.share is not None and not self.share.weights[self.share.source]:
            return None
        whole, begun = epoch + 1 - self.start.next_epoch, [one for one in self._begun if one.epoch <= epoch]
        every = np.zeros(self.num_lanes, np.int64)
        if whole >= 0:
            every = self._before(whole)
        elif begun:
            every = begun[-1].before + np.diff(begun[-1].bounds)
        lanes, (low, high) = np.arange(self.num_lanes), self._turns_around(every)
        while (low < high).any():  # the most turns after which no lane has more than it has of epochs up to this one
            middle = (low + high + 1) // 2
            fits = self._before_turns(lanes, middle) <= every
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return self.first + int((low * self.num_lanes + lanes).min())

    def _turns_around(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return numbers of micro-batches in which each lane surely gives fewer, and more, than ``rows`` positions."""
        if self.share is None:
            return rows // self.batch_size, rows // self.batch_size + 1
        found = [self.share.turns_around(int(one), self.batch_size) for one in rows]
        return np.array([low for low, _ in found], np.int64), np.array([high for _, high in found], np.int64)

    def rest(self, micro_batch: int) -> Rest:
        """See `lakeckpt.core.lanes.EpochDeal`."""
        done = turns(micro_batch - self.first, self.num_lanes)
        return self.rest_of(self._before_turns(np.arange(self.num_lanes), done))

    def rest_of(self, done: Int64Array, partly: Int64Array | None = None) -> Rest:
        """Return what is left when each lane has given its first ``done`` rows: int64, shape (num_lanes,).

        ``partly`` (of the same shape) is 1 where a part of the lane's next row was given, too; None: nowhere. The epoch
        of such a row keeps its layout.
        """
        read = done if partly is None else done + partly
        reached = [self._unit_of(lane, int(done[lane])) for lane in range(self.num_lanes)]
        lefts, entered = [], max(min(reached), len(self._begun)) - 1
        for index in range(min(reached), max(max(reached) + 1, len(self._begun))):
            unit = self._unit(index)
            inside, reading = (np.clip(one - unit.before, 0, np.diff(unit.bounds)) for one in (done, read))
            positions = unit.positions.select(unit.bounds[:-1] + inside, unit.bounds[1:])
            lefts.append((index, replace(self.whole(unit.epoch), positions=positions)))
            if reading.any():
                entered = max(entered, index)
        begun = tuple(left for index, left in lefts if index <= entered and left.positions)
        return Rest(begun=begun, next_epoch=self.start.next_epoch + entered + 1 - len(self._begun))

    def whole(self, epoch: int) -> Left:
        """Return what the deal began with of ``epoch``, with its layout: of epochs that had not begun, nothing is
        named. ValueError if the epoch is over."""
        for left in self.start.begun:
            if left.epoch == epoch:
                return left
        if epoch < self.start.next_epoch:
            raise ValueError(f"epoch {epoch} is over: the stream goes on from epoch {self.start.next_epoch}")
        rotation = self._rotation(epoch - self.start.next_epoch)
        return Left(epoch=epoch, positions=Intervals.empty(), num_lanes=self.num_lanes, rotation=rotation)

    def layout(self, epoch: int) -> tuple[int, int]:
        """See `lakeckpt.core.lanes.EpochDeal`."""
        found = self.whole(epoch)
        return found.num_lanes, found.rotation

"""This module computes from a reader state which rows each rank gets in each step, without asking anyone.

Within a segment that began at micro-batch m0 and step s0, rank r of W takes micro-batch ``m0 + (s - s0) * W + r`` in
step s. If the micro-batches left do not fill a step, the rows of that last step are dealt out equally, so that every
rank has the same number of steps (with ``drop_last=True`` they are dropped).

If consumption depends on the data, the plan says which lane a rank reads in a step, and which positions a lane has; how
far it comes with them, the receipts say. `lakeckpt.core.changes` goes on with another topology. The module never reads
a table or changes a state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lakeckpt.cached import cached_property
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Begun, EpochDeal, Left, Rest, inside
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.receipts import LaneMove, LaneRead, Receipt, Span
from lakeckpt.core.state import Frontier, Segment, State, lanes_of
from lakeckpt.core.streams.mixing import Share
from lakeckpt.core.streams.stream import StreamDeal
from lakeckpt.errors import StateError

__all__ = [
    "Assignment",
    "LaneRest",
    "LayoutKey",
    "Plan",
    "cut_spans",
    "deal_key",
    "deals",
    "dealt_in",
    "share_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKey:
    """The arguments of `lakeckpt.core.order.EpochLayout.build` that differ between the epochs of a table."""

    epoch: int
    num_lanes: int
    rotation: int
    phase: int = 0
    table: str = ""
    """The index of the table by which it is laid out, if epochs that begin later have another one; empty: that of the
    state."""

    def layout(self, spec: OrderSpec, rows: npt.NDArray[np.int64], unit: int, *, endless: bool) -> EpochLayout:
        """Return the layout over row groups of ``rows`` rows each: see `lakeckpt.core.order.EpochLayout.build`."""
        return EpochLayout.build(
            rows, spec, self.epoch, self.num_lanes, self.rotation, unit=unit, endless=endless, phase=self.phase
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A micro-batch dealt to a rank, with the layouts of the epochs that its positions are of."""

    receipt: Receipt
    layouts: tuple[LayoutKey, ...]
    owner: int
    """The number of its lane among this rank's lanes, counted from 0: the worker that owns the lane reads it."""
    lanes: int
    """How many lanes this rank has."""


LaneRest = tuple[Callable[[int, int], list[Span]], int, int | None]
"""The rest of a lane: a function that returns its ``start``-th to ``stop``-th positions, how many of them are consumed,
and how many it has; None: it has no end."""


class Plan:
    """The consequences of a reader state, or of a mixture as one of its sources sees it (`State.of`). Made once for a
    segment; `assignment` takes any step of the segment.

    Raises `StateError` if the state holds frontiers that no lane has.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.segment = state.segment
        self.deal, self.base = deque(deals(state), maxlen=1).pop()
        self.first = self.deal.first
        """The first micro-batch of the deal."""
        self._recent: tuple[LayoutKey, ...] = ()
        self._end = None if state.held else self.deal.end
        """One past the last micro-batch; None: there is none, or its number depends on the data."""
        if state.held is not None and self.sizes is not None:
            self._check_frontiers(self.sizes)

    @cached_property
    def _reader(self) -> str:
        return self.state.digest

    @cached_property
    def steps(self) -> int | None:
        """The number of steps of the epoch, those of earlier segments included; None if it is endless, or if the number
        depends on the data."""
        if self._end is None:
            return None
        left, world_size = self._end - self.segment.micro_batch, self.segment.world_size
        whole = -(-left // world_size) if self.state.identity.tail == "short" else left // world_size
        return self.segment.step + whole

    def micro_batch(self, step: int) -> int:
        """Return the first micro-batch of ``step``: what lies below it has been consumed when the step begins."""
        segment, end = self.segment, self._end
        first = segment.micro_batch + (step - segment.step) * segment.world_size
        return first if end is None or first < end else end

    def owner(self, step: int, rank: int) -> int:
        """Return which of its lanes ``rank`` reads in ``step``: the ``owner`` of that assignment."""
        world_size, first = self.segment.world_size, self.micro_batch(step)
        is_whole = self.micro_batch(step + 1) - first == world_size
        return (first + rank) % self.segment.num_lanes // world_size if is_whole else 0

    def lane_rest(self, lane: int, turn: int) -> LaneRest:
        """Return what is left of a lane of the deal after its first ``turn`` micro-batches."""
        end = None if self.sizes is None else self.sizes[lane]
        return partial(self.deal.lane_spans, lane), self.deal.done(lane, turn), end

    def assignment(self, step: int, rank: int, *, row_wise: bool = False) -> Assignment:
        """Return what ``rank`` gets in ``step``; ``row_wise``: the rank never gets a micro-batch without a row."""
        world_size, num_lanes = self.segment.world_size, self.segment.num_lanes
        first = self.micro_batch(step)
        stop = self.micro_batch(step + 1)
        number = first + rank
        if stop - first == world_size:
            spans, lane = self.deal.spans(number), number % num_lanes
        else:
            spans, lane = self._equal_part(first, stop, rank), -1
        receipt = Receipt(
            epoch=self.state.epoch,
            micro_batch=number,
            lane=lane,
            step=step,
            rank=rank,
            world_size=world_size,
            spans=tuple(spans),
            step_rows=self.deal.rows_of(first, stop),
            reader=self._reader,
            last=self._is_last(step, rank, row_wise=row_wise),
        )
        return Assignment(
            receipt=receipt,
            layouts=self.layouts_of(spans),
            owner=max(lane, 0) // world_size,
            lanes=num_lanes // world_size,
        )

    def _is_last(self, step: int, rank: int, *, row_wise: bool) -> bool | None:
        if self.state.identity.tail == "carry":
            return None  # what is left goes over to the next tranche, if there is one
        is_before_last = row_wise and self.steps == step + 2
        return self.steps == step + 1 or (is_before_last and not self.has_rows(rank, from_step=step + 1))

    def layouts_of(self, spans: list[Span]) -> tuple[LayoutKey, ...]:
        """Return the layouts of the epochs that ``spans`` are of."""
        if len(spans) == 1 and self._recent and self._recent[0].epoch == spans[0].epoch:
            return self._recent
        keys = [self.layout(epoch) for epoch in dict.fromkeys(span.epoch for span in spans)]
        self._recent = tuple(keys[-1:])
        return tuple(keys)

    def step_rows(self, step: int) -> int:
        """Return how many rows all ranks get in ``step``."""
        return self.deal.rows_of(self.micro_batch(step), self.micro_batch(step + 1))

    def has_rows(self, rank: int, *, from_step: int) -> bool:
        """Return whether a step from ``from_step`` on has rows for ``rank``."""
        return self.steps is None or any(
            self.assignment(step, rank).receipt.rows for step in range(from_step, self.steps)
        )

    def _equal_part(self, first: int, stop: int, rank: int) -> list[Span]:
        spans = [span for number in range(first, stop) for span in self.deal.spans(number)]
        share, extra = divmod(sum(span.rows for span in spans), self.segment.world_size)
        low = rank * share + min(rank, extra)
        return cut_spans(spans, low, low + share + (rank < extra))

    def rest(self, step: int) -> Rest:
        """Return what is left when ``step`` steps are done, in lockstep."""
        return self.deal.rest(self.micro_batch(step))

    @cached_property
    def left(self) -> Rest:
        """The rest at the state, positions that have begun included. Lanes that are not held have consumed
        nothing."""
        if self.state.held is None:
            return self.rest(self.state.step)
        done, partly = np.zeros((2, self.segment.num_lanes), np.int64)
        for lane, (count, offset) in self.state.frontiers.items():
            done[lane], partly[lane] = count, offset > 0
        return self.deal.rest_of(done) if isinstance(self.deal, EpochDeal) else self.deal.rest_of(done, partly)

    @property
    def begun(self) -> tuple[Begun, ...]:
        """The positions of which some items are consumed at the state, but not all."""
        if self.state.held is None:
            return ()
        begun = dict(self._begun)
        for lane, (count, offset) in self.state.frontiers.items():
            if offset:
                (at,) = self.lane_spans(lane, count, count + 1)
                begun[at.epoch, at.start] = max(offset, begun.get((at.epoch, at.start), 0))
        named = tuple(
            Begun(epoch=epoch, position=at, offset=begun[epoch, at], source=self.state.source)
            for epoch, at in sorted(begun)
        )
        return inside(self.left, self.state.identity, named)

    @property
    def at_end(self) -> bool:
        """True if nothing of the epoch is left to be dealt, in the lanes that the state holds."""
        if self.state.held is None:
            return self.steps is not None and self.state.step >= self.steps
        sizes = self.sizes
        return sizes is not None and all(count == sizes[lane] for lane, (count, _) in self.state.frontiers.items())

    # --- lanes, if consumption depends on the data

    @cached_property
    def sizes(self) -> list[int] | None:
        """The positions of each lane; None if lanes do not end."""
        found: list[int] | None = self.deal.limits.tolist() if isinstance(self.deal, EpochDeal) else None
        return found

    def lane(self, step: int, rank: int, open_lanes: Collection[int] | None = None) -> int:
        """Return the lane that ``rank`` reads in ``step``: that of its micro-batch m, m mod L, while all its lanes have
        items. ``open_lanes``: those of its lanes that have more, at least one; it takes turns among them.
        """
        segment, number = self.segment, self.micro_batch(step) + rank
        if open_lanes is None or len(open_lanes) == segment.num_lanes // segment.world_size:
            return number % segment.num_lanes
        return sorted(open_lanes)[number // segment.world_size % len(open_lanes)]

    def lane_spans(self, lane: int, start: int, stop: int) -> list[Span]:
        """Return the ``start``-th to ``stop``-th (exclusive) positions of ``lane``, in their order."""
        return self.deal.lane_spans(lane, start, stop)

    def skips(self, spans: Iterable[Span]) -> dict[Span, int]:
        """Return, for the positions of ``spans`` that had begun when the lanes were dealt, their consumed items."""
        if not self._begun:
            return {}
        single = [Span(epoch=one.epoch, start=at, stop=at + 1) for one in spans for at in range(one.start, one.stop)]
        return {one: self._begun[one.epoch, one.start] for one in single if (one.epoch, one.start) in self._begun}

    def open_lanes(self, rank: int) -> dict[int, Frontier]:
        """Return the lanes of ``rank`` of which a position is left at the state, and their frontiers there."""
        lanes, frontiers = lanes_of(self.segment, Intervals.of([(rank, rank + 1)])).tolist(), self.state.frontiers
        sizes = self.sizes
        return {lane: frontiers[lane] for lane in lanes if sizes is None or frontiers[lane][0] < sizes[lane]}

    def receipt(self, step: int, rank: int, read: LaneRead | None, moves: tuple[LaneMove, ...] = ()) -> Receipt:
        """Return the receipt of what ``rank`` gets in ``step``: ``read``, or no row. ``moves`` are of other lanes."""
        segment = self.segment
        return Receipt(
            epoch=self.state.epoch,
            micro_batch=self.micro_batch(step) + rank,
            lane=-1 if read is None else read.move.lane,
            step=step,
            rank=rank,
            world_size=segment.world_size,
            spans=() if read is None else read.spans,
            step_rows=segment.batch_size * segment.world_size,
            reader=self._reader,
            items=0 if read is None else read.items,
            moves=moves if read is None else (*moves, read.move),
        )

    def layout(self, epoch: int) -> LayoutKey:
        """Return the layout of ``epoch``."""
        num_lanes, rotation = self.deal.layout(epoch)
        order = self.state.order_of(epoch)
        table = order.table if order is not self.state.identity else ""
        return LayoutKey(epoch=epoch, num_lanes=num_lanes, rotation=rotation, phase=order.phase, table=table)

    @cached_property
    def _begun(self) -> dict[tuple[int, int], int]:
        return {(one.epoch, one.position): one.offset for one in self.state.begun}

    def _check_frontiers(self, sizes: list[int]) -> None:
        for lane, (done, offset) in self.state.frontiers.items():
            if done > sizes[lane] or (done == sizes[lane] and offset):
                raise StateError(
                    f"no job comes to this reader state: lane {lane} stands at ({done}, {offset}), and it has "
                    f"{sizes[lane]} positions. It was damaged or made by hand: load a state as it was saved"
                )


def deals(state: State) -> Iterator[tuple[EpochDeal | StreamDeal, Rest | None]]:
    """Yield for each segment the deal it is of, and the rest that the deal began with (None: all)."""
    deal, base = _deal(state, state.segments[0], state.base), state.base
    yield deal, base
    for before, segment in pairwise(state.segments):
        if deal_key(segment) != deal_key(before):
            base = deal.rest(segment.micro_batch)
            deal = _deal(state, segment, base)
        yield deal, base


def dealt_in(segments: Sequence[Segment]) -> int:
    """Return the number of the segment with which the deal of the last one began."""
    number = len(segments) - 1
    while number and deal_key(segments[number - 1]) == deal_key(segments[number]):
        number -= 1
    return number


def deal_key(segment: Segment) -> tuple[object, ...]:
    """Return all of a segment that a deal depends on."""
    return segment.num_lanes, segment.batch_size, segment.weights, segment.carried


def _deal(state: State, segment: Segment, rest: Rest | None) -> EpochDeal | StreamDeal:
    identity, num_lanes = state.identity, segment.num_lanes
    # Micro-batches of a deal have no meaning if consumption depends on the data.
    first, batch_size = (segment.micro_batch, segment.batch_size) if state.held is None else (0, 1)
    if identity.endless:
        rest = rest or Rest(begun=(), next_epoch=0)
        return StreamDeal(
            first=first,
            num_lanes=num_lanes,
            batch_size=batch_size,
            rows=identity.tokens or identity.rows,
            start=rest,
            unit=identity.unit,
            phase=identity.phase,
            share=None if state.held is not None or state.mixing is None else share_of(state, segment),
        )
    whole = Left(epoch=state.epoch, positions=Intervals.whole(identity.rows), num_lanes=num_lanes, rotation=0)
    left, tail = rest.begun[0] if rest else whole, identity.tail if state.held is None else "short"
    return EpochDeal(first=first, num_lanes=num_lanes, batch_size=batch_size, tail=tail, left=left)


def share_of(state: State, segment: Segment) -> Share:
    """Return what the source of a mixture that is looked at has of each micro-batch."""
    assert state.mixing is not None and state.source is not None and segment.weights is not None
    return Share(
        source=state.source,
        weights=segment.weights,
        seed=state.mixing.seed,
        whole=state.mixing.whole,
        carried=segment.carried or (),
    )


def cut_spans(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """Return the ``start``-th to ``stop``-th (exclusive) rows of ``spans``."""
    cut, before = [], 0
    for span in spans:
        low, high = max(start - before, 0), min(stop - before, span.rows)
        if low < high:
            cut.append(Span(epoch=span.epoch, start=span.start + low, stop=span.start + high))
        before += span.rows
    return cut

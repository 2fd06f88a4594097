"""This module reads micro-batches of the lanes of a flow, in one process, for one iteration.

Items that the transform yielded beyond a micro-batch wait for the next one of their lane: at most those of one row. The
threads are those of `lakeckpt.data.flows.source.LaneRows`; `FlowReading.close` ends them, and so does its deletion.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import LaneMove, LaneRead, Receipt
from lakeckpt.core.state import Frontier, State
from lakeckpt.core.streams.lane_batches import LaneBatches
from lakeckpt.data.flows.source import FlowSource, LaneRows
from lakeckpt.errors import StateUnavailable

__all__ = ["FlowReading", "Found"]

Found = tuple[LaneRead, dict[str, Any] | None]
"""A micro-batch of a lane: what was read for it, and its columns; None if it has no rows."""


class FlowReading(Iterator[tuple[Receipt, Found]]):
    """The lanes of ``rank`` that ``owns`` accepts, from ``state`` on. For one thread.

    `take` gives the next micro-batch of a lane. A worker iterates: it yields micro-batches of its lanes in turn, until
    all have given their last one, each with a receipt whose ``step`` counts them. Raises what reading and the transform
    raise.
    """

    is_ready = True
    """Always True: only calling the transform would tell if the next micro-batch comes without a wait."""

    def __init__(
        self, source: FlowSource, state: State, rank: int, *, owns: Callable[[int], bool] = lambda lane: True
    ) -> None:
        self._source, self._rank = source, rank
        self._plan = Plan(state)
        self._turn, self._count = state.step, itertools.count()
        source.begin(self)
        self._rows = LaneRows(source, self._plan, state.segment.num_lanes // state.segment.world_size)
        begins = {lane: begin for lane, begin in self._plan.open_lanes(rank).items() if owns(lane)}
        self._open = {lane: self._batches(lane, begin) for lane, begin in begins.items()}
        self._rows.follow({lane: done for lane, (done, _) in begins.items()})
        self._rows.fill()

    def _batches(self, lane: int, begin: Frontier) -> LaneBatches:
        positions = self._rows.positions(lane, begin[0])
        return LaneBatches(positions, begin=begin, batch_size=self._plan.state.segment.batch_size)

    def __next__(self) -> tuple[Receipt, Found]:
        while self._open:
            lane, self._turn = self._plan.lane(self._turn, self._rank), self._turn + 1
            if lane in self._open:
                return self._plan.receipt(next(self._count), self._rank, None), self.take(lane)
        raise StopIteration

    def take(self, lane: int) -> Found:
        """Return the next micro-batch of ``lane``. StateUnavailable if this was closed."""
        if lane not in self._open:
            raise StateUnavailable(
                f"the iterator over epoch {self._plan.state.epoch} was closed: go on with a new iterator, iter(loader)"
            )
        made = next(self._open[lane])
        if made.is_last:
            del self._open[lane]
        if not self._open:
            self._rows.end()
        start = made.before[0]
        read = LaneRead(
            move=LaneMove(lane=lane, before=made.before, after=made.after),
            spans=tuple(self._plan.lane_spans(lane, start, made.touched)) if made.touched > start else (),
            items=made.count,
            is_last=made.is_last,
        )
        return read, self._source.stacked(made)

    def close(self) -> None:
        """Drop what was decoded, and end the threads."""
        self._open = {}
        self._rows.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_rows"):
            self.close()

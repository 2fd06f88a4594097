"""This module reads the sources of a mixture whose consumption depends on the data: raw text, whole documents, and
transforms that yield any number of rows.

How many rows such a source gives to a micro-batch is dealt, as for every source. Which positions they take is known
when they are read: so the receipt is completed where that is done (`lakeckpt.data.streams.mixed_source`), and comes
with the batch (`Completed`). The module starts no threads itself; readers of windows do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import LaneMove, LaneRead
from lakeckpt.core.streams.lane_batches import LaneBatches
from lakeckpt.data.flows.source import FlowSource, LaneRows
from lakeckpt.reading.windows.positions import PositionReader

__all__ = ["Completed", "FlowLanes", "FlowRows"]


class FlowRows(NamedTuple):
    """What a source gave to a micro-batch."""

    read: LaneRead
    columns: dict[str, Any]


class FlowLanes:
    """The lanes of one source, read by ``reader`` from the frontiers of ``plan`` on, for one iteration."""

    is_ready = True
    """Always True: only making rows would tell if they come without a wait."""

    def __init__(self, source: FlowSource, plan: Plan, reader: PositionReader, lanes: int) -> None:
        self._source, self._plan = source, plan
        self._rows = LaneRows(source, plan, lanes, reader=reader)
        self._open: dict[int, LaneBatches] = {}

    def follow(self, lanes: Iterable[int], share: float) -> None:
        """Read ahead ``lanes``. ``share``: see `lakeckpt.reading.windows.cache.WindowCache.follow`."""
        begins = self._plan.state.frontiers
        self._rows.follow({lane: begins[lane][0] for lane in lanes}, share)

    def take(self, lane: int, rows: int) -> FlowRows:
        """Return the next ``rows`` rows of ``lane``. After an error, only another iteration can go on."""
        if lane not in self._open:
            begin = self._plan.state.frontiers[lane]
            self._open[lane] = LaneBatches(self._rows.positions(lane, begin[0]), begin=begin, batch_size=rows)
        made = self._open[lane].take(rows * self._source.items_of_row)
        columns = self._source.columns_of(made)
        assert columns is not None and not made.is_last, "a stream does not end"
        number = self._plan.state.source
        read = LaneRead(
            move=LaneMove(lane=lane, before=made.before, after=made.after, source=number),
            spans=tuple(self._plan.lane_spans(lane, made.before[0], made.touched)),
            items=rows,
            is_last=False,
        )
        return FlowRows(read, columns)


class Completed(Iterator[tuple[Any, Any]]):
    """Yields (receipt, batch) of ``found``, with the receipt that the reading of the batch has completed."""

    def __init__(self, found: Iterator[tuple[Any, Any]]) -> None:
        self._found = found

    def __next__(self) -> tuple[Any, Any]:
        _, batch = next(self._found)
        return batch.receipt, batch

    @property
    def ready(self) -> Any:
        """How many batches would come without a wait; None: it is not known. Any thread may ask."""
        return getattr(self._found, "ready", None)

"""This module reads the sources of a mixture whose consumption depends on the data: raw text, whole documents,
transforms that yield any number of rows, and documents of several sources that are packed together.

How many rows a micro-batch has of such a source is dealt, as for every source; of a packed mixture, how many of all
sources. Which positions they take is known when they are read: so the receipt is completed where that is done
(`lakeckpt.data.streams.mixed_source`), and comes with the batch (`Completed`). The module starts no threads itself;
readers of windows do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lakeckpt.core.receipts import LaneRead
from lakeckpt.core.streams.flow_turns import FlowTurns
from lakeckpt.core.streams.lane_batches import LaneBatches, PositionItems
from lakeckpt.data.flows.source import FlowSource, LaneRows
from lakeckpt.reading.windows.positions import PositionReader

__all__ = ["Completed", "FlowLanes", "FlowRows"]


class FlowRows(NamedTuple):
    """What flows gave to a micro-batch."""

    reads: dict[int, LaneRead]
    """Source → what was read of it."""
    columns: dict[str, Any]


class FlowLanes:
    """The lanes of the sources of ``turns``, read from the frontiers of their plans on, for one iteration.

    ``reader`` returns the reader of a source.
    """

    is_ready = True
    """Always True: only making rows would tell if they come without a wait."""

    def __init__(
        self, turns: FlowTurns, sources: Sequence[Any], reader: Callable[[int], PositionReader], lanes: int
    ) -> None:
        self._turns, self._source = turns, sources[next(iter(turns.plans))]
        assert isinstance(self._source, FlowSource)
        self._rows = {
            number: LaneRows(sources[number], plan, lanes, reader=reader(number))
            for number, plan in turns.plans.items()
        }
        self._open: dict[int, LaneBatches] = {}

    def follow(self, lanes: Iterable[int], shares: Sequence[float]) -> None:
        """Read ahead ``lanes``. ``shares``, one of each source: see
        `lakeckpt.reading.windows.cache.WindowCache.follow`."""
        begins = {lane: self._turns.begin(lane) for lane in lanes}
        for number, rows in self._rows.items():
            found = {lane: self._turns.frontier(number, lane, place)[0] for lane, place in begins.items()}
            rows.follow(found, shares[number])

    def take(self, lane: int, rows: int) -> FlowRows:
        """Return the next ``rows`` rows of ``lane``. After an error, only another iteration can go on."""
        if lane not in self._open:
            begin = self._turns.begin(lane)
            self._open[lane] = LaneBatches(self._positions(lane, begin[0]), begin=begin, batch_size=rows)
        made = self._open[lane].take(rows * self._source.items_of_row)
        columns = self._source.columns_of(made)
        assert columns is not None and not made.is_last, "a stream does not end"
        return FlowRows(self._turns.reads(lane, made), columns)

    def _positions(self, lane: int, done: int) -> Iterator[PositionItems]:
        """Return what the positions of ``lane`` yield, from the ``done``-th on; it does not refer to this."""
        every = {
            number: rows.positions(lane, self._turns.frontier(number, lane, (done, 0))[0])
            for number, rows in self._rows.items()
        }
        return _in_turn(every, self._turns.sources(lane, done))


def _in_turn(every: Mapping[int, Iterator[PositionItems]], turns: Iterator[int]) -> Iterator[PositionItems]:
    """Yield the next one of the source that ``turns`` names, until that source is closed."""
    for number in turns:
        found = next(every[number], None)
        if found is None:
            return
        yield found


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

"""This module reads the rows of a flow's lanes, and calls the transform for each.

`FlowSource` reads rows as `lakeckpt.data.base.source.BatchSource` does. `LaneRows` has the rows of the lanes of one
process, for one iteration: windows of each lane are decoded ahead in threads while the transform works. The threads are
those of the reader; `LaneRows.close` ends them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lakeckpt.core.changes import start
from lakeckpt.core.identity import Identity, Maker
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Span
from lakeckpt.core.state import State
from lakeckpt.core.streams.lane_batches import LaneBatch, PositionItems
from lakeckpt.data.base.source import BatchSource, delivered, row_of
from lakeckpt.data.base.transform import maker_of
from lakeckpt.data.flows.calls import collate, empty_of, rows_of_row
from lakeckpt.data.flows.fingerprints import rows_digest
from lakeckpt.errors import ConfigError
from lakeckpt.reading.windows.positions import PositionReader

__all__ = ["FlowSource", "LaneRows"]

_SAMPLED = 16
"""Rows of which a fingerprint is made."""
_TRIED = 4096
"""Rows that are looked at for the columns of a batch without rows."""


class FlowSource(BatchSource):
    """A `BatchSource` whose transform yields any number of rows of each row."""

    block = 256
    """Rows that are taken from a window at a time."""

    @property
    def maker(self) -> Maker:
        """The transform, without the fingerprint that rows give it."""
        assert self._transform is not None
        return Maker(name=maker_of(self._transform))

    def describe(self, identity: Identity) -> Maker:
        """Return the maker, with a fingerprint: of what has no serialised form, a few rows give it."""
        maker = self.maker
        return replace(maker, fingerprint=maker.fingerprint or self.fingerprint(identity))

    def fingerprint(self, identity: Identity) -> str:
        """Return the digest of what up to 16 rows of the table give: those that stand first in its smallest row group
        of as many, which is read for it. Empty if they give something else when called again, or raise: that is
        raised where the rows are read.
        """
        smallest, source = self._smallest_group(), copy.copy(self)
        if smallest is None:
            return ""
        source._spec, source._endless = replace(self._spec, shuffle=False, window=1), False
        plain = replace(identity, spec=source._spec, endless=False, tail="short", maker=self.maker)
        rows = LaneRows(source, Plan(_start(plain)), 1)
        try:
            found, again = (rows_digest(one.items for one in rows.some(*smallest)) for _ in range(2))
        except Exception:
            return ""
        finally:
            rows.close()
        return found if found == again else ""

    def _smallest_group(self) -> tuple[int, int] | None:
        """Return [start, stop) of the rows of the table, in its order, of which a fingerprint is; None: it has none."""
        kept = None if self._selecting is None else self._selecting.get()
        sizes = (self._table.index if kept is None else kept).group_rows
        if not sizes.any():
            return None
        enough = min(_SAMPLED, int(sizes.max()))
        group = int(np.where(sizes >= enough, sizes, sizes.max()).argmin())
        start = int(sizes[:group].sum())
        return start, start + enough

    def items(self, columns: Any, row: int, span: Span) -> Sequence[Any]:
        """Return what the transform yields of row ``row`` of ``columns``, which stands at the position of ``span``."""
        assert self._transform is not None
        return rows_of_row(self._transform, row_of(columns, row), span, seed=self._spec.seed)

    @property
    def items_of_row(self) -> int:
        """How many items make a row of a batch."""
        return 1

    def stacked(self, made: LaneBatch) -> dict[str, Any] | None:
        """Return the items of a micro-batch as columns; None if it has none."""
        found = self.columns_of(made)
        return None if found is None else delivered(found)

    def columns_of(self, made: LaneBatch) -> dict[str, Any] | None:
        """Return `stacked` before `lakeckpt.data.base.source.delivered` is called, so that rows can be taken of it."""
        return collate(made.items, output=self.output) if made.count else None

    def empty(self, state: State) -> dict[str, Any]:
        """Return the columns of a batch without rows, by the first row that the transform yields in the epoch.

        Columns are unknown, and there are none, if it yields nothing of the first 4096 rows.
        """
        rows = LaneRows(self, Plan(_start(state.identity, state.epoch)), 1)
        found = next((one.items for one in itertools.islice(rows.positions(0, 0), _TRIED) if len(one.items)), None)
        rows.close()
        return {} if found is None else empty_of(collate(found[:1], output=self.output))


def _start(identity: Identity, epoch: int = 0) -> State:
    return start(identity, epoch=epoch, num_lanes=1, batch_size=1, world_size=1)


class LaneRows:
    """Rows of the lanes of ``plan``, of which ``lanes`` may be read in all, with what the transform yields of them.

    The iterator over `positions` refers to this, and this does not refer to it: so threads and windows are free as soon
    as nobody reads.
    """

    def __init__(self, source: FlowSource, plan: Plan, lanes: int, *, reader: PositionReader | None = None) -> None:
        self._source, self._plan, self._lanes = source, plan, lanes
        self._reader: PositionReader | None = source.new_reader(lanes) if reader is None else reader

    def close(self) -> None:
        """Drop what was decoded, and end the threads."""
        if self._reader is not None:
            self._reader.clear()

    def end(self) -> None:
        """Give the reader back: everything was read."""
        if self._reader is not None:
            self._source.end(self._reader, self._lanes)
            self._reader = None

    def follow(self, begins: Mapping[int, int], share: float = 1.0) -> None:
        """Read ahead the lanes of ``begins``, each from so many positions on, once the reader's room is filled."""
        assert self._reader is not None
        turns = [(done, lane) for lane, done in begins.items()]  # a turn of a flow's deal is a position
        self._source.follow(self._reader, self._plan, turns, share)

    def fill(self) -> None:
        """Have the reader read ahead."""
        assert self._reader is not None
        self._reader.windows.fill()

    def positions(self, lane: int, done: int) -> Iterator[PositionItems]:
        """Yield what the positions of ``lane`` yield, from the ``done``-th on."""
        idle = 0
        for spans in self._blocks(lane, done):
            if self._reader is None:
                return
            for one in self._read(self._reader, spans):
                idle = 0 if len(one.items) else idle + 1
                self._check_idle(lane, idle)
                yield one

    def some(self, start: int, stop: int) -> Iterator[PositionItems]:
        """Yield what positions [start, stop) of the only lane yield."""
        assert self._reader is not None
        return self._read(self._reader, self._plan.lane_spans(0, start, stop))

    def _read(self, reader: PositionReader, spans: list[Span]) -> Iterator[PositionItems]:
        opened = self._source.open_spans(reader, tuple(spans), self._plan.layouts_of(spans))
        return self._called(self._source.columns(reader, opened), spans)

    def _called(self, columns: Any, spans: list[Span]) -> Iterator[PositionItems]:
        skips, row = self._plan.skips(spans), 0
        for span in spans:
            for at in range(span.start, span.stop):
                single = Span(epoch=span.epoch, start=at, stop=at + 1)
                items = self._source.items(columns, row, single)
                name = f"the row at position {at} of epoch {span.epoch}"
                yield PositionItems(items=items, skip=skips.get(single, 0), name=name)
                row += 1

    def _blocks(self, lane: int, done: int) -> Iterator[list[Span]]:
        sizes, block = self._plan.sizes, self._source.block
        while sizes is None or done < sizes[lane]:
            stop = done + block if sizes is None else min(done + block, sizes[lane])
            yield self._plan.lane_spans(lane, done, stop)
            done = stop

    def _check_idle(self, lane: int, idle: int) -> None:
        if self._plan.sizes is None and idle > self._plan.state.identity.rows:
            raise ConfigError(
                f"the transform has yielded no row for {idle:,} rows of lane {lane}, one after another, more than an "
                "epoch has: an endless stream of such rows never gives a micro-batch"
            )

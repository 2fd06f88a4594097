"""What rows stand at these positions of an epoch?  Windows are decoded once, and served as lanes advance through them.

`parts_of` plans (pure): spans of positions are cut where windows end. `PositionReader` executes: a window's fragments
are decoded when it is first entered, wherever that is, and each span is then a slice of them (unshuffled) or a gather
(shuffled: by the window's permutation, over fragments joined to one block). A window leaves memory once all of its
rows were served, or when more than ``max_windows`` would be held (the one unused for longest).

Memory of a row is served once. A slice is the decoded row group's own memory, handed out to be written to: so where
positions of an unshuffled window are asked for again, the window is decoded again. A gather is a copy of its own.

Where a `Skipper` goes around damaged row groups, their rows are missing from the window: positions keep their places,
and what stands at those of a missing row group is left out of what is served, and told.

Nothing here runs per row, and nothing is kept but windows: any position can be entered at any time.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.core.skips import Skip
from lakeckpt.errors import ConfigError
from lakeckpt.lake.table import Table
from lakeckpt.reading.arrays import join, narrowed
from lakeckpt.reading.decode import RowGroupDecoder
from lakeckpt.reading.skipping import Skipper

__all__ = ["Part", "Piece", "PositionReader", "parts_of"]

Piece = tuple[EpochLayout, int, int]
"""Positions [start, stop) of an epoch's layout."""

_Key = tuple[tuple[OrderSpec, int, int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Positions [start, stop) of an epoch, all in one window of its layout."""

    layout: EpochLayout
    window: Window
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not self.window.start <= self.start < self.stop <= self.window.stop:
            raise ValueError(f"[{self.start}, {self.stop}) is no part of [{self.window.start}, {self.window.stop})")

    @property
    def key(self) -> _Key:
        """What tells this part's window apart from all others of the table."""
        return (self.layout.identity, self.window.start)


def parts_of(pieces: Iterable[Piece]) -> list[Part]:
    """Return ``pieces`` cut where windows end, in their order; empty pieces have no parts."""
    parts = []
    for layout, start, stop in pieces:
        if not 0 <= start <= stop <= layout.rows:
            raise ValueError(f"positions [{start}, {stop}) of epoch {layout.epoch}, which has {layout.rows} rows")
        while start < stop:
            window = layout.window_at(start)
            parts.append(Part(layout=layout, window=window, start=start, stop=min(stop, window.stop)))
            start = parts[-1].stop
    return parts


class _Served:
    """Which positions of a window were given out: sorted runs that do not touch. Nearly always one, growing at its end.

    (`Intervals` would do, at a price per micro-batch that is felt with small ones.)
    """

    __slots__ = ("size", "starts", "stops")

    def __init__(self) -> None:
        self.size = 0
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add the non-empty [start, stop); tell whether all of it is new."""
        first = bisect.bisect_left(self.stops, start)  # the first run that ends at or after start
        last = bisect.bisect_right(self.starts, stop)  # one past the last run that begins at or before stop
        touched = list(zip(self.starts[first:last], self.stops[first:last], strict=True))
        low, high = min([start, *(a for a, _ in touched)]), max([stop, *(b for _, b in touched)])
        grown = (high - low) - sum(b - a for a, b in touched)
        self.starts[first:last], self.stops[first:last] = [low], [high]
        self.size += grown
        return grown == stop - start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """The rows [start, stop) of a window's fragments that are missing: those of row group ``group``."""

    start: int
    stop: int
    group: int


@dataclass(slots=True, kw_only=True)
class _Held:
    """A decoded window; ``permutation`` is None where rows stand in order."""

    table: pa.Table
    """All rows but those in ``gaps``."""
    permutation: npt.NDArray[np.int64] | None
    served: _Served
    gaps: tuple[_Gap, ...]


class PositionReader:
    """Reads rows of ``table`` by their positions in the order that ``spec`` makes of it. For one thread.

    At most ``max_windows`` decoded windows are held: as many as lanes are read in turn, else windows are decoded again
    and again. ``columns`` as for `RowGroupDecoder`. Without a ``skipper``, damage is raised.
    """

    def __init__(
        self,
        table: Table,
        columns: Sequence[str] | None,
        spec: OrderSpec,
        *,
        max_windows: int,
        decoder: RowGroupDecoder | None = None,
        skipper: Skipper | None = None,
    ) -> None:
        if max_windows < 1:
            raise ConfigError(f"max_windows must be at least 1, got {max_windows}")
        self.spec = spec
        self.windows_decoded = 0
        """How many windows were decoded so far: more than there are means that they were decoded again."""
        self._decoder = RowGroupDecoder(table, columns) if decoder is None else decoder
        self._skipper = skipper
        self._max_windows = max_windows
        self._held: OrderedDict[_Key, _Held] = OrderedDict()

    @property
    def schema(self) -> pa.Schema:
        """The schema of what `read` returns."""
        return self._decoder.schema

    @property
    def windows_held(self) -> int:
        """How many decoded windows are in memory now."""
        return len(self._held)

    def read(self, pieces: Sequence[Piece]) -> pa.Table:
        """Return the rows at the positions of ``pieces``, in their order; pieces may be of any lanes and epochs.

        Of positions whose rows are skipped there are none; `read_around` tells which. The rows' memory is the caller's,
        to write to. Raises what `RowGroupDecoder.decode` does; `ValueError` for
        positions outside of an epoch, or a layout of another order than ``spec``.
        """
        return self.read_around(pieces)[0]

    def read_around(self, pieces: Sequence[Piece]) -> tuple[pa.Table, tuple[Skip, ...]]:
        """Return what `read` does, and what was skipped."""
        skips: list[Skip] = []
        parts = parts_of(pieces)
        for part in parts:
            if part.layout.spec != self.spec:
                raise ValueError(f"a layout of {part.layout.spec} was given to a reader of {self.spec}")
        tables = [self._serve(part, skips) for part in parts]
        if not tables:
            return self.schema.empty_table(), ()
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables), tuple(skips)

    def clear(self) -> None:
        """Forget the windows held and close files; reading goes on by decoding anew."""
        self._held.clear()
        self._decoder.close()

    def _serve(self, part: Part, skips: list[Skip]) -> pa.Table:
        held = self._held.pop(part.key, None)
        if held is None or not (held.served.add(part.start, part.stop) or held.permutation is not None):
            # Not here, or (unshuffled) memory that is already somebody's.
            held = None
            while len(self._held) >= self._max_windows:
                self._held.popitem(last=False)
            held = self._decoded(part.layout, part.window)
            held.served.add(part.start, part.stop)
        if held.served.size < part.window.rows:
            self._held[part.key] = held
        start, stop = part.start - part.window.start, part.stop - part.window.start
        if held.gaps:
            return self._serve_around(part, held, start, stop, skips)
        if held.permutation is None:
            return held.table.slice(start, stop - start)
        return self._gathered(held.table, held.permutation[start:stop])

    def _serve_around(self, part: Part, held: _Held, start: int, stop: int, skips: list[Skip]) -> pa.Table:
        """Serve offsets [start, stop) of a window with gaps, and note in ``skips`` what is missing."""
        assert self._skipper is not None
        rows = np.arange(start, stop) if held.permutation is None else held.permutation[start:stop]
        missing = np.zeros(len(rows), bool)
        before = np.zeros(len(rows), np.int64)
        for gap in held.gaps:
            mine = (gap.start <= rows) & (rows < gap.stop)
            missing |= mine
            before += np.where(rows >= gap.stop, gap.stop - gap.start, 0)
            if mine.any():
                skips.append(self._skipper.skip(part.layout, gap.group, part.start, part.stop, int(mine.sum())))
        kept = (rows - before)[~missing]
        if held.permutation is not None:
            return self._gathered(held.table, kept)
        return held.table.slice(int(kept[0]), len(kept)) if len(kept) else self.schema.empty_table()

    def _decoded(self, layout: EpochLayout, window: Window) -> _Held:
        self.windows_decoded += 1
        tables, gaps, offset = [], [], 0
        for part in window.fragments:
            if self._skipper is None:
                found = self._decoder.decode(part.group, part.start, part.stop)
            else:
                found = self._skipper.decode(self._decoder, layout, window, part)
            if found is None:
                gaps.append(_Gap(start=offset, stop=offset + part.rows, group=part.group))
            tables.append(self.schema.empty_table() if found is None else found)
            offset += part.rows
        permutation = window.permutation()
        table = _block(tables) if permutation is not None else pa.concat_tables(tables)
        missing = sum(gap.stop - gap.start for gap in gaps)
        assert table.num_rows + missing == window.rows, "a window's fragments do not add up to it"
        return _Held(table=table, permutation=permutation, served=_Served(), gaps=tuple(gaps))

    def _gathered(self, block: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
        indices = pa.array(rows)
        columns = [
            narrowed(pc.take(column.chunk(0), indices, boundscheck=False), field.type)
            for column, field in zip(block.itercolumns(), self.schema, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _block(tables: list[pa.Table]) -> pa.Table:
    """Return the rows of ``tables``, one after another, as a table of one chunk per column.

    The tables are used up: each column is let go of as soon as it is joined, so that the window is never held twice.
    """
    names = tables[0].schema.names
    sources = [table.columns for table in tables]
    tables.clear()
    joined = []
    for place in range(len(names)):
        chunks = [chunk for columns in sources for chunk in columns[place].chunks]
        joined.append(join(pa.chunked_array(chunks)))
        for columns in sources:
            columns[place] = None
    return pa.Table.from_arrays(joined, names=names)

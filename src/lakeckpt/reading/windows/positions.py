"""This module reads the rows at positions of an epoch.

Spans of positions are cut where windows end. Windows are *opened* first, which begins to decode them in
threads, and their rows are taken then: views of the windows. The windows that lanes need next are decoded ahead, as
many as memory allows (`lakeckpt.reading.windows.cache`). A window leaves memory once all of its rows were served.

The memory of a row is served once, because it is handed out to be written to. If positions are asked for again,
their window is decoded again. An error of a window is raised when a part of it is taken, and not before. Nothing here
runs per row, and any position can be entered at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.errors import ConfigError
from lakeckpt.reading.columns.convert import Nulls
from lakeckpt.reading.columns.gather import cut, join_rows
from lakeckpt.reading.columns.ragged import map_namespace
from lakeckpt.reading.windows.cache import Decoding, WindowCache
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.lanes import CachedWindow
from lakeckpt.reading.windows.room import Room
from lakeckpt.reading.windows.threads import Threads, usual_threads
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["Opened", "Piece", "PositionReader"]

Piece = tuple[EpochLayout, int, int]
"""Positions [start, stop) of an epoch's layout."""


class Opened:
    """Positions whose windows are decoded or being decoded, as parts of windows."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[tuple[CachedWindow, int, int]]) -> None:
        self.parts = parts
        """(the window, offsets [start, stop) in it)"""

    @property
    def is_ready(self) -> bool:
        """True if the rows can be taken without a wait."""
        return all(needed.is_ready for needed, _, _ in self.parts)


class PositionReader:
    """Reads the rows that ``decoder`` decodes by their positions in the order that ``spec`` makes. For one thread.

    ``max_windows`` is the number of windows that are open at once, and ``room`` bounds the windows that are held, as
    `WindowCache` has them; None: any memory. ``nulls`` as for `convert`; None: rows are given as Arrow tables. ``make``
    is applied to every array of the columns. At most ``threads`` decode; None: as many as there are processors.
    ``decoder_of`` makes what decodes windows, if they are not of rows (`lakeckpt.reading.packed`).
    """

    def __init__(
        self,
        decoder: RowGroupDecoder,
        spec: OrderSpec,
        *,
        max_windows: int,
        nulls: Nulls | None = "error",
        make: Callable[[Any], Any] | None = None,
        room: Room | None = None,
        threads: int | None = None,
        decoder_of: Callable[[Threads], Decoding] | None = None,
    ) -> None:
        if max_windows < 1:
            raise ConfigError(f"max_windows must be at least 1, got {max_windows}")
        self.spec = spec
        self._nulls = nulls
        self._make = make
        self.schema: pa.Schema = decoder.schema
        """The schema of the rows."""
        self.windows = WindowCache(
            decoder,
            nulls=nulls,
            threads=usual_threads() if threads is None else threads,
            most_open=max_windows,
            room=Room() if room is None else room,
            decoder_of=decoder_of,
        )

    def open(self, pieces: Iterable[Piece]) -> Opened:
        """Begin to decode the windows of ``pieces``. `take` accepts the result.

        Pieces may be of any lanes and epochs. `ValueError` for positions outside of an epoch, or a layout of another
        order than ``spec``.
        """
        self._check_process()
        parts: list[tuple[CachedWindow, int, int]] = []
        for layout, start, stop in pieces:
            if layout.spec is not self.spec and layout.spec != self.spec:
                raise ValueError(f"a layout of {layout.spec} was given to a reader of {self.spec}")
            if not 0 <= start <= stop <= layout.rows:
                raise ValueError(f"positions [{start}, {stop}) of epoch {layout.epoch}, which has {layout.rows} rows")
            while start < stop:
                needed = self.windows.at(layout, start)
                self.windows.use(needed)
                begin, upto = needed.window.start, min(stop, needed.window.stop)
                parts.append((needed, start - begin, upto - begin))
                start = upto
        return Opened(parts)

    def take(self, opened: Opened, *, raw: bool = False) -> Any:
        """Return the rows that were opened, in their order.

        The rows' memory is the caller's, to write to: columns, with ``make`` applied to every array unless they are to
        be ``raw``, or an Arrow table. Raises what `WindowDecoder.decode` does.
        """
        self._check_process()
        make = _as_it_is if raw or self._make is None else self._make
        is_one = len(opened.parts) == 1
        cuts = [self._cut(*part, make if is_one else _as_it_is) for part in opened.parts]
        if is_one:
            return cuts[0]
        if self._nulls is None:
            return pa.concat_tables(cuts) if cuts else self.schema.empty_table()
        found: Any = join_rows(cuts) if cuts else cut(self.windows.nothing(), 0, 0, _as_it_is)
        return found if make is _as_it_is else map_namespace(found, make)

    def read(self, pieces: Iterable[Piece]) -> Any:
        """Open ``pieces`` and `take` them at once."""
        return self.take(self.open(pieces))

    def clear(self) -> None:
        """Drop all windows, as `WindowCache.clear`; rows that are read later are decoded anew."""
        self.windows.clear()

    # --- inside

    def _check_process(self) -> None:
        if self.windows.process != os.getpid():
            self.clear()

    def _cut(self, needed: CachedWindow, start: int, stop: int, make: Callable[[Any], Any]) -> Any:
        windows = self.windows
        if needed.gone:
            needed = windows.known(needed.layout, needed.window)
        if not needed.served.add(start, stop):  # the caller has the memory already
            windows.drop(needed)
            needed = windows.known(needed.layout, needed.window)
            needed.served.add(start, stop)
        if needed.decoded is None:
            windows.use(needed)
        found = _rows(windows.wait_for(needed), start, stop, make)
        size = needed.served.size
        if size == needed.window.rows:
            windows.drop(needed)
        if size in (stop - start, needed.window.rows):  # the window was entered, or is read
            windows.trim()
            windows.fill()
        return found


def _rows(decoded: DecodedWindow, start: int, stop: int, make: Callable[[Any], Any]) -> Any:
    if decoded.columns is not None:
        return cut(decoded.columns, start, stop, make)
    assert decoded.table is not None
    return decoded.table.slice(start, stop - start)


def _as_it_is(array: Any) -> Any:
    return array

"""This module reads the rows at positions of an epoch.

Spans of positions are cut where windows end. The windows of pieces that were *announced* are decoded in threads, as
many as memory allows, in the order in which they will be needed (`lakeckpt.reading.windows.cache`). Windows of other
pieces are decoded when the pieces are taken. Each part is then a cut of its window: views. A window leaves memory once
all of its rows were served.

The memory of a row is served once, because it is handed out to be written to. Where positions are asked for again,
their window is decoded again. An error of a window is raised when a part of it is taken, and not before. Nothing here
runs per row, and any position can be entered at any time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.errors import ConfigError
from lakeckpt.reading.columns.convert import Nulls
from lakeckpt.reading.columns.gather import cut, join_rows
from lakeckpt.reading.columns.ragged import map_namespace
from lakeckpt.reading.windows.cache import CachedWindow, Decoding, WindowCache
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.room import Room
from lakeckpt.reading.windows.threads import Threads, usual_threads
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["Announced", "Piece", "PositionReader"]

Piece = tuple[EpochLayout, int, int]
"""Positions [start, stop) of an epoch's layout."""


Announced = list[tuple[CachedWindow, int, int]]
"""Pieces as parts of windows: (the window, offsets [start, stop) in it)."""


class PositionReader:
    """Reads the rows that ``decoder`` decodes by their positions in the order that ``spec`` makes. For one thread.

    ``max_windows`` is the number of windows that are open at once, and ``room`` bounds the windows that are held, as
    `WindowCache` has them; None: any memory. ``nulls`` as for `convert`; None: rows are given as Arrow tables. ``make``
    is applied to every array of the columns. At most ``threads`` decode; None: as many as there are processors.
    ``decoder_of`` makes what decodes windows, where they are not of rows (`lakeckpt.reading.packed`).
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
        self._max_windows = max_windows
        self.schema: pa.Schema = decoder.schema
        """The schema of the rows."""
        self._windows = WindowCache(
            decoder,
            nulls=nulls,
            threads=usual_threads() if threads is None else threads,
            most_open=max_windows,
            room=Room() if room is None else room,
            decoder_of=decoder_of,
        )
        self._follows: dict[int, CachedWindow] = {}
        """By the position where the last announced piece of a lane stopped: its window. The next piece of the lane
        nearly always begins there."""

    @property
    def windows_held(self) -> int:
        """The number of windows that are in memory or being decoded."""
        return self._windows.held

    @staticmethod
    def is_ready(announced: Announced) -> bool:
        """Return whether `take` would not wait."""
        return all(needed.is_ready for needed, _, _ in announced)

    @property
    def has_room(self) -> bool:
        """See `WindowCache.has_room`."""
        return self._windows.has_room

    def announce(self, pieces: Iterable[Piece]) -> Announced:
        """Begin to decode the windows of ``pieces``, as far as there is room. `take` accepts the result.

        Pieces may be of any lanes and epochs. `ValueError` for positions outside of an epoch, or a layout of another
        order than ``spec``.
        """
        self._check_process()
        found: Announced = []
        follows = self._follows
        for layout, start, stop in pieces:
            needed = follows.pop(start, None)
            if (
                needed is not None
                and needed.layout is layout
                and not needed.gone
                and start < stop <= needed.window.stop
            ):
                needed.waiting += 1
                found.append((needed, start - needed.window.start, stop - needed.window.start))
                follows[stop] = needed
                continue
            if layout.spec != self.spec:
                raise ValueError(f"a layout of {layout.spec} was given to a reader of {self.spec}")
            if not 0 <= start <= stop <= layout.rows:
                raise ValueError(f"positions [{start}, {stop}) of epoch {layout.epoch}, which has {layout.rows} rows")
            while start < stop:
                window = layout.window_at(start)
                upto = min(stop, window.stop)
                needed = self._windows.get(layout, window)
                needed.waiting += 1
                found.append((needed, start - window.start, upto - window.start))
                if len(follows) > 4 * self._max_windows:  # entries of lanes that did not go on
                    follows.clear()
                follows[upto] = needed
                start = upto
        return found

    def joined(self, every: Iterable[Announced]) -> Announced:
        """Return ``every`` announcement as one, whose rows are taken together: pieces that adjoin become one piece."""
        found: Announced = []
        for needed, start, stop in itertools.chain.from_iterable(every):
            if found and found[-1][0] is needed and found[-1][2] == start:
                needed.waiting -= 1
                found[-1] = (needed, found[-1][1], stop)
            else:
                found.append((needed, start, stop))
        return found

    def take(self, announced: Announced) -> Any:
        """Return the rows that were announced, in their order.

        The rows' memory is the caller's, to write to: columns, with ``make`` applied to every array, or an Arrow table.
        Raises what `WindowDecoder.decode` does.
        """
        self._check_process()
        if len(announced) == 1 and (found := self._within(*announced[0])) is not None:
            return found
        cuts = [self._cut(needed, start, stop, alone=len(announced) == 1) for needed, start, stop in announced]
        self._windows.trim()
        if len(cuts) == 1:
            return cuts[0]
        if self._nulls is None:
            return pa.concat_tables(cuts) if cuts else self.schema.empty_table()
        columns: Any = join_rows(cuts) if cuts else cut(self._windows.nothing(), 0, 0, _as_it_is)
        return columns if self._make is None else map_namespace(columns, self._make)

    def _within(self, needed: CachedWindow, start: int, stop: int) -> dict[str, Any] | None:
        """Return the rows if they follow the rows of a decoded window that were served last, and are not its last rows.

        This is the case for nearly all micro-batches. Otherwise return None.
        """
        columns = self._served_within(needed, start, stop)
        return None if columns is None else cut(columns, start, stop, self._make or _as_it_is)

    def _served_within(self, needed: CachedWindow, start: int, stop: int) -> Mapping[str, Any] | None:
        """Return the columns of the window if its rows up to ``start`` were served last and rows follow ``stop``.

        Then the rows [start, stop) count as served, too. Otherwise return None.
        """
        decoded, served = needed.decoded, needed.served
        if decoded is None or decoded.columns is None or needed.gone:
            return None
        if not served.stops or served.stops[-1] != start or served.size + stop - start >= needed.window.rows:
            return None
        served.add(start, stop)
        needed.waiting -= 1
        needed.used = next(self._windows.uses)
        return decoded.columns

    def read(self, pieces: Iterable[Piece]) -> Any:
        """Announce ``pieces`` and `take` them at once."""
        return self.take(self.announce(pieces))

    def clear(self) -> None:
        """Drop all windows, as `WindowCache.clear`; rows that are read later are decoded anew."""
        self._windows.clear()
        self._follows = {}

    # --- inside

    def _check_process(self) -> None:
        if self._windows.process != os.getpid():
            self.clear()

    def _cut(self, needed: CachedWindow, start: int, stop: int, *, alone: bool) -> Any:
        needed.waiting -= 1
        needed.used = next(self._windows.uses)
        if needed.gone:
            needed = self._windows.get(needed.layout, needed.window)
        if not needed.served.add(start, stop):  # the caller has the memory already
            self._windows.drop(needed)
            needed = self._windows.get(needed.layout, needed.window)
            needed.served.add(start, stop)
        decoded = self._windows.wait_for(needed)
        found = _rows(decoded, start, stop, self._make if alone and self._make is not None else _as_it_is)
        if needed.served.size == needed.window.rows:
            self._windows.drop(needed)
            self._windows.fill()
        elif needed.served.size == stop - start:  # one more window is open: other windows may be idle now
            self._windows.fill()
        return found


def _rows(decoded: DecodedWindow, start: int, stop: int, make: Callable[[Any], Any]) -> Any:
    if decoded.columns is not None:
        return cut(decoded.columns, start, stop, make)
    assert decoded.table is not None
    return decoded.table.slice(start, stop - start)


def _as_it_is(array: Any) -> Any:
    return array

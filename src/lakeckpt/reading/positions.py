"""What rows stand at these positions of an epoch?  Windows are decoded ahead, and cut as lanes advance through them.

Spans of positions are cut where windows end (`lakeckpt.reading.parts`). Windows of pieces that were *announced* are
decoded in threads, as many as memory allows, in the order in which they will be needed (`lakeckpt.reading.needed`);
those of pieces that were not are decoded when they are taken. Each part is then a cut of its window: views. A window
leaves memory once all of its rows were served.

Memory of a row is served once: it is handed out to be written to. So where positions are asked for again, the window is
decoded again. What goes wrong with a window is raised when a part of it is taken, and not before.

Where a `Skipper` goes around damaged row groups, their rows are missing from the window: positions keep their places,
and what stands at those of a missing row group is left out of what is served, and told.

Nothing here runs per row, and nothing is kept but windows: any position can be entered at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.skips import Skip
from lakeckpt.errors import ConfigError, NullValueError
from lakeckpt.lake.table import Table
from lakeckpt.reading.convert import Nulls, convert
from lakeckpt.reading.decode import RowGroupDecoder
from lakeckpt.reading.gather import cut, join_rows
from lakeckpt.reading.needed import NeededWindow, NeededWindows
from lakeckpt.reading.parts import Piece, parts_of
from lakeckpt.reading.plain import PlainRows
from lakeckpt.reading.ragged import map_namespace
from lakeckpt.reading.skipping import Skipper
from lakeckpt.reading.threads import Threads, usual_threads
from lakeckpt.reading.windows import DecodedWindow, WindowDecoder

__all__ = ["Announced", "NullFound", "PositionReader"]


class NullFound(Exception):
    """A null where none may be: ``table`` are the rows that stand at ``positions`` (int64) of ``layout``."""

    def __init__(self, error: NullValueError, table: pa.Table, layout: EpochLayout, positions: Any) -> None:
        super().__init__(str(error))
        self.error, self.table, self.layout, self.positions = error, table, layout, positions


Announced = list[tuple[NeededWindow, int, int]]
"""Pieces as parts of windows: (the window, offsets [start, stop) in it)."""


class PositionReader:
    """Reads rows of ``table`` by their positions in the order that ``spec`` makes of it. For one thread.

    ``max_windows`` and ``memory_limit_bytes``: how many windows are open at once, and what holds their memory down, as
    `NeededWindows` has them. ``nulls`` as for `convert`; None: rows are given as Arrow tables. ``columns`` as for
    `RowGroupDecoder`. ``threads`` decode. Without a ``skipper``, damage is raised.
    """

    def __init__(
        self,
        table: Table,
        columns: Sequence[str] | None,
        spec: OrderSpec,
        *,
        max_windows: int,
        nulls: Nulls | None = "error",
        make: Callable[[Any], Any] | None = None,
        memory_limit_bytes: int | None = None,
        threads: int | None = None,
        new_decoder: Callable[[], RowGroupDecoder] | None = None,
        skipper: Skipper | None = None,
    ) -> None:
        if max_windows < 1:
            raise ConfigError(f"max_windows must be at least 1, got {max_windows}")
        self.spec = spec
        self._nulls = nulls
        self._make = make
        self._skipper = skipper
        self._max_windows = max_windows
        new_decoder = partial(RowGroupDecoder, table, columns) if new_decoder is None else new_decoder
        self._needed = NeededWindows(
            partial(_new_windows, new_decoder, nulls, skipper),
            threads=usual_threads() if threads is None else threads,
            most_open=max_windows,
            limit_bytes=memory_limit_bytes,
            skipper=skipper,
        )
        self._follows: dict[int, NeededWindow] = {}
        """The windows of what was announced last of each lane, by where that stopped: nearly all goes on there."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of what is read."""
        return self._needed.decoder.schema

    @property
    def windows_held(self) -> int:
        """How many windows are in memory now, or being decoded."""
        return self._needed.held

    @property
    def windows_decoded(self) -> int:
        """How many windows were decoded so far: more than there are means that they were decoded again."""
        return self._needed.begun

    @staticmethod
    def is_ready(announced: Announced) -> bool:
        """Whether `take` would not wait."""
        return all(needed.is_ready for needed, _, _ in announced)

    @staticmethod
    def waits(announced: Announced, when_over: Callable[[], None]) -> bool:
        """Whether a window of ``announced`` is being decoded; if so ``when_over`` is called when it has been.

        It is called once, in any thread, however often it was asked for of one window.
        """
        return any(needed.is_being_decoded(when_over) for needed, _, _ in announced)

    @property
    def has_room(self) -> bool:
        """Whether more may be announced to some use: to be decoded soon, or to be fetched from a store."""
        return self._needed.has_room

    def announce(self, pieces: Iterable[Piece]) -> Announced:
        """Begin to decode the windows of ``pieces``, as far as there is room; `take` what is returned.

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
            for part in parts_of([(layout, start, stop)]):
                needed = self._needed.get(part.key, part.layout, part.window)
                needed.waiting += 1
                found.append((needed, part.start - part.window.start, part.stop - part.window.start))
                if len(follows) > 4 * self._max_windows:  # of what was never gone on with
                    follows.clear()
                follows[part.stop] = needed
        return found

    def take(self, announced: Announced) -> tuple[Any, tuple[Skip, ...]]:
        """Return the rows that were announced, in their order, and what was skipped.

        The rows' memory is the caller's, to write to: columns, with ``make`` applied to every array, or an Arrow table.
        Of positions whose rows are skipped there are none. Raises what `RowGroupDecoder.decode` does; `NullFound`.
        """
        self._check_process()
        if len(announced) == 1 and (found := self._within(*announced[0])) is not None:
            return found, ()
        skips: list[Skip] = []
        cuts = [self._cut(needed, start, stop, skips, alone=len(announced) == 1) for needed, start, stop in announced]
        self._needed.trim()
        if len(cuts) == 1:
            return cuts[0], tuple(skips)
        if self._nulls is None:
            return pa.concat_tables(cuts) if cuts else self.schema.empty_table(), tuple(skips)
        columns: Any = join_rows(cuts) if cuts else convert(self.schema.empty_table(), nulls=self._nulls)
        return columns if self._make is None else map_namespace(columns, self._make), tuple(skips)

    def take_plain(self, announced: Announced) -> tuple[PlainRows, int, int] | None:
        """`take`, for whoever copies the rows: where rows [start, stop) lie, without arrays over them. None where they
        are not all of one window that is decoded, and plain: nothing was taken then."""
        self._check_process()
        if len(announced) != 1:
            return None
        needed, start, stop = announced[0]
        plain = None if needed.decoded is None else needed.decoded.plain
        return None if plain is None or self._served_within(needed, start, stop) is None else (plain, start, stop)

    def _within(self, needed: NeededWindow, start: int, stop: int) -> dict[str, Any] | None:
        """The rows, where they go on from the last ones of a decoded window, and more of it follow: nearly all do."""
        columns = self._served_within(needed, start, stop)
        return None if columns is None else cut(columns, start, stop, self._make or _as_it_is)

    def _served_within(self, needed: NeededWindow, start: int, stop: int) -> Mapping[str, Any] | None:
        """The columns of the window, if its rows up to ``start`` were served, all of them came and more follow: then
        these are served, too."""
        decoded, served = needed.decoded, needed.served
        if decoded is None or decoded.columns is None or decoded.came is not None or needed.gone:
            return None
        if not served.stops or served.stops[-1] != start or served.size + stop - start >= needed.window.rows:
            return None
        served.add(start, stop)
        needed.waiting -= 1
        needed.used = next(self._needed.uses)
        return decoded.columns

    def read(self, pieces: Iterable[Piece]) -> Any:
        """`take` of what is not announced any sooner; without what was skipped."""
        return self.take(self.announce(pieces))[0]

    def clear(self, *, again: bool = False) -> None:
        """Forget all windows, as `NeededWindows.clear`; reading goes on by decoding anew."""
        self._needed.clear(again=again)
        self._follows = {}

    # --- inside

    def _check_process(self) -> None:
        if self._needed.process != os.getpid():
            self.clear()

    def _cut(self, needed: NeededWindow, start: int, stop: int, skips: list[Skip], *, alone: bool) -> Any:
        needed.waiting -= 1
        needed.used = next(self._needed.uses)
        if needed.gone:
            needed = self._needed.get(needed.key, needed.layout, needed.window)
        if not needed.served.add(start, stop):  # memory that is already somebody's
            self._needed.let_go(needed)
            needed = self._needed.get(needed.key, needed.layout, needed.window)
            needed.served.add(start, stop)
        decoded = self._needed.wait_for(needed)
        for gap in decoded.gaps:
            rows = int(gap.before[stop] - gap.before[start])
            if rows:
                assert self._skipper is not None
                first = needed.window.start
                skips.append(self._skipper.skip(needed.layout, gap.group, first + start, first + stop, rows))
        found = self._rows(needed, decoded, start, stop, self._make if alone and self._make is not None else _as_it_is)
        if needed.served.size == needed.window.rows:
            self._needed.let_go(needed)
            self._needed.fill()
        elif needed.served.size == stop - start:  # one more is open: others may be idle now
            self._needed.fill()
        return found

    def _rows(
        self, needed: NeededWindow, decoded: DecodedWindow, start: int, stop: int, make: Callable[[Any], Any]
    ) -> Any:
        first, last = decoded.rows(start, stop)
        if decoded.columns is not None:
            return cut(decoded.columns, first, last, make)
        assert decoded.table is not None
        table = decoded.table.slice(first, last - first)
        if self._nulls is None:
            return table
        try:
            return map_namespace(convert(table, nulls=self._nulls), make)
        except NullValueError as error:
            offsets = np.arange(start, stop)
            if decoded.came is not None:
                offsets = offsets[np.diff(decoded.came[start : stop + 1]) > 0]
            raise NullFound(error, table, needed.layout, needed.window.start + offsets) from error


def _as_it_is(array: Any) -> Any:
    return array


def _new_windows(
    new_decoder: Callable[[], RowGroupDecoder], nulls: Nulls | None, skipper: Skipper | None, threads: Threads
) -> WindowDecoder:
    return WindowDecoder(new_decoder(), nulls=nulls, skipper=skipper, threads=threads)

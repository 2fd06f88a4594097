"""What rows stand at these positions of an epoch?  Windows are decoded ahead, and cut as lanes advance through them.

Spans of positions are cut where windows end (`lakeckpt.reading.parts`). Windows of pieces that were *announced* are
decoded in threads (`lakeckpt.reading.windows`), as many as memory allows, in the order in which they will be needed;
those of pieces that were not are decoded when they are taken. Each part is then a cut of its window: views. A window
leaves memory once all of its rows were served; where there is no room for one that is needed, the one that nothing
announced needs, unused for longest, makes room.

Memory of a row is served once: it is handed out to be written to. So where positions are asked for again, the window is
decoded again. What goes wrong with a window is raised when a part of it is taken, and not before.

Where a `Skipper` goes around damaged row groups, their rows are missing from the window: positions keep their places,
and what stands at those of a missing row group is left out of what is served, and told.

Nothing here runs per row, and nothing is kept but windows: any position can be entered at any time.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.core.skips import Skip
from lakeckpt.errors import ConfigError, NullValueError
from lakeckpt.lake.table import Table
from lakeckpt.reading.convert import Nulls, convert
from lakeckpt.reading.decode import RowGroupDecoder
from lakeckpt.reading.gather import cut, join_rows
from lakeckpt.reading.parts import Key, Piece, Served, parts_of
from lakeckpt.reading.plain import PlainRows
from lakeckpt.reading.ragged import map_namespace
from lakeckpt.reading.skipping import Skipper
from lakeckpt.reading.threads import Threads, usual_threads
from lakeckpt.reading.windows import DecodedWindow, WindowDecoder

__all__ = ["Announced", "NullFound", "PositionReader", "windows_held_of"]

_FEW = 32
"""Windows that are decoded for each that is held, until giving their memory back, to ask for it again, costs little."""


def windows_held_of(lanes: int) -> int:
    """How many windows a process that reads so many lanes may hold: one of each, and as many read ahead, two at least.

    With one alone, a lane's next window is decoded in one thread while this one is consumed, and the other waits.
    """
    return lanes + max(lanes, 2)


class NullFound(Exception):
    """A null where none may be: ``table`` are the rows that stand at ``positions`` (int64) of ``layout``."""

    def __init__(self, error: NullValueError, table: pa.Table, layout: EpochLayout, positions: Any) -> None:
        super().__init__(str(error))
        self.error, self.table, self.layout, self.positions = error, table, layout, positions


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """A window that is needed, from when it is announced until all of it was served."""

    key: Key
    layout: EpochLayout
    window: Window
    served: Served = field(default_factory=Served)
    waiting: int = 0
    """Announced parts that have not been taken."""
    used: int = 0
    """When a part was last taken: counted."""
    future: Future[DecodedWindow] | None = None
    """None while there is no room for it."""
    decoded: DecodedWindow | None = None
    gone: bool = False
    told: Callable[[], None] | None = None
    """What is called when it has been decoded."""


Announced = list[tuple[_Slot, int, int]]
"""Pieces as parts of windows: (the window, offsets [start, stop) in it)."""


class PositionReader:
    """Reads rows of ``table`` by their positions in the order that ``spec`` makes of it. For one thread.

    ``max_windows``: how many windows are open at once, as many as lanes are read in turn. Up to `windows_held_of` it
    are held: those, and others that were announced; with ``memory_limit_bytes``, of these only what fits. Windows that
    are needed now are always decoded, and those that are open are kept. ``nulls`` as for `convert`; None: rows are
    given as Arrow tables. ``columns`` as for `RowGroupDecoder`. ``threads`` decode. Without a ``skipper``, damage is
    raised.
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
        self.windows_decoded = 0
        """How many windows were decoded so far: more than there are means that they were decoded again."""
        self._decoded_before = 0
        self._nulls = nulls
        self._make = make
        self._skipper = skipper
        self._max_windows, self._most_held = max_windows, windows_held_of(max_windows)
        self._limit = memory_limit_bytes
        self._threads = Threads(usual_threads() if threads is None else threads)
        self._new_decoder = partial(RowGroupDecoder, table, columns) if new_decoder is None else new_decoder
        self._windows = self._new_windows()
        self._process = os.getpid()
        self._slots: dict[Key, _Slot] = {}
        self._uses = 0
        self._deferred: deque[_Slot] = deque()
        self._row_bytes = 0.0
        self._follows: dict[int, _Slot] = {}
        """The windows of what was announced last of each lane, by where that stopped: nearly all goes on there."""

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, its threads have, and modules may have been emptied: nothing is left to do or use.
        if not is_finalizing() and hasattr(self, "_follows") and self._process == os.getpid():
            self._threads.close()

    @property
    def schema(self) -> pa.Schema:
        """The schema of what is read."""
        return self._windows.schema

    @property
    def windows_held(self) -> int:
        """How many windows are in memory now, or being decoded."""
        return sum(slot.future is not None for slot in self._slots.values())

    @staticmethod
    def is_ready(announced: Announced) -> bool:
        """Whether `take` would not wait."""
        for slot, _, _ in announced:
            if slot.decoded is None and (slot.future is None or not slot.future.done()):
                return False
        return True

    @staticmethod
    def waits(announced: Announced, when_over: Callable[[], None]) -> bool:
        """Whether a window of ``announced`` is being decoded; if so ``when_over`` is called when it has been.

        It is called once, in any thread, however often it was asked for of one window.
        """
        for slot, _, _ in announced:
            if slot.decoded is None and slot.future is not None and not slot.future.done():
                if slot.told is not when_over:
                    slot.told = when_over
                    slot.future.add_done_callback(lambda _: when_over())
                return True
        return False

    @property
    def has_room(self) -> bool:
        """Whether more may be announced to some use: to be decoded soon, or to be fetched from a store."""
        return (not self._deferred and not self._threads.have_enough) or self._windows.has_room

    def announce(self, pieces: Iterable[Piece]) -> Announced:
        """Begin to decode the windows of ``pieces``, as far as there is room; `take` what is returned.

        Pieces may be of any lanes and epochs. `ValueError` for positions outside of an epoch, or a layout of another
        order than ``spec``.
        """
        self._check_process()
        found: Announced = []
        follows = self._follows
        for layout, start, stop in pieces:
            slot = follows.pop(start, None)
            if slot is not None and slot.layout is layout and not slot.gone and start < stop <= slot.window.stop:
                slot.waiting += 1
                found.append((slot, start - slot.window.start, stop - slot.window.start))
                follows[stop] = slot
                continue
            if layout.spec != self.spec:
                raise ValueError(f"a layout of {layout.spec} was given to a reader of {self.spec}")
            for part in parts_of([(layout, start, stop)]):
                slot = self._slot_of(part.key, part.layout, part.window)
                slot.waiting += 1
                found.append((slot, part.start - part.window.start, part.stop - part.window.start))
                if len(follows) > 4 * self._max_windows:  # of what was never gone on with
                    follows.clear()
                follows[part.stop] = slot
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
        cuts = [self._cut(slot, start, stop, skips, alone=len(announced) == 1) for slot, start, stop in announced]
        if len(self._slots) > self._most_held:
            self._trim()
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
        slot, start, stop = announced[0]
        plain = None if slot.decoded is None else slot.decoded.plain
        return None if plain is None or self._served_within(slot, start, stop) is None else (plain, start, stop)

    def _within(self, slot: _Slot, start: int, stop: int) -> dict[str, Any] | None:
        """The rows, where they go on from the last ones of a decoded window, and more of it follow: nearly all do."""
        columns = self._served_within(slot, start, stop)
        return None if columns is None else cut(columns, start, stop, self._make or _as_it_is)

    def _served_within(self, slot: _Slot, start: int, stop: int) -> Mapping[str, Any] | None:
        """The columns of the window, if its rows up to ``start`` were served, all of them came and more follow: then
        these are served, too."""
        decoded, served = slot.decoded, slot.served
        if decoded is None or decoded.columns is None or decoded.came is not None or slot.gone:
            return None
        if not served.stops or served.stops[-1] != start or served.size + stop - start >= slot.window.rows:
            return None
        served.add(start, stop)
        slot.waiting -= 1
        self._uses = slot.used = self._uses + 1
        return decoded.columns

    def read(self, pieces: Iterable[Piece]) -> Any:
        """`take` of what is not announced any sooner; without what was skipped."""
        return self.take(self.announce(pieces))[0]

    def clear(self, *, again: bool = False) -> None:
        """Forget all windows, close files and end threads; reading goes on by decoding anew.

        Arrow gives back the memory that it keeps; not where as little is read ``again`` as was read since the last
        time: then new pages would cost more than a few percent of reading.
        """
        if self._process != os.getpid():
            # Forked: the threads that were decoding, and what they were holding locks of, are the parent's.
            self._threads = Threads(self._threads.count)
            self._windows = self._new_windows()
            self._process = os.getpid()
        else:
            self._threads.close()
            decoded = self.windows_decoded - self._decoded_before
            self._windows.close(gives_back=decoded > (_FEW * self._most_held if again else 0))
        self._decoded_before = self.windows_decoded
        for slot in self._slots.values():
            slot.gone = True
        self._slots, self._follows = {}, {}
        self._deferred.clear()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            self.clear()

    def _new_windows(self) -> WindowDecoder:
        return WindowDecoder(self._new_decoder(), nulls=self._nulls, skipper=self._skipper, threads=self._threads)

    # --- windows

    def _slot_of(self, key: Key, layout: EpochLayout, window: Window) -> _Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _Slot(key=key, layout=layout, window=window)
            self._windows.announce(window)
            self._deferred.append(slot)
            self._fill()
        return slot

    def _fill(self) -> None:
        """Begin what was announced, in that order, while there is room."""
        while self._deferred and self._make_room(self._deferred[0], spared=self._max_windows):
            self._begin(self._deferred.popleft())

    def _make_room(self, slot: _Slot, *, spared: int) -> bool:
        """Whether ``slot`` may be decoded beside what is held, once what nothing announced needs was let go of.

        As many as are open at once are ``spared``: a lane's next part may not be announced yet.
        """
        while not self._fits(slot):
            entered = [one for one in self._by_use() if one.served.size and one.future is not None]
            idle = next((one for one in entered if not one.waiting), None)
            if idle is None or len(entered) <= spared:
                return False
            self._let_go(idle)
        return True

    def _by_use(self) -> list[_Slot]:
        """All windows, the one used last last."""
        return sorted(self._slots.values(), key=lambda slot: slot.used)

    def _fits(self, slot: _Slot) -> bool:
        held = [one for one in self._slots.values() if one.future is not None]
        if not held:
            return True
        if len(held) >= self._most_held:
            return False
        if self._limit is None:
            return True
        known = sum(map(self._bytes_of, held)) + self._bytes_of(slot)
        return self._row_bytes > 0 and known <= self._limit

    def _bytes_of(self, slot: _Slot) -> float:
        """What a window takes, or is expected to: as many bytes a row as the widest so far."""
        decoded = slot.decoded
        if decoded is None and slot.future is not None and slot.future.done() and not slot.future.cancelled():
            decoded = None if slot.future.exception() is not None else slot.future.result()
        if decoded is None:
            return slot.window.rows * self._row_bytes
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / slot.window.rows)
        return decoded.size_bytes

    def _trim(self) -> None:
        """Let go of what was decoded since it was needed, beyond what is allowed, and nothing needs any more."""
        held = [one for one in self._by_use() if one.future is not None]
        idle = [one for one in held if not one.waiting]
        for one in idle[: max(0, len(held) - self._most_held)]:
            self._let_go(one)

    def _begin(self, slot: _Slot) -> None:
        self.windows_decoded += 1
        slot.decoded = None
        slot.future = self._threads.submit(partial(self._windows.decode, slot.layout, slot.window))

    def _let_go(self, slot: _Slot) -> None:
        slot.gone, slot.decoded, slot.future = True, None, None
        del self._slots[slot.key]

    def _needed(self, slot: _Slot) -> DecodedWindow:
        """The window of ``slot``, waited for. What cannot be read now is tried again when it is asked for again."""
        if slot.future is None:
            self._deferred.remove(slot)
            # Were the other lanes' windows to make room, each would be decoded again for its next micro-batch.
            self._make_room(slot, spared=self._max_windows - 1)
            self._begin(slot)
        assert slot.future is not None
        try:
            decoded = slot.future.result()
            for fragment, error in decoded.damage:
                if self._skipper is None:
                    raise error
                self._skipper.found(error, slot.layout, slot.window, fragment)
        except BaseException:
            self._let_go(slot)
            raise
        slot.decoded = decoded
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / slot.window.rows)
        return decoded

    def _cut(self, slot: _Slot, start: int, stop: int, skips: list[Skip], *, alone: bool) -> Any:
        slot.waiting -= 1
        self._uses = slot.used = self._uses + 1
        if slot.gone:
            slot = self._slot_of(slot.key, slot.layout, slot.window)
        if not slot.served.add(start, stop):  # memory that is already somebody's
            self._let_go(slot)
            slot = self._slot_of(slot.key, slot.layout, slot.window)
            slot.served.add(start, stop)
        decoded = slot.decoded or self._needed(slot)
        for gap in decoded.gaps:
            rows = int(gap.before[stop] - gap.before[start])
            if rows:
                assert self._skipper is not None
                first = slot.window.start
                skips.append(self._skipper.skip(slot.layout, gap.group, first + start, first + stop, rows))
        found = self._rows(slot, decoded, start, stop, self._make if alone and self._make is not None else _as_it_is)
        if slot.served.size == slot.window.rows:
            self._let_go(slot)
            self._fill()
        elif self._deferred and slot.served.size == stop - start:  # one more is open: others may be idle now
            self._fill()
        return found

    def _rows(self, slot: _Slot, decoded: DecodedWindow, start: int, stop: int, make: Callable[[Any], Any]) -> Any:
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
            raise NullFound(error, table, slot.layout, slot.window.start + offsets) from error


def _as_it_is(array: Any) -> Any:
    return array

"""This module holds decoded windows, and decodes windows ahead in the order in which they were asked for.

A window is needed from when it is announced until all of its rows were served. It is decoded in a thread as soon as
there is room for it, at the latest when the reader waits for it. Where there is no room for a window that is needed,
the window that was used least recently, and that nothing announced needs, makes room.

An error of a window is raised when the reader waits for the window, and not before. The module looks at no rows. It
starts the threads of `lakeckpt.reading.windows.threads`, and `WindowCache.clear` ends them.
"""

from __future__ import annotations

import bisect
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

import pyarrow as pa

from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.reading.columns.convert import Nulls
from lakeckpt.reading.columns.ragged import Column
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.room import Room
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import Array, DecodedWindow, WindowDecoder

__all__ = ["CachedWindow", "Decoding", "Served", "WindowCache", "windows_held_of"]

Key = tuple[tuple[OrderSpec, int, int, int], int]
"""The identity of a layout, and where the window begins in it."""


def windows_held_of(lanes: int) -> int:
    """Return how many windows a process that reads so many lanes may hold: one for each lane, and as many that are
    read ahead, at least two.

    With a single window ahead, the second thread would have nothing to decode.
    """
    return lanes + max(lanes, 2)


class Served:
    """The rows of a window that were served: sorted runs that do not touch. There is nearly always one run, which grows
    at its end. `Intervals` would take longer than this for each micro-batch.
    """

    __slots__ = ("size", "starts", "stops")

    def __init__(self) -> None:
        self.size = 0
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add the non-empty [start, stop). Return whether all of it is new."""
        if self.stops and self.stops[-1] == start:
            self.stops[-1] = stop
            self.size += stop - start
            return True
        first = bisect.bisect_left(self.stops, start)  # the first run that ends at or after start
        last = bisect.bisect_right(self.starts, stop)  # one past the last run that begins at or before stop
        low, high = min([start, *self.starts[first:last]]), max([stop, *self.stops[first:last]])
        grown = (high - low) - (sum(self.stops[first:last]) - sum(self.starts[first:last]))
        self.starts[first:last], self.stops[first:last] = [low], [high]
        self.size += grown
        return grown == stop - start


@dataclass(slots=True, kw_only=True, eq=False)
class CachedWindow:
    """A window from its announcement until all of its rows were served."""

    key: Key
    layout: EpochLayout
    window: Window
    served: Served = field(default_factory=Served)
    waiting: int = 0
    """Announced parts that have not been taken."""
    used: int = 0
    """The number of the last use: the larger, the later."""
    future: Future[DecodedWindow] | None = None
    """None while there is no room for it."""
    decoded: DecodedWindow | None = None
    gone: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the window can be read without a wait."""
        return self.decoded is not None or (self.future is not None and self.future.done())

    @property
    def is_waiting(self) -> bool:
        """Whether the window is needed, and waits for room."""
        return self.future is None and not self.gone


class Decoding(Protocol):
    """Decodes windows, in several threads at once: a `WindowDecoder`, or one for packed sequences."""

    room_bytes: float
    """The most memory that may wait to be used for a later window, beside the windows that are held."""

    def decode(self, window: Window) -> DecodedWindow:
        """Return what stands at the positions of ``window``."""

    def groups(self, window: Window) -> list[int]:
        """Return the row groups that are read for ``window``."""

    def kept_bytes(self) -> int:
        """Return the bytes that the decoder alone keeps for later windows."""

    def release(self) -> None:
        """Release what is kept for later windows, but for the memory of one."""


def _rows_of(rows: RowGroupDecoder, nulls: Nulls | None, threads: Threads) -> Decoding:
    return WindowDecoder(rows, nulls=nulls, threads=threads)


class WindowCache:
    """The windows of the row groups that ``rows`` decodes. For one thread of one process.

    ``nulls`` as for `WindowDecoder`; or ``decoder_of`` makes what decodes windows. At most ``threads`` decode.
    ``most_open``: how many windows are open at once, as many as lanes are read in turn. Up to `windows_held_of` it are
    held: the open windows, and others that were announced. If ``room`` has a limit, only those announced windows are
    held that fit beside all others of the room, and memory waits to be used again only as far as it fits beside them. A
    window that the reader waits for is always decoded, and open windows are kept.
    """

    def __init__(
        self,
        rows: RowGroupDecoder,
        *,
        nulls: Nulls | None,
        threads: int,
        most_open: int,
        room: Room,
        decoder_of: Callable[[Threads], Decoding] | None = None,
    ) -> None:
        self._decoder_of = decoder_of or partial(_rows_of, rows, nulls)
        self.uses = count(1)
        """Numbers for `CachedWindow.used`."""
        self.rows = rows
        self._begin_threads(threads)
        self._most_open, self._most_held = most_open, windows_held_of(most_open)
        self._room = room
        self._all: dict[Key, CachedWindow] = {}
        self._row_bytes = 0.0
        room.enter(self)

    def _begin_threads(self, count: int) -> None:
        self.process = os.getpid()
        """The process that has the threads. A forked process calls `clear` first."""
        self._threads = Threads(count)
        self._decoder = self._decoder_of(self._threads)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, its threads have ended, and modules may have been emptied.
        if not is_finalizing() and hasattr(self, "process") and self.process == os.getpid():
            self._threads.close()

    @property
    def held(self) -> int:
        """How many windows are in memory now, or being decoded."""
        return len(self._held())

    def _held(self) -> list[CachedWindow]:
        return [one for one in self._all.values() if one.future is not None]

    @property
    def has_room(self) -> bool:
        """Whether windows that are announced now would be decoded soon, or fetched from a store."""
        return (not self._room.is_full and not self._threads.have_enough) or self.rows.has_room

    def get(self, layout: EpochLayout, window: Window) -> CachedWindow:
        """Return the window of ``layout``; a new one is begun as soon as there is room."""
        key = layout.identity, window.start
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = CachedWindow(key=key, layout=layout, window=window)
            waiting = [one.window for one in self._all.values() if not one.is_ready]
            self.rows.expect([group for one in waiting for group in self._decoder.groups(one)])
            self._room.wait(self, found)
            self.fill()
        return found

    def wait_for(self, needed: CachedWindow) -> DecodedWindow:
        """Return the rows of ``needed``. A window that cannot be read now is tried again at the next call."""
        if needed.decoded is not None:
            return needed.decoded
        if needed.future is None:
            # If the windows of other lanes made room, each would be decoded again for its next micro-batch.
            self._make_room(needed, spared=self._most_open - 1)
            self._begin(needed)
        assert needed.future is not None
        try:
            decoded = needed.future.result()
        except BaseException:
            self.drop(needed)
            raise
        needed.decoded = decoded
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / needed.window.rows)
        return decoded

    def nothing(self) -> Mapping[str, Column[Array]]:
        """Return the columns of a window without rows; not for Arrow tables."""
        columns = self._decoder.decode(Window(start=0, stop=0, fragments=(), key=None)).columns
        assert columns is not None
        return columns

    def fill(self) -> None:
        """Begin to decode the announced windows of the room, in the order of their announcement, while there is any."""
        self._room.fill()

    def begin(self, window: CachedWindow) -> bool:
        """See `lakeckpt.reading.windows.room.Taking`."""
        if not self._make_room(window, spared=self._most_open):
            return False
        self._begin(window)
        return True

    def taken_bytes(self) -> float:
        """See `lakeckpt.reading.windows.room.Taking`."""
        return self._decoder.kept_bytes() + sum(map(self._bytes_of, self._held()))

    def drop(self, needed: CachedWindow) -> None:
        """Drop a window that is no longer needed, or that must be decoded anew."""
        needed.gone, needed.decoded, needed.future = True, None, None
        del self._all[needed.key]

    def trim(self) -> None:
        """Drop windows that nothing announced needs, beyond the number that may be held."""
        if len(self._all) <= self._most_held:
            return
        held = [one for one in self._by_use() if one.future is not None]
        idle = [one for one in held if not one.waiting]
        for one in idle[: max(0, len(held) - self._most_held)]:
            self.drop(one)

    def clear(self) -> None:
        """Drop all windows, close files and end threads; windows that are needed later are decoded anew."""
        if self.process != os.getpid():  # forked: the threads, and the locks that they hold, are the parent's
            self.rows.forget()
            self._begin_threads(self._threads.count)
        else:
            self._threads.close()
            self.rows.close()
        for one in self._all.values():
            one.gone = True
        if self._all:  # reading was broken off; after a whole epoch, the next epoch uses the memory again
            pa.default_memory_pool().release_unused()
        self._all = {}
        self._decoder.release()

    # --- room

    def _begin(self, needed: CachedWindow) -> None:
        needed.decoded = None
        if self._room.limit_bytes is not None:  # the window is decoded into the memory that waits
            self._decoder.room_bytes = self._room.left_bytes() + self._decoder.kept_bytes()
        needed.future = self._threads.submit(partial(self._decoder.decode, needed.window))

    def _make_room(self, needed: CachedWindow, *, spared: int) -> bool:
        """Say whether there is room to decode ``needed``, once windows that nothing needs were dropped.

        As many as are open at once are ``spared``: a lane's next part may not be announced yet.
        """
        while not self._fits(needed):
            entered = [one for one in self._by_use() if one.served.size and one.future is not None]
            idle = next((one for one in entered if not one.waiting), None)
            if idle is None or len(entered) <= spared:
                return False
            self.drop(idle)
        return True

    def _by_use(self) -> list[CachedWindow]:
        """Return all windows, the one used last at the end."""
        return sorted(self._all.values(), key=lambda one: one.used)

    def _fits(self, needed: CachedWindow) -> bool:
        held = self._held()
        if not held:
            return True
        if len(held) >= self._most_held:
            return False
        if self._room.limit_bytes is None:
            return True
        return self._row_bytes > 0 and self._bytes_of(needed) <= self._room.left_bytes()

    def _bytes_of(self, needed: CachedWindow) -> float:
        """Return the bytes of a window. One that is not decoded is expected to have the widest rows so far."""
        decoded, future = needed.decoded, needed.future
        if decoded is None and future is not None and future.done() and not future.cancelled():
            decoded = None if future.exception() is not None else future.result()
        if decoded is None:
            return needed.window.rows * self._row_bytes
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / needed.window.rows)
        return decoded.size_bytes

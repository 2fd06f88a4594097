"""This module holds decoded windows, and decodes windows ahead in the order in which lanes need them.

A reader says which lanes it follows. Of each lane the open window is held, and the windows that follow are decoded in
threads as soon as there is room for them (`lakeckpt.reading.windows.room`), at the latest when the reader waits for
them. If there is no room for a window that is needed, the window that was used least recently, and that no lane needs,
makes room. Any other window may be read as well: it is decoded when it is opened.

An error of a window is raised when the reader waits for the window, and not before. The module looks at no rows. It
starts the threads of `lakeckpt.reading.windows.threads`, and `WindowCache.clear` ends them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, starmap
from typing import Protocol

import pyarrow as pa

from lakeckpt.core.order import EpochLayout, Window
from lakeckpt.lake.parquet.prefetch import MOST_AHEAD
from lakeckpt.reading.columns.convert import Nulls
from lakeckpt.reading.columns.ragged import Column
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.lanes import CachedWindow, FollowedLane, Key
from lakeckpt.reading.windows.room import Room
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import Array, DecodedWindow, WindowDecoder

__all__ = ["Decoding", "WindowCache", "windows_held_of"]


def windows_held_of(lanes: int) -> int:
    """Return how many windows a process that reads so many lanes may hold: one for each lane, and as many that are
    read ahead, at least two.

    With a single window ahead, the second thread would have nothing to decode.
    """
    return lanes + max(lanes, 2)


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
    held: the open windows, and those that are read ahead. If ``room`` has a limit, only those windows are read ahead
    that fit beside all others of the room, and memory waits to be used again only as far as it fits beside them. A
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
        self._uses = count(1)
        """Numbers for `CachedWindow.used`."""
        self.rows = rows
        self._begin_threads(threads)
        self._most_open, self._most_held = most_open, windows_held_of(most_open)
        self._room = room
        self._all: dict[Key, CachedWindow] = {}
        self._lanes: list[FollowedLane] = []
        self._share = 1.0
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

    # --- lanes

    def follow(self, lanes: Iterable[Iterator[tuple[EpochLayout, Window]]], share: float = 1.0) -> None:
        """Read ahead what ``lanes`` yield, instead of what was followed before, once `fill` is called.

        ``share``: which part of all rows that the loop gets are of this reader. Windows are begun so long before they
        are needed that those of all readers of a room are about as many as one reader would read ahead.
        """
        self._lanes, self._share = [FollowedLane(starmap(self.known, one)) for one in lanes], share
        for window in list(self._all.values()):
            if not window.served.size:
                self.drop(window)

    def fill(self) -> None:
        """Read ahead, and have all readers do so that share the room."""
        self._room.fill()

    def next(self) -> tuple[float, CachedWindow] | None:
        """See `lakeckpt.reading.windows.room.Taking`."""
        found = min(filter(None, (lane.next() for lane in self._lanes)), key=lambda one: one[0], default=None)
        lead = self._share * (self._most_held - self._most_open) / self._most_open
        if found is None or found[0] > lead * found[1].window.rows:
            return None
        return found[0] / self._share, found[1]

    def begin(self, window: CachedWindow) -> bool:
        """See `lakeckpt.reading.windows.room.Taking`."""
        if not self._make_room(window, spared=self._most_open):
            return False
        self._begin(window)
        return True

    def fetch(self) -> None:
        """See `lakeckpt.reading.windows.room.Taking`."""
        lanes, most = list(self._lanes) if self.rows.fetches else [], max(1, MOST_AHEAD * self._share)
        while lanes and len(self._unread()) < most:
            lane = min(lanes, key=lambda one: one.rows_known)
            if not lane.extend():
                lanes.remove(lane)
            self.rows.expect(self._unread())

    @property
    def rows_ready(self) -> int:
        """The rows that are decoded and not served yet. Any thread may ask."""
        return sum(one.rows_left for one in list(self._all.values()) if one.is_ready)

    def _unread(self) -> list[int]:
        """Return the row groups of windows that are not decoded."""
        waiting = [one.window for one in self._all.values() if not one.is_ready]
        return [group for one in waiting for group in self._decoder.groups(one)]

    # --- windows

    def at(self, layout: EpochLayout, position: int) -> CachedWindow:
        """Return the window of ``layout`` that holds ``position``."""
        for one in self._all.values():
            if one.layout is layout and one.window.start <= position < one.window.stop:
                return one
        return self.known(layout, layout.window_at(position))

    def known(self, layout: EpochLayout, window: Window) -> CachedWindow:
        """Return the window of ``layout``, which is new if it was not known."""
        key = layout.identity, window.start
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = CachedWindow(key=key, layout=layout, window=window)
        return found

    def use(self, needed: CachedWindow) -> None:
        """Begin to decode ``needed``, if it was not begun: the reader reads rows of it now, or soon."""
        needed.used = next(self._uses)
        if needed.future is None and not needed.gone:
            # If the windows of other lanes made room, each would be decoded again for its next micro-batch.
            self._make_room(needed, spared=self._most_open - 1)
            self._begin(needed)

    def wait_for(self, needed: CachedWindow) -> DecodedWindow:
        """Return the rows of ``needed``, which is in use. A window that cannot be read is tried again when it is used
        again."""
        if needed.decoded is not None:
            return needed.decoded
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

    def taken_bytes(self) -> float:
        """See `lakeckpt.reading.windows.room.Taking`."""
        return self._decoder.kept_bytes() + sum(map(self._bytes_of, self._held()))

    def drop(self, needed: CachedWindow) -> None:
        """Drop a window that is no longer needed, or that must be decoded anew."""
        needed.gone, needed.decoded, needed.future = True, None, None
        del self._all[needed.key]

    def trim(self) -> None:
        """Drop windows that were entered, beyond the number that may be held."""
        for one in self._entered()[: max(0, self.held - self._most_held)]:
            self.drop(one)

    def clear(self) -> None:
        """Drop all windows, close files and end threads; windows that are needed later are decoded anew. Lanes are no
        longer followed."""
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
        self._all, self._lanes = {}, []
        self._decoder.release()

    # --- room

    def _begin(self, needed: CachedWindow) -> None:
        needed.decoded = None
        if self._room.limit_bytes is not None:  # the window is decoded into the memory that waits
            self._decoder.room_bytes = self._room.left_bytes() + self._decoder.kept_bytes()
        needed.future = self._threads.submit(partial(self._decoder.decode, needed.window))

    def _make_room(self, needed: CachedWindow, *, spared: int) -> bool:
        """Say whether there is room to decode ``needed``, once windows that nothing needs were dropped.

        As many as are open at once are ``spared``: lanes read on in those that were used last.
        """
        while not self._fits(needed):
            entered = self._entered()
            if len(entered) <= spared:
                return False
            self.drop(entered[0])
        return True

    def _entered(self) -> list[CachedWindow]:
        """Return the windows in memory of which rows were served, the one used last at the end."""
        return sorted((one for one in self._held() if one.served.size), key=lambda one: one.used)

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

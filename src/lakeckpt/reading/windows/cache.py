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
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import DecodedWindow, WindowDecoder

__all__ = ["CachedWindow", "Served", "WindowCache", "windows_held_of"]

Key = tuple[tuple[OrderSpec, int, int, int], int]
"""The identity of a layout, and where the window begins in it."""


def windows_held_of(lanes: int) -> int:
    """Return how many windows a process that reads so many lanes may hold: one for each lane, and as many read ahead,
    two at least.

    With one alone, a lane's next window is decoded in one thread while this one is consumed, and the other waits.
    """
    return lanes + max(lanes, 2)


class Served:
    """Which rows of a window were served: sorted runs that do not touch. Nearly always one run, which grows at its end.

    (`Intervals` would do, at a price for each micro-batch that is felt with small ones.)
    """

    __slots__ = ("size", "starts", "stops")

    def __init__(self) -> None:
        self.size = 0
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add the non-empty [start, stop); tell whether all of it is new."""
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
    """A window from when it is announced until all of it was served."""

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

    @property
    def is_ready(self) -> bool:
        """Whether the reader would not wait for it."""
        return self.decoded is not None or (self.future is not None and self.future.done())


class WindowCache:
    """Windows that a decoder of ``new_decoder`` decodes, in at most ``threads``. For one thread of one process.

    ``most_open``: how many are open at once, as many as lanes are read in turn. Up to `windows_held_of` it are held:
    those, and others that were announced; with ``limit_bytes``, of these only what fits. A window that the reader waits
    for is always decoded, and those that are open are kept.
    """

    def __init__(
        self,
        new_decoder: Callable[[Threads], WindowDecoder],
        *,
        threads: int,
        most_open: int,
        limit_bytes: int | None,
    ) -> None:
        self.uses = count(1)
        """Numbers for `CachedWindow.used`."""
        self._new_decoder = new_decoder
        self._threads = Threads(threads)
        self.decoder = new_decoder(self._threads)
        self._most_open, self._most_held = most_open, windows_held_of(most_open)
        self._limit = limit_bytes
        self._all: dict[Key, CachedWindow] = {}
        self._deferred: deque[CachedWindow] = deque()
        self._row_bytes = 0.0
        self.process = os.getpid()
        """Whose threads and files they are: in one that was forked, `clear` comes first."""

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, its threads have, and modules may have been emptied: nothing is left to do or use.
        if not is_finalizing() and hasattr(self, "process") and self.process == os.getpid():
            self._threads.close()

    @property
    def held(self) -> int:
        """How many are in memory now, or being decoded."""
        return sum(one.future is not None for one in self._all.values())

    @property
    def has_room(self) -> bool:
        """Whether it is of use to announce more now: it would be decoded soon, or fetched from a store."""
        return (not self._deferred and not self._threads.have_enough) or self.decoder.rows.has_room

    def get(self, layout: EpochLayout, window: Window) -> CachedWindow:
        """Return the window of ``layout``; a new one is begun as soon as there is room."""
        key = layout.identity, window.start
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = CachedWindow(key=key, layout=layout, window=window)
            waiting = [one.window for one in self._all.values() if not one.is_ready]
            self.decoder.rows.expect([part.group for one in waiting for part in one.fragments])
            self._deferred.append(found)
            self.fill()
        return found

    def wait_for(self, needed: CachedWindow) -> DecodedWindow:
        """Return what ``needed`` decodes to. What cannot be read now is tried again when it is asked for again."""
        if needed.decoded is not None:
            return needed.decoded
        if needed.future is None:
            self._deferred.remove(needed)
            # Were the other lanes' windows to make room, each would be decoded again for its next micro-batch.
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

    def fill(self) -> None:
        """Begin to decode the announced windows, in the order of their announcement, while there is room."""
        while self._deferred and self._make_room(self._deferred[0], spared=self._most_open):
            self._begin(self._deferred.popleft())

    def drop(self, needed: CachedWindow) -> None:
        """Drop a window that is not needed any more, or that must be decoded anew."""
        needed.gone, needed.decoded, needed.future = True, None, None
        del self._all[needed.key]

    def trim(self) -> None:
        """Drop windows beyond what is allowed that nothing announced needs any more."""
        if len(self._all) <= self._most_held:
            return
        held = [one for one in self._by_use() if one.future is not None]
        idle = [one for one in held if not one.waiting]
        for one in idle[: max(0, len(held) - self._most_held)]:
            self.drop(one)

    def clear(self) -> None:
        """Forget all windows, close files and end threads; what is needed next is decoded anew.

        Where windows were left, reading was broken off, and memory that waits to be used again is released. At the end
        of an epoch none are left, and the next epoch uses the memory again.
        """
        if self.process != os.getpid():
            # Forked: the threads that were decoding, and what they were holding locks of, are the parent's.
            self._threads = Threads(self._threads.count)
            self.decoder = self._new_decoder(self._threads)
            self.process = os.getpid()
        else:
            self._threads.close()
            self.decoder.close(gives_back=bool(self._all))
        for one in self._all.values():
            one.gone = True
        self._all = {}
        self._deferred.clear()

    # --- room

    def _begin(self, needed: CachedWindow) -> None:
        needed.decoded = None
        needed.future = self._threads.submit(partial(self.decoder.decode, needed.window))

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
        """All windows, the one used last last."""
        return sorted(self._all.values(), key=lambda one: one.used)

    def _fits(self, needed: CachedWindow) -> bool:
        held = [one for one in self._all.values() if one.future is not None]
        if not held:
            return True
        if len(held) >= self._most_held:
            return False
        if self._limit is None:
            return True
        known = sum(map(self._bytes_of, held)) + self._bytes_of(needed)
        return self._row_bytes > 0 and known <= self._limit

    def _bytes_of(self, needed: CachedWindow) -> float:
        """Return what a window takes, or is expected to take: as many bytes a row as the widest so far."""
        decoded, future = needed.decoded, needed.future
        if decoded is None and future is not None and future.done() and not future.cancelled():
            decoded = None if future.exception() is not None else future.result()
        if decoded is None:
            return needed.window.rows * self._row_bytes
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / needed.window.rows)
        return decoded.size_bytes

"""Which windows are needed, and which of them are in memory?  Decoded ahead, in the order in which they were asked for.

A window is needed from when it is announced until all of its rows were served. It is decoded in a thread as soon as
there is room for it, at the latest when it is waited for. Where there is no room for one that is needed, the one that
nothing announced needs, unused for longest, makes room.

What goes wrong with a window is raised when it is waited for, and not before. Nothing here looks at rows.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from lakeckpt.core.order import EpochLayout, Window
from lakeckpt.reading.parts import Key, Served
from lakeckpt.reading.skipping import Skipper
from lakeckpt.reading.threads import Threads
from lakeckpt.reading.windows import DecodedWindow, WindowDecoder

__all__ = ["NeededWindow", "NeededWindows", "windows_held_of"]

_FEW = 32
"""Windows that are decoded for each that is held, until giving their memory back, to ask for it again, costs little."""


def windows_held_of(lanes: int) -> int:
    """How many windows a process that reads so many lanes may hold: one of each, and as many read ahead, two at least.

    With one alone, a lane's next window is decoded in one thread while this one is consumed, and the other waits.
    """
    return lanes + max(lanes, 2)


@dataclass(slots=True, kw_only=True, eq=False)
class NeededWindow:
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
    told: Callable[[], None] | None = None
    """What is called when it has been decoded."""

    @property
    def is_ready(self) -> bool:
        """Whether nobody would wait for it."""
        return self.decoded is not None or (self.future is not None and self.future.done())

    def is_being_decoded(self, when_over: Callable[[], None]) -> bool:
        """Whether it is in the hands of a thread; if so ``when_over`` is called when it no longer is: once, in any
        thread, however often it was asked for."""
        if self.is_ready or self.future is None:
            return False
        if self.told is not when_over:
            self.told = when_over
            self.future.add_done_callback(lambda _: when_over())
        return True


class NeededWindows:
    """Windows that a decoder of ``new_decoder`` decodes, in at most ``threads``. For one thread of one process.

    ``most_open``: how many are open at once, as many as lanes are read in turn. Up to `windows_held_of` it are held:
    those, and others that were announced; with ``limit_bytes``, of these only what fits. What is waited for is always
    decoded, and those that are open are kept. Without a ``skipper``, damage is raised.
    """

    def __init__(
        self,
        new_decoder: Callable[[Threads], WindowDecoder],
        *,
        threads: int,
        most_open: int,
        limit_bytes: int | None,
        skipper: Skipper | None,
    ) -> None:
        self.begun = 0
        """How many were begun so far: more than there are means that they were decoded again."""
        self._begun_before = 0
        self.uses = count(1)
        """Numbers for `NeededWindow.used`."""
        self._new_decoder = new_decoder
        self._threads = Threads(threads)
        self.decoder = new_decoder(self._threads)
        self._most_open, self._most_held = most_open, windows_held_of(most_open)
        self._limit = limit_bytes
        self._skipper = skipper
        self._all: dict[Key, NeededWindow] = {}
        self._deferred: deque[NeededWindow] = deque()
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
        """Whether more may be announced to some use: to be decoded soon, or to be fetched from a store."""
        return (not self._deferred and not self._threads.have_enough) or self.decoder.has_room

    def get(self, key: Key, layout: EpochLayout, window: Window) -> NeededWindow:
        """Return the one of ``key``; one that is new is begun as soon as there is room."""
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = NeededWindow(key=key, layout=layout, window=window)
            self.decoder.announce(window)
            self._deferred.append(found)
            self.fill()
        return found

    def wait_for(self, needed: NeededWindow) -> DecodedWindow:
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
            for fragment, error in decoded.damage:
                if self._skipper is None:
                    raise error
                self._skipper.found(error, needed.layout, needed.window, fragment)
        except BaseException:
            self.let_go(needed)
            raise
        needed.decoded = decoded
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / needed.window.rows)
        return decoded

    def fill(self) -> None:
        """Begin what was announced, in that order, while there is room."""
        while self._deferred and self._make_room(self._deferred[0], spared=self._most_open):
            self._begin(self._deferred.popleft())

    def let_go(self, needed: NeededWindow) -> None:
        """Nobody needs it any more, or as it is."""
        needed.gone, needed.decoded, needed.future = True, None, None
        del self._all[needed.key]

    def trim(self) -> None:
        """Let go of what was decoded since it was needed, beyond what is allowed, and nothing needs any more."""
        if len(self._all) <= self._most_held:
            return
        held = [one for one in self._by_use() if one.future is not None]
        idle = [one for one in held if not one.waiting]
        for one in idle[: max(0, len(held) - self._most_held)]:
            self.let_go(one)

    def clear(self, *, again: bool = False) -> None:
        """Forget all, close files and end threads; what is needed next is decoded anew.

        Arrow gives back the memory that it keeps; not where as little is read ``again`` as was read since the last
        time: then new pages would cost more than a few percent of reading.
        """
        if self.process != os.getpid():
            # Forked: the threads that were decoding, and what they were holding locks of, are the parent's.
            self._threads = Threads(self._threads.count)
            self.decoder = self._new_decoder(self._threads)
            self.process = os.getpid()
        else:
            self._threads.close()
            few = _FEW * self._most_held if again else 0
            self.decoder.close(gives_back=self.begun - self._begun_before > few)
        self._begun_before = self.begun
        for one in self._all.values():
            one.gone = True
        self._all = {}
        self._deferred.clear()

    # --- room

    def _begin(self, needed: NeededWindow) -> None:
        self.begun += 1
        needed.decoded = None
        needed.future = self._threads.submit(partial(self.decoder.decode, needed.layout, needed.window))

    def _make_room(self, needed: NeededWindow, *, spared: int) -> bool:
        """Whether ``needed`` may be decoded beside what is held, once what nothing announced needs was let go of.

        As many as are open at once are ``spared``: a lane's next part may not be announced yet.
        """
        while not self._fits(needed):
            entered = [one for one in self._by_use() if one.served.size and one.future is not None]
            idle = next((one for one in entered if not one.waiting), None)
            if idle is None or len(entered) <= spared:
                return False
            self.let_go(idle)
        return True

    def _by_use(self) -> list[NeededWindow]:
        """All windows, the one used last last."""
        return sorted(self._all.values(), key=lambda one: one.used)

    def _fits(self, needed: NeededWindow) -> bool:
        held = [one for one in self._all.values() if one.future is not None]
        if not held:
            return True
        if len(held) >= self._most_held:
            return False
        if self._limit is None:
            return True
        known = sum(map(self._bytes_of, held)) + self._bytes_of(needed)
        return self._row_bytes > 0 and known <= self._limit

    def _bytes_of(self, needed: NeededWindow) -> float:
        """What a window takes, or is expected to: as many bytes a row as the widest so far."""
        decoded, future = needed.decoded, needed.future
        if decoded is None and future is not None and future.done() and not future.cancelled():
            decoded = None if future.exception() is not None else future.result()
        if decoded is None:
            return needed.window.rows * self._row_bytes
        self._row_bytes = max(self._row_bytes, decoded.size_bytes / needed.window.rows)
        return decoded.size_bytes

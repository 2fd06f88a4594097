"""This module bounds the memory that the windows of several readers take together.

The readers of a mixture share a `Room`; any other reader has one of its own. Each reader says what it takes, and what
it needs soon. One thread uses a room and its readers; only the garbage collector may drop a reader's windows in any
thread. The module holds no rows, and starts no threads.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

__all__ = ["Room", "Taking"]


class Taking(Protocol):
    """A reader that takes memory of a room."""

    def taken_bytes(self) -> float:
        """Return the bytes of the windows that it holds, and of what it keeps for later windows."""

    def next(self) -> tuple[float, Any] | None:
        """Return the window that is needed soon, is not begun, and is needed first, and after how many rows of the
        loop."""

    def begin(self, window: Any) -> bool:
        """Begin to decode a window; return whether there was room for it."""

    def fetch(self) -> None:
        """Fetch from a store what is needed later."""


class Room:
    """Memory for windows: at most ``limit_bytes``, but for windows that a reader waits for. None: any memory."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._readers: weakref.WeakSet[Taking] = weakref.WeakSet()

    def enter(self, reader: Taking) -> None:
        """Count what ``reader`` takes."""
        self._readers.add(reader)

    def left_bytes(self) -> float:
        """Return how many bytes are left; less than 0 if more is taken. Only for a room with a limit."""
        assert self.limit_bytes is not None
        return self.limit_bytes - sum(one.taken_bytes() for one in list(self._readers))

    def fill(self) -> None:
        """Begin to decode what readers need soon, in the order in which they need it, while there is room."""
        readers = list(self._readers)
        while coming := [(found, one) for one in readers if (found := one.next()) is not None]:
            (_, window), reader = min(coming, key=lambda one: one[0][0])
            if not reader.begin(window):
                if self.limit_bytes is not None:
                    break
                readers.remove(reader)
        for one in list(self._readers):
            one.fetch()

"""This module bounds the memory that the windows of several readers take together.

The readers of a mixture share a `Room`; any other reader has one of its own. Windows that are announced and have no
room wait in one queue, in the order in which they will be needed. Each reader says what it takes. One thread uses a
room and its readers; only a reader's windows may be dropped by the garbage collector in any thread, and they leave the
queue when their turn comes. The module holds no rows, and starts no threads.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

__all__ = ["Room", "Taking", "Waiting"]


class Waiting(Protocol):
    """A window that waits for room."""

    @property
    def is_waiting(self) -> bool:
        """Whether somebody still needs the window and it was not begun."""


class Taking(Protocol):
    """A reader that takes memory of a room."""

    def taken_bytes(self) -> float:
        """Return the bytes of the windows that it holds, and of what it keeps for later windows."""

    def begin(self, window: Any) -> bool:
        """Begin to decode a window that waits; return whether there was room for it."""


class Room:
    """Memory for windows: at most ``limit_bytes``, but for windows that a reader waits for. None: any memory."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._readers: weakref.WeakSet[Taking] = weakref.WeakSet()
        self._waiting: deque[tuple[weakref.ref[Taking], Waiting]] = deque()

    def enter(self, reader: Taking) -> None:
        """Count what ``reader`` takes."""
        self._readers.add(reader)

    def left_bytes(self) -> float:
        """Return how many bytes are left; less than 0 where more is taken. Only for a room with a limit."""
        assert self.limit_bytes is not None
        return self.limit_bytes - sum(one.taken_bytes() for one in list(self._readers))

    @property
    def is_full(self) -> bool:
        """Whether a window waits."""
        while self._waiting and (self._waiting[0][0]() is None or not self._waiting[0][1].is_waiting):
            self._waiting.popleft()
        return bool(self._waiting)

    def wait(self, reader: Taking, window: Waiting) -> None:
        """Let a window of ``reader`` wait for room."""
        self._waiting.append((weakref.ref(reader), window))

    def fill(self) -> None:
        """Begin to decode the windows that wait, in their order, while there is room."""
        while self.is_full:
            holder, window = self._waiting[0]
            reader = holder()
            if reader is not None and not reader.begin(window):
                return
            self._waiting.popleft()

"""May a finalizer wait for a lock?  No: it leaves its work to whoever takes the lock next.

The garbage collector lets go of things in any thread, at any moment: also in one that holds the very lock, or another
lock that the owner of this one waits for. `Deferring.when_free` does not wait.

The lock is a plain one, taken by a plain ``with``: an exception that comes from a signal (Ctrl-C) at any moment leaves
it free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Deferring"]


class Deferring:
    """A ``lock``, and what is still to be done under it: by `catch_up`, first of all, by whoever takes it."""

    __slots__ = ("_due", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._due: deque[Callable[[], None]] = deque()

    def catch_up(self) -> None:
        """Do what is due. The caller has the lock."""
        while self._due:
            self._due.popleft()()

    def when_free(self, work: Callable[[], None]) -> None:
        """Do ``work``, which must not raise, under the lock: now, unless somebody has it; else before whoever takes it
        next does anything."""
        self._due.append(work)
        self.settle()

    def settle(self) -> None:
        """Do what is due, unless somebody has the lock."""
        while self._due and not self.lock.locked():
            with self.lock:
                self.catch_up()

"""May a finalizer wait for a lock?  No: it leaves its work to whoever has the lock.

The garbage collector lets go of things in any thread, at any moment: also in one that holds the very lock, or another
lock that the owner of this one waits for. `DeferringLock.when_free` never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["DeferringLock"]


class DeferringLock:
    """A lock for ``with``. Not to be taken twice by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._do_what_is_due()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._settle()

    def when_free(self, work: Callable[[], None]) -> None:
        """Do ``work``, which must not raise, under the lock: now, or in the thread that has it, once it lets go.

        Whoever takes the lock from now on does so after ``work``.
        """
        self._due.append(work)
        self._settle()

    def _settle(self) -> None:
        while self._due and self._lock.acquire(blocking=False):
            try:
                self._do_what_is_due()
            finally:
                self._lock.release()

    def _do_what_is_due(self) -> None:
        while self._due:
            self._due.popleft()()

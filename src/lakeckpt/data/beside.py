"""Who waits for the next micro-batch and copies it into pinned memory, while the loop computes?  One thread.

The thread takes from an iterator and stays at most two items ahead of the loop. It is started by `Beside`, told to end
by `close` (or when nobody refers to the `Beside` any more, or the interpreter ends), and joined there. What the
iterator raises is raised to the loop, in its place.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Beside"]

T = TypeVar("T")
_MOST = 2


class _Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: deque[Any] = deque()
        self.ends_with: BaseException | None = None
        self.given_up = threading.Event()


class Beside(Iterator[T], Generic[T]):
    """The items of ``found``, taken in a thread that begins with ``prepare``. Items are the loop's.

    ``found`` is told to give up waiting by the event that it was made with: ``given_up``.
    """

    def __init__(
        self, found: Callable[[threading.Event], Iterator[T]], *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._shared = _Shared()
        thread = threading.Thread(
            target=_run,
            args=(found(self._shared.given_up), self._shared, prepare),
            name="lakeckpt-pin",
            daemon=True,  # the finalizer ends it; where that cannot run, nothing must wait for it
        )
        self._finalizer = weakref.finalize(self, _end, self._shared, thread, os.getpid())
        self._thread = thread
        thread.start()

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.items or shared.ends_with is not None)
            if shared.items:
                item: T = shared.items.popleft()
                shared.changed.notify()
                return item
            error = shared.ends_with
        assert error is not None
        self.close()
        raise error

    def close(self) -> None:
        """End the thread, and wait for that; the thread itself cannot."""
        if threading.current_thread() is not self._thread:
            self._finalizer()


def _run(found: Iterator[Any], shared: _Shared, prepare: Callable[[], None]) -> None:
    try:
        prepare()
        while not shared.given_up.is_set():
            item = next(found)
            with shared.changed:
                shared.items.append(item)
                del item
                shared.changed.notify()
                shared.changed.wait_for(lambda: len(shared.items) < _MOST or shared.given_up.is_set())
        error: BaseException = StopIteration()
    except BaseException as raised:
        error = raised
    with shared.changed:
        shared.ends_with = error
        shared.changed.notify()


def _end(shared: _Shared, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return  # a copy in a process that was forked: it has no such thread, and the lock may be held for ever
    with shared.changed:
        shared.given_up.set()
        shared.items.clear()
        shared.ends_with = shared.ends_with or StopIteration()
        shared.changed.notify()
    if thread is not threading.current_thread():
        thread.join()

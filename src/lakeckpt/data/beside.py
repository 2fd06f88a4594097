"""Who waits for the next micro-batch and copies it into pinned memory, while the loop computes?  One thread.

The thread takes from an iterator and stays at most two items ahead of the loop. It is started by `Beside`, told to end
by `close` (or when nobody refers to the `Beside` any more, or the interpreter ends), and joined there. What the
iterator raises is raised to the loop, in its place.

What they tell each other goes through queues whose ``put`` may be interrupted by itself (`queue.SimpleQueue`): the
garbage collector may let go of a `Beside` in any thread, at any moment, while that thread holds any lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["Beside"]

T = TypeVar("T")
_MOST = 2
_PATIENCE_S = 5.0
"""So long a finalizer waits for the thread: the two may need each other."""


class _Shared:
    def __init__(self) -> None:
        self.room: SimpleQueue[None] = SimpleQueue()
        """One for each item that may be taken, and one when no more are."""
        self.items: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        """What was taken, or why nothing more is."""
        self.is_wanted = True
        for _ in range(_MOST):
            self.room.put(None)


class Beside(Iterator[T], Generic[T]):
    """The items of ``found``, taken in a thread that begins with ``prepare``. Items are the loop's.

    ``found`` is to give up waiting once what it was made with, called, says that nothing more is wanted.
    """

    def __init__(
        self, found: Callable[[Callable[[], bool]], Iterator[T]], *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        shared = self._shared = _Shared()
        self._ends_with: BaseException | None = None
        thread = self._thread = threading.Thread(
            target=_run,
            args=(found(lambda: shared.is_wanted), shared, prepare),
            name="lakeckpt-pin",
            daemon=True,  # the finalizer ends it; where that cannot run, nothing must wait for it
        )
        self._finalizer = weakref.finalize(self, _end, shared, thread, os.getpid())
        thread.start()

    def __next__(self) -> T:
        shared = self._shared
        if self._ends_with is None and shared.is_wanted:
            item, self._ends_with = shared.items.get()
            if self._ends_with is None:
                shared.room.put(None)
                return item  # type: ignore[no-any-return]
            self.close()
        raise self._ends_with or StopIteration

    def close(self) -> None:
        """End the thread, and wait for that; the thread itself cannot."""
        if threading.current_thread() is not self._thread:
            self._finalizer()
            self._thread.join()


def _run(found: Iterator[Any], shared: _Shared, prepare: Callable[[], None]) -> None:
    try:
        prepare()
        while True:
            shared.room.get()
            if not shared.is_wanted:
                break
            shared.items.put((next(found), None))
        error: BaseException = StopIteration()
    except BaseException as raised:
        error = raised
    shared.items.put((None, error))


def _end(shared: _Shared, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return  # a copy in a process that was forked: it has no such thread
    shared.is_wanted = False
    shared.room.put(None)
    try:
        while True:
            shared.items.get_nowait()
    except Empty:
        shared.items.put((None, StopIteration()))  # to whoever waits
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_PATIENCE_S)

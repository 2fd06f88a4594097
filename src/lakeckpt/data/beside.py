"""Who waits for the next micro-batch and copies it into pinned memory, while the loop computes?  One thread.

The thread takes from an iterator and stays at most two items ahead of the loop. It is started by `Beside`, told to end
by `close` (or when nobody refers to the `Beside` any more, or the interpreter ends), and joined there, but not where
nobody refers to it: the garbage collector lets go of things in any thread, at any moment, while that thread holds any
lock. So what is told then goes through queues whose ``put`` may be interrupted by itself (`queue.SimpleQueue`), and
whoever needs the thread to be over joins it (`Beside.thread`). What the iterator raises is raised to the loop, in its
place.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from lakeckpt.errors import StateUnavailable

__all__ = ["Beside"]

T = TypeVar("T")
_MOST = 2
_PATIENCE_S = 5.0
"""So long the interpreter waits for a thread before it ends."""


class _Shared:
    """What the two tell each other."""

    def __init__(self) -> None:
        self.room: SimpleQueue[None] = SimpleQueue()
        """One for each item that may be taken, and one when no more are."""
        self.items: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        """What was taken, or why nothing more is."""
        self.is_wanted = True
        for _ in range(_MOST):
            self.room.put(None)

    def end(self, owner: int) -> None:
        """Nothing more is wanted. Waits for nothing."""
        if os.getpid() != owner:
            return  # a copy in a process that was forked: it has no such thread
        self.is_wanted = False
        self.room.put(None)
        try:
            while True:
                self.items.get_nowait()
        except Empty:
            self.items.put((None, _given_up()))  # to whoever waits


_running: dict[threading.Thread, _Shared] = {}


class Beside(Iterator[T], Generic[T]):
    """The items of ``found``, taken in a thread that begins with ``prepare``. Items are the loop's.

    ``found`` is to give up waiting once what it was made with, called, says that nothing more is wanted. After `close`
    `StateUnavailable` is raised: that is not the end of the items.
    """

    def __init__(
        self, found: Callable[[Callable[[], bool]], Iterator[T]], *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        shared = self._shared = _Shared()
        self._process = os.getpid()
        self._ends_with: BaseException | None = None
        self.thread = threading.Thread(
            target=_run,
            args=(found(lambda: shared.is_wanted), shared, prepare),
            name="lakeckpt-pin",
            daemon=True,  # the finalizer ends it; where that cannot run, nothing must wait for it
        )
        """Who takes them."""
        self._finalizer = weakref.finalize(self, shared.end, self._process)
        self.thread.start()

    def __next__(self) -> T:
        shared = self._shared
        if self._process != os.getpid():
            raise StateUnavailable(
                "what this iterator gives is taken by a thread of the process that this one was forked from: iterate "
                "over the loader anew in this process"
            )
        if self._ends_with is None and shared.is_wanted:
            item, self._ends_with = shared.items.get()
            if self._ends_with is None:
                shared.room.put(None)
                return item  # type: ignore[no-any-return]
            self.close()
        error = self._ends_with or _given_up()
        try:
            raise error
        finally:
            del self, error  # which refers to this frame

    def close(self) -> None:
        """End the thread, and wait for that; the thread itself cannot."""
        if threading.current_thread() is not self.thread:
            self._finalizer()
            self.thread.join()


def _run(found: Iterator[Any], shared: _Shared, prepare: Callable[[], None]) -> None:
    me = threading.current_thread()
    _running[me] = shared
    try:
        prepare()
        while True:
            shared.room.get()
            if not shared.is_wanted:
                shared.items.put((None, _given_up()))
                return
            shared.items.put((next(found), None))
    except StopIteration:
        shared.items.put((None, StopIteration() if shared.is_wanted else _given_up()))
    except BaseException as error:
        shared.items.put((None, error))
    finally:
        del found  # an error refers to this frame
        _running.pop(me, None)


def _given_up() -> StateUnavailable:
    return StateUnavailable(
        "what this iterator waits for was given up, for a newer iteration or by close(): iterate again to go on"
    )


def _end_all() -> None:
    for thread, shared in list(_running.items()):
        shared.end(os.getpid())
        thread.join(_PATIENCE_S)


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)

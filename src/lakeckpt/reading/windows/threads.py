"""This module runs the threads that decode windows while the training loop does something else.

*Whole* threads each decode one window: its row groups, and the gathering of its columns. *Part* threads help them. A
whole thread does its work alone if no part thread is free, so a window that is needed first never waits behind parts
of a later window.

All readers of a process share the threads, however many tables they read. The threads are started when they are first
needed. They end when the last `Threads` that uses them is closed or no longer referred to, after the current work. The
interpreter joins them when it exits; work that was not begun is not done. A forked process has none of the threads and
must make its own `Threads`.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from lakeckpt.lake.parquet.ranges import unless_ending
from lakeckpt.reading.shared import Shared

__all__ = ["Threads", "usual_threads"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_WHOLE = 2
"""Windows that are decoded at once: while the last parts of one are awaited, the next one is begun."""
_MOST = 8


def usual_threads(processes: int = 1) -> int:
    """Return how many part threads each of so many processes can use: its share of the processors, at most 8."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, processors // processes))


class _Pools:
    """The threads that readers share, which decode by ``count`` part threads."""

    def __init__(self, count: int) -> None:
        self.decoding = threading.Lock()
        self.whole = ThreadPoolExecutor(min(_WHOLE, count), thread_name_prefix="lakeckpt-window")
        self.parts = ThreadPoolExecutor(count, thread_name_prefix="lakeckpt-part")


_shared = Shared(_Pools)


class Threads:
    """The part of the process's threads that one reader uses: two whole threads (one, if ``count`` is 1), and at most
    ``count`` that help them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pools: _Pools | None = None
        self._is_wanted = [True]  # emptied by `close`: the work that was submitted is dropped

    @property
    def decoding(self) -> threading.Lock:
        """Held while a window of several row groups is decoded, so that the first window is ready first."""
        return self._used().decoding

    def _used(self) -> _Pools:
        pools = self._pools  # `close` may be called meanwhile
        if pools is None:
            pools = self._pools = _shared.get(self.count)
        return pools

    def submit(self, work: Callable[[], _R]) -> Future[_R]:
        """Do ``work`` in a whole thread, after the work that was submitted before."""
        whole, is_wanted = self._used().whole, self._is_wanted

        def done() -> _R:
            if not is_wanted:
                raise CancelledError
            return work()

        return whole.submit(unless_ending, whole, done)

    def map(self, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Return the results of ``work`` for ``items``, in their order. Raises one of the errors of ``work``."""
        if len(items) < 2 or self.count < 2:
            return [work(item) for item in items]
        parts = self._used().parts
        found: dict[int, _R] = {}
        places = itertools.count()  # each is given to one thread
        failed: list[BaseException] = []

        def help_out() -> None:
            try:
                while not failed and (place := next(places)) < len(items):
                    found[place] = work(items[place])
            except BaseException as error:
                failed.append(error)

        helpers = [parts.submit(help_out) for _ in range(min(self.count, len(items)) - 1)]
        help_out()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if failed:
            raise failed[0]
        return [found[place] for place in range(len(items))]

    def close(self) -> None:
        """Begin no more work. Work that has begun is finished in the background.

        The method takes no lock, because the garbage collector may call it in any thread: also in a thread that a pool
        is starting while it holds its own lock. A pool that is garbage-collected ends its threads.
        """
        self._is_wanted.clear()
        self._pools = None
        self._is_wanted = [True]

"""Who does what must not keep training waiting?  A thread that takes jobs, one after the other.

The first job starts it, `stop` ends and joins it. Jobs see to their own failures: one that raises would end the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Copier"]


class Copier:
    """The copier of an engine. Called by one thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have the thread. ``RuntimeError`` where there can be no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="lakeckpt-copier", daemon=True)
            thread.start()
            self._thread = thread

    def do(self, job: Callable[[], None]) -> None:
        """Have ``job`` done after those before it."""
        self.start()
        self._work.put(job)

    def stop(self) -> None:
        """Return when all jobs are done, and the thread has ended."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            job()

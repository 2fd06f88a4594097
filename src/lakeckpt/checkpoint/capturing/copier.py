"""Who does what must not keep training waiting?  A thread that takes jobs one after the other, and some helpers.

The first job starts the copier, the first call of `beside` its helpers; `stop` ends and joins all. Jobs see to their
own failures: one that raises would end the thread. What helpers raise, their futures tell.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lakeckpt.errors import SaveFailed

__all__ = ["Copier"]

_HELPERS = 3


class Copier:
    """The copier of an engine. `beside` is called by the copier's own jobs, all else by one thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._helpers: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Have the thread. `SaveFailed` where there can be no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="lakeckpt-copier", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise SaveFailed(
                    f"no capture can begin, as its thread cannot be started: {error}. Allow this user, or the "
                    "container, more processes (ulimit -u, pids.max), or start fewer threads and workers"
                ) from error
            self._thread = thread

    def do(self, job: Callable[[], None]) -> None:
        """Have ``job`` done after those before it."""
        self.start()
        self._work.put(job)

    def beside(self, call: Callable[[], None]) -> Future[None]:
        """Have ``call`` done by a helper."""
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="lakeckpt-copier-helper")
        return self._helpers.submit(call)

    def stop(self) -> None:
        """Return when all jobs are done, and the threads have ended."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        if self._helpers is not None:
            self._helpers.shutdown()
            self._helpers = None

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            job()

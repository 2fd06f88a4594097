"""This module asks the kernel for ten seconds, when a stall begins, who sends signals to the ranks and who is blocked.

`StallTrace.begin` starts a daemon thread that runs the scripts ``signals`` and ``blocked`` by
`lakeckpt.watch.system.kernel` if this is root and bpftrace is installed; else it does nothing. Nobody waits for the
thread. The scripts end with the agent: they print twice a second, and the pipe has no reader then. The module imports
without torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing

from lakeckpt.errors import ConfigError
from lakeckpt.watch.system.kernel import READY, KernelEvent, missing, trace

__all__ = ["StallTrace"]

_SECONDS, _BLOCKED_MS, _MOST = 10.0, 1000, 50


class StallTrace:
    """What the kernel saw since the newest stall began. One thread calls all methods."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._thread: threading.Thread | None = None
        self._events: list[str] = []

    @property
    def events(self) -> tuple[str, ...]:
        """The events so far, as sentences, the oldest first."""
        return tuple(self._events)

    @property
    def runs(self) -> bool:
        """Whether the scripts run."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, pids: Collection[int]) -> None:
        """Start the scripts for the ranks with these ``pids``, unless they run."""
        if self.runs or missing():
            return
        self._events = []
        work = (frozenset(pids), self._events)
        self._thread = threading.Thread(target=self._run, args=work, name="lakeckpt-trace", daemon=True)
        self._thread.start()

    def _run(self, pids: frozenset[int], events: list[str]) -> None:
        try:
            with closing(trace(("signals", "blocked"), _SECONDS, blocked_ms=_BLOCKED_MS)) as found:
                for event in found:
                    if event.kind != READY and _concerns(event, pids) and len(events) < _MOST:
                        at = time.strftime("%H:%M:%S", time.gmtime())
                        events.append(f"{at} UTC: process {event.pid} ({event.process}) {event.text}")
                        self._log(events[-1])
        except (ConfigError, OSError) as error:
            self._log(f"the kernel is not asked about the stall: {error}")


def _concerns(event: KernelEvent, pids: Collection[int]) -> bool:
    """Return whether an event tells something of the ranks: a signal that this agent did not send itself, or a thread,
    of whatever process, that waits for a disk."""
    return event.kind == "blocked" or (event.amount in pids and event.pid != os.getpid())

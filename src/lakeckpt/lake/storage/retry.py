"""This module decides how long a call to a store may take, and what is tried again.

A call (one object, or one span of up to 8 MiB of it) is a series of attempts with pauses between them. Every attempt
gets a time by which it must have ended; the call as a whole has a deadline; both grow with the bytes that move, at the
slowest rate that is still called progress. Pauses are drawn evenly from zero to a bound that doubles ("full jitter"),
so that many readers that failed at once do not come back at once; a store that says how long to wait is obeyed.

An attempt raises `Retryable` where another attempt may succeed; everything else goes through as it is. The clients
below repeat nothing by themselves. A call that an attempt outlasts ends with that attempt. `stop_retrying_when` lets
the threads of a pool make no further attempt once the process ends. Starts no threads; clock, sleep and randomness are
arguments.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lakeckpt.errors import ConfigError, StorageError

__all__ = ["Deadlines", "Retrier", "Retryable", "stop_retrying_when"]

T = TypeVar("T")
_thread = threading.local()


def stop_retrying_when(ending: Callable[[], bool]) -> None:
    """Make no further attempt in this thread once ``ending()`` is true."""
    _thread.ending = ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """``total_s`` for a call with all its attempts and pauses, ``attempt_s`` for each attempt, at most
    ``max_attempts`` of them. Both times grow by a second for every ``slowest_bytes_per_s`` that a call moves. Pauses
    are at most ``pause_s``, doubled each time, up to ``longest_pause_s``."""

    total_s: float = 60.0
    attempt_s: float = 15.0
    slowest_bytes_per_s: int = 1 << 20
    max_attempts: int = 8
    pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("total_s", "attempt_s", "slowest_bytes_per_s", "max_attempts", "pause_s", "longest_pause_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a number above 0, got {value!r}")

    def bound_s(self, size_bytes: int = 0) -> float:
        """The time by which a call that moves ``size_bytes`` has returned or raised."""
        return self.total_s + size_bytes / self.slowest_bytes_per_s


class Retryable(Exception):
    """An attempt failed in a way that another may not. ``kind(text)`` is raised when none is left.

    ``pause_s`` is what the store asked to wait, if it did; ``errno`` goes into the error.
    """

    def __init__(
        self,
        text: str,
        *,
        kind: type[StorageError] = StorageError,
        errno: int | None = None,
        pause_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.kind, self.errno, self.pause_s = kind, errno, pause_s


class Retrier:
    """Makes attempts until one succeeds, ``deadlines`` have passed, or a failure is final. Holds no state of calls."""

    __slots__ = ("_draw", "_sleep", "clock", "deadlines")

    def __init__(
        self,
        deadlines: Deadlines,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.deadlines, self.clock = deadlines, clock
        self._sleep, self._draw = sleep, draw

    def call(self, what: str, attempt: Callable[[float], T], *, size_bytes: int = 0) -> T:
        """What ``attempt(until)`` returns, ``until`` being when (on the clock) it must have ended.

        ``what`` begins the message of an error, as in "cannot read 'x' in s3://bucket". Raises the ``kind`` of the last
        `Retryable` when attempts run out, `StorageError` when the time does.
        """
        limits, begin, tried = self.deadlines, self.clock(), 0
        moving_s = size_bytes / limits.slowest_bytes_per_s
        end = begin + limits.total_s + moving_s
        while True:
            tried += 1
            try:
                return attempt(min(end, self.clock() + limits.attempt_s + moving_s))
            except Retryable as failure:
                pause_s = self._pause_s(tried, failure)
                late = self.clock() + pause_s >= end
                if not late and tried < limits.max_attempts and not getattr(_thread, "ending", bool)():
                    self._sleep(pause_s)
                    continue
                kind = StorageError if late else failure.kind
                spent = f"{tried} attempt{'s' * (tried > 1)} in {self.clock() - begin:.1f} of {end - begin:.1f} s"
                error = kind(f"{what}: {failure} ({spent})")
                error.errno = failure.errno
            raise error from None

    def _pause_s(self, tried: int, failure: Retryable) -> float:
        limits = self.deadlines
        bound_s = min(limits.longest_pause_s, limits.pause_s * 2 ** min(tried - 1, 30))
        asked_s = min(failure.pause_s or 0.0, limits.total_s)
        return float(max(asked_s, self._draw() * bound_s))

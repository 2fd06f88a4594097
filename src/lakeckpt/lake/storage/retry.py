"""This module bounds how long a call to a store may take, and repeats attempts that failed.

A call (one object, or one span of up to 8 MiB of it) is a series of attempts with pauses between them. The client below
bounds the time of each attempt and retries nothing by itself. The call as a whole has a deadline, which grows with the
bytes that move, at the slowest rate that is still called progress. Pauses are drawn evenly from zero to a bound that
doubles ("full jitter"), so that many readers that failed at once do not come back at once.

An attempt raises `Retryable` if another attempt may succeed; all other exceptions end the call. A call that an
attempt outlasts ends with that attempt. A call that follows one whose time ran out gets at most a ninth of the time
since then, at most the time of one attempt, and at least one attempt: an outage that is known holds up its callers for
about a tenth of its length, and they come back soon. The module starts no threads; clock, sleep and randomness are
arguments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lakeckpt.counters import StoreCounters
from lakeckpt.errors import ConfigError, StorageError

__all__ = ["Deadlines", "Retrier", "Retryable"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """``total_s`` for a call with all its attempts and pauses, ``attempt_s`` for each attempt. Both times grow by a
    second for every ``slowest_bytes_per_s`` that a call moves. Pauses are at most ``pause_s``, doubled each time, up to
    ``longest_pause_s``."""

    total_s: float = 60.0
    attempt_s: float = 15.0
    slowest_bytes_per_s: int = 1 << 20
    pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("total_s", "attempt_s", "slowest_bytes_per_s", "pause_s", "longest_pause_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a number above 0, got {value!r}")

    def bound_s(self, size_bytes: int = 0) -> float:
        """The time by which a call that moves ``size_bytes`` has returned or raised."""
        return self.total_s + size_bytes / self.slowest_bytes_per_s


class Retryable(Exception):
    """An attempt failed in a way that another may not. A `StorageError` with ``errno`` is raised when none is left."""

    def __init__(self, text: str, *, errno: int) -> None:
        super().__init__(text)
        self.errno = errno


_SHARE = 9
"""After a call whose time ran out, the next may take the time since then, divided by this number."""


class Retrier:
    """Makes attempts until one succeeds, ``deadlines`` have passed, or a failure is final. Any thread may call it.
    ``counters`` count the attempts that are made once more."""

    __slots__ = ("_counters", "_draw", "_failed_s", "_sleep", "clock", "deadlines")

    def __init__(
        self,
        deadlines: Deadlines,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
        counters: StoreCounters | None = None,
    ) -> None:
        self.deadlines, self.clock = deadlines, clock
        self._counters = counters
        self._sleep, self._draw = sleep, draw
        self._failed_s = float("-inf")  # when the time of a call ran out; no call has succeeded since

    def call(self, what: str, attempt: Callable[[], T], *, size_bytes: int = 0) -> T:
        """Return what ``attempt()`` returns, which moves ``size_bytes``.

        ``what`` begins the message of an error, as in "cannot read 'x' in s3://bucket". Raises `StorageError`
        with the text of the last `Retryable` when the time runs out.
        """
        limits, begin, tried = self.deadlines, self.clock(), 0
        end = begin + limits.bound_s(size_bytes)
        if self._failed_s > float("-inf"):
            end = min(end, begin + limits.attempt_s, begin + (begin - self._failed_s) / _SHARE)
        while True:
            tried += 1
            try:
                found = attempt()
                self._failed_s = float("-inf")
                return found
            except StorageError:  # an answer, if only a refusal
                self._failed_s = float("-inf")
                raise
            except Retryable as failure:
                pause_s = self._draw() * min(limits.longest_pause_s, limits.pause_s * 2 ** min(tried - 1, 30))
                if self.clock() + pause_s < end:
                    self._sleep(pause_s)
                    if self._counters is not None:
                        self._counters.retried()
                    continue
                spent = f"{tried} attempt{'s' * (tried > 1)} in {self.clock() - begin:.1f} of {end - begin:.1f} s"
                error = StorageError(f"{what}: {failure} ({spent})")
                error.errno, self._failed_s = failure.errno, self.clock()
            raise error from None

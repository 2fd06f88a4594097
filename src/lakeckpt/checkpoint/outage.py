"""This module decides what a failed save by policy means: training goes on for a while, and the save is tried again.

A failure that time mends is a warning until ``fail_after`` has passed since the first of them. The next save is tried
ever later, so that synchronous saves hold training up for about a tenth of an outage at most. Other failures are raised
at once: a store that refuses for good, and the first save of an attempt, which is wrong more often than unlucky.

The training thread alone calls this module. It starts no threads and does no I/O.
"""

from __future__ import annotations

from lakeckpt.errors import SaveFailed, SaveRefused
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Outage"]

_FIRST_S, _LONGEST_S = 10.0, 300.0
_SHARE = 9
"""After a retry that has failed, training goes on for so many times as long as the retry took."""


class Outage:
    """The saves by policy that have failed since the last commit; none at first, and after each commit.

    ``fail_after_s``: how long after the first of them a failure ends training. ``waiter`` is the clock.
    """

    def __init__(self, fail_after_s: float, waiter: Waiter) -> None:
        self._fail_after_s, self._waiter = fail_after_s, waiter
        self._has_saved = False
        self._failures = 0
        self._since_s = 0.0  # when the first of the failures began
        self._failed_s = 0.0  # when the last of them was known
        self._wait_s = 0.0

    def now(self) -> float:
        """Return the time, in seconds on the clock."""
        return self._waiter.now()

    def committed(self) -> None:
        """Record that a checkpoint was committed: saves succeed."""
        self._has_saved, self._failures = True, 0

    def failed(self, error: SaveFailed, begin_s: float) -> str:
        """Record that a save which began at ``begin_s`` has failed, and return what follows, as a text. Raises the
        error if training is not to go on."""
        now_s = self.now()
        if not self._has_saved or isinstance(error, SaveRefused):
            raise error
        if not self._failures:
            self._since_s = begin_s
        left_s = self._since_s + self._fail_after_s - now_s
        if left_s <= 0:
            text = f"{error}. No save has succeeded for {now_s - self._since_s:.0f} s"
            raise type(error)(f"{text} (fail_after={self._fail_after_s:g})") from error
        self._failures, self._failed_s = self._failures + 1, now_s
        wait_s = min(_FIRST_S * 2.0**self._failures, _LONGEST_S)
        if self._failures > 1:
            wait_s = max(wait_s, _SHARE * (now_s - begin_s))
        self._wait_s = min(wait_s, left_s)
        return (
            f"the next save is tried after {self._wait_s:.0f} s, and training ends if none succeeds in {left_s:.0f} s"
        )

    def left_s(self, tried_s: float) -> float | None:
        """Return the seconds until the next save is to be tried, if the last one began at ``tried_s``; None if saves
        succeed."""
        return max(self._failed_s, tried_s) + self._wait_s - self.now() if self._failures else None

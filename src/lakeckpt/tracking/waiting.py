"""This module waits for what another rank writes: it looks again and again, ever less often, until a deadline.

The clock and the wait are one seam, so that tests wait for events. Nothing else in the package sleeps. The module
starts no threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["LONGEST_S", "SystemWaiter", "Waiter", "poll"]

_FIRST_S = 0.005
LONGEST_S = 1.0
"""The longest pause between two looks."""

_T = TypeVar("_T")


class Waiter(Protocol):
    """A clock that one can wait on."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def wait(self, seconds: float) -> None:
        """Return after at most about ``seconds``."""
        ...


class SystemWaiter:
    """The machine's clock."""

    def now(self) -> float:
        """See `Waiter`."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """See `Waiter`."""
        time.sleep(seconds)


def poll(
    look: Callable[[], _T | None],
    *,
    waiter: Waiter,
    timeout_s: float,
    longest_s: float = LONGEST_S,
    obstacles: Callable[[], object] = lambda: None,
) -> _T | None:
    """Return what ``look`` returns, as soon as that is not None; None after ``timeout_s``.

    It looks at least once, and once more after the last wait. ``longest_s`` is the longest pause between two looks.
    ``obstacles`` is called whenever ``look`` has found nothing. It raises why waiting is in vain.
    """
    deadline, pause = waiter.now() + timeout_s, _FIRST_S
    while (found := look()) is None:
        obstacles()
        left = deadline - waiter.now()
        if left <= 0:
            return None
        waiter.wait(min(pause, left))
        pause = min(2 * pause, longest_s)
    return found

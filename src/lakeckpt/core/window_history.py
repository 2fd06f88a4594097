"""How much longer will a wait that has begun go on?  From how long waits at the same place of an iteration took before.

Training repeats itself: the wait of one iteration's third pipeline gap is like that of the iteration before. For each
*site* (a place in the iteration that has a name) the last lengths are kept. Of a window that is open for ``elapsed_s``,
only the lengths that were longer still say anything; its remaining time is taken to be a low quantile, usually the
lower quartile, of what those had left (the empirical residual life). So a site whose waits are either nothing or long
is judged rightly once the short ones would be over. A window that outlasts everything known of its site is trusted for
as long again as it has outlasted it: whoever starts work in it by that rule at most doubles the surprise.

A length that something else predicts (a pipeline's table of actions) stands in until a site was measured. Pure: times
are arguments, in seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf

__all__ = ["BOLD", "CAUTIOUS", "USUAL", "WindowHistory"]

_KEEP = 16
CAUTIOUS, USUAL, BOLD = 0.1, 0.25, 0.5
"""Quantiles of what remained: how far a length is trusted."""


class WindowHistory:
    """Lengths of the windows at each site: of the last ``keep`` that were measured."""

    def __init__(self, *, keep: int = _KEEP) -> None:
        if keep < 1:
            raise ValueError(f"a history keeps at least one length, got keep={keep}")
        self._keep = keep
        self._lengths: dict[str, deque[float]] = {}
        self._ordered: dict[str, list[float]] = {}  # of what was asked for since it was measured
        self._predicted: dict[str, float] = {}

    def record(self, site: str, length_s: float) -> None:
        """A window at ``site`` took ``length_s``."""
        if not length_s >= 0:
            raise ValueError(f"a window at {site!r} took {length_s!r} seconds")
        self._lengths.setdefault(site, deque(maxlen=self._keep)).append(length_s)
        self._ordered.pop(site, None)

    def predict(self, site: str, length_s: float) -> None:
        """Until a window at ``site`` was measured, take it to be ``length_s`` long."""
        self._predicted[site] = length_s

    def expected_s(self, site: str, quantile: float = USUAL) -> float:
        """How long a window at ``site`` will be, at least, most of the time; 0 where nothing is known."""
        known = self._known(site)
        return self._left(known, 0.0, quantile) if known else 0.0

    def remaining_s(self, site: str, elapsed_s: float, quantile: float = USUAL) -> float:
        """How much longer a window at ``site`` will be open that is open for ``elapsed_s``."""
        return self._left(self._known(site), elapsed_s, quantile)

    def longest_s(self, site: str) -> float:
        """The longest that is known of the windows at ``site``; infinite where nothing is."""
        known = self._known(site)
        return known[-1] if known else inf

    def ready_s(self, site: str, elapsed_s: float, need_s: float, quantile: float = USUAL) -> float:
        """After how many seconds from its begin, not before ``elapsed_s``, the window is trusted for ``need_s`` more.

        Between two lengths of the history what remains only falls, so it is looked for where one of them is over.
        """
        known = self._known(site)
        for instant in (elapsed_s, *known[bisect_right(known, elapsed_s) :]):
            if self._left(known, instant, quantile) >= need_s:
                return instant
        return (known[-1] if known else 0.0) + need_s

    def _known(self, site: str) -> Sequence[float]:
        """The lengths at ``site``, the shortest first."""
        if (found := self._ordered.get(site)) is not None:
            return found
        if lengths := self._lengths.get(site):
            self._ordered[site] = sorted(lengths)
            return self._ordered[site]
        return (self._predicted[site],) if site in self._predicted else ()

    @staticmethod
    def _left(known: Sequence[float], elapsed_s: float, quantile: float) -> float:
        longer = bisect_right(known, elapsed_s)
        if longer < len(known):
            return known[longer + int((len(known) - longer) * quantile)] - elapsed_s
        return elapsed_s - (known[-1] if known else 0.0)

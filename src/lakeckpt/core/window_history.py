"""How much longer will a wait that has begun go on?  From how long waits at the same place of an iteration took before.

Training repeats itself: the wait of one iteration's third pipeline gap is like that of the iteration before. For each
*site* (a place in the iteration that has a name) the last lengths are kept. Of a window that is open for ``elapsed_s``,
only the lengths that were longer still say anything; its remaining time is taken to be the lower quartile of what those
had left (the empirical residual life). So a site whose waits are either nothing or long is judged rightly once the
short ones would be over. A window that outlasts everything known of its site is trusted for as long again as it has
outlasted it: whoever starts work in it by that rule at most doubles the surprise.

A length that something else predicts (a pipeline's table of actions) stands in until a site was measured. Pure: times
are arguments, in seconds.
"""

from __future__ import annotations

from collections import deque

__all__ = ["WindowHistory"]

_KEEP = 16
_QUANTILE = 0.25
_BOLD = 0.5


class WindowHistory:
    """Lengths of the windows at each site: of the last ``keep`` that were measured."""

    def __init__(self, *, keep: int = _KEEP) -> None:
        if keep < 1:
            raise ValueError(f"a history keeps at least one length, got keep={keep}")
        self._keep = keep
        self._lengths: dict[str, deque[float]] = {}
        self._predicted: dict[str, float] = {}

    def record(self, site: str, length_s: float) -> None:
        """A window at ``site`` took ``length_s``."""
        if not length_s >= 0:
            raise ValueError(f"a window at {site!r} took {length_s!r} seconds")
        self._lengths.setdefault(site, deque(maxlen=self._keep)).append(length_s)

    def predict(self, site: str, length_s: float) -> None:
        """Until a window at ``site`` was measured, take it to be ``length_s`` long."""
        self._predicted[site] = length_s

    def expected_s(self, site: str) -> float:
        """How long a window at ``site`` will be, at least, most of the time; 0 where nothing is known."""
        return self._left(self._known(site), 0.0) if self._known(site) else 0.0

    def remaining_s(self, site: str, elapsed_s: float) -> float:
        """How much longer a window at ``site`` will be open that is open for ``elapsed_s``."""
        return self._left(self._known(site), elapsed_s)

    def ready_s(self, site: str, elapsed_s: float, need_s: float, *, boldly: bool = False) -> float:
        """After how many seconds from its begin, not before ``elapsed_s``, the window is trusted for ``need_s`` more.

        ``boldly``: by the median of what remained, not the lower quartile.

        Between two lengths of the history what remains only falls, so it is looked for where one of them is over.
        """
        known = self._known(site)
        over = sorted(length for length in known if length > elapsed_s)
        for instant in (elapsed_s, *over):
            if self._left(known, instant, _BOLD if boldly else _QUANTILE) >= need_s:
                return instant
        return max([*known, 0.0]) + need_s

    def _known(self, site: str) -> list[float]:
        if lengths := self._lengths.get(site):
            return list(lengths)
        return [self._predicted[site]] if site in self._predicted else []

    @staticmethod
    def _left(known: list[float], elapsed_s: float, quantile: float = _QUANTILE) -> float:
        longer = sorted(length - elapsed_s for length in known if length > elapsed_s)
        if longer:
            return longer[int(len(longer) * quantile)]
        return elapsed_s - max(known, default=0.0)

"""This module knows the windows of a reader: which of their rows were served, and which windows each lane needs next.

The next windows of a lane are known without dealing: the window that is open, and those at its next positions. The
module decodes nothing, and starts no threads.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.core.plan import LaneRest
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["CachedWindow", "FollowedLane", "Key", "Served", "windows_of"]

Key = tuple[tuple[OrderSpec, int, int, int], int]
"""The identity of a layout, and where the window begins in it."""


class Served:
    """The rows of a window that were served: sorted runs that do not touch. There is nearly always one run, which grows
    at its end. `Intervals` would take longer than this for each micro-batch.
    """

    __slots__ = ("size", "starts", "stops")

    def __init__(self) -> None:
        self.size = 0
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add the non-empty [start, stop). Return whether all of it is new."""
        if self.stops and self.stops[-1] == start:
            self.stops[-1] = stop
            self.size += stop - start
            return True
        first = bisect.bisect_left(self.stops, start)  # the first run that ends at or after start
        last = bisect.bisect_right(self.starts, stop)  # one past the last run that begins at or before stop
        low, high = min([start, *self.starts[first:last]]), max([stop, *self.stops[first:last]])
        grown = (high - low) - (sum(self.stops[first:last]) - sum(self.starts[first:last]))
        self.starts[first:last], self.stops[first:last] = [low], [high]
        self.size += grown
        return grown == stop - start


@dataclass(slots=True, kw_only=True, eq=False)
class CachedWindow:
    """A window from when it is known to be needed until all of its rows were served."""

    key: Key
    layout: EpochLayout
    window: Window
    served: Served = field(default_factory=Served)
    used: int = 0
    """The number of the last use: the larger, the later."""
    future: Future[DecodedWindow] | None = None
    """None while it was not begun."""
    decoded: DecodedWindow | None = None
    gone: bool = False

    @property
    def rows_left(self) -> int:
        """The rows that come after those that were served last."""
        return self.window.rows - (self.served.stops[-1] if self.served.stops else 0)

    @property
    def is_ready(self) -> bool:
        """True if the window can be read without a wait."""
        return self.decoded is not None or ((future := self.future) is not None and future.done())


def windows_of(
    rest: LaneRest, layout_of: Callable[[int], EpochLayout], parts: int = 1
) -> Iterator[tuple[EpochLayout, Window]]:
    """Yield the windows that hold what is left of a lane, in their order, or ``parts`` of each. ``layout_of`` returns
    the layout of an epoch."""
    spans_of, done, end = rest
    while end is None or done < end:
        first = spans_of(done, done + 1)[0]
        layout = layout_of(first.epoch)
        window = layout.window_at(first.start).part(first.start, parts)
        yield layout, window
        upto = done + window.stop - first.start
        for span in spans_of(done, upto if end is None else min(upto, end)):
            if span.epoch == first.epoch and span.start < window.stop:
                done += min(span.stop, window.stop) - span.start


class FollowedLane:
    """The window that a lane has open, and those that it needs next, as ``found`` yields them.

    ``known`` returns what a reader knows of a window.
    """

    def __init__(self, found: Iterator[tuple[EpochLayout, Window]]) -> None:
        self._found = found
        self._open: CachedWindow | None = None
        self._coming: deque[CachedWindow] = deque()
        """Of these windows no row was served."""

    def extend(self, known: Callable[[EpochLayout, Window], CachedWindow]) -> bool:
        """Find one more window; return whether there is one."""
        found = next(self._found, None)
        if found is not None:
            self._coming.append(known(*found))
        return found is not None

    def next(self, known: Callable[[EpochLayout, Window], CachedWindow]) -> tuple[int, CachedWindow] | None:
        """Return how many rows come before the first window that is not begun, and that window; None: there is none."""
        while self._coming and (self._coming[0].served.size or self._coming[0].gone):
            self._open = self._coming.popleft()
        rows, place = self._rows_open, 0
        while place < len(self._coming) or self.extend(known):
            window = self._coming[place]
            if window.future is None and not window.gone:
                return rows, window
            rows, place = rows + window.window.rows, place + 1
        return None

    @property
    def rows_known(self) -> int:
        """The rows of the windows that are known."""
        return self._rows_open + sum(one.window.rows for one in self._coming)

    @property
    def _rows_open(self) -> int:
        return 0 if self._open is None or self._open.gone else self._open.rows_left

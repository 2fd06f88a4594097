"""Which windows do these positions touch?  Spans cut where windows end, and what of a window was given out. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from lakeckpt.core.order import EpochLayout, OrderSpec, Window

__all__ = ["Key", "Part", "Piece", "Served", "parts_of"]

Piece = tuple[EpochLayout, int, int]
"""Positions [start, stop) of an epoch's layout."""

Key = tuple[tuple[OrderSpec, int, int, int], int]
"""What tells a window apart from all others of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Positions [start, stop) of an epoch, all in one window of its layout."""

    layout: EpochLayout
    window: Window
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not self.window.start <= self.start < self.stop <= self.window.stop:
            raise ValueError(f"[{self.start}, {self.stop}) is no part of [{self.window.start}, {self.window.stop})")

    @property
    def key(self) -> Key:
        """What tells this part's window apart from all others of the table."""
        return (self.layout.identity, self.window.start)


def parts_of(pieces: Iterable[Piece]) -> list[Part]:
    """Return ``pieces`` cut where windows end, in their order; empty pieces have no parts."""
    parts = []
    for layout, start, stop in pieces:
        if not 0 <= start <= stop <= layout.rows:
            raise ValueError(f"positions [{start}, {stop}) of epoch {layout.epoch}, which has {layout.rows} rows")
        while start < stop:
            window = layout.window_at(start)
            parts.append(Part(layout=layout, window=window, start=start, stop=min(stop, window.stop)))
            start = parts[-1].stop
    return parts


class Served:
    """Which positions of a window were given out: sorted runs that do not touch. Nearly always one, growing at its end.

    (`Intervals` would do, at a price per micro-batch that is felt with small ones.)
    """

    __slots__ = ("size", "starts", "stops")

    def __init__(self) -> None:
        self.size = 0
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add the non-empty [start, stop); tell whether all of it is new."""
        if self.stops and self.stops[-1] == start:
            self.stops[-1] = stop
            self.size += stop - start
            return True
        first = bisect.bisect_left(self.stops, start)  # the first run that ends at or after start
        last = bisect.bisect_right(self.starts, stop)  # one past the last run that begins at or before stop
        touched = list(zip(self.starts[first:last], self.stops[first:last], strict=True))
        low, high = min([start, *(a for a, _ in touched)]), max([stop, *(b for _, b in touched)])
        grown = (high - low) - sum(b - a for a, b in touched)
        self.starts[first:last], self.stops[first:last] = [low], [high]
        self.size += grown
        return grown == stop - start

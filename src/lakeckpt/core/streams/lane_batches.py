"""This module cuts the items of one lane into micro-batches, and says after each where the lane stands.

Positions are taken one after another, and the items of a position may lie in several micro-batches. After a
micro-batch, the next position that has an item is already known: so the frontier lies behind positions that yield
nothing, and the last micro-batch of a lane is known to be the last.

Nothing is read here: the caller gives the items of each position. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lakeckpt.core.state import Frontier
from lakeckpt.errors import StateMismatch

__all__ = ["LaneBatch", "LaneBatches", "Piece", "PositionItems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionItems:
    """The items of one position."""

    items: Sequence[Any]
    skip: int = 0
    """How many of them were consumed before the lanes were dealt."""
    name: str = ""
    """The position, for errors."""


Piece = tuple[Sequence[Any], int, int]
"""The items of a position, of which those from a first to a last (exclusive) one are meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBatch:
    """A micro-batch of a lane."""

    pieces: tuple[Piece, ...]
    """Its items, position by position."""
    before: Frontier
    after: Frontier
    touched: int
    """One past the last position of the lane that was looked at for it, and of which an item was taken or none came."""
    is_last: bool
    """True if the lane has no more items; ``after`` is then its end."""

    @property
    def count(self) -> int:
        """The number of items."""
        return sum(stop - start for _, start, stop in self.pieces)

    @property
    def items(self) -> list[Any]:
        """The items."""
        return [item for items, start, stop in self.pieces for item in items[start:stop]]


class LaneBatches(Iterator[LaneBatch]):
    """The micro-batches of a lane from the frontier ``begin`` on; ``positions`` are those of the lane from there on.

    There is at least one micro-batch, which is without items if no position has any; only the last one has fewer
    than ``batch_size`` items. `StateMismatch` if a position has not more items than were consumed of it.
    """

    def __init__(self, positions: Iterator[PositionItems], *, begin: Frontier, batch_size: int) -> None:
        self._positions, self._batch_size = positions, batch_size
        self._done, self._skip = begin
        self._items: Sequence[Any] = ()
        self._at = 0
        """The items of the current position that are consumed."""
        self._opened_at = 0
        """How many of them were consumed before."""
        self._is_open = False
        """True while there is a current position."""
        self._is_over = False
        self._before = begin

    def __next__(self) -> LaneBatch:
        if self._is_over:
            raise StopIteration
        return self.take(self._batch_size)

    def take(self, count: int) -> LaneBatch:
        """Return the next ``count`` items of the lane, or fewer where it ends, as a micro-batch."""
        pieces, left = list[Piece](), count
        while left and self._has_item():
            start = self._at
            self._at = min(len(self._items), start + left)
            pieces.append((self._items, start, self._at))
            left -= self._at - start
        self._is_over = not self._has_item()
        before, self._before = self._before, (self._done, self._at)
        touched = self._done + (self._at > self._opened_at)
        return LaneBatch(
            pieces=tuple(pieces), before=before, after=self._before, touched=touched, is_last=self._is_over
        )

    def _has_item(self) -> bool:
        """Go to the next position that has an item left; return whether there is one."""
        while self._at >= len(self._items):
            if self._is_open:
                self._done, self._at, self._items, self._is_open = self._done + 1, 0, (), False
                self._opened_at = 0
            found = next(self._positions, None)
            if found is None:
                return False
            self._open(found)
        return True

    def _open(self, found: PositionItems) -> None:
        skip, self._skip = max(found.skip, self._skip), 0
        if skip and skip >= len(found.items):
            raise StateMismatch(
                f"{found.name or 'a position'} yielded {len(found.items)} rows, and {skip} of its rows, but not all, "
                "had been consumed before: a transform must yield the same rows whenever it is called with one row"
            )
        self._items, self._at, self._is_open, self._opened_at = found.items, skip, True, skip

"""This module holds the receipts of a flow: each names the positions of a micro-batch, and how far its lane has come.

Only what was read tells how many items a position yields. So the frontier after a micro-batch travels with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.wire.documents import Count, as_row

__all__ = ["FlowReceipt", "LaneMove", "LaneRead"]


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMove:
    """A lane went from one frontier (positions done, items done of the next position) to another."""

    lane: Count
    before: tuple[Count, Count]
    after: tuple[Count, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRead:
    """What was read of a lane for one micro-batch: as a `FlowReceipt`, but of no step yet."""

    move: LaneMove
    spans: tuple[Span, ...]
    items: int
    is_last: bool
    """True where the lane has no more items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowReceipt(Receipt):
    """The receipt of a micro-batch of a flow.

    Its ``spans`` are the positions whose items it holds, in part or all, or that yielded none; its ``step_rows`` are
    those of a full step, because a rank does not know how many rows the others have.
    """

    items: Count
    """The rows of the micro-batch."""
    moves: tuple[LaneMove, ...]
    """How its lane moved, and before that, lanes that had nothing more to yield."""

    @property
    def rows(self) -> int:
        """The number of rows of the micro-batch."""
        return self.items

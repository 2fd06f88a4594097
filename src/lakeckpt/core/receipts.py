"""This module holds receipts: each micro-batch carries one that names the rows in it.

A receipt names positions, never rows: with the table's index and the order, positions are enough to find the rows
again. If consumption depends on the data, only what was read tells how many items a position yields, so the receipt
also says how lanes moved. A receipt does not state that its rows were *used*: a cut does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lakeckpt.errors import StateError
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain

__all__ = ["EPOCH_NUMBERS", "LaneMove", "LaneRead", "Receipt", "Span"]

EPOCH_NUMBERS: int = 2**32
"""How many numbers (`Receipt.number`) each epoch has, which is more than any epoch has steps."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """Positions [start, stop) of an epoch."""

    epoch: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not (self.epoch >= 0 and 0 <= self.start < self.stop):
            raise ValueError(f"not a span of positions: epoch {self.epoch}, [{self.start}, {self.stop})")

    @property
    def rows(self) -> int:
        """The number of positions."""
        return self.stop - self.start


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMove:
    """A lane went from one frontier (positions done, items done of the next position) to another."""

    lane: Count
    before: tuple[Count, Count]
    after: tuple[Count, Count]
    source: Count | None = None
    """The number of the source of a mixture whose lane it is; None: there is one."""

    @property
    def key(self) -> Any:
        """The lane, or of a mixture (source, lane), as `lakeckpt.core.state.State.frontiers` names it."""
        return self.lane if self.source is None else (self.source, self.lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRead:
    """The items that were read of a lane for one micro-batch, before the micro-batch has a step."""

    move: LaneMove
    spans: tuple[Span, ...]
    items: int
    is_last: bool
    """True if the lane has no more items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The rows of one micro-batch, and the step and rank that it was dealt to."""

    epoch: int
    """The current epoch; of an endless stream 0: its spans name the epochs."""
    micro_batch: int
    """Its number m over the whole job, per epoch."""
    lane: int
    """The lane that it comes from; -1 if an epoch's last rows are dealt out equally."""
    step: int
    """The step of this rank, per epoch."""
    rank: int
    """The data-parallel rank that it was dealt to."""
    world_size: int
    """The number of data-parallel ranks."""
    spans: tuple[Span, ...]
    """The positions, in the order of the rows. If consumption depends on the data: the positions whose items it holds,
    in part or all, or that yielded none."""
    step_rows: int
    """Rows of all ranks in this step. If consumption depends on the data: those of a full step, because a rank does not
    know how many rows the others have."""
    reader: str = ""
    """`lakeckpt.core.identity.Identity.digest` of the reader; empty: not named."""
    last: bool | None = field(default=None, compare=False)
    """True if it is the last of its rank in the epoch, or in a mixture that ends; of an endless stream never. None if
    only the data tell: the rows of a transform with ``rows="many"``, of a ``tokenizer=`` or of whole documents, and a
    table that is followed."""
    items: Count | None = None
    """The rows of the micro-batch, if consumption depends on the data; None: one row for each position."""
    moves: tuple[LaneMove, ...] = ()
    """How its lane moved, and before that, lanes that had nothing more to yield; empty: positions say it."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        rows = self.rows
        if rows > self.step_rows:
            raise ValueError(f"{rows} rows in a step of {self.step_rows}")

    @property
    def rows(self) -> int:
        """The number of rows of the micro-batch."""
        if self.items is not None:
            return self.items
        spans = self.spans
        return spans[0].stop - spans[0].start if len(spans) == 1 else sum(span.rows for span in spans)

    @property
    def weight(self) -> float:
        """``rows * world_size / step_rows``: scale the mean loss by it, and DDP's average over ranks is over rows."""
        return self.rows * self.world_size / self.step_rows if self.step_rows else 0.0

    @property
    def number(self) -> int:
        """A number that names the micro-batch to its rank: ``epoch * 2**32 + step``; of an endless stream, the step."""
        return self.epoch * EPOCH_NUMBERS + self.step

    def to_plain(self) -> dict[str, object]:
        """Return the receipt as JSON-able values."""
        found: dict[str, object] = to_plain(self)
        return found

    @classmethod
    def from_plain(cls, plain: object) -> Receipt:
        """Return the receipt that `to_plain` made ``plain`` of; StateError if ``plain`` is no receipt."""
        found: Receipt = from_plain(cls, plain, "a receipt", error=StateError)
        return found

"""This module holds the micro-batches of a mixture: their receipts, and what they are dealt as.

A `MixedReceipt` names the positions of each source, never rows, as `lakeckpt.core.receipts.Receipt` does. The module
imports the standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from lakeckpt.core.plan import LayoutKey, Plan, cut_spans
from lakeckpt.core.receipts import LaneMove, LaneRead, Receipt, Span
from lakeckpt.wire.documents import to_plain

__all__ = ["AnyReceipt", "MixedAssignment", "MixedBlock", "MixedReceipt", "Part", "planned_receipt"]

Spans = tuple[tuple[str, tuple[Span, ...]], ...]


class _Planned:
    """A receipt whose spans are computed when somebody looks at them: most loops look at few."""

    __slots__ = ("_planned",)
    _planned: Callable[[], Spans]

    def __getattr__(self, name: str) -> Spans:
        if name != "spans":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self._planned()
        object.__setattr__(self, "spans", found)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedReceipt(_Planned):
    """The rows of one micro-batch of a mixture, and the step and rank that it was dealt to."""

    micro_batch: int
    """Its number over the whole job."""
    lane: int
    step: int
    rank: int
    world_size: int
    rows: int
    """Its rows, of all sources."""
    spans: tuple[tuple[str, tuple[Span, ...]], ...]
    """(source, its positions in the order of its rows), of the sources that have rows in it; each names its epochs. If
    the consumption of a source depends on the data: the positions whose items it holds, in part or all, or that yielded
    none."""
    epoch: int = 0
    """0: sources count their epochs themselves."""
    reader: str = ""
    """`lakeckpt.core.state.State.digest`; empty: not named."""
    last: bool | None = field(default=None, compare=False)
    """As in `lakeckpt.Receipt`."""
    moves: tuple[LaneMove, ...] = ()
    """How its lane of each source whose consumption depends on the data moved."""
    items: ClassVar[None] = None

    def __eq__(self, other: object) -> bool:
        if self is other:  # as nearly always: no spans are computed
            return True
        return isinstance(other, MixedReceipt) and _compared(self) == _compared(other)

    @property
    def step_rows(self) -> int:
        """Rows of all ranks in this step: micro-batches are always full."""
        return self.rows * self.world_size

    @property
    def weight(self) -> float:
        """1.0: every rank has equally many rows. See `lakeckpt.Receipt.weight`."""
        return 1.0

    @property
    def number(self) -> int:
        """A number that names the micro-batch to its rank: the step."""
        return self.step

    def of_part(self, spans: tuple[Span, ...]) -> Receipt:
        """Return a receipt of the rows of one source. It counts as if that source had equally many on every rank."""
        rows = sum(span.rows for span in spans)
        return Receipt(
            epoch=0,
            micro_batch=self.micro_batch,
            lane=self.lane,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            spans=spans,
            step_rows=rows * self.world_size,
        )

    def with_reads(self, names: tuple[str, ...], reads: Mapping[int, LaneRead]) -> MixedReceipt:
        """Return the receipt with what was read of sources whose consumption depends on the data: ``reads``, by the
        numbers of ``names``."""
        spans = dict(self.spans) | {names[source]: one.spans for source, one in reads.items()}
        return replace(
            self,
            spans=tuple((name, spans[name]) for name in names if name in spans),
            moves=tuple(one.move for _, one in sorted(reads.items())),
        )

    def to_plain(self) -> dict[str, object]:
        """Return the receipt as JSON-able values."""
        found: dict[str, object] = to_plain(self)
        return found


_compared = attrgetter("micro_batch", "lane", "step", "rank", "world_size", "rows", "spans", "moves", "epoch", "reader")


def planned_receipt(planned: Callable[[], Spans], **fields: Any) -> MixedReceipt:
    """Return the receipt of all ``fields`` but ``spans``, which ``planned`` returns."""
    found = object.__new__(MixedReceipt)
    for name, value in {"_planned": planned, "epoch": 0, "moves": (), **fields}.items():
        object.__setattr__(found, name, value)
    return found


AnyReceipt = Receipt | MixedReceipt
"""The receipt of a micro-batch, of one source or of a mixture."""


class Part(NamedTuple):
    """The rows that a source gives to micro-batches of a mixture."""

    source: int
    """Its number."""
    spans: tuple[Span, ...]
    layouts: tuple[LayoutKey, ...]
    """As in `lakeckpt.core.plan.Assignment`."""
    rows: int
    plan: Plan | None = None
    """If the consumption of the source depends on the data, the plan by which its lanes go on, in place of spans."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedBlock:
    """Micro-batches of one lane that follow one another, planned together."""

    turn: int
    """How many micro-batches the lane gave before."""
    whole: bool
    """True if each micro-batch is of one source."""
    order: npt.NDArray[np.uint16] = field(repr=False)
    """The source of each row: uint16, shape (micro-batches, rows)."""
    parts: tuple[Part, ...]
    """Of the sources that have rows in it, in their order."""
    before: list[list[int]] = field(repr=False)
    """Micro-batch → for each source, its rows in the micro-batches of the block before; and at the end, in all."""

    def parts_of(self, number: int) -> list[Part]:
        """Return what the sources give to micro-batch ``number`` of the block."""
        starts, stops = self.before[number], self.before[number + 1]
        return [
            Part(
                one.source,
                tuple(cut_spans(one.spans, starts[one.source], stops[one.source])),
                one.layouts,
                stops[one.source] - starts[one.source],
                one.plan,
            )
            for one in self.parts
            if starts[one.source] < stops[one.source]
        ]

    def spans_of(self, number: int, names: Sequence[str]) -> Spans:
        """Return the `MixedReceipt.spans` of micro-batch ``number``; ``names`` are those of the sources."""
        return tuple((names[part.source], part.spans) for part in self.parts_of(number) if part.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAssignment:
    """A micro-batch of a mixture dealt to a rank: one of a block."""

    receipt: MixedReceipt
    block: MixedBlock = field(repr=False)
    number: int
    """Its number in the block."""
    owner: int
    lanes: int
    """As in `lakeckpt.core.plan.Assignment`."""

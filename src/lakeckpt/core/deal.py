"""Which positions of an epoch does micro-batch m hold?  What is left of the data, dealt to lanes.

A *deal* begins at micro-batch ``first`` with a rest (what nobody has consumed yet), and deals it to ``num_lanes`` lanes
in turn: micro-batch m is the next ``batch_size`` rows of lane m mod num_lanes. A topology change that keeps the lanes
goes on with the same deal; any other (a re-cut) takes what is left of one deal as the rest of the next. Positions are
divided, never re-permuted: an epoch that had begun keeps the layout (lanes and windows) that it began with.

`EpochDeal` deals one epoch: lane k holds the k-th equal share of the rest, in the order of positions; the ends are
those of `lakeckpt.core.ends`. `lakeckpt.core.stream` deals epochs without end.

A deal knows neither ranks nor steps: `lakeckpt.core.plan` hands its micro-batches to those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lakeckpt.core.ends import Tail, lane_limit, micro_batches, rows_before
from lakeckpt.core.order import lane_bounds
from lakeckpt.core.receipts import Span
from lakeckpt.core.rest import Left, Rest, spans_of

__all__ = ["Deal", "EpochDeal", "turns"]

Int64Array = npt.NDArray[np.int64]


class Deal(Protocol):
    """Micro-batches of what is left, in turn from each lane. Micro-batches below ``first`` are not its own."""

    @property
    def first(self) -> int:
        """The first micro-batch, that of lane 0."""

    @property
    def end(self) -> int | None:
        """One past the last micro-batch; None where there is no last one."""

    def spans(self, micro_batch: int) -> list[Span]:
        """Return the positions of ``micro_batch``, in the order of its rows."""

    def rows_of(self, start: int, stop: int) -> int:
        """Return how many rows micro-batches ``start`` … ``stop`` - 1 have together."""

    def rest(self, micro_batch: int) -> Rest:
        """Return what is left when every micro-batch below ``micro_batch`` has been consumed."""

    def layout(self, epoch: int) -> tuple[int, int]:
        """Return the lanes and the rotation of ``epoch``'s layout."""


def turns(done: int, num_lanes: int) -> Int64Array:
    """Return how many of the first ``done`` micro-batches of a deal are each lane's: int64, shape (num_lanes,)."""
    each, over = divmod(done, num_lanes)
    return each + (np.arange(num_lanes) < over).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class EpochDeal:
    """One epoch, or what is left of it: see the module."""

    first: int
    num_lanes: int
    batch_size: int
    tail: Tail
    left: Left
    count: int = field(init=False)
    """Micro-batches of each lane."""

    def __post_init__(self) -> None:
        size = self.left.positions.size
        object.__setattr__(self, "count", micro_batches(size, self.num_lanes, self.batch_size, self.tail))

    @cached_property
    def bounds(self) -> Int64Array:
        """Where lanes begin and end among what is left: int64, shape (num_lanes + 1,)."""
        return lane_bounds(self.left.positions.size, self.num_lanes)

    @cached_property
    def limits(self) -> Int64Array:
        """How many rows each lane gives: int64, shape (num_lanes,)."""
        size = self.left.positions.size
        return lane_limit(np.diff(self.bounds), size, self.num_lanes, self.count, self.batch_size, self.tail)

    @cached_property
    def extras(self) -> Int64Array | None:
        """How many rows each lane gives in a last turn for lanes' extra rows; None where there is no such turn."""
        if self.tail != "rows" or not self.left.positions.size % self.num_lanes:
            return None
        return self.limits - self.left.positions.size // self.num_lanes

    def _before(self, turns: Int64Array) -> Int64Array:
        """Return how many rows each lane gives in its first ``turns`` micro-batches: int64, shape (num_lanes,)."""
        return rows_before(self.limits, self.count, self.batch_size, turns, extra=self.extras)

    @cached_property
    def end(self) -> int:
        """One past the last micro-batch that any rank needs: trailing ones without a row are left out."""
        if not self.count:
            return self.first
        before = self._before(np.full(self.num_lanes, self.count - 1))
        last_turn = np.flatnonzero(self.limits > before)
        # Lanes with a row in the last turn come first: the extra rows are the first lanes'.
        return self.first + (self.count - 1) * self.num_lanes + len(last_turn)

    def spans(self, micro_batch: int) -> list[Span]:
        """See `Deal`."""
        turn, lane = divmod(micro_batch - self.first, self.num_lanes)
        start = self._begins[lane]
        if turn < self._whole_turns:  # nearly all are
            low = start + turn * self.batch_size
            if self._shift is not None:
                low += self._shift
                return [Span(epoch=self.left.epoch, start=low, stop=low + self.batch_size)]
            return spans_of(self.left.epoch, self.left.positions.stretch(low, low + self.batch_size))
        limit = self.limits[lane : lane + 1].repeat(2)
        extra = None if self.extras is None else self.extras[lane : lane + 1].repeat(2)
        inside = rows_before(limit, self.count, self.batch_size, np.array([turn, turn + 1]), extra=extra)
        return spans_of(self.left.epoch, self.left.positions.stretch(start + int(inside[0]), start + int(inside[1])))

    @cached_property
    def _whole_turns(self) -> int:
        """In how many turns, from the first on, all lanes give ``batch_size`` rows."""
        return self.count - 2 - (self.extras is not None)

    @cached_property
    def _begins(self) -> list[int]:
        """Where lanes begin. As the next: asked for every micro-batch, so plain numbers."""
        found: list[int] = self.bounds.tolist()
        return found

    @cached_property
    def _shift(self) -> int | None:
        """What is left is one interval that begins here; None where it is not."""
        return int(self.left.positions.starts[0]) if len(self.left.positions) == 1 else None

    def rows_of(self, start: int, stop: int) -> int:
        """See `Deal`."""
        if (stop - 1 - self.first) // self.num_lanes < self._whole_turns:
            return (stop - start) * self.batch_size
        turn, lane = np.divmod(np.arange(start, stop) - self.first, self.num_lanes)
        limits, extra = self.limits[lane], None if self.extras is None else self.extras[lane]
        before = rows_before(limits, self.count, self.batch_size, turn, extra=extra)
        return int((rows_before(limits, self.count, self.batch_size, turn + 1, extra=extra) - before).sum())

    def rest(self, micro_batch: int) -> Rest:
        """See `Deal`."""
        done = self._before(turns(micro_batch - self.first, self.num_lanes))
        positions = self.left.positions.select(self.bounds[:-1] + done, self.bounds[1:])
        left = Left(
            epoch=self.left.epoch,
            positions=positions,
            num_lanes=self.left.num_lanes,
            rotation=self.left.rotation,
        )
        return Rest(begun=(left,), next_epoch=self.left.epoch + 1)

    def layout(self, epoch: int) -> tuple[int, int]:
        """See `Deal`."""
        if epoch != self.left.epoch:
            raise ValueError(f"epoch {epoch} is not dealt here, epoch {self.left.epoch} is")
        return self.left.num_lanes, self.left.rotation

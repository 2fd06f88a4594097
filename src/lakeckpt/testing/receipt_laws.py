"""This module compares receipts with the table: the receipts of a step add up, and each names the rows of its batch.

Rows are looked up in the table's own order (row group and row), by the layout of the epoch that the state names. So a
loader whose batches hold other rows than their receipts name is found at once, not only when a row is lost.

An epoch drops no row by default; with ``drop_last=True`` it drops what its plan leaves at the end. The code under test
computes the plan, so `most_dropped` bounds the number of rows by the promise alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from lakeckpt.core.consumption import consumed
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import EpochLayout
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.testing.observed import Violation

__all__ = ["TrueRows", "check_receipts", "dealt", "most_dropped", "planned_drop"]


def check_receipts(receipts: list[Receipt], world_size: int, dataset: LakeDataset) -> None:
    """Compare the receipts of one step, one per rank, with each other and with the batch size."""
    for rank, receipt in enumerate(receipts):
        if len(receipts) == world_size and (receipt.rank, receipt.world_size) != (rank, world_size):
            raise Violation(f"rank {rank} of {world_size} got a receipt of another: {receipt}")
        if receipt.rows > (dataset.batch_size or 1):
            raise Violation(
                f"a micro-batch of {receipt.rows} rows is above the batch size {(dataset.batch_size or 1)}: {receipt}"
            )
        if dataset.identity.endless and receipt.rows != (dataset.batch_size or 1):
            raise Violation(f"a micro-batch of an endless stream is full, got {receipt}")
    _check_places(receipts)
    if len(receipts) != world_size:  # row by row, some ranks may have ended before the last row
        return
    rows = sum(receipt.rows for receipt in receipts)
    if any(receipt.step_rows != rows for receipt in receipts):
        raise Violation(f"a step of {rows} rows, of which receipts say {[receipt.step_rows for receipt in receipts]}")
    weight = sum(receipt.weight for receipt in receipts)
    if rows and not math.isclose(weight, world_size):
        raise Violation(f"the weights of a step of {world_size} ranks add up to {weight}")


def _check_places(receipts: list[Receipt]) -> None:
    """Check that all ranks are at the same step."""
    steps = [receipt.step for receipt in receipts]
    if len(set(steps)) > 1:
        raise Violation(f"the ranks are at steps {steps}")


class TrueRows:
    """Compares batches with the rows at the positions of their receipts. ``groups``: the keys of each row group."""

    def __init__(self, dataset: LakeDataset, groups: list[list[Hashable]]) -> None:
        self._dataset = dataset
        self._groups = groups
        self._layouts: dict[tuple[int, int, int], EpochLayout] = {}

    def every(self) -> Counter[Hashable]:
        """Count the keys of an epoch."""
        return Counter(key for group in self._groups for key in group)

    def check(self, keys: list[Hashable], receipt: Receipt, plan: Plan) -> None:
        """Compare an item with the rows at the positions of its receipt; ``plan`` names the layouts of epochs."""
        expected: list[Hashable] = []
        for epoch, positions in _in_order(receipt):
            layout = self._layout(epoch, *plan.deal.layout(epoch))
            where = zip(*(array.tolist() for array in layout.locate(positions)), strict=True)
            expected += [self._groups[group][row] for group, row in where]
        if keys == expected:
            return
        differ = next((i for i, (a, b) in enumerate(zip(keys, expected, strict=False)) if a != b), None)
        if differ is None:
            what = f"it has {len(keys)} rows, not {len(expected)}"
        else:
            what = f"row {differ} is {keys[differ]!r}, not {expected[differ]!r}"
        own = (
            "; a transform that drops, makes or reorders rows needs key=function" if self._dataset.has_transform else ""
        )
        raise Violation(f"a batch does not hold the rows that its receipt names: {what}; {receipt}{own}")

    def _layout(self, epoch: int, num_lanes: int, rotation: int) -> EpochLayout:
        known = self._layouts.get((epoch, num_lanes, rotation))
        if known is None:
            counted = self._dataset.selection or self._dataset.table.index
            rows, spec = counted.group_rows, self._dataset.identity.spec
            known = EpochLayout.build(rows, spec, epoch, num_lanes, rotation)
            self._layouts[epoch, num_lanes, rotation] = known
        return known


def _in_order(receipt: Receipt) -> list[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    return [(span.epoch, np.arange(span.start, span.stop)) for span in receipt.spans]


def dealt(plan: Plan) -> Intervals:
    """Return the positions that are consumed when the epoch of ``plan``, which is not endless, has ended."""
    assert plan.steps is not None
    ended = replace(plan.state, step=plan.steps)
    return consumed(ended).get(ended.epoch, Intervals.empty())


def planned_drop(plan: Plan) -> int:
    """Return how many rows the epoch of ``plan`` drops: as the plan says, but no more than `most_dropped`."""
    most = most_dropped(plan.state)
    return min(most, plan.state.identity.rows - dealt(plan).size) if most else 0


def most_dropped(state: State) -> int:
    """Return how many rows the epoch of ``state`` drops at most.

    Each lane drops less than a micro-batch and a row. The micro-batches that do not fill a step of all ranks are
    dropped, too.
    """
    if state.identity.endless or state.identity.tail != "drop":
        return 0
    return (state.segment.num_lanes + state.segment.world_size - 1) * state.segment.batch_size

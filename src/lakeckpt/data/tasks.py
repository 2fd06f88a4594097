"""How does an assignment cross to a worker, and not cost more than reading it?  As a tuple of numbers.

Assignments are small, and there are tens of thousands in a second: as pickled dataclasses they would cost more than
the rows. What rows are known not to be read is told once, when it changes, and not with every assignment.
"""

from __future__ import annotations

from typing import Any

from lakeckpt.core.plan import Assignment, LayoutKey
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.core.skips import SkipList

__all__ = ["Task", "from_task", "to_task"]

Task = tuple[Any, ...]
"""An assignment without its skips, in plain numbers."""


def to_task(assignment: Assignment) -> Task:
    """Return ``assignment``, without its skips, as numbers."""
    receipt = assignment.receipt
    return (
        receipt.epoch,
        receipt.micro_batch,
        receipt.lane,
        receipt.step,
        receipt.rank,
        receipt.world_size,
        receipt.step_rows,
        tuple([(span.epoch, span.start, span.stop) for span in receipt.spans]),
        tuple([(key.epoch, key.num_lanes, key.rotation) for key in assignment.layouts]),
        assignment.owner,
        assignment.lanes,
    )


def from_task(task: Task, skips: SkipList) -> Assignment:
    """Return what `to_task` made ``task`` of, with ``skips``."""
    epoch, micro_batch, lane, step, rank, world_size, step_rows, spans, layouts, owner, lanes = task
    receipt = Receipt(
        epoch=epoch,
        micro_batch=micro_batch,
        lane=lane,
        step=step,
        rank=rank,
        world_size=world_size,
        spans=tuple([Span(epoch=of, start=start, stop=stop) for of, start, stop in spans]),
        step_rows=step_rows,
    )
    keys = tuple([LayoutKey(epoch=of, num_lanes=number, rotation=rotation) for of, number, rotation in layouts])
    return Assignment(receipt=receipt, layouts=keys, owner=owner, lanes=lanes, skips=skips)

"""How many rows does an epoch leave out?  None with ``tail="short"``; with ``"drop"``, what its plan leaves at the end.

The plan is exact, whatever was re-cut. But a plan is computed by what is being tested: so there is a bound as well, of
the promise alone, that no plan may be above. Nothing here looks at what was consumed.
"""

from __future__ import annotations

from dataclasses import replace

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan, consumed
from lakeckpt.core.state import ReaderState

__all__ = ["dealt", "most_dropped", "planned_drop"]


def dealt(plan: Plan) -> Intervals:
    """Return the positions that are consumed when the epoch of ``plan``, which is not endless, has ended."""
    assert plan.steps is not None
    ended = replace(plan.state, step=plan.steps, row=0)
    return consumed(ended).get(ended.epoch, Intervals.empty())


def planned_drop(plan: Plan) -> int:
    """Return how many rows the epoch of ``plan`` leaves out: as the plan says, but no more than `most_dropped`."""
    most = most_dropped(plan.state)
    return min(most, plan.state.identity.rows - dealt(plan).size) if most else 0


def most_dropped(state: ReaderState) -> int:
    """Return how many rows the epoch of ``state`` leaves out at most.

    Of every lane less than a micro-batch and a row; then the micro-batches that do not fill a step of all ranks.
    (Row-wise, where only rows are dropped that some ranks would get alone: a row of every lane.)
    """
    if state.identity.endless or state.identity.tail not in ("drop", "even"):
        return 0
    size = state.segment.batch_size if state.identity.tail == "drop" else 1
    return (state.segment.num_lanes + state.segment.world_size - 1) * size

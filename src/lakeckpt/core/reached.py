"""Can a job have come to this state?  What is asked of a state that is loaded, beyond what each of its values must be.

A state that was damaged, or made by hand, may name a step behind the end of its epoch, rows that no micro-batch has, or
segments that begin where those before them do not lead: rows would be left out without an error, or an error come late.

It takes the rest that a state names (its base) for true: what came before that is not in the state.
"""

from __future__ import annotations

from itertools import pairwise

from lakeckpt.core.plan import Plan, deals
from lakeckpt.core.state import MAX_EPOCH, MAX_ROWS, ReaderState, Segment
from lakeckpt.errors import StateInvalid

__all__ = ["check_reached"]


def check_reached(state: ReaderState, *, ahead: int = 0) -> None:
    """StateInvalid where no job comes to ``state``. ``ahead``: how many steps behind the end of an epoch it may be."""
    wrong = _wrong_segment(state) or _wrong_place(state, ahead)
    if wrong:
        raise StateInvalid(
            f"no job comes to this reader state: {wrong}. It was damaged or made by hand: load one as it was saved"
        )


def _wrong_place(state: ReaderState, ahead: int) -> str:
    if state.epoch > MAX_EPOCH:
        return f"epoch {state.epoch} is at hand, and they are counted from 0 to {MAX_EPOCH}"
    if state.base is not None and state.base.next_epoch > MAX_ROWS:
        return f"epoch {state.base.next_epoch} is the next one, and a stream has at most {MAX_ROWS} rows"
    plan = Plan(state)
    steps = plan.steps
    if steps is not None and state.step > steps + ahead:
        return f"step {state.step} of epoch {state.epoch} is at hand, which has {steps}"
    if state.row and not _has_row(plan, state.row):
        return f"{state.row} rows of step {state.step} are done, and no rank's micro-batch has more"
    return ""


def _has_row(plan: Plan, row: int) -> bool:
    """Whether a rank's micro-batch of the step at hand goes on at ``row``: nearly always that of the first does."""
    if plan.at_end:
        return False
    step, ranks = plan.state.step, range(plan.segment.world_size)
    return any(row < plan.assignment(step, rank).receipt.rows for rank in ranks)


def _wrong_segment(state: ReaderState) -> str:
    for index, ((deal, _), (before, segment)) in enumerate(zip(deals(state), pairwise(state.segments), strict=False)):
        least, most = _reach(before, segment, was_shortened=index == 0)
        if deal.end is not None:
            least, most = min(least, deal.end), min(most, deal.end)
        if not least <= segment.micro_batch <= most:
            return (
                f"a segment begins at step {segment.step} and micro-batch {segment.micro_batch}, and the one before it "
                f"comes to {least}{f' … {most}' if most > least else ''} there"
            )
    return ""


def _reach(before: Segment, segment: Segment, *, was_shortened: bool) -> tuple[int, int]:
    """To which micro-batches, the least and the most, ``before`` leads at the step at which ``segment`` begins."""
    steps = segment.step - before.step
    if was_shortened and (before.num_lanes, before.batch_size) == (segment.num_lanes, segment.batch_size):
        # Those between them may have been left out: of one to as many ranks as there are lanes.
        return before.micro_batch + steps, before.micro_batch + steps * before.num_lanes
    reached = before.micro_batch + steps * before.world_size
    return reached, reached

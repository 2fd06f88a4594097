"""This module computes which positions were consumed between two states, or up to one.

A position that yields several items is consumed when all of them are. The module is pure.
"""

from __future__ import annotations

from lakeckpt.core.changes import start
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import inside
from lakeckpt.core.plan import Plan, deal_key
from lakeckpt.core.state import State
from lakeckpt.errors import StateMismatch

__all__ = ["between", "consumed", "consumption", "dropped"]


def consumption(before: State, after: State) -> dict[int, Intervals]:
    """Return which positions of which epochs were consumed going from ``before`` to ``after``.

    Both are of one order and one epoch (or stream), and of the whole job or of the same part. StateMismatch if they are
    not, or if what ``before`` had consumed is left in ``after``.
    """
    _check_comparable(before, after)
    first, last = Plan(before), Plan(after)
    earlier, later = first.left, last.left
    begins = earlier.begun[0].epoch if earlier.begun else earlier.next_epoch
    found = {}
    for epoch in range(min(begins, *(left.epoch for left in later.begun), later.next_epoch), later.next_epoch):
        rows = before.rows_of(epoch)
        was, still = earlier.of(epoch, rows), later.of(epoch, rows)
        if again := still.difference(was):
            raise StateMismatch(
                f"epoch {epoch}: positions {again} had been consumed and are left again: "
                "the later state does not follow from the earlier one"
            )
        if used := was.difference(still):
            found[epoch] = used
    if before.held is not None:
        known = {(one.epoch, one.position): one.offset for one in last.begun}
        for one in inside(later, before.identity, first.begun):
            if known.get((one.epoch, one.position), 0) < one.offset:
                raise StateMismatch(f"items of a position had been consumed and are left again: {one}")
    return found


def _check_comparable(before: State, after: State) -> None:
    lines = before.identity.differences(after.identity)
    if before.epoch != after.epoch:
        lines.append(f"epoch: {before.epoch} became {after.epoch}")
    if before.identity.maker != after.identity.maker:
        lines.append(f"what makes the rows: {before.identity.maker} became {after.identity.maker}")
    ranks = [None if one.held is None else one.held.ranks for one in (before, after)]
    is_same_deal = (before.segment, before.base, ranks[0]) == (after.segment, after.base, ranks[1])
    if not (before.is_whole and after.is_whole) and not is_same_deal:
        lines.append(f"the part of the ranks {ranks[0]} became the part of the ranks {ranks[1]}, or another deal")
    if lines:
        raise StateMismatch(f"two states that are not of one order of rows: {'; '.join(lines)}")


def consumed(state: State) -> dict[int, Intervals]:
    """Return which positions of the current epoch (of an endless stream: of every epoch so far) have been consumed.

    Epochs that are over are counted in the order of the state; that they had another one, a state does not say.
    """
    rest = Plan(state).left
    epochs = range(state.epoch, rest.next_epoch)  # the state of a stream is of epoch 0
    rows = {epoch: state.rows_of(epoch) for epoch in epochs}
    every = {epoch: Intervals.whole(rows[epoch]).difference(rest.of(epoch, rows[epoch])) for epoch in epochs}
    return {epoch: positions for epoch, positions in every.items() if positions}


def dropped(state: State) -> Intervals:
    """Return the positions that the end of the epoch of ``state`` drops on purpose."""
    plan = Plan(state)
    if state.identity.tail == "short" or plan.steps is None:
        return Intervals.empty()
    return plan.rest(plan.steps).of(state.epoch, state.identity.rows)


def between(before: State, after: State) -> list[tuple[State, State]]:
    """Return the stretches by which a job came from ``before`` to ``after``: pairs of states, each of one epoch.

    The segments of an epoch that ended between the two are not known, and its rows do not depend on them: all of them
    were consumed. So ``tail`` must be "short", and the job in lockstep. Raises StateMismatch if ``after`` does not
    follow from ``before``, and if their positions may not mean the same rows, as in an endless stream whose lanes have
    changed.
    """
    assert before.identity.tail == "short", before.identity
    found = []
    while before.epoch < after.epoch:
        steps = Plan(before).steps
        assert steps is not None
        found.append((before, before.moved(step=steps)))
        before = _start_like(after, before.identity, before.epoch + 1)
    if before.is_start:
        before = _start_like(after, before.identity, before.epoch)
    if _layouts(before) != _layouts(after):
        raise StateMismatch(
            f"two states whose epochs were laid out in other lanes: {_layouts(before)} became {_layouts(after)}"
        )
    consumption(before, after)
    return [*found, (before, after)]


def _start_like(state: State, identity: Identity, epoch: int) -> State:
    """Return the start of ``epoch`` in the layout that the epoch of ``state`` began with."""
    num_lanes, batch_size, world_size = state.segments[0].topology
    if state.base is not None and state.base.begun:
        num_lanes, world_size = state.base.begun[0].num_lanes, 1
    return start(identity, epoch=epoch, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)


def _layouts(state: State) -> tuple[object, ...]:
    """Return what the layout of each epoch of ``state`` depends on."""
    if state.identity.endless:
        return state.base, {deal_key(segment) for segment in state.segments}
    return (state.segments[0].num_lanes if state.base is None else state.base.begun[0].num_lanes,)

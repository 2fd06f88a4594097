"""This module makes reader states: the start of an epoch, and states that follow from other states.

`replan` opens a segment when the topology or the batch size changes. While the lanes and the batch size stay, the deal
goes on, so that micro-batches are the same for every number of ranks that divides the lanes; else what is left is
re-cut: positions are divided, never permuted again. If consumption depends on the data, frontiers stay while the number
of lanes does; a re-cut gives each position that has begun to the lane it falls to, at its offset.

`without` excludes positions: they count as consumed, and what is left is re-cut.

The module never reads a row, and never communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest, inside
from lakeckpt.core.plan import Plan, dealt_in
from lakeckpt.core.state import MAX_EPOCH, Frontier, Held, Segment, State, lanes_of
from lakeckpt.errors import StateError

__all__ = [
    "MAX_SEGMENTS",
    "check_place",
    "check_whole",
    "dealt_anew",
    "fit_lanes",
    "moved",
    "of_each",
    "opening",
    "part_of",
    "rebase",
    "replan",
    "start",
    "unread",
    "without",
]

MAX_SEGMENTS = 32
"""A state with more segments is written with the rest that was left at its last re-cut instead of what came before."""


def fit_lanes(wanted: int | None, stored: int | None, world_size: int, workers: int) -> int:
    """Return the number of lanes for a topology: a multiple of ``world_size``.

    ``wanted`` (the user's) is rounded up to a multiple; without it, the ``stored`` number is kept if it is one; else it
    is ``world_size * max(1, workers)``.

    >>> fit_lanes(8, None, 3, 0), fit_lanes(None, 8, 4, 2), fit_lanes(None, 8, 3, 2)
    (9, 8, 6)
    """
    if wanted is not None:
        return -(-wanted // world_size) * world_size
    if stored is not None and stored % world_size == 0:
        return stored
    return world_size * max(1, workers)


def start(identity: Identity, *, epoch: int, num_lanes: int, batch_size: int, world_size: int) -> State:
    """Return the state of the whole job before the first step of ``epoch``."""
    first = Segment(micro_batch=0, step=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)
    return State(orders=(identity,), epoch=epoch, segments=(first,), step=0, held=unread((identity,), first))


def unread(orders: Sequence[Identity], segment: Segment) -> Held | None:
    """Return the frontiers of lanes that nothing was consumed of; None in lockstep."""
    makers = sum(one.maker is not None for one in orders)
    if not makers:
        return None
    nothing = (0,) * (segment.num_lanes * makers)
    return Held(ranks=Intervals.whole(segment.world_size), done=nothing, offsets=nothing)


def check_place(state: State, *, ahead: int = 0) -> None:
    """Raise StateError if ``state`` is more than ``ahead`` steps behind the end of its epoch.

    Such a state was damaged or made by hand. Loading it would skip rows without an error. A mixture has no such end.
    """
    if state.mixing is not None:
        return
    steps = Plan(state).steps if state.epoch <= MAX_EPOCH else 0
    if steps is not None and state.step > steps + ahead:
        raise StateError(
            f"no job comes to this reader state: it stands at step {state.step} of epoch {state.epoch}, which has "
            f"{steps}. It was damaged or made by hand: load a state as it was saved"
        )


def replan(state: State, *, num_lanes: int, batch_size: int, world_size: int) -> State:
    """Return ``state``, which is of one order, going on with another topology: unchanged if it is the same.

    Every row, or item, that is left is dealt again exactly once. An epoch that has not begun is planned anew; one that
    is over stays as it is. `StateError` if the topology changes and ``state`` is a part.
    """
    topology: dict[str, Any] = {"num_lanes": num_lanes, "batch_size": batch_size, "world_size": world_size}
    if state.segment.topology == (num_lanes, batch_size, world_size):
        return state
    check_whole(state)
    if state.is_start or (state.step == 0 and not state.bases and state.held is None):
        return start(state.identity, epoch=state.epoch, **topology)
    plan = Plan(state)
    if plan.at_end:
        return state
    opened = Segment(micro_batch=plan.micro_batch(state.step), step=state.step, **topology)
    return opening(state, opened)


def check_whole(state: State) -> None:
    """Raise `StateError` if ``state`` is a part, with which no other topology can go on."""
    if not state.is_whole:
        assert state.held is not None
        raise StateError(
            f"this is the part of the ranks {state.held.ranks} of {state.segment.world_size}, and another topology "
            "needs the state of the whole job: lakeckpt.merge_states joins the parts of all ranks"
        )


def opening(state: State, opened: Segment) -> State:
    """Return ``state`` going on in the segment ``opened``, without segments that what is to come does not depend on.

    Frontiers that are held stay, if the lanes do; else all that is left is dealt anew.
    """
    held, before = state.held, state.segments
    if held is not None:
        if opened.num_lanes != state.segment.num_lanes:
            return dealt_anew(state, opened)
        if opened.world_size != state.segment.world_size:
            held = replace(held, ranks=Intervals.whole(opened.world_size))
        before = () if state.mixing is None else before
    state = replace(state, segments=(*before, opened), held=held)
    return state if len(state.segments) <= MAX_SEGMENTS else _shortened(state)


def dealt_anew(state: State, opened: Segment) -> State:
    """Return ``state`` with all that is left dealt to the lanes of the segment ``opened``."""
    return without(state, opened, [{}] * len(state.orders), state.orders)


def without(
    state: State,
    opened: Segment,
    excluded: Sequence[Mapping[int, Intervals]],
    orders: Sequence[Identity],
) -> State:
    """Return ``state``, of the whole job, going on in the segment ``opened`` without some positions.

    ``excluded`` are, for each order, positions by epoch. ``orders`` are those of epochs that begin later; an epoch that
    has begun, or of which positions are excluded, keeps its own.
    """
    plans = [Plan(one) for one in of_each(state)]
    bases = tuple(_rest_without(*each) for each in zip(plans, excluded, orders, strict=True))
    return replace(
        state,
        orders=tuple(orders),
        segments=(opened,),
        bases=bases,
        begun=tuple(
            one
            for plan, base in zip(plans, bases, strict=True)
            for one in inside(base, plan.state.identity, plan.begun)
        ),
        held=unread(orders, opened),
    )


def _rest_without(plan: Plan, excluded: Mapping[int, Intervals], order: Identity) -> Rest:
    rest, state = plan.left, plan.state
    lefts = list(rest.begun)
    for epoch in range(rest.next_epoch, max(excluded, default=-1) + 1):  # epochs that have not begun
        num_lanes, rotation = plan.deal.layout(epoch)
        whole = Intervals.whole(state.rows_of(epoch))
        lefts.append(Left(epoch=epoch, positions=whole, num_lanes=num_lanes, rotation=rotation))
    begun = []
    for left in lefts:
        positions = left.positions.difference(excluded.get(left.epoch, Intervals.empty()))
        before = state.order_of(left.epoch)
        if positions or not order.endless:
            begun.append(replace(left, positions=positions, order=None if before == order else before))
    return Rest(begun=tuple(begun), next_epoch=rest.next_epoch + len(lefts) - len(rest.begun))


def rebase(state: State, identity: Identity) -> State:
    """Return ``state``, which is in lockstep, with what is left of it dealt anew, with the ends of ``identity``.

    ``identity`` has as many rows in the same order. An epoch that has not begun is only renamed.
    """
    if state.step == 0 and not state.bases:
        return replace(state, orders=(identity,))
    plan = Plan(state)
    opened = replace(state.segment, micro_batch=plan.micro_batch(state.step), step=state.step)
    return replace(state, orders=(identity,), bases=(plan.rest(state.step),), segments=(opened,))


def _shortened(state: State) -> State:
    """Return the state without the segments that what is to come does not depend on."""
    number = dealt_in(state.segments)
    every = [one.base if one.held is not None else Plan(one).base for one in of_each(state)]
    rests = tuple(one or Rest(begun=(), next_epoch=0) for one in every) if number or state.bases else ()
    kept = state.segments[number : number + 1] + state.segments[max(number + 1, len(state.segments) - 1) :]
    return replace(state, bases=rests, segments=kept)


def of_each(state: State) -> list[State]:
    """Return ``state`` as each source of a mixture sees it; of one order, as it is."""
    return [state] if state.mixing is None else [state.of(number) for number in range(len(state.orders))]


def moved(state: State, *, step: int, frontiers: Mapping[Any, Frontier]) -> State:
    """Return ``state`` with ``step`` steps done, and its lanes at ``frontiers``; other lanes stay where they are.

    ``frontiers`` names lanes as `State.frontiers` does; in lockstep there are none.
    """
    if state.held is None:
        return state.moved(step=step)
    found = state.frontiers
    if not found.keys() >= frontiers.keys():
        wrong = sorted(frontiers.keys() - found.keys())
        raise ValueError(f"a part with lanes {sorted(found)[:8]} has none of {wrong}")
    return _holding(state.moved(step=step), None, (found | dict(frontiers)).values())


def part_of(state: State, rank: int) -> State:
    """Return the part of ``rank``; ValueError if ``state`` does not hold the lanes of that rank."""
    assert state.held is not None
    ranks = Intervals.of([(rank, rank + 1)])
    if ranks.difference(state.held.ranks):
        raise ValueError(f"a state of the ranks {state.held.ranks} has no part of rank {rank}")
    lanes = set(lanes_of(state.segment, ranks).tolist())
    found = [one for key, one in state.frontiers.items() if (key if state.mixing is None else key[1]) in lanes]
    return _holding(state, ranks, found)


def _holding(state: State, ranks: Intervals | None, frontiers: Any) -> State:
    """Return ``state`` with the frontiers of ``ranks`` (None: of the same ones)."""
    assert state.held is not None
    held = Held(
        ranks=state.held.ranks if ranks is None else ranks,
        done=tuple(done for done, _ in frontiers),
        offsets=tuple(offset for _, offset in frontiers),
    )
    return replace(state, held=held)

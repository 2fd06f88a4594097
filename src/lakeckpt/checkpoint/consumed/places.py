"""This module answers what managers and ledgers ask of a reader's state, be it of positions or of a flow.

The place of an ordinary reader is a number (`lakeckpt.core.state.ReaderState`). The place of a flow, whose consumption
depends on the data, is a frontier for each lane (`lakeckpt.core.flows.state.FlowState`). A position of a flow is
consumed when all that it yields is.

The module is pure, never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lakeckpt.core import plan as of_positions
from lakeckpt.core.flows.plan import FlowPlan, begun_of, flow_consumption, replan_flow, rest_of
from lakeckpt.core.flows.state import FLOW_FORMAT, Begun, FlowState
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import Identity, ReaderState
from lakeckpt.errors import StateMismatch

__all__ = ["Place", "at_end", "begun", "consumed", "consumption", "dropped", "is_flow", "layout", "replanned"]

Place = ReaderState | FlowState
"""The state of a reader, of either kind."""


def is_flow(plain: Mapping[str, Any]) -> bool:
    """Return whether a plain state is of a flow."""
    return plain.get("format") == FLOW_FORMAT


def consumption(before: Place, after: Place) -> dict[int, Intervals]:
    """Return which positions of which epochs were consumed going from ``before`` to ``after``.

    Raises `StateMismatch` where ``after`` does not follow from ``before``.
    """
    if isinstance(before, FlowState) and isinstance(after, FlowState):
        return dict(flow_consumption(before, after).finished)
    return of_positions.consumption(_of_positions(before), _of_positions(after))


def consumed(state: Place) -> dict[int, Intervals]:
    """Return which positions of the epoch at hand (of an endless stream: of every epoch so far) have been consumed."""
    if isinstance(state, ReaderState):
        return of_positions.consumed(state)
    rest, found = rest_of(state), {}
    for epoch in range(state.epoch, rest.next_epoch):
        rows = state.identity.rows_of(epoch)
        if positions := Intervals.whole(rows).difference(rest.of(epoch, rows)):
            found[epoch] = positions
    return found


def begun(state: Place) -> tuple[Begun, ...]:
    """Return the positions of which some items are consumed, but not all."""
    return begun_of(state) if isinstance(state, FlowState) else ()


def layout(state: Place, epoch: int) -> tuple[int, int]:
    """Return the lanes and the rotation of the layout of ``epoch``; ValueError if nothing of it is left."""
    plan = FlowPlan(state) if isinstance(state, FlowState) else Plan(state)
    return plan.deal.layout(epoch)


def at_end(state: Place) -> bool:
    """Return whether nothing of the epoch is left to be dealt."""
    return (FlowPlan(state) if isinstance(state, FlowState) else Plan(state)).at_end


def dropped(state: Place) -> Intervals:
    """Return the positions that the end of the epoch of ``state`` drops on purpose."""
    if isinstance(state, FlowState) or state.identity.tail == "short" or (steps := Plan(state).steps) is None:
        return Intervals.empty()
    return Plan(state).rest(steps).of(state.epoch, state.identity.rows)


def replanned(state: Place, identity: Identity, topology: tuple[int, int, int]) -> Place:
    """Return ``state``, of the whole job, going on in the order of ``identity`` with ``topology``: lanes, batch size,
    world size."""
    lanes, batch_size, world_size = topology
    if isinstance(state, FlowState):
        state = replace(state, identity=identity)
        return replan_flow(state, num_lanes=lanes, batch_size=batch_size, world_size=world_size)
    state = replace(state, identity=identity)
    return of_positions.replan(state, num_lanes=lanes, batch_size=batch_size, world_size=world_size)


def _of_positions(state: Place) -> ReaderState:
    if isinstance(state, ReaderState):
        return state
    raise StateMismatch("a state of positions, and one of a flow: they are not of one order of rows")

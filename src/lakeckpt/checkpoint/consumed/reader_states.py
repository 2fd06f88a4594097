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

from lakeckpt.core import plan
from lakeckpt.core.flows.plan import FlowPlan, begun_of, flow_consumption, replan_flow, rest_of
from lakeckpt.core.flows.state import FLOW_FORMAT, Begun, FlowState
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import Identity, ReaderState
from lakeckpt.errors import ConfigError, StateMismatch

__all__ = [
    "AnyState",
    "at_end",
    "begun",
    "consumed",
    "consumption",
    "dropped",
    "is_flow",
    "layout",
    "of_positions",
    "replanned",
]

AnyState = ReaderState | FlowState
"""The state of a reader, of either kind."""


def is_flow(plain: Mapping[str, Any]) -> bool:
    """Return whether a plain state is of a flow."""
    return plain.get("format") == FLOW_FORMAT


def of_positions(plain: Mapping[str, Any], what: str) -> ReaderState:
    """Return the state of which `ReaderState.to_plain` made ``plain``. Raises `ConfigError`, which says that ``what``
    cannot be done in mid-epoch, if it is of a flow, and `StateError` if it is none."""
    if is_flow(plain):
        raise ConfigError(
            f"{what} cannot go on in the middle of an epoch: what it consumes depends on the data, and a row may be "
            "consumed in part. Let the epoch end first"
        )
    return ReaderState.from_plain(plain)


def consumption(before: AnyState, after: AnyState) -> dict[int, Intervals]:
    """Return which positions of which epochs were consumed going from ``before`` to ``after``.

    Raises `StateMismatch` where ``after`` does not follow from ``before``.
    """
    if isinstance(before, FlowState) and isinstance(after, FlowState):
        return dict(flow_consumption(before, after).finished)
    return plan.consumption(_checked(before), _checked(after))


def consumed(state: AnyState) -> dict[int, Intervals]:
    """Return which positions of the epoch at hand (of an endless stream: of every epoch so far) have been consumed."""
    if isinstance(state, ReaderState):
        return plan.consumed(state)
    rest, found = rest_of(state), {}
    for epoch in range(state.epoch, rest.next_epoch):
        rows = state.identity.rows_of(epoch)
        if positions := Intervals.whole(rows).difference(rest.of(epoch, rows)):
            found[epoch] = positions
    return found


def begun(state: AnyState) -> tuple[Begun, ...]:
    """Return the positions of which some items are consumed, but not all."""
    return begun_of(state) if isinstance(state, FlowState) else ()


def layout(state: AnyState, epoch: int) -> tuple[int, int]:
    """Return the lanes and the rotation of the layout of ``epoch``; ValueError if nothing of it is left."""
    return _plan(state).deal.layout(epoch)


def at_end(state: AnyState) -> bool:
    """Return whether nothing of the epoch is left to be dealt."""
    return _plan(state).at_end


def dropped(state: AnyState) -> Intervals:
    """Return the positions that the end of the epoch of ``state`` drops on purpose."""
    if isinstance(state, FlowState) or state.identity.tail == "short" or (steps := Plan(state).steps) is None:
        return Intervals.empty()
    return Plan(state).rest(steps).of(state.epoch, state.identity.rows)


def replanned(state: AnyState, identity: Identity, topology: tuple[int, int, int]) -> AnyState:
    """Return ``state``, of the whole job, going on in the order of ``identity`` with ``topology``: lanes, batch size,
    world size."""
    lanes, batch_size, world_size = topology
    if isinstance(state, FlowState):
        state = replace(state, identity=identity)
        return replan_flow(state, num_lanes=lanes, batch_size=batch_size, world_size=world_size)
    state = replace(state, identity=identity)
    return plan.replan(state, num_lanes=lanes, batch_size=batch_size, world_size=world_size)


def _plan(state: AnyState) -> Plan | FlowPlan:
    return FlowPlan(state) if isinstance(state, FlowState) else Plan(state)


def _checked(state: AnyState) -> ReaderState:
    if isinstance(state, ReaderState):
        return state
    raise StateMismatch("a state of positions, and one of a flow: they are not of one order of rows")

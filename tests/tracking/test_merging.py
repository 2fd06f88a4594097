"""Parts of ranks merge in every shape of a tree to the state of the job, and what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.flows.plan import flow_start, joined, merge, merge_states, part_of
from lakeckpt.core.flows.state import FlowState, Maker, deal_of
from lakeckpt.core.lanes import EpochDeal
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.state import Identity
from lakeckpt.errors import StateError, StateMismatch
from lakeckpt.tracking.lane_messages import HeldLanes, from_message, to_message
from lakeckpt.wire.values import pack, unpack

SPEC = OrderSpec(seed=3, shuffle=True, window=2)


@st.composite
def jobs(draw: st.DrawFn, *, least: int = 1) -> FlowState:
    """The state of a job of several ranks, in the middle of an epoch; its first micro-batch may be of any lane."""
    world_size, each = draw(st.integers(least, 6)), draw(st.integers(1, 3))
    identity = Identity(table="t", selection="", rows=draw(st.integers(0, 60)), spec=SPEC, tail="short", endless=False)
    topology = {"num_lanes": world_size * each, "batch_size": 2, "world_size": world_size}
    state = flow_start(identity, Maker(name="m"), epoch=1, **topology)
    deal = deal_of(state)
    assert isinstance(deal, EpochDeal)
    sizes = deal.limits.tolist()
    done = tuple(draw(st.integers(0, size)) for size in sizes)
    offsets = tuple(draw(st.integers(0, 9)) if at < size else 0 for at, size in zip(done, sizes, strict=True))
    segment = replace(state.segment, micro_batch=draw(st.integers(0, 20)), step=5)
    return replace(state, segment=segment, step=7, done=done, offsets=offsets)


def parts_of(state: FlowState) -> list[FlowState]:
    return [part_of(state, rank) for rank in range(state.segment.world_size)]


def held(part: FlowState) -> HeldLanes:
    return HeldLanes(ranks=part.ranks, done=part.done, offsets=part.offsets)


def sent(part: FlowState, base: FlowState | None) -> FlowState:
    """The part that has gone to another process, which has ``base``."""
    old = None if base is None else held(base)
    found = from_message(unpack(pack(to_message(held(part), old)), what="a message"), old)
    return joined(part, [(found.ranks, found.done, found.offsets)])


@given(jobs(), st.data())
@pytest.mark.soak
def test_every_shape_of_the_tree_gives_the_state_of_the_job(state: FlowState, data: st.DataObject) -> None:
    start = replace(state, done=(0,) * len(state.done), offsets=(0,) * len(state.done))
    left = list(zip(parts_of(state), parts_of(start), strict=True))
    while len(left) > 1:
        taken = data.draw(st.lists(st.integers(0, len(left) - 1), min_size=1, unique=True))
        children = [left[at] for at in taken]
        found = merge([sent(part, base if data.draw(st.booleans()) else None) for part, base in children])
        left = [one for at, one in enumerate(left) if at not in taken]
        left.insert(data.draw(st.integers(0, len(left))), (found, merge([base for _, base in children])))
    assert left[0] == (state, start)
    assert merge(parts_of(state)) == state


@given(jobs(least=2), st.data())
def test_a_part_that_is_missing_or_comes_twice_or_is_of_another_cut_is_refused_by_name(
    state: FlowState, data: st.DataObject
) -> None:
    parts, at = parts_of(state), data.draw(st.integers(0, state.segment.world_size - 1))
    one, others = parts[at], [*parts[:at], *parts[at + 1 :]]
    name = rf"\[{at}, {at + 1}\)"
    with pytest.raises(StateError, match=rf"the parts of the ranks Intervals\({name}\) of {len(parts)} are missing"):
        merge_states([part.to_plain() for part in others])
    with pytest.raises(StateError, match=rf"two parts hold the lanes of the ranks Intervals\({name}\)"):
        merge([merge(parts), one])
    changes = data.draw(
        st.sampled_from(
            [{"step": 8}, {"epoch": 2}, {"maker": Maker(name="n")}, {"segment": replace(state.segment, batch_size=3)}]
        )
    )
    with pytest.raises(StateMismatch, match=rf"{name}.*not of one cut|not of one cut.*{name}"):
        merge([*others, replace(one, **changes)])

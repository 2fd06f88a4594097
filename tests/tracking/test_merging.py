"""Parts of ranks merge in every shape of a tree to the state of the job, and what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.changes import part_of, start
from lakeckpt.core.identity import Identity, Maker
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import EpochDeal
from lakeckpt.core.merge import merge, merge_states
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import Held, State
from lakeckpt.errors import StateError, StateMismatch

SPEC = OrderSpec(seed=3, shuffle=True, window=2)


@st.composite
def jobs(draw: st.DrawFn, *, least: int = 1) -> State:
    """The state of a job of several ranks, in the middle of an epoch; its first micro-batch may be of any lane."""
    world_size, each = draw(st.integers(least, 6)), draw(st.integers(1, 3))
    identity = Identity(
        table="t",
        selection="",
        rows=draw(st.integers(0, 60)),
        spec=SPEC,
        tail="short",
        endless=False,
        maker=Maker(name="m"),
    )
    topology = {"num_lanes": world_size * each, "batch_size": 2, "world_size": world_size}
    state = start(identity, epoch=1, **topology)
    deal = Plan(state).deal
    assert isinstance(deal, EpochDeal)
    sizes = deal.limits.tolist()
    done = tuple(draw(st.integers(0, size)) for size in sizes)
    offsets = tuple(draw(st.integers(0, 9)) if at < size else 0 for at, size in zip(done, sizes, strict=True))
    segment = replace(state.segment, micro_batch=draw(st.integers(0, 20)), step=5)
    held = Held(ranks=Intervals.whole(world_size), done=done, offsets=offsets)
    return replace(state, segments=(segment,), step=7, held=held)


def parts_of(state: State) -> list[State]:
    return [part_of(state, rank) for rank in range(state.segment.world_size)]


@given(jobs(), st.data())
@pytest.mark.soak
def test_every_shape_of_the_tree_gives_the_state_of_the_job(state: State, data: st.DataObject) -> None:
    left = parts_of(state)
    while len(left) > 1:
        taken = data.draw(st.lists(st.integers(0, len(left) - 1), min_size=1, unique=True))
        found = merge([State.from_plain(left[at].to_plain()) for at in taken])
        left = [one for at, one in enumerate(left) if at not in taken]
        left.insert(data.draw(st.integers(0, len(left))), found)
    assert left[0] == state
    assert merge(parts_of(state)) == state


@given(jobs(least=2), st.data())
def test_a_part_that_is_missing_or_comes_twice_or_is_of_another_cut_is_refused_by_name(
    state: State, data: st.DataObject
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
            [
                {"step": 8},
                {"epoch": 2},
                {"orders": (replace(state.identity, maker=Maker(name="n")),)},
                {"segments": (replace(state.segment, batch_size=3),)},
            ]
        )
    )
    with pytest.raises(StateMismatch, match=rf"{name}.*not of one cut|not of one cut.*{name}"):
        merge([*others, replace(one, **changes)])

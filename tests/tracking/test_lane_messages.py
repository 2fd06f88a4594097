"""Messages of frontiers decode to what they were made of, and a lane that stands still costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import WireDamaged
from lakeckpt.tracking.lane_messages import HeldLanes, chain_from_plain, chain_to_plain, from_message, to_message
from lakeckpt.tracking.tally import ranks_of
from lakeckpt.wire.values import pack, unpack

COUNTS = st.integers(0, 2**50)


@st.composite
def lanes(draw: st.DrawFn, *, most: int = 6) -> HeldLanes:
    count = draw(st.integers(0, most))
    numbers = st.lists(COUNTS, min_size=count, max_size=count).map(tuple)
    ranks = ranks_of(draw(st.sets(st.integers(0, 3))))
    return HeldLanes(ranks=ranks, done=draw(numbers), offsets=draw(numbers))


@st.composite
def after(draw: st.DrawFn, one: HeldLanes) -> HeldLanes:
    """Some of the lanes have moved, on or back."""
    moved = {at: draw(st.tuples(COUNTS, COUNTS)) for at in range(len(one.done)) if draw(st.booleans())}
    pairs = [moved.get(at, pair) for at, pair in enumerate(zip(one.done, one.offsets, strict=True))]
    return replace(one, done=tuple(done for done, _ in pairs), offsets=tuple(offset for _, offset in pairs))


@given(st.data())
def test_a_message_decodes_to_the_lanes_that_it_was_made_of(data: st.DataObject) -> None:
    """Whatever the base is: the same lanes, moved or not, others, or none."""
    one = data.draw(lanes())
    for base in (data.draw(after(one)), data.draw(lanes()), one, None):
        sent = unpack(pack(to_message(one, base)), what="a message")
        assert from_message(sent, base) == one


@given(st.lists(lanes(most=3), max_size=4), st.data())
def test_a_chain_decodes_to_the_states_that_it_was_made_of(states: list[HeldLanes], data: st.DataObject) -> None:
    states += [data.draw(after(one)) for one in states[-1:] * 2]
    assert chain_from_plain(unpack(pack(chain_to_plain(states)), what="a chain")) == states


def test_a_lane_that_does_not_move_costs_nothing() -> None:
    before = HeldLanes(ranks=ranks_of(range(250)), done=(10**9,) * 1000, offsets=(7,) * 1000)
    still = len(pack(to_message(before, before)))
    assert still < 10
    done = tuple(count + 100 * (at == 500) for at, count in enumerate(before.done))
    assert len(pack(to_message(replace(before, done=done), before))) <= still + 6


@pytest.mark.parametrize(
    ("at", "value"), [(1, 1), (2, Intervals.whole(3).to_plain()), (3, [5]), (4, [0, 0, 0]), (0, [0]), (0, None)]
)
def test_a_message_that_does_not_fit_together_is_refused(at: int, value: object) -> None:
    message = to_message(HeldLanes(ranks=ranks_of([1]), done=(5, 6), offsets=(1, 0)))
    assert isinstance(message, list)
    assert from_message(message).done == (5, 6)
    message[at] = value
    with pytest.raises(WireDamaged, match="the frontiers of"):
        from_message(message)

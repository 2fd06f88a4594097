"""Mixtures of sources in lockstep and sources whose positions yield any number of items: each item counts once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.core.changes import moved, part_of
from lakeckpt.core.consumption import consumed, consumption
from lakeckpt.core.identity import Identity, Maker, Mixing
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.merge import merge, merge_states
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixing import fractions
from lakeckpt.core.streams.mixture import MixedPlan, advanced, joined, replanned, reweighed, started
from lakeckpt.core.streams.turns import CARRIED, MOST_ROWS_OFF
from lakeckpt.errors import StateError, StateMismatch
from lakeckpt.wire.envelope import dumps, loads
from tests.core.mixed_flow_runs import Items, Job, Rank
from tests.core.states import identity_of
from tests.examples import examples

topologies = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6))
"""(world size, lanes of each rank, batch size)"""
legs = st.lists(st.tuples(topologies, st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=5)
"""(topology, steps, how many of them are lost in a crash)"""
WEIGHTS = [[1, 1, 2], [4, 1, 3], [0, 1, 1], [1, 0, 3], [1, 1, 0]]


def weights_of(given: list[int]) -> tuple[int, ...]:
    return tuple(fractions({str(number): weight for number, weight in enumerate(given)}).values())


def order_of(rows: int, maker: str) -> Identity:
    return replace(identity_of(rows, endless=True), maker=Maker(name=maker) if maker else None)


def mixing_of(weights: list[int], **given: Any) -> Mixing:
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixing(**{"names": names, "weights": weights_of(weights), "seed": 5, "whole": False, **given})


def begin(orders: list[Identity], mixing: Mixing, *, lanes: int = 1, batch_size: int = 4, world_size: int = 1) -> State:
    topology = {"num_lanes": lanes, "batch_size": batch_size, "world_size": world_size}
    return started(mixing, tuple(orders), topology)


def topology_of(world_size: int, lanes: int, batch_size: int) -> dict[str, int]:
    return {"num_lanes": lanes * world_size, "batch_size": batch_size, "world_size": world_size}


def claimed(state: State, counts: Any) -> Items:
    """What ``state`` claims as consumed, from what it says is left."""
    found: Items = Counter()
    for number in range(len(state.orders)):
        one = state.of(number)
        plan = Plan(one)
        rest, begun = plan.left, {(each.epoch, each.position): each.offset for each in plan.begun}
        for epoch in range(rest.next_epoch):
            rows = one.identity.rows_of(epoch)
            left = {at for start, stop in rest.of(epoch, rows) for at in range(start, stop)}
            for at in range(rows):
                every = 1 if one.held is None else counts(epoch, at)
                stop = begun.get((epoch, at), 0) if at in left else every
                found.update((number, epoch, at, item) for item in range(stop))
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 25), min_size=3, max_size=3),
    st.lists(st.sampled_from(["", "cut"]), min_size=3, max_size=3).filter(any),
    st.lists(st.sampled_from([0, 0, 1, 2, 3, 17]), min_size=1, max_size=9).filter(any),
    legs,
    st.lists(st.sampled_from(WEIGHTS), min_size=6, max_size=6),
    st.booleans(),
)
def test_each_item_of_every_source_is_consumed_once_on_any_chain(
    rows: list[int], makers: list[str], numbers: list[int], chain: list[Any], changes: list[list[int]], whole: bool
) -> None:
    def counts(epoch: int, at: int) -> int:
        return numbers[hash((epoch, at)) % len(numbers)]  # in each lane, some position of some epoch has items

    mixing = mixing_of(changes.pop(), whole=whole, schedule=((5, weights_of(changes[-1])),))
    orders = [order_of(count, maker) for count, maker in zip(rows, makers, strict=True)]
    state, items = begin(orders, mixing), Counter[tuple[int, int, int, int]]()
    for number, (topology, steps, lost) in enumerate(chain):
        state = before = advanced(replanned(advanced(state), topology_of(*topology)))
        job = Job(state, counts)
        for _ in range(steps):
            job.step()
        state = job.state
        items += job.items
        for _ in range(lost):
            job.step()
        for source in range(3):
            consumption(before.of(source), state.of(source))
        if number % 2:
            state = reweighed(advanced(state), weights_of(changes[number]))
        assert state.held is not None and len(state.held.done) == state.segment.num_lanes * sum(map(bool, makers))
    assert set(items.values()) <= {1}
    assert items == claimed(state, counts)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 25), min_size=3, max_size=3),
    st.lists(st.sampled_from([0, 0, 1, 2, 3, 17]), min_size=1, max_size=9).filter(any),
    legs,
    st.sampled_from(WEIGHTS),
)
def test_each_token_of_a_packed_mixture_is_consumed_once_on_any_chain(
    rows: list[int], numbers: list[int], chain: list[Any], weights: list[int]
) -> None:
    def counts(epoch: int, at: int) -> int:
        return numbers[hash((epoch, at)) % len(numbers)]

    state = begin([order_of(count, "documents") for count in rows], mixing_of(weights, packs=True))
    items: Items = Counter()
    for topology, steps, lost in chain:
        before, state = state, replanned(state, topology_of(*topology))
        stays = state.segment.num_lanes == before.segment.num_lanes
        assert not stays or state.frontiers == before.frontiers, "documents stay in their lanes"
        before, job = state, Job(state, counts)
        for _ in range(steps):
            job.step()
        state = job.state
        items += job.items
        for _ in range(lost):
            job.step()
        for source in range(3):
            consumption(before.of(source), state.of(source))
        for lane in range(state.segment.num_lanes):
            done = [state.frontiers[source, lane][0] for source in range(3)]
            shares = [sum(done) * weight / sum(weights) for weight in weights]
            carried = [abs(one) / CARRIED for one in state.segment.carried or (0, 0, 0)]
            assert all(
                abs(mine - share) <= MOST_ROWS_OFF + sum(carried) for mine, share in zip(done, shares, strict=True)
            )
    assert set(items.values()) <= {1}
    assert items == claimed(state, counts)


def packed(rows: list[int], weights: list[int], **given: int) -> State:
    return begin([order_of(count, "documents") for count in rows], mixing_of(weights, packs=True), **given)


def test_sources_of_a_packed_mixture_do_not_drift_from_their_shares_over_many_changes_of_lanes() -> None:
    state, weights = packed([900, 900, 900], [1, 5, 2]), [1, 5, 2]
    for turn in range(61):
        job = Job(replanned(state, topology_of(1, 1 + turn % 5, 3)), seven)
        for _ in range(9):
            job.step()
        state = job.state
    done = [sum(one.size for one in consumed(state.of(source)).values()) for source in range(3)]
    assert done == pytest.approx([sum(done) * weight / 8 for weight in weights], abs=2)


def test_micro_batches_of_a_packed_mixture_are_the_same_for_all_ranks_that_divide_the_lanes() -> None:
    def run(*worlds: int) -> list[Items]:
        found, state = [], packed([50, 40], [3, 2], lanes=4)
        for world_size in worlds:
            job = Job(replanned(state, {"num_lanes": 4, "batch_size": 4, "world_size": world_size}), seven)
            for _ in range(8 // world_size):
                job.step()
            state = job.state
            found.append(job.items)
        return found

    assert run(1, 1) == run(2, 4) == run(4, 1)


def test_a_source_joins_a_packed_mixture_and_documents_that_have_begun_go_on() -> None:
    job = Job(packed([9, 30], [1, 1], lanes=2), seven)
    for _ in range(5):
        job.step()
    mixing = replace(mixing_of([2, 1, 1], packs=True), names=("new", "s0", "s1"))
    after = joined(job.state, mixing, (order_of(20, "documents"), *job.state.orders))
    assert after.begun
    more = Job(after, seven)
    for _ in range(8):
        more.step()
    every = Counter({(source + 1, *item): count for (source, *item), count in job.items.items()}) + more.items
    assert set(every.values()) == {1} and every == claimed(more.state, seven)


def test_frontiers_at_which_sources_cannot_stand_together_are_refused() -> None:
    job = Job(packed([50, 40], [3, 2], lanes=2), seven)
    job.step()
    for key, frontier in {(0, 0): (4, 0), (1, 1): (0, 3)}.items():
        wrong = moved(job.state, step=1, frontiers={key: frontier})
        turns = MixedPlan(State.from_plain(wrong.to_plain())).flows[0]
        with pytest.raises(StateError, match=rf"no job comes to this reader state: the sources of lane {key[1]} stand"):
            turns.begin(key[1])


def two(epoch: int, at: int) -> int:
    return 2


def seven(epoch: int, at: int) -> int:
    return 7


def test_weights_change_and_frontiers_stay() -> None:
    job = Job(begin([order_of(9, "cut"), order_of(9, "")], mixing_of([1, 1]), lanes=2, world_size=2), two)
    for _ in range(3):
        job.step()
    changed = reweighed(job.state, weights_of([0, 1]))
    assert changed.held == job.state.held and len(changed.segments) == 2
    again = Job(changed, two)
    for _ in range(4):
        again.step()
    assert again.state.held == job.state.held, "a source of weight 0 stays where it is"
    assert {source for source, *_ in again.items} == {1}


def test_micro_batches_have_the_same_items_on_all_ranks_that_divide_the_lanes() -> None:
    def run(*worlds: int) -> list[Items]:
        found, state = [], begin([order_of(50, "cut"), order_of(40, "")], mixing_of([3, 2]), lanes=4)
        for world_size in worlds:
            state = replanned(state, {"num_lanes": 4, "batch_size": 4, "world_size": world_size})
            job = Job(state, two)
            for _ in range(8 // world_size):
                job.step()
            state = job.state
            found.append(job.items)
        return found

    assert run(1, 1) == run(2, 4) == run(4, 1)


def test_a_source_that_joins_begins_at_its_first_row_and_the_others_go_on() -> None:
    job = Job(begin([order_of(9, ""), order_of(30, "cut")], mixing_of([1, 1]), lanes=2), seven)
    for _ in range(5):
        job.step()
    mixing = mixing_of([1, 1, 2, 1], whole=False)
    orders = [order_of(20, "cut"), *job.state.orders, order_of(8, "")]
    mixing = replace(mixing, names=("new", "s0", "s1", "other"))
    after = joined(job.state, mixing, tuple(orders))
    assert Plan(after.of(2)).begun and {one.source for one in after.begun} == {2}
    more = Job(after, seven)
    for _ in range(6):
        more.step()
    every = Counter({(source + 1, *item): count for (source, *item), count in job.items.items()}) + more.items
    assert set(every.values()) == {1} and every == claimed(more.state, seven)


def test_parts_of_a_mixture_join_and_others_are_refused_by_name() -> None:
    orders = [order_of(40, "cut"), order_of(30, ""), order_of(20, "other")]
    whole = begin(orders, mixing_of([1, 1, 1]), lanes=4, world_size=4)
    whole = moved(whole, step=7, frontiers={(2, 3): (4, 1), (0, 1): (2, 0)})
    parts = [part_of(whole, rank) for rank in range(4)]
    assert merge(parts) == whole and merge_states([one.to_plain() for one in parts]) == whole.to_plain()
    assert whole.of(2).frontiers[3] == (4, 1) and whole.of(1).frontiers == {} and whole.of(0).frontiers[3] == (0, 0)
    changed = replace(parts[1], orders=(orders[0], orders[1], order_of(20, "changed")))
    with pytest.raises(StateMismatch, match="maker: other and changed"):
        merge([parts[0], changed])
    with pytest.raises(StateMismatch, match="rows: 30 and 31"):
        merge([parts[0], replace(parts[1], orders=(orders[0], order_of(31, ""), orders[2]))])
    with pytest.raises(StateError, match="another topology needs the state of the whole job"):
        replanned(parts[0], {"num_lanes": 2, "batch_size": 4, "world_size": 2})
    with pytest.raises(StateError, match="another topology needs the state of the whole job"):
        joined(parts[0], mixing_of([1, 1, 1, 1]), (*orders, order_of(3, "")))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"held": None}, "holds frontiers if a maker yields any number"),
        ({"held": [[0, 2], [0, 0, 0, 0], [0, 0, 0, 0]]}, "2 of 2 lanes of each of 1 sources, and there are 4 counts"),
        ({"begun": [[0, 3, 1, 1]]}, "not among those that were left"),
        ({"begun": [[0, 3, 1]]}, "not among those that were left"),
        ({"segments": [[0, 0, 4, 4, 2, [32768, 32768]], [2, 1, 2, 4, 2, [32768, 32768]]]}, "have other lanes"),
    ],
)
def test_malformed_states_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    plain = begin([order_of(50, ""), order_of(50, "cut")], mixing_of([1, 1]), lanes=2, world_size=2).to_plain()
    with pytest.raises(StateError, match=named):
        State.from_plain({**plain, "step": 1, **changes})


def test_a_state_takes_at_most_24_bytes_for_each_lane_of_a_source_and_none_in_lockstep() -> None:
    choose, lanes = random.Random(3), 1024
    sizes = {}
    for makers in (0, 1, 3):
        orders = [order_of(10**9, "cut" if number < makers else "") for number in range(6)]
        state = begin(orders, mixing_of([1] * 6), lanes=lanes, world_size=128)
        frontiers = {
            (source, lane): (choose.randrange(2**40), choose.randrange(2**30))
            for source in range(makers)
            for lane in range(lanes)
        }
        state = moved(state, step=10**6, frontiers=frontiers)
        data = dumps(state.to_plain(), kind="state", version=(1, 0))
        assert State.from_plain(loads(data, kind="state", supported=(1, 0))) == state
        sizes[makers] = len(data)
    assert sizes[0] <= 1024 + 6 * 64
    assert all(sizes[makers] - sizes[0] <= 24 * lanes * makers + 64 * makers for makers in (1, 3)), sizes


def test_segments_before_a_change_of_weights_are_forgotten_and_frontiers_are_not() -> None:
    state = begin([order_of(50, "cut"), order_of(40, "")], mixing_of([1, 1]), lanes=2)
    items: Items = Counter()
    for turn in range(80):
        job = Job(state, two)
        job.step()
        items += job.items
        state = reweighed(job.state, weights_of(WEIGHTS[turn % 2][:2]))
        assert len(state.segments) <= 32
    assert items == claimed(state, two) and set(items.values()) == {1}
    again = Job(replanned(state, {"num_lanes": 3, "batch_size": 4, "world_size": 3}), two)
    again.step()
    assert items + again.items == claimed(again.state, two)
    left = Plan(again.state.of(0)).left
    assert left.of(0, 50) == Intervals.empty()


def test_receipts_of_the_same_positions_and_other_items_differ() -> None:
    state = begin([order_of(50, "cut")], mixing_of([1]), batch_size=2)
    found: Items = Counter()
    first, second = (Rank(state, 0, seven).step(found) for _ in range(2))
    assert first == second and first.moves == second.moves
    moves = (replace(first.moves[0], after=(0, 3)),)
    assert replace(first, moves=moves) != first

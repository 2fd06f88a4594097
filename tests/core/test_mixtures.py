"""Mixtures as states: every row of every source once in each of its epochs, whatever topologies and weights follow."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.core.consumption import consumed, consumption
from lakeckpt.core.identity import Mixing
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixing import fractions
from lakeckpt.core.streams.mixture import (
    MixedPlan,
    advanced,
    joined,
    replanned,
    reweighed,
    started,
    stretches,
)
from lakeckpt.errors import StateError
from lakeckpt.wire.envelope import dumps, loads
from tests.core.states import identity_of
from tests.examples import examples

Rows = Counter[tuple[int, int, int]]
"""(source, epoch, position) → how often it was delivered."""


def weights_of(*weights: float) -> tuple[int, ...]:
    return tuple(fractions({str(number): weight for number, weight in enumerate(weights)}).values())


def seen(state: State) -> list[State]:
    """The state as each source sees it."""
    return [state.of(number) for number in range(len(state.orders))]


def weights_in(state: State) -> tuple[int, ...]:
    assert state.segment.weights is not None
    return state.segment.weights


def mixing_of(weights: tuple[int, ...], **given: Any) -> Mixing:
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixing(**{"names": names, "weights": weights, "seed": 5, "whole": False, "exhausted": "next_epoch", **given})


def begin(rows: list[int], mixing: Mixing, *, lanes: int = 1, batch_size: int = 4, world_size: int = 1) -> State:
    identities = tuple(identity_of(one, endless=True) for one in rows)
    return started(mixing, identities, {"num_lanes": lanes, "batch_size": batch_size, "world_size": world_size})


def run(state: State, steps: int) -> tuple[State, Rows]:
    """Take ``steps`` steps (fewer where the mixture ends); return the state after them, and what all ranks got."""
    found: Rows = Counter()
    upto, reached = state.step + steps, state
    for plan, first, stop in stretches(state):
        assert isinstance(plan, MixedPlan)
        last = upto if stop is None else min(upto, stop)
        for step in range(first, last):
            for rank in range(plan.segment.world_size):
                taken = plan.assignment(step, rank)
                for source, spans, *_ in taken.block.parts_of(taken.number):
                    assert sum(span.rows for span in spans) == int((taken.block.order[taken.number] == source).sum())
                    for span in spans:
                        found.update((source, span.epoch, one) for one in range(span.start, span.stop))
        reached = plan.state.moved(step=max(last, first))
        if last == upto:
            break
    return reached, found


def check(state: State, found: Rows) -> None:
    """What was delivered is what the sources' states say, once each."""
    assert set(found.values()) <= {1}
    for number, one in enumerate(seen(state)):
        pieces = [(epoch, pair) for epoch, part in consumed(one).items() for pair in part.pairs()]
        known = {(epoch, place) for epoch, pair in pieces for place in range(*pair)}
        assert known == {(epoch, place) for source, epoch, place in found if source == number}


topologies = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 9))
"""(world size, lanes of each rank, batch size, steps)"""
quick_weights = st.sampled_from([[1, 1, 1, 1], [0, 1, 0, 3], [5, 1, 1, 1], [9, 4, 2, 1], [16, 8, 7, 1], [0, 0, 1, 0]])
"""Weights of four sources that add up to a power of two: their period is short."""


@settings(max_examples=examples(30))
@given(
    st.lists(st.integers(1, 60), min_size=4, max_size=4),
    st.lists(topologies, min_size=1, max_size=5),
    st.lists(quick_weights, min_size=3, max_size=3),
    st.booleans(),
)
def test_every_row_of_every_source_counts_once(
    rows: list[int], legs: list[tuple[int, int, int, int]], changes: list[list[int]], whole: bool
) -> None:
    mixing = mixing_of(weights_of(*changes.pop()), whole=whole)
    world_size, lanes, batch_size, _ = legs[0]
    state = begin(rows, mixing, lanes=lanes * world_size, batch_size=batch_size, world_size=world_size)
    found: Rows = Counter()
    for leg, (world_size, lanes, batch_size, steps) in enumerate(legs):
        topology = {"num_lanes": lanes * world_size, "batch_size": batch_size, "world_size": world_size}
        before = state = replanned(state, topology)
        state, taken = run(state, steps)
        for number, (earlier, later) in enumerate(zip(seen(before), seen(state), strict=True)):
            counted = {(number, epoch): part.size for epoch, part in consumption(earlier, later).items()}
            assert counted == Counter((source, epoch) for source, epoch, _ in taken if source == number)
        found += taken
        if leg < len(changes):
            state = reweighed(state, weights_of(*changes[leg]))
        assert State.from_plain(json.loads(json.dumps(state.to_plain()))) == state
    check(state, found)


@given(quick_weights, st.integers(1, 5), st.lists(topologies, min_size=2, max_size=8))
@settings(max_examples=examples(20))
def test_shares_stay_right_over_changes_of_lanes_and_weights(
    weights: list[float], lanes: int, legs: list[tuple[int, int, int, int]]
) -> None:
    mixing = mixing_of(weights_of(*weights))
    state = begin([1000] * len(weights), mixing, lanes=lanes)
    wanted, counts, most = [0] * len(weights), [0] * len(weights), lanes
    for world_size, each, batch_size, steps in legs:
        state = replanned(state, {"num_lanes": each * world_size, "batch_size": batch_size, "world_size": world_size})
        before = weights_in(state)
        state = reweighed(state, before[1:] + before[:1])
        state, taken = run(state, steps)
        most = max(most, each * world_size)
        for source, weight in enumerate(weights_in(state)):
            wanted[source] += weight * batch_size * world_size * steps
        for source, _, _ in taken.elements():
            counts[source] += 1
    # A lane is within two rows of its share, and the rows that lanes had too many are carried over.
    scale = sum(weights_in(state))
    assert all(abs(count * scale - want) <= 2 * (most + 1) * scale for count, want in zip(counts, wanted, strict=True))


def test_errors_do_not_add_up_over_many_changes_of_lanes() -> None:
    state = begin([10**6, 10**6], mixing_of(weights_of(1, 1)), batch_size=1)
    counts = Counter[int]()
    for lanes in [2, 1] * 60:
        state = replanned(state, {"num_lanes": lanes, "batch_size": 1, "world_size": 1})
        state, taken = run(state, 1)
        counts.update(source for source, _, _ in taken)
    assert abs(counts[0] - counts[1]) <= 6


def test_a_schedule_changes_weights_at_its_step_on_every_topology() -> None:
    mixing = mixing_of(weights_of(1, 1), schedule=((3, weights_of(1, 0)), (6, weights_of(0, 1))))
    state = begin([100, 100], mixing, lanes=2, batch_size=2, world_size=2)
    state, first = run(state, 3)
    state, second = run(replanned(advanced(state), {"num_lanes": 3, "batch_size": 2, "world_size": 1}), 3)
    _, third = run(state, 2)
    assert Counter(source for source, _, _ in first) == {0: 6, 1: 6}
    assert Counter(source for source, _, _ in second) == {0: 6}
    assert Counter(source for source, _, _ in third) == {1: 4}
    single, every = run(begin([100, 100], mixing, lanes=2, batch_size=2, world_size=2), 8)
    assert single.step == 8 and Counter(source for source, _, _ in every) == {0: 18, 1: 14}
    assert [one.step for one in single.segments] == [0, 3, 6]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixture_stops_where_a_source_is_used_up(world_size: int) -> None:
    mixing = mixing_of(weights_of(1, 1), exhausted="stop")
    state = begin([1000, 61], mixing, lanes=6, batch_size=2, world_size=world_size)
    state, found = run(state, 10**4)
    check(state, found)
    assert {epoch for _, epoch, _ in found} == {0}
    assert 61 - 6 * 3 <= sum(1 for source, _, _ in found if source == 1) <= 61
    assert run(state, 5)[1] == Counter()  # it stays at its end


def test_the_others_go_on_with_the_share_of_a_source_that_is_used_up() -> None:
    mixing = mixing_of(weights_of(0.5, 0.25, 0.25), exhausted="continue")
    state, found = run(begin([300, 40, 80], mixing, lanes=2, batch_size=4), 10**4)
    check(state, found)
    assert {epoch for _, epoch, _ in found} == {0}
    rows = Counter(source for source, _, _ in found)
    assert rows[0] > 290 and rows[1] > 32 and rows[2] > 72
    assert [bool(one) for one in weights_in(state)].count(True) == 1


def test_a_new_source_joins_a_mixture_that_goes_on() -> None:
    before, _ = run(begin([50, 50], mixing_of(weights_of(1, 1)), lanes=2), 7)
    mixing = mixing_of(weights_of(1, 1, 2))
    after = joined(before, mixing, (*before.orders, identity_of(30, endless=True)))
    state, found = run(after, 6)
    assert Counter(source for source, _, _ in found) == {0: 6, 1: 6, 2: 12}
    assert consumed(state.of(2))[0].size == 12


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"orders": []}, "2 sources, 0 orders"),
        ({"mixing": [["a"], 5, False]}, "1 sources, 2 orders"),
        ({"mixing": [["a", "a"], 5, False]}, r"a mixture is \[names, seed, whole\]"),
        ({"segments": [[0, 0, 1, 4, 1]]}, "the segments of 2 sources have weights for each"),
        ({"segments": [[0, 0, 1, 4, 1, [65536]]]}, "the segments of 2 sources have weights for each"),
        ({"bases": [{"begun": [], "next_epoch": 0}]}, "what was left of 1"),
        ({"identity": {}}, "knows no such field"),
        ({"source": 0}, "this is of one source of a mixture"),
    ],
)
def test_malformed_states_of_mixtures_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    plain = begin([50, 50], mixing_of(weights_of(1, 1))).to_plain()
    with pytest.raises(StateError, match=named):
        State.from_plain({**plain, **changes})


def test_micro_batches_are_the_same_for_all_ranks_that_divide_the_lanes() -> None:
    def micro_batches(world_size: int, steps: int) -> list[Any]:
        state = begin([90, 70], mixing_of(weights_of(0.6, 0.4)), lanes=6, world_size=world_size)
        plan = MixedPlan(state)
        return [plan.assignment(step, rank).receipt.spans for step in range(steps) for rank in range(world_size)]

    assert micro_batches(1, 12) == micro_batches(2, 6) == micro_batches(3, 4)


def test_other_ranks_that_divide_the_lanes_go_on_with_the_deal() -> None:
    mixing = mixing_of(weights_of(0.6, 0.4))
    alone, every = run(begin([90, 70], mixing, lanes=6), 14)
    half, first = run(begin([90, 70], mixing, lanes=6), 8)
    assert run(replanned(half, {"num_lanes": 6, "batch_size": 4, "world_size": 2}), 3)[1] + first == every
    assert alone.step == 14


def test_the_state_of_200_sources_after_eleven_changes_of_weights_takes_at_most_24_kilobytes() -> None:
    choose = random.Random(3)
    state = begin([10**9] * 200, mixing_of(weights_of(*[1] * 200)), lanes=128, world_size=8)
    orders = []
    for order in state.orders:
        table, selection = (f"{choose.getrandbits(128):032x}" for _ in range(2))
        orders.append(replace(order, table=table, selection=selection, rows=choose.randrange(10**9, 10**10)))
    state = replace(state, orders=tuple(orders))
    for _ in range(11):
        state = state.moved(step=state.step + 1000)
        state = reweighed(state, weights_of(*(choose.choice([1, 2, 3, 5]) for _ in range(200))))
    data = dumps(state.moved(step=10**6).to_plain(), kind="state", version=(1, 0), compress=True)
    assert len(data) <= 24 * 1024, len(data)
    assert State.from_plain(loads(data, kind="state", supported=(1, 0))) == state.moved(step=10**6)

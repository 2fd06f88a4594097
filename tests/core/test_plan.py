"""The laws of dealing: whatever the sizes and whatever happened, every row is dealt exactly once per epoch."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lakeckpt.core.changes import MAX_SEGMENTS, check_place, fit_lanes, replan, start
from lakeckpt.core.consumption import between, consumed, consumption
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.errors import StateError, StateMismatch
from tests.core.states import reached_states

SPEC = OrderSpec(seed=0, shuffle=True, window=2)


def identity_of(rows: int, tail: str = "short", *, endless: bool = False) -> Identity:
    return Identity(table="t", selection="", rows=rows, spec=SPEC, tail=tail, endless=endless)  # type: ignore[arg-type]


def rows_of(receipt: Receipt) -> list[tuple[int, int]]:
    return [(span.epoch, position) for span in receipt.spans for position in range(span.start, span.stop)]


def deal_out(state: State, steps: int | None = None) -> tuple[list[list[Receipt]], State]:
    """Take ``steps`` steps (None: all that are left) of every rank; return the receipts of each and the state after."""
    plan = Plan(state)
    stop = plan.steps if steps is None else state.step + steps
    if plan.steps is not None:
        stop = min(stop, plan.steps)
    world = range(state.segment.world_size)
    taken = [[plan.assignment(step, rank).receipt for rank in world] for step in range(state.step, stop)]
    after = State(
        orders=state.orders, epoch=state.epoch, segments=state.segments, step=max(stop, state.step), bases=state.bases
    )
    return taken, after


SMALL = [
    (rows, num_lanes, batch_size, world_size)
    for rows in (*range(14), 29)
    for num_lanes in (1, 2, 3, 4, 6, 8)
    for batch_size in (1, 2, 3, 7)
    for world_size in (1, 2, 3, 4, 8)
    if num_lanes % world_size == 0
]


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_all_ranks_partition_the_epoch_in_equally_many_steps(tail: str) -> None:
    for rows, num_lanes, batch_size, world_size in SMALL:
        case = (rows, num_lanes, batch_size, world_size)
        first = start(
            identity_of(rows, tail), epoch=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size
        )
        taken, after = deal_out(first)
        counts = Counter(row for step in taken for receipt in step for row in rows_of(receipt))
        assert all(count == 1 for count in counts.values()), case
        if tail == "short":
            assert len(counts) == rows, case
        elif tail == "drop":
            assert all(receipt.rows == batch_size for step in taken for receipt in step), case
            assert rows - len(counts) < num_lanes * batch_size + num_lanes, case
        else:
            assert rows - len(counts) < num_lanes + world_size, case
            each = [sum(step[rank].rows for step in taken) for rank in range(world_size)]
            assert len(set(each)) == 1, case
        for step in taken:
            assert all(receipt.rows <= batch_size for receipt in step), case
            assert sum(receipt.rows for receipt in step) == step[0].step_rows > 0, case
            assert sum(receipt.weight for receipt in step) == pytest.approx(world_size), case
        left = Plan(after).rest(after.step).of(0, rows).size
        assert left == rows - len(counts), case


def test_short_lanes_give_full_micro_batches_but_for_the_last_two() -> None:
    taken, _ = deal_out(start(identity_of(23), epoch=0, num_lanes=2, batch_size=4, world_size=1))
    sizes = {lane: [step[0].rows for step in taken if step[0].lane == lane] for lane in (0, 1)}
    assert sizes == {0: [4, 4, 4], 1: [4, 4, 3]}


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.sampled_from(["short", "drop"]))
def test_micro_batches_are_the_same_for_every_number_of_ranks_that_divides_the_lanes(
    rows: int, world: int, times: int, batch_size: int, tail: str
) -> None:
    num_lanes = world * times * 2
    per_world = {}
    for world_size in {1, 2, world, world * times, num_lanes}:
        first = start(
            identity_of(rows, tail), epoch=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size
        )
        taken, _ = deal_out(first)
        receipts = {receipt.micro_batch: rows_of(receipt) for step in taken for receipt in step}
        per_world[world_size] = {number: found for number, found in receipts.items() if found}
    assert len({json.dumps(found, sort_keys=True) for found in per_world.values()}) == 1


TOPOLOGIES = st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 9)))


@example(rows=12, tail="short", chain=[((1, 3, 1, None), 10), ((3, 0, 1, None), 1)])
@given(
    rows=st.integers(0, 90),
    tail=st.just("short"),
    chain=st.lists(st.tuples(TOPOLOGIES, st.integers(0, 12)), min_size=1, max_size=12),
)
def test_any_chain_of_topologies_consumes_every_row_once(
    rows: int, tail: str, chain: list[tuple[tuple[int, int, int, int | None], int]]
) -> None:
    state: State | None = None
    counts: Counter[tuple[int, int]] = Counter()
    recorded = Intervals.empty()
    for (world_size, workers, batch_size, lanes), steps in [*chain, ((3, 1, 4, None), 10**6)]:
        stored = None if state is None else state.segment.num_lanes
        num_lanes = fit_lanes(lanes, stored, world_size, workers)
        if state is None:
            state = start(
                identity_of(rows, tail), epoch=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size
            )
        state = State.from_plain(json.loads(json.dumps(state.to_plain())))
        state = replan(state, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)
        taken, after = deal_out(state, steps)
        counts.update(row for step in taken for receipt in step for row in rows_of(receipt))
        used = consumption(state, after).get(0, Intervals.empty())
        dealt = Intervals.of((s.start, s.stop) for step in taken for r in step for s in r.spans)
        assert used == dealt
        assert not used.intersection(recorded)
        recorded = recorded.union(used)
        assert consumed(after).get(0, Intervals.empty()) == recorded
        state = after
    assert all(count == 1 for count in counts.values())
    if tail == "short":
        assert len(counts) == rows
    else:
        assert rows - len(counts) < 20 * (len(chain) + 1)


@given(
    rows=st.integers(1, 60),
    chain=st.lists(st.tuples(TOPOLOGIES, st.integers(0, 15)), min_size=1, max_size=8),
)
def test_an_endless_stream_consumes_every_row_once_an_epoch_across_borders_and_topologies(
    rows: int, chain: list[tuple[tuple[int, int, int, int | None], int]]
) -> None:
    state: State | None = None
    counts: Counter[tuple[int, int]] = Counter()
    for (world_size, workers, batch_size, lanes), steps in chain:
        num_lanes = fit_lanes(lanes, None if state is None else state.segment.num_lanes, world_size, workers)
        if state is None:
            identity = identity_of(rows, endless=True)
            state = start(identity, epoch=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)
        state = State.from_plain(json.loads(json.dumps(state.to_plain())))
        state = replan(state, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)
        taken, after = deal_out(state, steps)
        assert all(receipt.rows == batch_size for step in taken for receipt in step)
        for step in taken:
            counts.update(row for receipt in step for row in rows_of(receipt))
        used = [(epoch, p) for epoch, found in consumption(state, after).items() for a, b in found for p in range(a, b)]
        assert Counter(used) == Counter(row for step in taken for receipt in step for row in rows_of(receipt))
        state = after
    assert state is not None
    assert all(count == 1 for count in counts.values())
    # What is left and what was consumed are all of every epoch that was entered, and epochs are entered in turn.
    rest = Plan(state).rest(state.step)
    by_epoch: dict[int, list[int]] = {}
    for epoch, position in counts:
        by_epoch.setdefault(epoch, []).append(position)
    for epoch in range(rest.next_epoch):
        used_here = Intervals.of((p, p + 1) for p in by_epoch.get(epoch, ()))
        assert used_here.union(rest.of(epoch, rows)) == Intervals.whole(rows)
        assert not used_here.intersection(rest.of(epoch, rows))
    assert all(epoch < rest.next_epoch for epoch in by_epoch)


@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 6), st.integers(0, 400))
def test_lanes_of_an_endless_stream_never_drift_more_than_a_row_apart(
    rows: int, num_lanes: int, batch_size: int, turn: int
) -> None:
    state = start(
        identity_of(rows, endless=True), epoch=0, num_lanes=num_lanes, batch_size=batch_size, world_size=num_lanes
    )
    plan = Plan(state)
    epochs = [plan.assignment(turn, rank).receipt.spans[-1].epoch for rank in range(num_lanes)]
    assert max(epochs) - min(epochs) <= 1 + num_lanes // rows


def test_fewer_rows_left_than_ranks_still_gives_every_rank_a_step() -> None:
    state = start(identity_of(13), epoch=0, num_lanes=4, batch_size=2, world_size=2)
    _, state = deal_out(state, 3)
    state = replan(state, num_lanes=8, batch_size=2, world_size=8)
    taken, _ = deal_out(state)
    assert [[receipt.rows for receipt in step] for step in taken] == [[1, 1, 0, 0, 0, 0, 0, 0]]
    assert [receipt.weight for receipt in taken[0]] == [4.0, 4.0] + [0.0] * 6
    assert {receipt.lane for receipt in taken[0]} == {-1}


def test_many_segments_are_shortened_to_a_bounded_state() -> None:
    state = start(identity_of(10**9), epoch=0, num_lanes=12, batch_size=7, world_size=4)
    reference = state
    for turn, world_size in zip(range(100), itertools.cycle([2, 3, 4, 6]), strict=False):
        _, state = deal_out(state, 1 + turn % 3)
        state = replan(state, num_lanes=12, batch_size=7, world_size=world_size)
        assert len(state.segments) <= 33
    plan = Plan(state)
    number = plan.micro_batch(state.step)
    assert Plan(reference).deal.spans(number) == plan.deal.spans(number)


@pytest.mark.parametrize("since", [0, 1, 2, MAX_SEGMENTS - 1, MAX_SEGMENTS])
def test_what_is_left_stays_wherever_the_last_new_lanes_of_a_shortened_state_began(since: int) -> None:
    """``since``: how many times only the number of ranks has changed after the last change of lanes."""
    state = start(identity_of(10**6), epoch=0, num_lanes=12, batch_size=7, world_size=4)
    for turn in range(MAX_SEGMENTS):
        before = deal_out(state, 1)[1]
        lanes = 12 if min(turn, MAX_SEGMENTS - 1 - since) % 2 else 24
        state = replan(before, num_lanes=lanes, batch_size=7, world_size=[6, 4][turn % 2])
    assert len(before.segments) == MAX_SEGMENTS and len(state.segments) <= 2
    assert state.segment.world_size == 4 and state.segment.step == state.step == MAX_SEGMENTS
    assert Plan(state).rest(state.step) == Plan(before).rest(before.step)


def test_re_cut_chains_beyond_the_bound_consume_every_row_once() -> None:
    state = start(identity_of(900), epoch=0, num_lanes=2, batch_size=2, world_size=2)
    counts: Counter[tuple[int, int]] = Counter()
    for turn in range(80):
        taken, state = deal_out(state, 1)
        counts.update(found for step in taken for receipt in step for found in rows_of(receipt))
        world = 1 + turn % 3
        state = replan(state, num_lanes=world, batch_size=1 + turn % 5, world_size=world)
    taken, _ = deal_out(state)
    counts.update(found for step in taken for receipt in step for found in rows_of(receipt))
    assert len(counts) == 900 and set(counts.values()) == {1}


def test_states_that_do_not_follow_from_each_other_are_refused() -> None:
    state = start(identity_of(40), epoch=0, num_lanes=2, batch_size=4, world_size=2)
    _, later = deal_out(state, 2)
    with pytest.raises(StateMismatch, match="left again"):
        consumption(later, state)
    other = start(identity_of(41), epoch=0, num_lanes=2, batch_size=4, world_size=2)
    with pytest.raises(StateMismatch, match="rows: 40 became 41"):
        consumption(state, other)


def test_a_state_of_one_epoch_resumed_on_the_same_topology_gains_no_segment() -> None:
    state = start(identity_of(40), epoch=0, num_lanes=2, batch_size=4, world_size=2)
    _, later = deal_out(state, 2)
    assert replan(later, num_lanes=2, batch_size=4, world_size=2) is later


@given(reached_states())
def test_a_state_behind_the_end_of_its_epoch_is_refused(state: State) -> None:
    check_place(state)
    steps = Plan(state).steps
    if steps is not None:
        check_place(replace(state, step=steps + 2), ahead=2)
        with pytest.raises(StateError, match=f"step {steps + 3} of epoch"):
            check_place(replace(state, step=steps + 3), ahead=2)


def test_what_others_consumed_is_the_rest_of_each_epoch_up_to_their_place() -> None:
    state = start(identity_of(40), epoch=0, num_lanes=2, batch_size=4, world_size=2)
    _, mine = deal_out(state, 2)
    theirs = start(identity_of(40), epoch=3, num_lanes=3, batch_size=4, world_size=3)
    _, theirs = deal_out(theirs, 1)
    found: Counter[tuple[int, int]] = Counter()
    for begin, end in between(mine, theirs):
        for epoch, positions in consumption(begin, end).items():
            found.update((epoch, position) for a, b in positions for position in range(a, b))
    assert set(found.values()) == {1}
    assert Counter(epoch for epoch, _ in found) == {0: 24, 1: 40, 2: 40, 3: 12}


def test_a_place_before_ones_own_is_not_what_others_came_to() -> None:
    state = start(identity_of(40), epoch=1, num_lanes=2, batch_size=4, world_size=2)
    _, later = deal_out(state, 2)
    earlier = start(identity_of(40), epoch=0, num_lanes=2, batch_size=4, world_size=2)
    for before, after in ((later, state), (later, earlier)):
        with pytest.raises(StateMismatch):
            between(before, after)


def test_what_others_consumed_of_an_epoch_is_in_the_layout_that_it_began_with() -> None:
    mine = start(identity_of(40), epoch=1, num_lanes=2, batch_size=4, world_size=2)
    theirs = start(identity_of(40), epoch=1, num_lanes=3, batch_size=4, world_size=3)
    _, theirs = deal_out(theirs, 1)
    theirs = replan(theirs, num_lanes=2, batch_size=4, world_size=2)
    ((begin, _),) = between(mine, theirs)
    assert begin.segment.num_lanes == 3
    _, mine = deal_out(mine, 1)
    with pytest.raises(StateMismatch, match=r"\(2,\) became \(3,\)"):
        between(mine, theirs)


def test_what_others_consumed_of_a_stream_is_known_while_its_lanes_stay() -> None:
    mine = start(identity_of(41, endless=True), epoch=0, num_lanes=6, batch_size=4, world_size=2)
    _, mine = deal_out(mine, 2)
    _, theirs = deal_out(replan(mine, num_lanes=6, batch_size=4, world_size=3), 9)
    assert between(mine, theirs) == [(mine, theirs)]
    _, theirs = deal_out(replan(mine, num_lanes=4, batch_size=4, world_size=4), 9)
    with pytest.raises(StateMismatch, match="other lanes"):
        between(mine, theirs)

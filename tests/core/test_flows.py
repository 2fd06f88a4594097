"""Flows: any number of items for a position, each consumed exactly once on any chain of topologies and kills."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.core.changes import check_place, moved, part_of, replan, start
from lakeckpt.core.consumption import consumption
from lakeckpt.core.identity import Maker
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Begun
from lakeckpt.core.merge import merge, merge_states
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.core.streams.lane_batches import LaneBatches, PositionItems
from lakeckpt.errors import StateError, StateMismatch
from lakeckpt.wire.envelope import dumps
from tests.core.flow_runs import Counts, Item, Job
from tests.core.states import identity_of
from tests.examples import examples

topologies = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 7))
"""(world size, lanes per rank, batch size)"""
legs = st.lists(st.tuples(topologies, st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=6)
"""(topology, steps, how many of them are lost in a crash)"""
counts_of = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 17]), min_size=1, max_size=40)


def begin(rows: int, *, endless: bool = False, lanes: int = 1, batch_size: int = 1, world_size: int = 1) -> State:
    identity = replace(identity_of(rows, endless=endless), maker=Maker(name="cut"))
    return start(identity, epoch=0, num_lanes=lanes, batch_size=batch_size, world_size=world_size)


def planned(state: State, topology: tuple[int, int, int]) -> State:
    world_size, lanes, batch_size = topology
    return replan(state, num_lanes=world_size * lanes, batch_size=batch_size, world_size=world_size)


def advance(state: State, counts: Counts, steps: int, lost: int) -> tuple[State, list[Item]]:
    """The state after some steps, and the items that they consumed; a crash loses what was read after them."""
    job, items = Job(state, counts), []
    while steps and not job.is_through:
        items += [item for _, batch in job.step() for item in batch]
        steps -= 1
    reached = job.state
    for _ in range(lost):
        job.step()
    return reached, items


def consumed_by(state: State, counts: Counts, epochs: int) -> list[Item]:
    """The items that ``state`` claims as consumed, from what it says is left."""
    rest, begun = Plan(state).left, {(one.epoch, one.position): one.offset for one in Plan(state).begun}
    found = []
    for epoch in range(epochs):
        rows = state.identity.rows_of(epoch)
        left = {at for start, stop in rest.of(epoch, rows) for at in range(start, stop)}
        for at in range(rows):
            stop = begun.get((epoch, at), 0) if at in left else counts(epoch, at)
            found += [(epoch, at, number) for number in range(stop)]
    return found


def test_an_epoch_keeps_its_lanes_once_a_position_of_it_has_begun() -> None:
    state = moved(begin(6, endless=True, lanes=2), step=1, frontiers={0: (0, 1)})
    again = planned(state, (1, 3, 1))
    assert again.base is not None and again.base.next_epoch == 1
    (left,) = again.base.begun
    assert (left.num_lanes, left.positions) == (2, Intervals.whole(6))
    assert Plan(again).layout(0).num_lanes == 2 and Plan(again).layout(1).num_lanes == 3
    assert again.begun == (Begun(epoch=0, position=0, offset=1),)


@settings(max_examples=examples(100), deadline=None)
@given(counts_of, legs)
def test_each_item_of_an_epoch_is_consumed_once_on_any_chain(numbers: list[int], chain: list[Any]) -> None:
    def counts(epoch: int, at: int) -> int:
        return numbers[at]

    state, items = begin(len(numbers)), []
    finished = []
    for topology, steps, lost in [*chain, ((1, 1, 5), 10_000, 0)]:
        state = planned(state, topology)
        before = state
        state, more = advance(state, counts, steps, lost)
        items += more
        used = consumption(before, state)
        finished.append(used.get(0, Intervals.empty()))
        assert sorted(items) == consumed_by(state, counts, 1)
    assert sorted(items) == [(0, at, number) for at, count in enumerate(numbers) for number in range(count)]
    if any(numbers):  # else there is no micro-batch that could say that positions without items were read
        assert Intervals.empty().union(*finished) == Intervals.whole(len(numbers))
    assert sum(one.size for one in finished) == Intervals.empty().union(*finished).size


@settings(max_examples=examples(80), deadline=None)
@given(counts_of.filter(any), legs)
def test_each_item_of_an_endless_stream_is_consumed_once_on_any_chain(numbers: list[int], chain: list[Any]) -> None:
    def counts(epoch: int, at: int) -> int:
        return numbers[hash((epoch, at)) % len(numbers)]  # in each lane, some position of some epoch has items

    state, items = begin(len(numbers), endless=True), []
    for topology, steps, lost in chain:
        before = state = planned(state, topology)
        state, more = advance(state, counts, steps, lost)
        items += more
        consumption(before, state)
    epochs = max([Plan(state).left.next_epoch, *(epoch + 1 for epoch, _, _ in items)])
    assert sorted(items) == consumed_by(state, counts, epochs)


@settings(max_examples=examples(40), deadline=None)
@given(counts_of, st.integers(1, 7), st.integers(1, 3), st.integers(0, 9))
def test_micro_batches_of_lanes_are_the_same_for_every_number_of_ranks_that_divides_the_lanes(
    numbers: list[int], batch_size: int, each: int, switch: int
) -> None:
    def counts(epoch: int, at: int) -> int:
        return numbers[at]

    def run(*worlds: int) -> dict[int, list[list[Item]]]:
        found: dict[int, list[list[Item]]] = {}
        state = begin(len(numbers), lanes=4 * each, batch_size=batch_size, world_size=worlds[0])
        for number, world_size in enumerate(worlds):
            state = replan(state, num_lanes=4 * each, batch_size=batch_size, world_size=world_size)
            job = Job(state, counts)
            while not job.is_through and (number or job.ranks[0].state.step < switch):
                for lane, items in job.step():
                    found.setdefault(lane, []).extend([items] if items else [])
            state = job.state
        return {lane: batches for lane, batches in found.items() if batches}

    assert run(1, 1) == run(2, 4) == run(4, 1) == run(1, 2)


@given(counts_of, st.integers(1, 5), st.integers(0, 3))
def test_micro_batches_of_a_lane_are_full_but_for_the_last(numbers: list[int], batch_size: int, first: int) -> None:
    positions = [PositionItems(items=[(at, n) for n in range(count)]) for at, count in enumerate(numbers)]
    offset = min(first, max(0, numbers[0] - 1))
    batches = list(LaneBatches(iter(positions), begin=(0, offset), batch_size=batch_size))
    assert [one.is_last for one in batches] == [False] * (len(batches) - 1) + [True]
    assert all(len(one.items) == batch_size for one in batches[:-1])
    assert len(batches[-1].items) or len(batches) == 1
    assert batches[0].before == (0, offset) and batches[-1].after == (len(numbers), 0)
    assert all(one.after == other.before for one, other in itertools.pairwise(batches))
    taken = [item for one in batches for item in one.items]
    assert taken == [item for one in positions for item in one.items][offset:]


def test_a_position_that_yields_fewer_items_than_before_is_refused() -> None:
    batches = LaneBatches(iter([PositionItems(items=[1, 2], name="row 5 of a.parquet")]), begin=(0, 2), batch_size=1)
    with pytest.raises(StateMismatch, match=r"row 5 of a\.parquet yielded 2 rows, and 2 of its rows, but not all"):
        next(batches)


def test_a_begun_position_goes_on_in_the_lane_that_it_falls_to() -> None:
    state = begin(8, lanes=2)
    state = moved(state, step=4, frontiers={0: (1, 3), 1: (2, 1)})
    assert Plan(state).begun == (Begun(epoch=0, position=1, offset=3), Begun(epoch=0, position=6, offset=1))
    cut = replan(state, num_lanes=3, batch_size=1, world_size=1)
    assert cut.begun == Plan(state).begun == Plan(cut).begun and Plan(cut).left == Plan(state).left
    plan = Plan(cut)
    spans = [plan.lane_spans(lane, 0, plan.sizes[lane]) for lane in range(3)]  # type: ignore[index]
    assert [[(one.start, one.stop) for one in each] for each in spans] == [[(1, 3)], [(3, 4), (6, 7)], [(7, 8)]]
    assert [list(plan.skips(each).values()) for each in spans] == [[3], [1], []]


def test_parts_that_do_not_join_are_refused_by_name() -> None:
    whole = begin(40, lanes=4, batch_size=2, world_size=4)
    parts = [part_of(whole, rank).to_plain() for rank in range(4)]
    assert merge_states(parts) == whole.to_plain()
    with pytest.raises(StateError, match=r"parts of the ranks Intervals\(\[1, 3\)\) of 4 are missing"):
        merge_states([parts[0], parts[3]])
    with pytest.raises(StateError, match=r"two parts hold the lanes of the ranks Intervals\(\[2, 3\)\)"):
        merge_states([*parts, parts[2]])
    with pytest.raises(StateError, match="no parts to merge"):
        merge([])
    for other, named in [
        (replace(part_of(whole, 1), step=3), "step: 0 and 3"),
        (
            replace(part_of(whole, 1), orders=(replace(whole.identity, maker=Maker(name="other")),)),
            "maker: .*cut.* and .*other",
        ),
        (part_of(begin(41, lanes=4, batch_size=2, world_size=4), 1), "rows: 40 and 41"),
        (part_of(begin(40, lanes=4, batch_size=3, world_size=4), 1), "segments: .*batch_size=2.*batch_size=3"),
    ]:
        with pytest.raises(StateMismatch, match=named):
            merge_states([parts[0], other.to_plain(), *parts[2:]])
    with pytest.raises(StateError, match="another topology needs the state of the whole job"):
        replan(part_of(whole, 0), num_lanes=2, batch_size=2, world_size=2)


def test_equal_states_of_ranks_in_lockstep_are_one() -> None:
    state = start(identity_of(9), epoch=0, num_lanes=2, batch_size=2, world_size=2)
    assert merge_states([state.to_plain()] * 2) == state.to_plain()
    assert State.from_plain(state.to_plain()) == state
    flow = begin(9, lanes=2, world_size=2)
    assert merge_states([flow.to_plain()] * 2) == flow.to_plain()
    with pytest.raises(StateMismatch, match="0 of 2 are parts"):
        merge_states([state.to_plain(), replace(state, step=1).to_plain()])
    with pytest.raises(StateMismatch, match="0 of 0"):
        merge_states([])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("held", [[0, 1, 1, 1], [0, 0, 0], [0, 0]], "have 3 counts of positions and 2 offsets"),
        ("held", [[0, 1, 1, 1], [0, 0, 0], [0, 0, 0]], "2 of 4 ranks have 2 of 4 lanes, and there are 3 counts"),
        ("held", [[0, 1, 1, 1], [0, 0], [-1, 0]], "at least 0"),
        ("held", [[0, 5], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], "of 4 ranks"),
        ("held", None, "holds frontiers if a maker yields any number"),
        ("step", -1, "at least 0"),
        ("begun", [[0, 3, 1]], "not among those that were left"),
    ],
)
def test_malformed_states_are_refused_by_name(field: str, value: Any, named: str) -> None:
    whole = begin(40, lanes=4, world_size=4)
    plain = merge([part_of(whole, 0), part_of(whole, 2)]).to_plain() | {field: value}
    with pytest.raises(StateError, match=named):
        State.from_plain(plain)


def test_a_frontier_behind_the_end_of_its_lane_is_refused_by_the_lane() -> None:
    state = begin(40, lanes=4, world_size=4)
    for frontier in [(11, 0), (10, 1)]:
        behind = moved(state, step=1, frontiers={2: frontier})
        with pytest.raises(StateError, match=rf"lane 2 stands at {re.escape(str(frontier))}, and it has 10 positions"):
            check_place(behind)


def test_a_position_that_has_begun_must_be_left() -> None:
    cut = replan(moved(begin(8), step=1, frontiers={0: (2, 1)}), num_lanes=2, batch_size=1, world_size=1)
    assert State.from_plain(cut.to_plain()) == cut and cut.to_plain()["begun"] == [[0, 2, 1]]
    with pytest.raises(StateError, match="not among those that were left"):
        State.from_plain(cut.to_plain() | {"begun": [[0, 1, 1]]})


def test_states_that_go_back_are_refused() -> None:
    early = moved(begin(8), step=1, frontiers={0: (2, 1)})
    late = moved(begin(8), step=2, frontiers={0: (2, 3)})
    assert consumption(early, late) == {}
    with pytest.raises(StateMismatch, match="items of a position had been consumed and are left again"):
        consumption(late, early)
    with pytest.raises(StateMismatch, match=r"positions Intervals\(\[1, 2\)\) had been consumed"):
        consumption(early, moved(begin(8), step=2, frontiers={0: (1, 0)}))
    with pytest.raises(StateMismatch, match="rows: 8 became 9"):
        consumption(early, begin(9))


def test_a_lane_takes_about_sixteen_bytes_of_a_state() -> None:
    lanes = 1024
    state = begin(1 << 40, lanes=lanes, world_size=lanes)
    state = moved(state, step=9, frontiers={lane: ((1 << 30) - 1 - lane, 60_000 - lane) for lane in range(lanes)})
    sizes = [len(dumps(one.to_plain(), kind="state", version=(1, 0))) for one in (state, part_of(state, 7))]
    assert sizes[0] < 16 * lanes and sizes[1] < 500
    assert len(json.dumps(state.to_plain())) < 24 * lanes

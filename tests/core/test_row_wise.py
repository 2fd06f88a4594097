"""Row by row, ranks are at one place: every row is dealt once, and the states of all ranks are equal."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.plan import Plan, consumed, replan, start
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import ReaderState
from tests.core.states import identity_of

SMALL = [
    (rows, num_lanes, block, world_size)
    for rows in (*range(12), 29, 31)
    for num_lanes in (1, 2, 3, 4, 6, 8)
    for block in (1, 2, 3, 7)
    for world_size in (1, 2, 3, 4, 8)
    if num_lanes % world_size == 0
]


def positions(receipt: Receipt) -> list[int]:
    return [position for span in receipt.spans for position in range(span.start, span.stop)]


def test_every_row_once_and_ranks_together_until_the_very_last_row() -> None:
    for rows, num_lanes, block, world_size in SMALL:
        case = (rows, num_lanes, block, world_size)
        state = start(identity_of(rows, "rows"), epoch=0, num_lanes=num_lanes, batch_size=block, world_size=world_size)
        plan = Plan(state)
        assert plan.steps is not None
        steps = [[plan.assignment(step, rank).receipt for rank in range(world_size)] for step in range(plan.steps)]
        dealt = Counter(position for step in steps for receipt in step for position in positions(receipt))
        assert dealt == Counter(range(rows)), case
        for step in steps[:-1]:
            assert len({receipt.rows for receipt in step}) == 1, case
        for step in steps:
            assert max(receipt.rows for receipt in step) - min(receipt.rows for receipt in step) <= 1, case
            assert 0 < sum(receipt.rows for receipt in step) == step[0].step_rows, case
            assert max(receipt.rows for receipt in step) <= block, case


def row_by_row(state: ReaderState, count: int) -> tuple[list[int], ReaderState]:
    """Take up to ``count`` rows of every rank in lockstep; return the positions and where every rank then is."""
    plan, taken, world = Plan(state), [], range(state.segment.world_size)
    places = [(state.step, state.row)] * len(world)
    assert plan.steps is not None
    for _ in range(count):
        moved = []
        for rank in world:
            step, row = places[rank]
            if step >= plan.steps:
                return taken, replace(state, step=plan.steps, row=0)
            found = positions(plan.assignment(step, rank).receipt)
            if row < len(found):
                taken.append(found[row])
            moved.append((step, row + 1) if row + 1 < len(found) else (step + 1, 0))
        assert len(set(moved)) == 1 or max(moved)[0] == plan.steps or min(moved)[0] >= plan.steps - 1
        places = moved
    if len(set(places)) > 1:  # some ranks have had the very last row, others had none
        return taken, replace(state, step=plan.steps, row=0)
    return taken, replace(state, step=places[0][0], row=places[0][1])


@given(
    rows=st.integers(0, 70),
    chain=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(0, 15)), min_size=1, max_size=8
    ),
)
def test_any_chain_of_topologies_deals_every_row_once(rows: int, chain: list[tuple[int, int, int, int]]) -> None:
    world_size, lanes, block, _ = chain[0]
    state = start(
        identity_of(rows, "rows"), epoch=0, num_lanes=lanes * world_size, batch_size=block, world_size=world_size
    )
    taken: list[int] = []
    for world_size, lanes, block, count in [*chain, (2, 1, 5, 100)]:
        state = ReaderState.from_plain(json.loads(json.dumps(state.to_plain())))
        state = replan(state, num_lanes=lanes * world_size, batch_size=block, world_size=world_size)
        more, state = row_by_row(state, count)
        taken += more
        done = consumed(state).get(0)
        assert sorted(taken) == ([] if done is None else [p for a, b in done for p in range(a, b)])
    assert Counter(taken) == Counter(range(rows))


@pytest.mark.parametrize("tail", ["rows", "even"])
@given(
    rows=st.integers(0, 90),
    block=st.integers(1, 8),
    chain=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 3)), min_size=2, max_size=4),
)
def test_ranks_stay_together_where_another_number_of_them_keeps_the_lanes(
    tail: str, rows: int, block: int, chain: list[tuple[int, int]]
) -> None:
    """12 lanes are kept by default: a step of 3 ranks that begins after one of 2 would have micro-batches of two turns,
    which are not of one size at an epoch's end."""
    state = start(identity_of(rows, tail), epoch=0, num_lanes=12, batch_size=block, world_size=chain[0][0])
    dealt: Counter[int] = Counter()
    for world_size, steps in [*chain, (chain[0][0], 10**6)]:
        state = replan(state, num_lanes=12, batch_size=block, world_size=world_size)
        plan = Plan(state)
        assert plan.steps is not None
        stop = min(plan.steps, state.step + steps)
        for step in range(state.step, stop):
            receipts = [plan.assignment(step, rank).receipt for rank in range(state.segment.world_size)]
            sizes = {receipt.rows for receipt in receipts}
            assert len(sizes) == 1 or (tail == "rows" and step == plan.steps - 1 and max(sizes) - min(sizes) == 1)
            dealt.update(position for receipt in receipts for position in positions(receipt))
        state = replace(state, step=max(state.step, stop))
    assert max(dealt.values(), default=1) == 1
    assert len(dealt) == rows if tail == "rows" else len(dealt) > rows - 12 * (len(chain) + 1)

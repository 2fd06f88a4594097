"""Positions that are excluded leave the deal: what is left of every epoch is dealt once, on any ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lakeckpt.core.changes import replan, start
from lakeckpt.core.consumption import consumed, consumption
from lakeckpt.core.identity import Identity, Mixing
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixture import excluding, started

ROWS = 97


def identity(*, endless: bool) -> Identity:
    spec = OrderSpec(seed=1, shuffle=True, window=2)
    return Identity(table="t", selection="", rows=ROWS, spec=spec, tail="short", endless=endless)


def dealt(state: State, steps: int) -> tuple[list[tuple[int, int]], State]:
    """The (epoch, position) pairs of up to ``steps`` steps of all ranks, and the state after them."""
    plan, found = Plan(state), list[tuple[int, int]]()
    last = state.step + steps if plan.steps is None else min(state.step + steps, plan.steps)
    for step in range(state.step, last):
        for rank in range(state.segment.world_size):
            spans = plan.assignment(step, rank).receipt.spans
            found += [(span.epoch, at) for span in spans for at in range(span.start, span.stop)]
    return found, state.moved(step=last)


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_position_is_dealt_once_or_excluded_on_any_ranks(seed: int, endless: bool) -> None:
    dice = random.Random(seed)
    state = start(identity(endless=endless), epoch=0, num_lanes=6, batch_size=dice.choice((1, 3, 5)), world_size=2)
    seen = list[tuple[int, int]]()
    for _ in range(3):
        found, state = dealt(state, dice.randrange(1, 9))
        seen += found
        epochs = [state.epoch, state.epoch + endless, state.epoch + 2 * endless]
        names = {(epoch, at) for epoch in epochs for at in dice.sample(range(ROWS), 9)} - {*seen}
        positions = {
            epoch: Intervals.of((at, at + 1) for of, at in names if of == epoch) for epoch in {of for of, _ in names}
        }
        before, state = state, excluding(state, [positions], state.orders)
        assert consumption(before, state) == {epoch: one for epoch, one in positions.items() if one}
        seen += names
        state = State.from_plain(state.to_plain())
        state = replan(state, num_lanes=dice.choice((4, 6)), batch_size=3, world_size=2)
    found, state = dealt(state, 200)
    seen += found
    assert len(seen) == len({*seen})
    claimed = {
        (epoch, at) for epoch, rows in consumed(state).items() for start, stop in rows for at in range(start, stop)
    }
    assert claimed == {*seen}
    assert endless or len(seen) == ROWS


def test_epochs_that_begin_later_have_the_other_order_and_begin_behind_what_a_sequence_has_taken() -> None:
    spec = OrderSpec(seed=1, shuffle=False, window=1)
    old = Identity(table="a", selection="s", rows=10, unit=4, tokens=38, spec=spec, tail="short", endless=True)
    state = start(old, epoch=0, num_lanes=1, batch_size=1, world_size=1).moved(step=8)
    new = replace(old, table="b", tokens=30, rows=8, phase=(2 + 30) % 4)  # the last sequence has 2 tokens of epoch 1
    after = excluding(state, [{0: Intervals.of([(9, 10)])}], [new])
    assert [after.order_of(epoch).table for epoch in (0, 1)] == ["a", "b"]
    found, _ = dealt(after, 8)
    assert found == [(0, 8), *((1, at) for at in range(7))]
    layout = EpochLayout.build(np.array([15, 15], np.int64), spec, 1, 1, unit=4, endless=True, phase=new.phase)
    assert (layout.first, layout.rows, after.rows_of(1)) == (2, 7, 7)
    assert Plan(after).layout(0).table == "a" and not Plan(after).layout(1).table
    assert State.from_plain(after.to_plain()) == after


def test_an_epoch_of_which_nothing_was_read_begins_in_the_other_order() -> None:
    mixing = Mixing(names=("a", "b"), seed=1, whole=False, weights=(65536, 0))
    orders = (identity(endless=True), identity(endless=True))
    topology = {"num_lanes": 1, "batch_size": 2, "world_size": 1}
    state = started(mixing, orders, topology).moved(step=3)
    after = excluding(state, [{}, {}], [replace(one, table="other", rows=90) for one in orders])
    assert [after.of(source).order_of(0).table for source in range(2)] == ["t", "other"]
    assert after.of(0).order_of(1).table == "other"

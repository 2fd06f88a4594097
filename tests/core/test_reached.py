"""States that no job comes to are refused when they are loaded, and none that one comes to."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import MAX_SEGMENTS, Plan, rebase, replan, start
from lakeckpt.core.reached import check_reached
from lakeckpt.core.rest import Left, Rest
from lakeckpt.core.state import MAX_EPOCH, MAX_ROWS, ReaderState, Segment
from lakeckpt.errors import StateInvalid
from tests.core.states import identity_of, reached_states


@given(reached_states(), st.sampled_from(["short", "drop", "even", "rows"]))
def test_what_a_job_comes_to_is_accepted(state: ReaderState, tail: Any) -> None:
    plan = Plan(state)
    if plan.steps is None or state.step < plan.steps:
        most = max(plan.assignment(state.step, rank).receipt.rows for rank in range(state.segment.world_size))
        state = replace(state, row=min(state.row, max(most - 1, 0)))
    check_reached(state)
    check_reached(rebase(state, replace(state.identity, tail=tail)))


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("recuts", [0.0, 0.05])
def test_histories_that_were_shortened_are_accepted(endless: bool, recuts: float) -> None:
    draw = random.Random(f"{endless} {recuts}")
    shortened = 0
    for tail in ("short",) if endless else ("short", "drop", "even", "rows"):
        state = start(
            identity_of(3000, tail, endless=endless),
            epoch=0,
            num_lanes=12,
            batch_size=1,
            world_size=draw.choice((1, 2)),
        )
        for _ in range(2 * MAX_SEGMENTS):
            batch_size = draw.randint(1, 4) if draw.random() < recuts else state.segment.batch_size
            before = len(state.segments)
            state = replan(state, num_lanes=12, batch_size=batch_size, world_size=draw.choice((1, 2, 3, 4, 6, 12)))
            state = replace(state, step=state.step + draw.randint(0, 3))
            shortened += before == MAX_SEGMENTS > len(state.segments)
            check_reached(state)
    assert shortened


FIRST = Segment(micro_batch=0, step=0, num_lanes=4, batch_size=8, world_size=2)
KEPT = Segment(micro_batch=6, step=3, num_lanes=4, batch_size=8, world_size=4)
RECUT = replace(KEPT, batch_size=5)
LEFT = Left(epoch=2, positions=Intervals.of([(0, 9)]), num_lanes=4, rotation=0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": 10}, "step 10 of epoch 2 is at hand, which has 9"),
        ({"step": 9, "row": 1}, "1 rows of step 9 are done"),
        ({"row": 8}, "8 rows of step 3 are done"),
        ({"step": 8, "row": 3}, "3 rows of step 8 are done"),
        (
            {"base": Rest(begun=(LEFT,), next_epoch=3), "segments": (FIRST,)},
            "step 3 of epoch 2 is at hand, which has 2",
        ),
        ({"segments": (FIRST, replace(KEPT, micro_batch=13))}, "begins at step 3 and micro-batch 13.* 3 … 12 there"),
        ({"segments": (FIRST, replace(KEPT, micro_batch=2))}, "micro-batch 2.* 3 … 12 there"),
        ({"segments": (FIRST, replace(RECUT, micro_batch=7))}, "micro-batch 7.* comes to 6 there"),
        ({"segments": (FIRST, KEPT, replace(KEPT, micro_batch=7))}, "micro-batch 7.* comes to 6 there"),
        ({"epoch": MAX_EPOCH + 1}, "epoch 2147483649 is at hand"),
        (
            {
                "identity": identity_of(100, endless=True),
                "epoch": 0,
                "base": Rest(begun=(), next_epoch=MAX_ROWS + 1),
            },
            "is the next one",
        ),
    ],
)
def test_what_no_job_comes_to_is_refused(changes: dict[str, Any], match: str) -> None:
    good: dict[str, Any] = {"identity": identity_of(200), "epoch": 2, "segments": (FIRST, KEPT), "step": 3}
    check_reached(ReaderState(**good))
    check_reached(ReaderState(**{**good, "segments": (FIRST, RECUT), "row": 4}))
    check_reached(ReaderState(**{**good, "epoch": MAX_EPOCH, "step": 9}))
    check_reached(ReaderState(**{**good, "step": 8, "row": 2}))
    with pytest.raises(StateInvalid, match=match):
        check_reached(ReaderState(**{**good, **changes}))


def test_a_worker_may_be_as_many_steps_behind_the_end_as_there_are_workers() -> None:
    state = replace(start(identity_of(12), epoch=0, num_lanes=1, batch_size=4, world_size=1), step=5)
    check_reached(state, ahead=2)
    with pytest.raises(StateInvalid, match="step 5 of epoch 0"):
        check_reached(state, ahead=1)

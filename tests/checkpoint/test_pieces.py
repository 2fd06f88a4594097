"""What no rank got of an epoch whose last step does not go round: of states as earlier versions saved them, too."""

from __future__ import annotations

from dataclasses import replace

from lakeckpt.checkpoint.pieces import undealt
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan, consumed, start
from lakeckpt.core.state import Identity, ReaderState


def state_of(tail: str) -> ReaderState:
    """Four ranks go on after two micro-batches of the forty, and not where a turn of theirs begins: two are left for
    the last step. Plans of today deal what is left anew there."""
    spec = OrderSpec(seed=3, shuffle=True, window=2)
    identity = Identity(table="t", selection="", rows=200, spec=spec, tail=tail, endless=False)  # type: ignore[arg-type]
    state = start(identity, epoch=0, num_lanes=4, batch_size=5, world_size=2)
    segment = replace(state.segment, step=1, micro_batch=2, world_size=4)
    return replace(state, segments=(state.segment, segment), step=1)


def test_rows_of_the_last_step_that_no_rank_got_are_those_that_no_receipt_names() -> None:
    state = state_of("even")
    plan = Plan(state)
    assert plan.steps == 11
    end = replace(state, step=plan.steps)
    receipts = [plan.assignment(step, rank).receipt for step in range(1, plan.steps) for rank in range(4)]
    got = Intervals.of((span.start, span.stop) for receipt in receipts for span in receipt.spans)
    before = consumed(state)[0]
    assert undealt(end, 0) == consumed(end)[0].difference(got.union(before)) and undealt(end, 0).size == 2
    assert not undealt(replace(end, step=10), 0), "the last step is yet to come"
    assert not undealt(end, 1)


def test_where_every_row_is_dealt_there_are_none() -> None:
    whole = replace(state_of("even"), segments=state_of("even").segments[:1])
    for state in (state_of("short"), whole):
        steps = Plan(state).steps
        assert steps is not None and not undealt(replace(state, step=steps), 0)

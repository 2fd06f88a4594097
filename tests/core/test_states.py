"""States and receipts as plain values: they come back equal, and what is malformed is refused as such, and only so."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.core.changes import rebase, replan, start
from lakeckpt.core.consumption import consumed, consumption
from lakeckpt.core.identity import MAX_ROWS
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.core.state import MAX_LANES, Segment, State
from lakeckpt.errors import StateError
from tests.core.states import identity_of, reached_states
from tests.examples import examples


@given(reached_states())
def test_states_come_back_from_json_as_they_were(state: State) -> None:
    plain = state.to_plain()
    back = json.loads(json.dumps(plain, allow_nan=False))
    assert back == plain
    assert State.from_plain(back) == state
    assert hash(State.from_plain(back)) == hash(state)


ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    2**31,
    2**56,
    2**62,
    2**63,
    2**64,
    1.0,
    float("nan"),
    "",
    "x",
    [],
    {},
]
ODD += [[0, 1], [[0, 1]], {"format": "lakeckpt.reader/1"}, b"bytes", [1, 0, 1, 1, 1], [0, 0, 4, 4, 4], object()]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += places(child, (*at, key))
    return found


@settings(max_examples=examples(300))
@given(reached_states(most_rows=60), st.data())
def test_a_mutated_state_is_refused_as_invalid_or_is_another_state(state: State, data: st.DataObject) -> None:
    plain = copy.deepcopy(json.loads(json.dumps(state.to_plain())))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(places(plain)))
        odd = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        if not at:
            plain = odd
            break
        target = plain
        for key in at[:-1]:
            target = target[key]
        if data.draw(st.booleans()):
            target[at[-1]] = odd
        else:
            del target[at[-1]]
    try:
        found = State.from_plain(plain)
    except StateError:
        return
    again = found.to_plain()
    assert State.from_plain(json.loads(json.dumps(again))) == found
    assert again == {**plain, **again}
    usable(found)


def usable(state: State) -> None:
    """Whatever was accepted can be planned, taken from and re-cut, without any surprise."""
    plan = Plan(state)
    for rank in {0, state.segment.world_size - 1}:
        if plan.steps is None or state.step < plan.steps:
            assignment = plan.assignment(state.step, rank)
            assert assignment.receipt.rows <= state.segment.batch_size
    replan(state, num_lanes=3, batch_size=2, world_size=3)


@pytest.mark.parametrize("value", ODD)
def test_what_is_no_state_at_all_is_refused(value: Any) -> None:
    with pytest.raises(StateError):
        State.from_plain(value)


FIRST = Segment(micro_batch=0, step=0, num_lanes=4, batch_size=8, world_size=2)
LATER = Segment(micro_batch=6, step=3, num_lanes=4, batch_size=8, world_size=4)
LEFT = Left(epoch=2, positions=Intervals.of([(0, 9)]), num_lanes=4, rotation=0)


def state_of(**changes: Any) -> State:
    made = {"orders": (identity_of(100),), "epoch": 2, "segments": (FIRST, LATER), "step": 3, **changes}
    return State(**made)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"segments": ()}, "at least one segment"),
        ({"step": 2}, "the state is at step 2"),
        ({"segments": (LATER, FIRST)}, "segments begin at"),
        ({"segments": (FIRST, replace(LATER, micro_batch=2), replace(LATER, micro_batch=1))}, "segments begin at"),
        ({"segments": (FIRST, LATER, replace(LATER, step=4, micro_batch=5)), "step": 4}, "segments begin at"),
        ({"segments": (LATER,)}, "begins at step 0"),
        ({"epoch": -1}, "counted from 0, got -1"),
        ({"step": 2**60}, "more than"),
        ({"orders": (identity_of(100, endless=True),)}, "counts its epochs itself"),
        ({"bases": (Rest(begun=(), next_epoch=3),)}, "cannot be the rest of epoch 2"),
        ({"bases": (Rest(begun=(LEFT,), next_epoch=4),)}, "cannot be the rest of epoch 2"),
        ({"bases": (Rest(begun=(replace(LEFT, epoch=1),), next_epoch=3),)}, "cannot be the rest of epoch 2"),
        (
            {"bases": (Rest(begun=(replace(LEFT, positions=Intervals.of([(99, 101)])),), next_epoch=3),)},
            "outside of epoch",
        ),
    ],
)
def test_states_that_no_job_reaches_are_refused(changes: dict[str, Any], match: str) -> None:
    state_of()
    state_of(bases=(Rest(begun=(LEFT,), next_epoch=3),))
    with pytest.raises(ValueError, match=match):
        state_of(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"micro_batch": -1}, "micro_batch is at least 0"),
        ({"world_size": 0}, "world_size is at least 1"),
        ({"world_size": 3}, "3 ranks do not divide 4 lanes"),
        ({"num_lanes": MAX_LANES + 4}, "at most 1048576 lanes"),
    ],
)
def test_segments_that_cannot_be_are_refused(changes: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(FIRST, **changes)


def of_identity(**changes: Any) -> State:
    plain: dict[str, Any] = state_of().to_plain()
    plain["identity"].update(changes)
    return State.from_plain(plain)


def test_what_the_format_calls_the_version_stays_with_the_state_and_decides_nothing() -> None:
    assert of_identity(version="snapshot 7").identity.version == "snapshot 7"
    assert replace(identity_of(3), version="snapshot 7") == identity_of(3)


def test_seeds_are_all_words_of_64_bits_signed_or_not() -> None:
    for seed in (-(2**63), -1, 2**64 - 1):
        assert of_identity(spec={"seed": seed, "shuffle": True, "window": 4}).identity.spec.seed == seed
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(StateError, match=r"identity\.spec.: seed must fit 64 bits"):
            of_identity(spec={"seed": seed, "shuffle": True, "window": 4})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"endless": 1}, "field 'identity.endless': it must be of type bool, got 1"),
        ({"tail": "long"}, "field 'identity.tail': it must be one of 'short', 'drop', 'carry', got 'long'"),
        ({"rows": "3"}, "field 'identity.rows': it must be of type int, got '3'"),
        ({"more": 1}, "field 'identity.more': this lakeckpt knows no such field"),
    ],
)
def test_what_is_wrong_in_a_state_is_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(StateError, match=match):
        of_identity(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rows": -1}, "an epoch has 0 to"),
        ({"rows": MAX_ROWS + 1}, "an epoch has 0 to"),
        ({"rows": 0, "endless": True}, "at least one row"),
    ],
)
def test_identities_that_cannot_be_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(identity_of(3), **changes)


def test_differences_name_each_field_with_both_values() -> None:
    one = identity_of(5)
    other = replace(one, rows=6, spec=OrderSpec(seed=8, shuffle=False, window=1))
    assert one.differences(one) == []
    assert one.differences(other) == [
        "rows: 5 became 6",
        "seed: 7 became 8",
        "shuffle: True became False",
        "window: 4 became 1",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"table": "other"},
        {"selection": "x"},
        {"rows": 6},
        {"tail": "drop"},
        {"endless": True},
        {"permutation_version": 2},
        {"spec": OrderSpec(seed=7, shuffle=True, window=5)},
    ],
)
def test_no_field_of_an_identity_differs_silently(changes: dict[str, Any]) -> None:
    one = identity_of(5)
    (line,) = one.differences(replace(one, **changes))
    assert line.startswith(next(iter(changes)) if "spec" not in changes else "window")


# --- receipts


spans = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(1, 20)).map(
        lambda one: Span(epoch=one[0], start=one[1], stop=one[1] + one[2])
    ),
    max_size=4,
).map(tuple)


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    chosen = draw(spans)
    world_size = draw(st.integers(1, 8))
    rows = sum(span.rows for span in chosen)
    return Receipt(
        epoch=draw(st.integers(0, 9)),
        micro_batch=draw(st.integers(0, 2**50)),
        lane=draw(st.integers(-1, 12)),
        step=draw(st.integers(0, 2**50)),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        spans=chosen,
        step_rows=rows + draw(st.integers(0, 100)),
    )


@given(receipts())
def test_receipts_come_back_from_json_as_they_were(receipt: Receipt) -> None:
    assert Receipt.from_plain(json.loads(json.dumps(receipt.to_plain()))) == receipt
    weight = receipt.rows * receipt.world_size / receipt.step_rows if receipt.step_rows else 0.0
    assert receipt.weight == weight


@settings(max_examples=examples(150))
@given(receipts(), st.data())
def test_a_mutated_receipt_is_refused_as_invalid_or_is_another(receipt: Receipt, data: st.DataObject) -> None:
    plain = json.loads(json.dumps(receipt.to_plain()))
    at = data.draw(st.sampled_from([place for place in places(plain) if place]))
    target = plain
    for key in at[:-1]:
        target = target[key]
    if data.draw(st.booleans()):
        target[at[-1]] = data.draw(st.sampled_from(ODD))
    else:
        del target[at[-1]]
    try:
        found = Receipt.from_plain(plain)
    except StateError:
        return
    assert found.to_plain() == {**found.to_plain(), **plain}


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_receipt_is_refused(value: Any) -> None:
    with pytest.raises(StateError):
        Receipt.from_plain(value)


def test_receipts_that_cannot_be_are_refused() -> None:
    good = {"epoch": 0, "micro_batch": 0, "lane": 0, "step": 0, "world_size": 2, "spans": (), "step_rows": 0}
    Receipt(rank=1, **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Receipt(rank=2, **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 rows in a step of 0"):
        Receipt(rank=0, **{**good, "spans": (Span(epoch=0, start=1, stop=4),)})  # type: ignore[arg-type]
    for wrong in ((0, 3, 3), (0, 4, 3), (-1, 0, 1), (0, -1, 1)):
        with pytest.raises(ValueError, match="not a span of positions"):
            Span(epoch=wrong[0], start=wrong[1], stop=wrong[2])


# --- going from state to state


@given(reached_states(), st.data())
def test_what_was_consumed_and_what_is_left_are_all_there_is(state: State, data: st.DataObject) -> None:
    plan = Plan(state)
    used, rest = consumed(state), plan.rest(state.step)
    for epoch in range(0 if state.identity.endless else state.epoch, rest.next_epoch):
        mine = used.get(epoch, Intervals.empty())
        assert not mine.intersection(rest.of(epoch, state.identity.rows))
        assert mine.union(rest.of(epoch, state.identity.rows)) == Intervals.whole(state.identity.rows)
    steps = data.draw(st.integers(0, 5))
    later = replace(state, step=state.step + steps)
    if plan.steps is None or later.step <= plan.steps:
        gone = consumption(state, later)
        again = {
            epoch: found
            for epoch, positions in consumed(later).items()
            if (found := positions.difference(used.get(epoch, Intervals.empty())))
        }
        assert gone == again


@given(reached_states(), st.sampled_from(["short", "drop"]))
def test_a_rebased_state_has_consumed_the_same_and_deals_the_rest_by_its_own_ends(state: State, tail: Any) -> None:
    identity = replace(state.identity, tail=tail)
    found = rebase(state, identity)
    assert found.identity == identity and found.epoch == state.epoch
    assert found.segment.topology == state.segment.topology
    assert consumed(found) == consumed(state)
    assert State.from_plain(json.loads(json.dumps(found.to_plain()))) == found
    if state == start(
        state.identity,
        epoch=state.epoch,
        num_lanes=state.segment.num_lanes,
        batch_size=state.segment.batch_size,
        world_size=state.segment.world_size,
    ):
        assert found == replace(state, orders=(identity,))

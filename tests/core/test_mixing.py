"""Mixing: in every lane each source has its share to within one row, after any n rows, in any period."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.core.streams.mixing import SCALE, Share, fractions

weights_of = st.one_of(
    st.sampled_from([[0.7, 0.3], [0.5, 0.3, 0.15, 0.04, 0.01], [0.9998, 1e-4, 1e-4], [1 / 3, 0, 2 / 3]]),
    st.lists(st.integers(0, 8), min_size=1, max_size=12).map(lambda one: [*one, 128 - sum(one)]),
)
"""Weights that users give, whose period is 65,536 rows, and random ones with a period of 128 rows."""


def shares(weights: list[float], *, seed: int = 0, whole: bool = False, carried: tuple[int, ...] = ()) -> list[Share]:
    found = tuple(fractions({str(number): weight for number, weight in enumerate(weights)}).values())
    return [
        Share(source=number, weights=found, seed=seed, whole=whole, carried=carried) for number in range(len(found))
    ]


@settings(max_examples=25)
@given(weights_of, st.integers(0, 1), st.integers(1, 9), st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_every_source_has_its_share_to_within_one_row_in_every_lane(
    weights: list[float], seed: int, lanes: int, places: list[int]
) -> None:
    numbers = np.repeat(np.arange(lanes), len(places))
    rows = np.tile(np.array([*range(len(places) // 2), *places[: (len(places) + 1) // 2]]), lanes)
    counts = [one.before(numbers, rows, 1) for one in shares(weights, seed=seed)]
    assert (sum(counts) == rows).all()
    for one, count in zip(shares(weights, seed=seed), counts, strict=True):
        error = count * SCALE - rows * one.weights[one.source]
        assert (np.abs(error) <= SCALE).all()


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.9998, 1e-4, 1e-4], [1 / (one + 1) ** 2 for one in range(64)]])
def test_every_row_of_a_period_is_within_one_row(weights: list[float]) -> None:
    rows = np.arange(SCALE + 2)
    for lane in (0, 5):
        for one in shares(weights, seed=3):
            error = one.before(np.full(len(rows), lane), rows, 1) * SCALE - rows * one.weights[one.source]
            assert np.abs(error).max() <= SCALE


@given(weights_of, st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 70), st.booleans())
@settings(max_examples=20)
def test_the_sources_of_a_micro_batch_are_those_that_are_counted(
    weights: list[float], lane: int, turn: int, size: int, whole: bool
) -> None:
    every = shares(weights, seed=1, whole=whole)
    order = every[0].sources(lane, turn, size)
    for one in every:
        counted = one.before_one(lane, turn + 1, size) - one.before_one(lane, turn, size)
        assert counted == int((order == one.source).sum())
        assert one.before(np.array([lane]), np.array([turn]), size)[0] == one.before_one(lane, turn, size)


def test_lanes_turn_to_a_rare_source_at_different_steps() -> None:
    rare = shares([0.999, 0.001], seed=1)[1]
    lanes = np.arange(8)
    first = [next(row for row in range(1001) if rare.before_one(int(lane), row + 1, 1) > 0) for lane in lanes]
    assert len(set(first)) == 8


def test_what_was_carried_over_is_made_up_for() -> None:
    carried = (SCALE // 2, -SCALE // 2, 0)
    for one in shares([0.5, 0.3, 0.2], carried=carried):
        rows = np.arange(3000)
        error = carried[one.source] + one.before(np.zeros_like(rows), rows, 1) * SCALE - rows * one.weights[one.source]
        assert np.abs(error).max() <= SCALE


def test_any_place_takes_under_a_millisecond_once_the_period_is_tabled() -> None:
    one = shares([0.7, 0.2, 0.1])[1]
    one.before_one(0, 1, 1)
    begun = time.perf_counter()
    for place in range(1000):
        one.before_one(0, 10**12 + place, 1)
    assert time.perf_counter() - begun < 100  # a thousand places; counted row by row, one would take days


@pytest.mark.parametrize("weights", [{"a": -1.0, "b": 2.0}, {"a": 0.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_weights_that_are_none_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights are numbers from 0 on, and not all 0"):
        fractions(weights)


def test_fractions_add_up_and_keep_what_is_small() -> None:
    found = fractions({"big": 1e9, "small": 1.0, "none": 0.0})
    assert found == {"big": SCALE - 1, "small": 1, "none": 0}
    assert sum(fractions({str(number): 1.0 for number in range(999)}).values()) == SCALE


def test_a_share_crosses_to_a_worker_without_its_tables() -> None:
    one = shares([0.7, 0.3])[0]
    one.before_one(0, 10, 1)
    crossed = pickle.loads(pickle.dumps(one))
    assert crossed == one and len(pickle.dumps(one)) < 500


def test_the_golden_order_of_a_mixture() -> None:
    """This order is part of the format: a change of it changes what resumed runs read."""
    every = shares([0.5, 0.3, 0.2], seed=7)
    assert ["".join(map(str, every[0].sources(lane, 0, 20))) for lane in range(3)] == GOLDEN


GOLDEN = ["01020101020102010102", "01200102010101200102", "01201001020120102010"]

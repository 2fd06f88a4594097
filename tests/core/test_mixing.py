"""Mixing: in every lane each source has its share to within two rows, after any n rows, at any place."""

from __future__ import annotations

import pickle
import time
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lakeckpt.core.streams.mixing import Share, fractions
from lakeckpt.core.streams.turns import CARRIED, MOST_ROWS_OFF, Turns
from tests.examples import examples

FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]
weights_of = st.one_of(
    st.sampled_from([[0.7, 0.3], [0.5, 0.3, 0.15, 0.04, 0.01], [0.9998, 1e-4, 1e-4], [1 / 3, 0, 2 / 3], FIBONACCI]),
    st.lists(st.integers(0, 8), min_size=1, max_size=12).map(lambda one: [*one, 128 - sum(one)]),
    st.lists(st.floats(1e-6, 1), min_size=1, max_size=40),
)
"""Weights that users give, those whose tree is deepest, and random ones."""


def shares(weights: list[float], *, seed: int = 0, whole: bool = False, carried: tuple[int, ...] = ()) -> list[Share]:
    found = tuple(fractions({str(number): weight for number, weight in enumerate(weights)}).values())
    return [
        Share(source=number, weights=found, seed=seed, whole=whole, carried=carried) for number in range(len(found))
    ]


def errors_of(one: Share, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[int]:
    """Return how many rows too many the source has of the first ``rows`` rows, times the sum of weights."""
    pairs = zip(rows.tolist(), counts.tolist(), strict=True)
    return [count * sum(one.weights) - row * one.weights[one.source] for row, count in pairs]


@settings(max_examples=examples(25))
@given(weights_of, st.integers(0, 1), st.integers(1, 9), st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_every_source_has_its_share_to_within_two_rows_in_every_lane(
    weights: list[float], seed: int, lanes: int, places: list[int]
) -> None:
    numbers = np.repeat(np.arange(lanes), len(places))
    rows = np.tile(np.array([*range(len(places) // 2), *places[: (len(places) + 1) // 2]]), lanes)
    counts = [one.before(numbers, rows, 1) for one in shares(weights, seed=seed)]
    assert (sum(counts) == rows).all()
    for one, count in zip(shares(weights, seed=seed), counts, strict=True):
        assert max(map(abs, errors_of(one, rows, count))) <= MOST_ROWS_OFF * sum(one.weights)


@pytest.mark.parametrize(
    ("weights", "most"),
    [
        ([0.7, 0.3], 1),
        ([0.9998, 1e-4, 1e-4], 2),
        ([1 / (one + 1) ** 2 for one in range(64)], 2),
        (FIBONACCI, 2),
        ([1.0] * 1024, 1),
    ],
)
def test_every_row_of_a_long_stretch_is_within_two_rows_and_within_one_for_two_sources(
    weights: list[float], most: int
) -> None:
    rows = np.arange(5_000)
    for lane in (0, 5):
        for one in shares(weights, seed=3)[:20]:
            counts = one.before(np.full(len(rows), lane), rows, 1)
            assert max(map(abs, errors_of(one, rows, counts))) <= most * sum(one.weights)
            assert set(np.diff(counts).tolist()) <= {0, 1}


def test_no_lane_of_thousands_is_two_rows_off_with_the_deepest_tree_that_weights_can_make() -> None:
    turns = shares([0.01, 1, *FIBONACCI[:12]])[0]._turns
    lanes, rows = np.arange(400_000) % 20_000, np.random.default_rng(0).integers(0, 10**6, 400_000)
    for source, weight in enumerate(turns.weights):
        off = turns.before(source, lanes, rows) * sum(turns.weights) - rows * weight
        assert np.abs(off).max() <= MOST_ROWS_OFF * sum(turns.weights)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=60), st.integers(0, 3), st.data())
@settings(max_examples=examples(30))
def test_the_order_is_the_same_wherever_it_is_entered(weights: list[int], lane: int, data: st.DataObject) -> None:
    turns = Turns(weights, (), 1)
    start = data.draw(st.integers(0, 10**12))
    every = turns.sources(lane, start, start + 300).tolist()
    for first, rows in data.draw(st.lists(st.tuples(st.integers(0, 290), st.integers(1, 10)), min_size=1)):
        assert turns.sources(lane, start + first, start + first + rows).tolist() == every[first : first + rows]
        counts = [turns.before(source, lane, start + first) for source in range(len(weights))]
        assert sum(counts) == start + first
        found = Counter(every[first : first + rows])
        for source, count in enumerate(counts):
            assert turns.before(source, lane, start + first + rows) == count + found[source]


@given(weights_of, st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 70), st.booleans())
@settings(max_examples=examples(20))
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
    carried = (4 * CARRIED, -3 * CARRIED, -CARRIED)
    for one in shares([0.5, 0.3, 0.2], carried=carried):
        rows = np.arange(3000)
        counts = one.before(np.zeros_like(rows), rows, 1)
        assert set(np.diff(counts).tolist()) <= {0, 1}
        error = [each + carried[one.source] * sum(one.weights) // CARRIED for each in errors_of(one, rows, counts)]
        assert max(map(abs, error[40:])) <= MOST_ROWS_OFF * sum(one.weights)
    order = shares([0.5, 0.3, 0.2], carried=carried)[0].sources(0, 0, 40).tolist()
    assert order.count(0) <= 18 and not order[:4].count(0)


def test_any_place_of_many_sources_takes_a_division_for_each_level_of_the_tree() -> None:
    begun = time.perf_counter()
    one = shares([1 / (source + 1) for source in range(1024)])[1]
    for place in range(1000):
        one.before_one(0, 10**12 + place, 1)
        one.sources(place % 7, 10**12 + place, 1)
    assert time.perf_counter() - begun < 100  # a thousand places; counted row by row, one would take days


@pytest.mark.parametrize("weights", [{"a": -1.0, "b": 2.0}, {"a": 0.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_weights_that_are_none_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights are numbers from 0 on, and not all 0"):
        fractions(weights)


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-7, 1e3)), min_size=1, max_size=1024))
def test_fractions_add_up_and_none_is_off_by_more_than_one_percent(weights: list[float]) -> None:
    given_ = {str(number): weight for number, weight in enumerate(weights)}
    total = sum(weights)
    assume(total and all(weight == 0 or weight / total >= 1e-7 for weight in weights))
    found = fractions(given_)
    scale = sum(found.values())
    assert scale in {1 << bits for bits in range(16, 32)}
    for name, weight in given_.items():
        assert abs(found[name] / scale - weight / total) <= 0.01 * weight / total


def test_a_weight_that_is_too_small_for_a_fraction_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"weights are 0, or at least 1 / 42,949,672 of their sum.*'small': 1.0"):
        fractions({"big": 1e9, "small": 1.0, "none": 0.0})
    assert sum(fractions({str(number): 1.0 for number in range(999)}).values()) == 1 << 16
    assert sum(fractions({"big": 1e6, "small": 1.0}).values()) == 1 << 26


def test_a_share_crosses_to_a_worker_without_the_rows_that_were_made() -> None:
    one = shares([0.7, 0.3])[0]
    one.before_one(0, 10, 1)
    crossed = pickle.loads(pickle.dumps(one))
    assert crossed == one and len(pickle.dumps(one)) < 500


def test_the_golden_order_of_a_mixture() -> None:
    """This order is part of the format: a change of it changes what resumed runs read."""
    every = shares([0.5, 0.3, 0.2], seed=7)
    assert ["".join(map(str, every[0].sources(lane, 0, 20))) for lane in range(3)] == GOLDEN


GOLDEN = ["10102010201010201020", "02010102010201010201", "01020101020102010102"]

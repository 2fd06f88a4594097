"""Intervals against plain Python sets."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def as_set(intervals: Intervals) -> set[int]:
    return {position for start, stop in intervals for position in range(start, stop)}


def set_of(pairs: list[tuple[int, int]]) -> set[int]:
    return {position for start, stop in pairs for position in range(start, stop)}


@given(PAIRS)
def test_any_pairs_become_sorted_intervals_that_do_not_touch(pairs: list[tuple[int, int]]) -> None:
    found = Intervals.of(pairs)
    assert as_set(found) == set_of(pairs)
    assert found.size == len(set_of(pairs))
    flat = [edge for pair in found.pairs() for edge in pair]
    assert all(a < b for a, b in itertools.pairwise(flat))
    assert Intervals.of(found.pairs()) == found == pickle.loads(pickle.dumps(found))
    assert hash(found) == hash(Intervals.of(list(reversed(pairs))))


@given(PAIRS, PAIRS)
def test_the_algebra_is_that_of_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, other = Intervals.of(first), Intervals.of(second)
    assert as_set(one.union(other)) == set_of(first) | set_of(second)
    assert as_set(one.intersection(other)) == set_of(first) & set_of(second)
    assert as_set(one.difference(other)) == set_of(first) - set_of(second)
    assert as_set(one.complement(80)) == set(range(80)) - set_of(first)
    assert (one == other) == (set_of(first) == set_of(second))
    assert bool(one) == bool(set_of(first))


@given(PAIRS, st.data())
def test_places_are_selected_in_ascending_order_of_positions(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    whole = Intervals.of(pairs)
    ascending = sorted(as_set(whole))
    edges = sorted(data.draw(st.lists(st.integers(0, len(ascending)), min_size=2, max_size=8)))
    edges = edges[: len(edges) // 2 * 2]
    starts, stops = np.array(edges[::2], np.int64), np.array(edges[1::2], np.int64)
    wanted = {ascending[place] for a, b in zip(starts, stops, strict=True) for place in range(a, b)}
    assert as_set(whole.select(starts, stops)) == wanted
    assert as_set(whole.take(edges[0], edges[-1])) == set(ascending[edges[0] : edges[-1]])


def test_what_is_no_set_of_intervals_is_refused() -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        Intervals.of([(3, 2)])
    with pytest.raises(ValueError, match="sorted, and must not touch"):
        Intervals(np.array([0, 2]), np.array([2, 3]))
    with pytest.raises(ValueError, match="outside of 5 rows"):
        Intervals.of([(3, 7)]).complement(5)
    with pytest.raises(ValueError, match="outside of a set"):
        Intervals.of([(3, 7)]).take(2, 5)
    with pytest.raises(ValueError, match="read-only"):
        Intervals.of([(3, 7)]).starts[0] = 1


def test_long_sets_are_shown_in_short() -> None:
    assert repr(Intervals.of([(2 * n, 2 * n + 1) for n in range(20)])).endswith("[14, 15), … 12 more)")

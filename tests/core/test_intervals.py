"""Intervals, held to Python's sets."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals

MOST = 40
pairs = st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)).map(lambda p: (min(p), max(p))), max_size=8)
sets = st.sets(st.integers(0, MOST - 1))


def of_set(members: set[int]) -> Intervals:
    return Intervals.of((one, one + 1) for one in members)


def to_set(intervals: Intervals) -> set[int]:
    return {one for start, stop in intervals.pairs() for one in range(start, stop)}


def assert_canonical(intervals: Intervals) -> None:
    last = -1
    for start, stop in intervals.pairs():
        assert last < start < stop
        last = stop
    assert intervals.starts.dtype == intervals.stops.dtype == np.int64
    assert not intervals.starts.flags.writeable and not intervals.stops.flags.writeable


@given(pairs)
def test_any_pairs_become_their_union(given_pairs: list[tuple[int, int]]) -> None:
    members = {one for start, stop in given_pairs for one in range(start, stop)}
    found = Intervals.of(given_pairs)
    assert_canonical(found)
    assert to_set(found) == members and found.size == len(members) and bool(found) == bool(members)
    assert found == of_set(members) and hash(found) == hash(of_set(members))
    assert len(found) == len(found.pairs()) == len(list(found))
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (lambda a, b: a.union(b), set.union),
        (lambda a, b: a.intersection(b), set.intersection),
        (lambda a, b: a.difference(b), set.difference),
    ],
)
@given(a=sets, b=sets)
def test_the_algebra_is_that_of_sets(
    mine: Callable[[Intervals, Intervals], Intervals],
    theirs: Callable[[set[int], set[int]], set[int]],
    a: set[int],
    b: set[int],
) -> None:
    found = mine(of_set(a), of_set(b))
    assert_canonical(found)
    assert to_set(found) == theirs(a, b)


@given(st.lists(sets, max_size=4))
def test_a_union_of_many_is_that_of_sets(many: list[set[int]]) -> None:
    first = Intervals.empty()
    assert to_set(first.union(*map(of_set, many))) == set().union(*many)


@given(sets, st.integers(0, 10))
def test_the_complement_is_what_is_missing(members: set[int], more: int) -> None:
    rows = max(members, default=-1) + 1 + more
    found = of_set(members).complement(rows)
    assert_canonical(found)
    assert to_set(found) == set(range(rows)) - members
    assert found.complement(rows) == of_set(members)
    if members:
        with pytest.raises(ValueError, match="outside of"):
            of_set(members).complement(max(members))


@given(sets, st.data())
def test_take_counts_in_ascending_order(members: set[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(members)))
    stop = data.draw(st.integers(start, len(members)))
    found = of_set(members).take(start, stop)
    assert Intervals.of(found).pairs() == found
    assert to_set(Intervals.of(found)) == set(sorted(members)[start:stop])


@given(sets, st.lists(st.integers(0, MOST), max_size=10))
def test_select_takes_many_ranges_at_once(members: set[int], cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(members)) for cut in cuts)
    starts, stops = cuts[: len(cuts) // 2 * 2 : 2], cuts[1::2]
    found = of_set(members).select(np.array(starts, np.int64), np.array(stops, np.int64))
    assert_canonical(found)
    ordered = sorted(members)
    assert to_set(found) == {one for a, b in zip(starts, stops, strict=True) for one in ordered[a:b]}


def test_no_operation_changes_what_it_is_given() -> None:
    a, b = Intervals.of([(0, 5), (8, 9)]), Intervals.of([(3, 8)])
    for _ in range(2):
        a.union(b), a.difference(b), a.intersection(b), a.complement(20), a.take(1, 3)
        assert (a.pairs(), b.pairs()) == ([(0, 5), (8, 9)], [(3, 8)])


@pytest.mark.parametrize("wrong", [[(3, 2)], [(0, 4), (9, 1)]])
def test_an_interval_that_ends_before_it_starts_is_refused(wrong: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        Intervals.of(wrong)


@pytest.mark.parametrize(
    ("starts", "stops"), [([0], [0]), ([1, 0], [2, 1]), ([0, 2], [2, 3]), ([-1], [2]), ([0, 1], [3]), ([0, 3], [4, 5])]
)
def test_intervals_that_are_not_canonical_are_refused(starts: list[int], stops: list[int]) -> None:
    with pytest.raises(ValueError, match=r"intervals must be|two lists of one length"):
        Intervals(np.array(starts, np.int64), np.array(stops, np.int64))
    with pytest.raises(ValueError, match="outside of a set of 3"):
        Intervals.of([(0, 3)]).take(1, 4)
    with pytest.raises(ValueError, match="outside of a set"):
        Intervals.of([(0, 3)]).take(2, 1)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        Intervals.of([(-3, 2)])


def test_positions_near_two_to_the_62_keep_their_place() -> None:
    far = 2**62
    found = Intervals.of([(0, 3), (far, far + 5)])
    assert found.size == 8 and found.take(2, 5) == [(2, 3), (far, far + 2)]
    assert found.complement(far + 6).pairs() == [(3, far), (far + 5, far + 6)]
    assert found.difference(Intervals.of([(1, far + 1)])).pairs() == [(0, 1), (far + 1, far + 5)]


def test_reprs_name_the_first_few() -> None:
    assert repr(Intervals.of([(0, 2), (5, 6)])) == "Intervals([0, 2), [5, 6))"
    assert repr(Intervals.of([(3 * i, 3 * i + 1) for i in range(10)])).endswith("[21, 22), … 2 more)")

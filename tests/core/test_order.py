"""The order of an epoch: every row has one position, lanes and windows partition them, and nothing else matters."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core import order
from lakeckpt.core.order import EpochLayout, OrderSpec, lane_bounds
from tests.core.plain_hashing import plain_hash, plain_key, plain_permutation

tables = st.lists(st.integers(0, 9), max_size=9).map(lambda rows: np.array(rows, np.int64))
windows = st.integers(1, 4)


def spec_of(window: int = 2, *, shuffle: bool = True, seed: int = 3) -> OrderSpec:
    return OrderSpec(seed=seed, shuffle=shuffle, window=window if shuffle else 1)


class Cut(np.ndarray):
    """An array that notes how many elements each cut of it has."""

    sizes: ClassVar[list[int]] = []

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.sizes.append(np.size(found))
        return found


def test_positions_of_many_windows_are_sorted_once() -> None:
    spec = OrderSpec(seed=0, shuffle=True, window=1)
    layout = EpochLayout.build(np.full(50, 4), spec, epoch=0, num_lanes=1)
    positions = np.random.default_rng(0).permutation(200)
    Cut.sizes.clear()
    groups, rows = layout.locate(positions.view(Cut))
    assert sum(Cut.sizes) <= 4 * len(positions), "not all positions again for each window"
    assert len(set(zip(groups.tolist(), rows.tolist(), strict=True))) == 200


def located(layout: EpochLayout) -> list[tuple[int, int]]:
    groups, rows = layout.locate(np.arange(layout.rows))
    return list(zip(groups.tolist(), rows.tolist(), strict=True))


def table_rows(group_rows: np.ndarray) -> list[tuple[int, int]]:
    return [(group, row) for group, rows in enumerate(group_rows.tolist()) for row in range(rows)]


@given(tables, windows, st.booleans(), st.integers(0, 4), st.integers(1, 7), st.data())
def test_positions_are_a_bijection_onto_the_rows(
    group_rows: np.ndarray, window: int, shuffle: bool, epoch: int, num_lanes: int, data: st.DataObject
) -> None:
    rotation = data.draw(st.integers(0, num_lanes - 1))
    layout = EpochLayout.build(group_rows, spec_of(window, shuffle=shuffle), epoch, num_lanes, rotation)
    assert layout.rows == group_rows.sum()
    found = located(layout)
    assert sorted(found) == table_rows(group_rows)
    again = EpochLayout.build(group_rows, spec_of(window, shuffle=shuffle), epoch, num_lanes, rotation)
    assert located(again) == found


@given(tables, windows, st.integers(1, 7))
def test_unshuffled_positions_are_the_tables_own_order(group_rows: np.ndarray, window: int, num_lanes: int) -> None:
    layout = EpochLayout.build(group_rows, spec_of(shuffle=False), 5, num_lanes)
    assert located(layout) == table_rows(group_rows)


@given(tables, windows, st.booleans(), st.integers(1, 7), st.data())
def test_windows_lie_inside_lanes_and_partition_the_epoch(
    group_rows: np.ndarray, window: int, shuffle: bool, num_lanes: int, data: st.DataObject
) -> None:
    rotation = data.draw(st.integers(0, num_lanes - 1))
    layout = EpochLayout.build(group_rows, spec_of(window, shuffle=shuffle), 1, num_lanes, rotation)
    every = layout.windows(0, layout.rows)
    assert [one.start for one in every] + [layout.rows] == [0] + [one.stop for one in every]
    bounds = layout.lane_bounds.tolist()
    for one in every:
        assert any(low <= one.start < one.stop <= high for low, high in itertools.pairwise(bounds))
        assert len(one.fragments) <= (window if shuffle else 1)
        assert all(fragment.rows > 0 for fragment in one.fragments), "no row group is decoded for nothing"
        assert sum(fragment.rows for fragment in one.fragments) == one.rows == one.stop - one.start
        for position in range(one.start, one.stop):
            assert layout.window_at(position) == one
        permuted = one.permutation()
        assert (permuted is None) == (not shuffle)
        assert permuted is None or sorted(permuted.tolist()) == list(range(one.rows))
    # Row groups are cut only where a lane border falls: in all, at most one cut a border.
    fragments = [fragment for one in every for fragment in one.fragments]
    assert len(fragments) <= np.count_nonzero(group_rows) + num_lanes - 1


@given(st.integers(0, 200), st.integers(1, 20), st.data())
def test_lanes_are_equal_to_within_a_row_and_rotation_says_who_has_more(
    rows: int, num_lanes: int, data: st.DataObject
) -> None:
    rotation = data.draw(st.integers(0, num_lanes - 1))
    bounds = lane_bounds(rows, num_lanes, rotation)
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == rows and len(sizes) == num_lanes
    share, extra = divmod(rows, num_lanes)
    more = {(rotation + i) % num_lanes for i in range(extra)}
    assert sizes.tolist() == [share + (lane in more) for lane in range(num_lanes)]


def test_groups_windows_epochs_and_seeds_permute_apart() -> None:
    group_rows = np.full(12, 6, np.int64)
    orders = {}
    for seed, epoch in itertools.product(range(3), range(3)):
        layout = EpochLayout.build(group_rows, spec_of(3, seed=seed), epoch, 1)
        found = located(layout)
        orders[seed, epoch] = found
        groups = [group for group, _ in found]
        for start in range(0, 72, 18):  # a window holds the rows of three row groups, and of no other
            assert len(set(groups[start : start + 18])) == 3
        assert found != sorted(found)
    assert len({tuple(found) for found in orders.values()}) == 9


@given(tables, st.integers(1, 5))
def test_empty_row_groups_change_nothing_but_their_ordinals(group_rows: np.ndarray, num_lanes: int) -> None:
    unshuffled = spec_of(shuffle=False)
    full = np.flatnonzero(group_rows)
    dense = EpochLayout.build(group_rows[full], unshuffled, 0, num_lanes)
    sparse = EpochLayout.build(group_rows, unshuffled, 0, num_lanes)
    assert [(full[group], row) for group, row in located(dense)] == located(sparse)


def test_a_row_group_keeps_its_hash_whatever_the_table_around_it() -> None:
    """Row groups are ordered by hashes of their ordinals: appending to a table moves no row group past another."""
    small = EpochLayout.build(np.full(20, 1, np.int64), spec_of(), 4, 1)
    large = EpochLayout.build(np.full(50, 1, np.int64), spec_of(), 4, 1)
    assert [group for group in large.order.tolist() if group < 20] == small.order.tolist()


def test_a_window_of_too_many_rows_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MAX_PERMUTED", 10)
    group_rows = np.array([7, 25, 3, 40], np.int64)
    layout = EpochLayout.build(group_rows, spec_of(4), 0, 2)
    every = layout.windows(0, 75)
    assert max(one.rows for one in every) == 10
    assert sorted(located(layout)) == table_rows(group_rows)
    assert {one.start for one in every} >= {0, 10, 20, 38, 48}
    assert all(layout.window_at(one.stop - 1) == one for one in every)


def test_the_real_limit_is_kept_on_a_row_group_of_billions() -> None:
    layout = EpochLayout.build(np.array([3 * 10**9], np.int64), spec_of(1), 0, 1)
    one = layout.window_at(2 * 10**9)
    assert one.rows == order.MAX_PERMUTED and one.start <= 2 * 10**9 < one.stop
    assert one.start % order.MAX_PERMUTED == 0
    assert one.fragments == (order.Fragment(group=0, start=one.start, stop=one.stop),)


@given(tables, st.integers(1, 4), st.lists(st.integers(0, 80), max_size=30))
def test_locate_takes_positions_in_any_order_and_number(
    group_rows: np.ndarray, num_lanes: int, wanted: list[int]
) -> None:
    layout = EpochLayout.build(group_rows, spec_of(), 2, num_lanes)
    wanted = [position for position in wanted if position < layout.rows]
    every = located(layout)
    groups, rows = layout.locate(np.array(wanted, np.int64))
    assert list(zip(groups.tolist(), rows.tolist(), strict=True)) == [every[position] for position in wanted]


@pytest.mark.parametrize("position", [-1, 12, 10**9])
def test_positions_outside_of_the_epoch_are_refused(position: int) -> None:
    layout = EpochLayout.build(np.array([5, 7], np.int64), spec_of(), 0, 2)
    with pytest.raises(ValueError, match=f"position {position} lies outside of an epoch of 12 rows"):
        layout.window_at(position)


@pytest.mark.parametrize(
    "wrong", [{"seed": 2**64}, {"seed": -(2**63) - 1}, {"window": 0}, {"shuffle": False, "window": 2}]
)
def test_specs_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"seed must fit|at least one row group|windows of one"):
        OrderSpec(**{"seed": 0, "shuffle": True, "window": 1, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(-1, 1, 0), (0, 0, 0), (0, 2, 2), (0, 2, -1)])
def test_layouts_that_cannot_be_are_refused(wrong: tuple[int, int, int]) -> None:
    epoch, num_lanes, rotation = wrong
    with pytest.raises(ValueError, match="no such layout"):
        EpochLayout.build(np.array([3], np.int64), spec_of(), epoch, num_lanes, rotation)


GOLDEN = [(0, 1), (0, 2), (0, 0), (2, 0), (2, 1), (3, 0), (2, 2), (2, 3), (3, 1)]


def plain_order(rows: list[int], seed: int, epoch: int, num_lanes: int, window: int) -> list[tuple[int, int]]:
    """The order written once more from its description, in plain Python."""
    groups = sorted(
        (group for group, count in enumerate(rows) if count),
        key=lambda group: plain_hash(plain_key("row groups", seed, epoch), group),
    )
    straight = [(group, row) for group in groups for row in range(rows[group])]
    found = []
    for start, stop in itertools.pairwise(lane_bounds(len(straight), num_lanes).tolist()):
        lane = straight[start:stop]
        pieces = [list(piece) for _, piece in itertools.groupby(lane, key=lambda one: one[0])]
        for first in range(0, len(pieces), window):
            together = [one for piece in pieces[first : first + window] for one in piece]
            key = plain_key("rows", seed, epoch, start + sum(map(len, pieces[:first])))
            found += [together[place] for place in plain_permutation(key, len(together))]
    return found


def test_the_order_itself_is_golden() -> None:
    """Rows of a small table in the order of version 1: this must never change."""
    layout = EpochLayout.build(np.array([3, 0, 4, 2], np.int64), spec_of(2, seed=7), 1, 2)
    assert located(layout) == GOLDEN == plain_order([3, 0, 4, 2], 7, 1, 2, 2)


@given(tables, windows, st.integers(0, 3), st.integers(1, 6), st.integers(-(2**63), 2**64 - 1))
def test_the_order_is_that_of_the_description(
    group_rows: np.ndarray, window: int, epoch: int, num_lanes: int, seed: int
) -> None:
    layout = EpochLayout.build(group_rows, spec_of(window, seed=seed), epoch, num_lanes)
    assert located(layout) == plain_order(group_rows.tolist(), seed, epoch, num_lanes, window)

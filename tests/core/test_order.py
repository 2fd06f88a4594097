"""The order of an epoch: every row has one position; lanes and windows partition positions."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core import order
from lakeckpt.core.order import EpochLayout, OrderSpec, lane_bounds

GROUPS = st.lists(st.integers(0, 9), max_size=12)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], EpochLayout]:
    groups = draw(GROUPS)
    shuffle = draw(st.booleans())
    spec = OrderSpec(
        seed=draw(st.integers(-(2**63), 2**64 - 1)), shuffle=shuffle, window=draw(st.integers(1, 5)) if shuffle else 1
    )
    num_lanes = draw(st.integers(1, 8))
    rotation = draw(st.integers(0, num_lanes - 1))
    layout = EpochLayout.build(np.array(groups, np.int64), spec, draw(st.integers(0, 3)), num_lanes, rotation)
    return groups, layout


@given(layouts())
def test_every_row_of_the_table_has_one_position(made: tuple[list[int], EpochLayout]) -> None:
    groups, layout = made
    located = layout.locate(np.arange(layout.rows))
    found = sorted(zip(*(array.tolist() for array in located), strict=True))
    assert found == [(group, row) for group, rows in enumerate(groups) for row in range(rows)]


@given(layouts(), st.randoms(use_true_random=False))
def test_a_position_is_located_alone_as_among_others(
    made: tuple[list[int], EpochLayout], chance: random.Random
) -> None:
    _, layout = made
    positions = list(range(layout.rows))
    chance.shuffle(positions)
    groups, rows = layout.locate(np.array(positions, np.int64))
    for position, group, row in zip(positions, groups.tolist(), rows.tolist(), strict=True):
        alone = layout.locate(np.array([position]))
        assert (alone[0][0], alone[1][0]) == (group, row)


@given(layouts())
def test_windows_partition_lanes_and_hold_so_many_row_groups(made: tuple[list[int], EpochLayout]) -> None:
    _, layout = made
    lanes = list(itertools.pairwise(layout.lane_bounds.tolist()))
    assert lanes[0][0] == 0
    assert lanes[-1][1] == layout.rows
    for start, stop in lanes:
        windows = layout.windows(start, stop)
        assert [window.start for window in windows] == [start, *(window.stop for window in windows[:-1])][
            : len(windows)
        ]
        assert (windows[-1].stop if windows else start) == stop
        for window in windows:
            assert window.rows == sum(fragment.rows for fragment in window.fragments)
            assert 1 <= len(window.fragments) <= layout.spec.window
            assert all(layout.window_at(position) == window for position in range(window.start, window.stop))


@given(layouts())
def test_row_groups_are_cut_only_where_lanes_end(made: tuple[list[int], EpochLayout]) -> None:
    groups, layout = made
    fragments = [fragment for window in layout.windows(0, layout.rows) for fragment in window.fragments]
    assert len(fragments) - sum(rows > 0 for rows in groups) <= layout.num_lanes - 1


@given(st.integers(0, 100), st.integers(1, 20), st.data())
def test_lanes_are_equal_to_within_a_row_and_extras_rotate(rows: int, num_lanes: int, data: st.DataObject) -> None:
    rotation = data.draw(st.integers(0, num_lanes - 1))
    sizes = np.diff(lane_bounds(rows, num_lanes, rotation)).tolist()
    extra = {(rotation + i) % num_lanes for i in range(rows % num_lanes)}
    assert sizes == [rows // num_lanes + (lane in extra) for lane in range(num_lanes)]


@given(GROUPS, st.integers(1, 6))
def test_unshuffled_positions_are_in_table_order_whatever_the_lanes(groups: list[int], num_lanes: int) -> None:
    spec = OrderSpec(seed=3, shuffle=False, window=1)
    layout = EpochLayout.build(np.array(groups, np.int64), spec, 5, num_lanes)
    located = layout.locate(np.arange(layout.rows))
    found = list(zip(*(array.tolist() for array in located), strict=True))
    assert found == [(group, row) for group, rows in enumerate(groups) for row in range(rows)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    groups = np.full(8, 16)
    orders = {
        tuple(
            EpochLayout.build(groups, OrderSpec(seed=seed, shuffle=True, window=2), epoch, 2).locate(np.arange(128))[0]
        )
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_a_window_of_too_many_rows_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MAX_PERMUTED", 10)
    layout = EpochLayout.build(np.array([7, 25, 3]), OrderSpec(seed=0, shuffle=True, window=3), 0, 1)
    assert [window.rows for window in layout.windows(0, 35)] == [10, 10, 10, 5]
    located = layout.locate(np.arange(35))
    assert len(set(zip(*(array.tolist() for array in located), strict=True))) == 35


@pytest.mark.parametrize(
    ("seed", "shuffle", "window", "message"),
    [(2**64, True, 4, "64 bits"), (0, True, 0, "at least one row group"), (0, False, 2, "windows of one row group")],
)
def test_orders_that_cannot_be_are_refused(seed: int, shuffle: bool, window: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrderSpec(seed=seed, shuffle=shuffle, window=window)


def test_places_outside_are_refused() -> None:
    layout = EpochLayout.build(np.array([4]), OrderSpec(seed=0, shuffle=True, window=1), 0, 1)
    with pytest.raises(ValueError, match="position 4 lies outside of an epoch of 4 rows"):
        layout.window_at(4)
    with pytest.raises(ValueError, match="no such layout"):
        EpochLayout.build(np.array([4]), layout.spec, 0, 2, 2)

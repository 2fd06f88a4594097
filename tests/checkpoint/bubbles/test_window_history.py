"""How much longer a wait goes on, by how long those before it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.bubbles.policy import WindowHistory

LENGTHS = st.lists(st.floats(0, 100), min_size=1, max_size=16)


def history(*lengths: float) -> WindowHistory:
    made = WindowHistory()
    for length in lengths:
        made.record("gap", length)
    return made


def test_a_window_is_expected_to_be_as_long_as_the_shorter_ones_before() -> None:
    assert history(4, 1, 2, 3).expected_s("gap") == 2


def test_waits_that_are_nothing_or_long_are_told_apart_by_how_long_one_lasts() -> None:
    made = history(0.1, 0.1, 0.1, 30.0)
    assert made.remaining_s("gap", 0.0) == 0.1
    assert made.remaining_s("gap", 0.2) == pytest.approx(29.8)
    assert made.ready_s("gap", 0.0, 5.0) == 0.1


def test_a_window_that_outlasts_all_that_is_known_is_trusted_for_as_long_as_it_did() -> None:
    made = history(2.0)
    assert made.remaining_s("gap", 2.0) == 0
    assert made.remaining_s("gap", 5.0) == 3.0
    assert made.ready_s("gap", 0.0, 3.0) == 5.0


def test_of_a_site_that_nobody_knows_nothing_is_expected() -> None:
    assert WindowHistory().expected_s("gap") == 0
    assert WindowHistory().ready_s("gap", 0.5, 2.0) == 2.0


def test_old_lengths_are_forgotten() -> None:
    made = history(1.0, *[8.0] * 15)
    assert made.remaining_s("gap", 0.0, 0.0) == 1.0
    made.record("gap", 8.0)
    assert made.remaining_s("gap", 0.0, 0.0) == 8.0
    assert made.expected_s("gap") == 8.0


@given(LENGTHS, st.floats(0, 120), st.floats(0.001, 50))
def test_a_window_is_ready_at_the_first_instant_at_which_enough_remains(
    lengths: list[float], elapsed: float, need: float
) -> None:
    made = WindowHistory()
    for length in lengths:
        made.record("gap", length)
    ready = made.ready_s("gap", elapsed, need)
    assert ready >= elapsed
    assert made.remaining_s("gap", ready) >= need - 1e-9
    for before in [elapsed, *lengths]:
        if elapsed <= before < ready:
            assert made.remaining_s("gap", before) < need


def test_what_is_measured_after_it_was_asked_for_counts() -> None:
    history = WindowHistory()
    assert (history.expected_s("a"), history.longest_s("a")) == (0.0, float("inf"))
    for length_s, expected in ((1.0, (1.0, 1.0)), (3.0, (1.0, 3.0)), (0.5, (0.5, 3.0)), (4.0, (1.0, 4.0))):
        history.record("a", length_s)
        assert (history.expected_s("a"), history.longest_s("a")) == expected

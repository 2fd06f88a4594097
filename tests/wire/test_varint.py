"""Interval lists: short, exact, one spelling each, and refused when damaged."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged
from lakeckpt.wire.varint import (
    NUMBER_LIMIT,
    POSITION_LIMIT,
    pack_intervals,
    pack_numbers,
    unpack_intervals,
    unpack_numbers,
)

bounds = st.lists(st.integers(min_value=0, max_value=POSITION_LIMIT), unique=True, max_size=40).map(sorted)
interval_lists = bounds.map(lambda b: list(zip(b[::2], b[1::2], strict=False)))
touching_lists = bounds.map(lambda b: list(itertools.pairwise(b)))


@given(st.one_of(interval_lists, touching_lists))
def test_interval_lists_come_back_in_at_most_16_bytes_each(pairs: list[tuple[int, int]]) -> None:
    data = pack_intervals(pairs)
    assert unpack_intervals(data) == pairs
    assert len(data) <= 16 * len(pairs)


def test_the_widest_interval_takes_sixteen_bytes() -> None:
    half = POSITION_LIMIT // 2
    assert len(pack_intervals([(half, POSITION_LIMIT)])) == 16
    assert pack_intervals([]) == b"" and unpack_intervals(b"") == []


@pytest.mark.parametrize(
    "pairs",
    [[(1, 1)], [(2, 1)], [(-1, 1)], [(0, 2), (1, 3)], [(4, 5), (0, 1)], [(0, POSITION_LIMIT + 1)], [(2**60, 2**61)]],
)
def test_lists_that_are_not_sorted_disjoint_and_in_range_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(UnsupportedValue, match="sorted, disjoint"):
        pack_intervals(pairs)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_the_only_spelling_of_what_they_say(data: bytes) -> None:
    try:
        pairs = unpack_intervals(data)
    except WireDamaged:
        return
    assert pack_intervals(pairs) == data


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x00", "does not end"),
        (b"\x80", "does not end"),
        (b"\x00\x80", "does not end"),
        (b"\x00\x00", "empty"),
        (b"\x80\x00\x01", "longer than it needs"),
        (b"\x00" + b"\xff" * 8 + b"\x7f", "out of range"),
        (b"\xff" * 200, "does not end"),
    ],
)
def test_damaged_lists_say_what_is_wrong(data: bytes, what: str) -> None:
    with pytest.raises(WireDamaged, match=what):
        unpack_intervals(data)


def test_more_intervals_than_allowed_are_refused() -> None:
    data = pack_intervals([(2 * i, 2 * i + 1) for i in range(20)])
    assert len(unpack_intervals(data, most=20)) == 20
    with pytest.raises(LimitExceeded):
        unpack_intervals(data, most=19)
    with pytest.raises(LimitExceeded):
        unpack_intervals(data, most=2)


@given(st.lists(st.integers(0, NUMBER_LIMIT - 1) | st.integers(0, 300), max_size=20))
def test_numbers_come_back_in_a_byte_for_each_seven_bits(numbers: list[int]) -> None:
    data = pack_numbers(numbers)
    assert list(unpack_numbers(data)) == numbers
    assert len(data) == sum(max(1, -(-number.bit_length() // 7)) for number in numbers)


@pytest.mark.parametrize("number", [-1, NUMBER_LIMIT, 2**70])
def test_numbers_that_could_not_be_read_again_are_refused(number: int) -> None:
    assert list(unpack_numbers(pack_numbers([NUMBER_LIMIT - 1]))) == [NUMBER_LIMIT - 1]
    with pytest.raises(UnsupportedValue, match=f"{number} is not a number from 0 to"):
        pack_numbers([1, number])


def test_a_number_of_more_bits_is_refused_where_it_is_read() -> None:
    with pytest.raises(WireDamaged, match="byte 10 of a list of numbers: a number does not end"):
        list(unpack_numbers(b"\x01" + b"\xff" * 9 + b"\x01"))

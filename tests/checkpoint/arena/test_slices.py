"""Slices: every byte of every tensor is copied exactly once, to a place of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.arena.slices import fitting_slice_bytes, plan_slices
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.lake.storage.direct import PAGE_BYTES, STRAIGHT_BYTES


@given(st.lists(st.integers(0, 700), max_size=30), st.integers(1, 8))
def test_slices_hold_every_byte_once_and_tensors_do_not_overlap(sizes: list[int], units: int) -> None:
    plan = plan_slices({f"t{n}": size for n, size in enumerate(sizes)}, slice_bytes=64 * units)
    copied: dict[str, bytearray] = {f"t{n}": bytearray(size) for n, size in enumerate(sizes)}
    taken = bytearray(plan.data_bytes)
    for number, pieces in enumerate(plan.slices):
        low, high = plan.bounds(number)
        assert 0 < high - low <= 64 * units
        for piece in pieces:
            at, _ = plan.places[piece.key]
            assert piece.at == at + piece.start
            assert low <= piece.at < piece.at + piece.stop - piece.start <= high
            for i in range(piece.start, piece.stop):
                copied[piece.key][i] += 1
                taken[at + i] += 1
    assert all(set(found) <= {1} for found in copied.values())
    assert set(taken) <= {0, 1}
    assert all(at % 64 == 0 for at, _ in plan.places.values())


def test_large_tensors_begin_at_pages() -> None:
    plan = plan_slices({"a": 100, "b": STRAIGHT_BYTES, "c": 1, "d": STRAIGHT_BYTES + 1}, slice_bytes=2**20)
    assert [plan.places[key][0] % PAGE_BYTES for key in "abd"] == [0, 0, 0]
    assert plan.places["b"][0] == PAGE_BYTES


def test_the_largest_tensors_begin_at_leaves_of_digests_and_little_is_lost() -> None:
    sizes = {"a": 100, "b": 8 * LEAF_BYTES + 1, "c": 4 * LEAF_BYTES, "d": 4 * LEAF_BYTES + 1, "e": 9 * LEAF_BYTES}
    plan = plan_slices(sizes, slice_bytes=16 * LEAF_BYTES)
    assert [plan.places[key][0] % LEAF_BYTES for key in "bce"] == [0, 0, 0]
    assert plan.places["d"][0] % PAGE_BYTES == 0
    assert plan.data_bytes < 1.13 * sum(sizes.values())


def test_plans_of_other_sizes_names_or_slices_have_other_digests() -> None:
    plans = [
        plan_slices({"a": 64, "b": 1}, slice_bytes=64),
        plan_slices({"a": 64, "c": 1}, slice_bytes=64),
        plan_slices({"a": 63, "b": 1}, slice_bytes=64),
        plan_slices({"a": 64, "b": 1}, slice_bytes=128),
        plan_slices({"b": 1, "a": 64}, slice_bytes=64),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert plan_slices({"a": 64, "b": 1}, slice_bytes=64).digest == plans[0].digest


@given(st.integers(0, 2**42), st.booleans())
def test_slices_are_many_wherever_they_can_be_and_whole_leaves_always(size_bytes: int, linked: bool) -> None:
    found = fitting_slice_bytes(size_bytes, linked=linked)
    least, most, few = (4, 64, 64) if linked else (1, 16, 256)
    assert least * LEAF_BYTES <= found <= most * LEAF_BYTES and found % LEAF_BYTES == 0
    assert found == least * LEAF_BYTES or size_bytes >= few * found
    assert found == most * LEAF_BYTES or size_bytes < 2 * few * found

"""The permutation, held to golden numbers, to an independent implementation, and to being a bijection."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.hashing import (
    MAX_PERMUTED,
    PERMUTATION_VERSION,
    derive_key,
    hash64,
    permutation,
    places_in_order,
)
from tests.core.plain_hashing import MASK, plain_hash, plain_key, plain_permutation

# --- golden numbers: what released versions gave; never to be changed, only added to

KEYS = {
    ("row groups", 7, 0): (12655043861791806808, 4595562169041436489),
    ("rows", -1, 3, 2**40): (12973828477246055172, 16611777285383885170),
    ("rows", 2**64 - 1, 3, 2**40): (12973828477246055172, 16611777285383885170),
    ("",): (17245373046932444649, 1703887634311861579),
}
HASHES = [
    (0, 18339027244292831740),
    (1, 14540275149421822999),
    (2, 15264812535848773352),
    (255, 3802407995136612766),
    (4294967296, 1971738257097919587),
    (9223372036854775808, 9579431953551340457),
    (18446744073709551615, 6240464953552619369),
]
PERMUTATIONS = {
    0: ([], "e4a6a0577479b2b4"),
    1: ([0], "ca08ea5bca49cc18"),
    2: ([0, 1], "eb82aaee034ca970"),
    13: ([2, 11, 10, 0, 5, 1, 6, 12, 8, 4, 9, 7], "562f52825e5c763f"),
    1000: ([185, 172, 28, 627, 968, 832, 50, 984, 505, 243, 885, 287], "303df6a4bb13aba4"),
    1000000: (
        [628118, 390755, 996078, 394853, 395859, 911992, 203553, 606854, 690839, 232540, 543210, 893412],
        "6b20caa00982bf26",
    ),
}


def test_the_version_is_the_one_that_the_golden_numbers_are_of() -> None:
    assert PERMUTATION_VERSION == 1


@pytest.mark.parametrize("arguments", KEYS)
def test_golden_keys(arguments: tuple[Any, ...]) -> None:
    assert derive_key(*arguments) == KEYS[arguments] == plain_key(*arguments)


def test_golden_hashes() -> None:
    key = derive_key("golden", 1)
    numbers = [number for number, _ in HASHES]
    assert hash64(key, np.array(numbers, np.uint64)).tolist() == [found for _, found in HASHES]
    assert [plain_hash(key, number) for number in numbers] == [found for _, found in HASHES]


@pytest.mark.parametrize("count", PERMUTATIONS)
def test_golden_permutations(count: int) -> None:
    key = derive_key("golden", 2)
    found = permutation(key, count)
    first, digest = PERMUTATIONS[count]
    assert found.dtype == np.int64 and found[:12].tolist() == first
    assert hashlib.blake2b(found.astype("<i8").tobytes(), digest_size=8).hexdigest() == digest
    if count <= 5000:
        assert found.tolist() == plain_permutation(key, count)


# --- laws


@given(st.sets(st.integers(0, 40) | st.integers(2**63, 2**63 + 40) | st.integers(0, 2**64 - 1), max_size=60))
def test_places_are_those_of_sorting_also_where_words_differ_in_their_lowest_bits_alone(words: set[int]) -> None:
    array = np.array(sorted(words, key=lambda word: word % 37), np.uint64)
    assert places_in_order(array).tolist() == np.argsort(array).tolist()


@given(st.text(max_size=20), st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4))
def test_keys_are_those_of_the_description(domain: str, numbers: list[int]) -> None:
    assert derive_key(domain, *numbers) == plain_key(domain, *numbers)


keys = st.tuples(st.integers(0, MASK), st.integers(0, MASK))


@given(keys, st.lists(st.integers(0, MASK), max_size=20))
def test_hashes_are_those_of_the_description(key: tuple[int, int], numbers: list[int]) -> None:
    given_numbers = np.array(numbers, np.uint64)
    before = given_numbers.tolist()
    assert hash64(key, given_numbers).tolist() == [plain_hash(key, number) for number in numbers]
    assert given_numbers.tolist() == before


@given(keys, st.integers(0, 300))
def test_permutations_are_those_of_the_description(key: tuple[int, int], count: int) -> None:
    assert permutation(key, count).tolist() == plain_permutation(key, count)


def is_bijection(found: np.ndarray[Any, Any]) -> bool:
    seen = np.zeros(len(found), np.bool_)
    seen[found] = True
    return bool(seen.all())


def test_permutations_of_every_small_size_are_bijections() -> None:
    for count in range(2049):
        assert is_bijection(permutation(derive_key("bijection", count), count)), count


@pytest.mark.parametrize("count", [2**12 - 1, 10**4 + 7, 2**16, 2**17 + 1, 10**5, 3 * 10**5 + 3, 2**19, 777_777, 10**6])
def test_permutations_of_large_sizes_are_bijections(count: int) -> None:
    for seed in range(2):
        found = permutation(derive_key("large", seed), count)
        assert is_bijection(found)
        # and no place is favoured: about one element stays where it was
        assert int((found == np.arange(count)).sum()) < 12


@pytest.mark.parametrize("count", [100, 2**19 + 1, 2**20, 3 * 2**20])
def test_permutations_are_in_the_order_of_hashes(count: int) -> None:
    key = derive_key("in order", count)
    in_order = hash64(key, np.arange(count, dtype=np.uint64))[permutation(key, count)]
    assert (in_order[1:] > in_order[:-1]).all()


def test_hashes_of_a_million_numbers_are_distinct() -> None:
    for key in ((0, 0), derive_key("distinct", 5)):
        assert len(np.unique(hash64(key, np.arange(10**6, dtype=np.uint64)))) == 10**6


def test_every_place_of_a_permutation_is_about_equally_likely() -> None:
    counts = np.zeros((8, 8), np.int64)
    for seed in range(4000):
        counts[np.arange(8), permutation(derive_key("fair", seed), 8)] += 1
    expected = 4000 / 8
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square with 49 degrees of freedom, far out


@pytest.mark.parametrize("count", [-1, MAX_PERMUTED + 1])
def test_sizes_that_cannot_be_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"got {count}"):
        permutation((0, 0), count)

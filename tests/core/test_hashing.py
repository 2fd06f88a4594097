"""The permutation is ours: the same in every release, on every machine, and a bijection for every size."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.hashing import MAX_PERMUTED, PERMUTATION_VERSION, derive_key, hash64, permutation

WORD = 2**64
WORDS = st.integers(0, WORD - 1)


def mix(word: int) -> int:
    """SplitMix64's finalizer, in plain Python."""
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 % WORD
    word ^= word >> 27
    word = word * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def plain_key(domain: str, *numbers: int) -> tuple[int, int]:
    data = domain.encode() + b"\0" + b"".join((number % WORD).to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(data, digest_size=16, person=b"lakeckpt-order1").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def plain_permutation(key: tuple[int, int], count: int) -> list[int]:
    return sorted(range(count), key=lambda number: mix((mix(number ^ key[0]) + key[1]) % WORD))


def test_golden_permutations_have_not_changed() -> None:
    assert PERMUTATION_VERSION == 1
    assert derive_key("rows", 7, 0, 1000) == (GOLDEN_KEY := plain_key("rows", 7, 0, 1000))
    assert [hex(word) for word in GOLDEN_KEY] == ["0x82b6bab620439724", "0xe7a21bb3cfd83599"]
    assert permutation(GOLDEN_KEY, 16).tolist() == [14, 7, 11, 12, 6, 1, 4, 3, 2, 9, 13, 8, 0, 15, 10, 5]
    assert permutation(derive_key("row groups", -1, 3), 12).tolist() == [8, 4, 7, 5, 10, 6, 2, 1, 3, 9, 11, 0]
    assert [hex(word) for word in hash64((1, 2), np.array([0, 1, 2**64 - 1], np.uint64)).tolist()] == [
        "0xef30b01c2974aeeb",
        "0xdbd238973a2b148a",
        "0x7043262305b46351",
    ]
    digest = hashlib.blake2b(permutation(derive_key("rows", 1), 10**6).tobytes(), digest_size=8).hexdigest()
    assert digest == "7bd6f11e61c2fdd8"


@given(st.text(max_size=20), st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4))
def test_keys_are_those_of_the_published_algorithm(domain: str, numbers: list[int]) -> None:
    assert derive_key(domain, *numbers) == plain_key(domain, *numbers)


@given(st.tuples(WORDS, WORDS), st.integers(0, 300))
def test_permutations_are_those_of_the_published_algorithm(key: tuple[int, int], count: int) -> None:
    assert permutation(key, count).tolist() == plain_permutation(key, count)


@given(st.tuples(WORDS, WORDS), st.lists(WORDS, unique=True, max_size=50))
def test_distinct_numbers_never_have_equal_hashes(key: tuple[int, int], numbers: list[int]) -> None:
    hashes = hash64(key, np.array(numbers, np.uint64))
    assert len(set(hashes.tolist())) == len(numbers)


def test_every_size_up_to_a_few_thousand_is_permuted_bijectively() -> None:
    for count in range(2_000):
        assert np.array_equal(np.sort(permutation((count, 7), count)), np.arange(count))


@pytest.mark.parametrize("count", [65_535, 65_536, 131_073, 999_983, 1_000_000])
def test_large_sizes_are_permuted_bijectively(count: int) -> None:
    for key in ((0, 0), (WORD - 1, WORD - 1), derive_key("rows", 7, 1)):
        assert np.array_equal(np.sort(permutation(key, count)), np.arange(count))


def test_a_permutation_is_not_near_its_neighbours_or_the_identity() -> None:
    first, second = permutation(derive_key("rows", 0), 10_000), permutation(derive_key("rows", 1), 10_000)
    assert (first == second).sum() < 20
    assert (first == np.arange(10_000)).sum() < 20
    assert abs(float(np.corrcoef(first, np.arange(10_000))[0, 1])) < 0.05


@pytest.mark.parametrize("count", [-1, MAX_PERMUTED + 1])
def test_sizes_that_cannot_be_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="0 to 134217728 elements"):
        permutation((0, 0), count)

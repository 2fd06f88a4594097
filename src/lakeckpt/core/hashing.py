"""This module permutes n things by sorting keyed 64-bit hashes that this project defines.

A permutation must be the same on every machine and in every release, so it is never taken from a library's random
stream. Version 1, in full:

1. ``derive_key``: BLAKE2b (RFC 7693) with 16 bytes of digest and the personalisation ``lakeckpt-order1`` over the
   domain's UTF-8 bytes, a zero byte, and each integer as 8 bytes (two's complement, little-endian). The digest read
   as two little-endian 64-bit words is the key ``(k0, k1)``.
2. ``hash64``: ``mix(mix(i XOR k0) + k1)`` modulo 2^64, where ``mix`` is the finalizer of SplitMix64 (Steele, Lea and
   Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with Stafford's constants, variant 13).
3. ``permutation``: the order of 0 … n-1 by their hashes.

``mix``, XOR and addition are bijections of 64-bit words, so the hashes of distinct numbers under one key are distinct:
there are no ties, and every correct sorting algorithm gives the same permutation.

It never draws random numbers and keeps no state. It is not cryptographic: it hides nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "DIGITS",
    "MAX_PERMUTED",
    "PERMUTATION_VERSION",
    "USUAL",
    "Means",
    "derive_key",
    "hash64",
    "permutation",
]

PERMUTATION_VERSION = 1
"""Raised whenever any of the three steps changes; part of every reader state."""

MAX_PERMUTED = 1 << 27
"""The most things that are permuted at once (2^27: 1 GiB of hashes)."""

UInt16Array = npt.NDArray[np.uint16]
UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
_T = TypeVar("_T", bound=np.generic)

_WORD = (1 << 64) - 1


def derive_key(domain: str, *numbers: int) -> tuple[int, int]:
    """Return the 128-bit key of ``domain`` and ``numbers`` as two unsigned 64-bit words.

    Numbers are taken modulo 2^64, so that any seed that fits 64 bits, signed or not, is allowed.

    >>> derive_key("rows", 7, 0) == derive_key("rows", 7, 1)
    False
    """
    digest = hashlib.blake2b(digest_size=16, person=b"lakeckpt-order1")
    digest.update(domain.encode())
    digest.update(b"\0")
    for number in numbers:
        digest.update((number & _WORD).to_bytes(8, "little"))
    raw = digest.digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


_FIRST: UInt64Array = np.arange(1 << 10, dtype=np.uint64)


def _count_up(words: UInt64Array) -> None:
    """Make ``words`` 0 … n-1, in a few calls: a thread may have to wait for the interpreter after each."""
    words[: len(_FIRST)] = _FIRST[: len(words)]
    done = len(_FIRST)
    while done < len(words):
        more = min(done, len(words) - done)
        np.add(words[:more], np.uint64(done), out=words[done : done + more])
        done += more


def _mix(words: UInt64Array, scratch: UInt64Array) -> None:
    """Apply the SplitMix64 finalizer to ``words`` in place; ``scratch`` is as long."""
    words ^= np.right_shift(words, np.uint64(30), out=scratch)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= np.right_shift(words, np.uint64(27), out=scratch)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= np.right_shift(words, np.uint64(31), out=scratch)


def hash64(key: tuple[int, int], numbers: UInt64Array) -> UInt64Array:
    """Return the keyed hash of each of ``numbers`` (uint64, shape (n,)) as a new uint64 array of shape (n,)."""
    words = numbers.copy()
    _hash(key, words, np.empty_like(words))
    return words


def _hash(key: tuple[int, int], words: UInt64Array, scratch: UInt64Array) -> None:
    """Put the hash of each of ``words`` in its place; ``scratch`` is as long."""
    words ^= np.uint64(key[0])
    _mix(words, scratch)
    words += np.uint64(key[1])
    _mix(words, scratch)


def _new(count: int) -> UInt64Array:
    return np.empty(count, np.uint64)


def _counted(digits: UInt16Array) -> Int64Array:
    return np.argsort(digits, kind="stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a permutation is made with. It never changes the outcome, only how long that takes."""

    new: Callable[[int], UInt64Array] = _new
    """Makes arrays of so many words, of whatever values: memory that the system has to find costs as hashing does."""
    counted: Callable[[UInt16Array], Int64Array] = _counted
    """The places of digits, numbers below `DIGITS`, in ascending order; of those that are equal, in their own order."""


USUAL = Means()


def permutation(key: tuple[int, int], count: int, means: Means = USUAL) -> Int64Array:
    """Return 0 … ``count`` - 1 (int64, shape (count,)) in the order of their hashes under ``key``.

    Element ``i`` is what stands at place ``i``. ``count`` is at most ``MAX_PERMUTED``.
    """
    if not 0 <= count <= MAX_PERMUTED:
        raise ValueError(f"a permutation has 0 to {MAX_PERMUTED} elements, got {count}")
    words, scratch = means.new(count), means.new(count)
    _count_up(words)
    _hash(key, words, scratch)
    return _sorted_places(words, scratch, means)


def _sorted_places(words: UInt64Array, scratch: UInt64Array, means: Means) -> Int64Array:
    """Return the places of ``words`` (distinct hashes) in ascending order of the words.

    The upper 24 bits of the words (36, of more than a million words) are sorted by counting, digit after digit from the
    lowest, and the few neighbours that do not differ in those bits are put right afterwards. That takes 20 to 25 ns a
    word on any processor. ``np.argsort`` takes 12 to 18 where it has fast vector instructions, and 50 to 90 elsewhere.
    ``words`` and ``scratch`` are used up.
    """
    count = len(words)
    digits, rearranged = scratch.view(np.uint16).reshape(4, -1)[:2]
    places: Int64Array | None = None
    shifts = [64 - _DIGIT_BITS * place for place in range(_digits(count), 0, -1)]
    for shift in shifts:
        np.right_shift(words, np.uint64(shift), out=digits, casting="unsafe")
        digits &= np.uint16(DIGITS - 1)
        if places is None:
            places = means.counted(digits)
        else:
            counted = means.counted(_take(digits, places, rearranged))
            places = _take(places, counted, means.new(count).view(np.int64))
    assert places is not None
    in_order = _take(words, places, scratch)
    tied = np.flatnonzero(np.bitwise_xor(in_order[1:], in_order[:-1], out=words[1:]) < np.uint64(1 << shifts[0]))
    swapped = len(tied) > 0
    while swapped:  # by turns those that do not overlap, until each run of ties is in order
        swapped = False
        for left in (tied[tied % 2 == 0], tied[tied % 2 == 1]):
            wrong = left[in_order[left] > in_order[left + 1]]
            for one in (in_order, places):
                one[wrong], one[wrong + 1] = one[wrong + 1], one[wrong]
            swapped = swapped or len(wrong) > 0
    return places


def _take(array: npt.NDArray[_T], places: Int64Array, out: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Return the elements at ``places``, which are there: in the mode "raise" numpy would make a copy first."""
    return np.take(array, places, out=out, mode="wrap")


_DIGIT_BITS = 12
DIGITS = 1 << _DIGIT_BITS


def _digits(count: int) -> int:
    """Return how many digits tell most of ``count`` words apart: of 2^20, all but 3 %."""
    return 2 if count <= 1 << 20 else 3

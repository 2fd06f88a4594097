"""Which keyed order do n things have?  By sorting a keyed 64-bit hash that this project owns.

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

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_PERMUTED", "PERMUTATION_VERSION", "derive_key", "hash64", "permutation", "sorted_places"]

PERMUTATION_VERSION = 1
"""Raised whenever any of the three steps changes; part of every reader state."""

MAX_PERMUTED = 1 << 27
"""The most things that are permuted at once (2^27: 1 GiB of hashes)."""

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

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


_FIRST: UInt64Array = np.arange(1 << 15, dtype=np.uint64)


def _count_up(words: UInt64Array) -> None:
    """Make ``words`` 0 … n-1."""
    for start in range(0, len(words), len(_FIRST)):
        run = words[start : start + len(_FIRST)]
        np.add(_FIRST[: len(run)], np.uint64(start), out=run)


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


def permutation(key: tuple[int, int], count: int, *, new: Callable[[int], UInt64Array] = _new) -> Int64Array:
    """Return 0 … ``count`` - 1 (int64, shape (count,)) in the order of their hashes under ``key``.

    Element ``i`` is what stands at place ``i``. ``count`` is at most ``MAX_PERMUTED``. ``new`` makes arrays of so many
    words, of whatever values: memory that the system has to find each time costs as much as hashing.
    """
    if not 0 <= count <= MAX_PERMUTED:
        raise ValueError(f"a permutation has 0 to {MAX_PERMUTED} elements, got {count}")
    words, scratch, packed = new(count), new(count), new(count)
    _count_up(words)
    _hash(key, words, scratch)
    return _sorted_places(words, scratch, packed)


def sorted_places(words: UInt64Array) -> Int64Array:
    """Return the places of ``words`` (uint64, shape (n,), distinct, n at most 2^32) in ascending order of the words.

    As ``np.argsort``, in a fraction of its time: numpy sorts values with vector instructions. Each word's low bits give
    way to its place; the few neighbours that do not differ above those are put right afterwards.
    """
    return _sorted_places(words, np.empty_like(words), np.empty_like(words))


def _sorted_places(words: UInt64Array, scratch: UInt64Array, packed: UInt64Array) -> Int64Array:
    """`sorted_places`, in the memory of ``packed``."""
    place_bits = max(1, (len(words) - 1).bit_length())
    low = np.uint64((1 << place_bits) - 1)
    np.bitwise_and(words, ~low, out=packed)
    _count_up(scratch)
    packed |= scratch
    packed.sort()
    tied = np.flatnonzero(np.bitwise_xor(packed[1:], packed[:-1], out=scratch[1:]) <= low)
    packed &= low
    places = packed.view(np.int64)
    swapped = len(tied) > 0
    while swapped:  # by turns those that do not overlap, until each run of ties is in order
        swapped = False
        for left in (tied[tied % 2 == 0], tied[tied % 2 == 1]):
            wrong = left[words[places[left]] > words[places[left + 1]]]
            places[wrong], places[wrong + 1] = places[wrong + 1], places[wrong]
            swapped = swapped or len(wrong) > 0
    return places

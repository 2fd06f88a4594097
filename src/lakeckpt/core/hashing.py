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

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_PERMUTED", "PERMUTATION_VERSION", "derive_key", "hash64", "permutation", "places_in_order"]

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


def _mix(words: UInt64Array, scratch: UInt64Array) -> None:
    """Apply the SplitMix64 finalizer to ``words`` in place; ``scratch`` is as long."""
    words ^= np.right_shift(words, np.uint64(30), out=scratch)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= np.right_shift(words, np.uint64(27), out=scratch)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= np.right_shift(words, np.uint64(31), out=scratch)


def hash64(key: tuple[int, int], numbers: UInt64Array) -> UInt64Array:
    """Return the keyed hash of each of ``numbers`` (uint64, shape (n,)) as a new uint64 array of shape (n,)."""
    words = numbers ^ np.uint64(key[0])
    scratch = np.empty_like(words)
    _mix(words, scratch)
    words += np.uint64(key[1])
    _mix(words, scratch)
    return words


def permutation(key: tuple[int, int], count: int) -> Int64Array:
    """Return 0 … ``count`` - 1 (int64, shape (count,)) in the order of their hashes under ``key``.

    Element ``i`` is what stands at place ``i``. ``count`` is at most ``MAX_PERMUTED``.
    """
    if not 0 <= count <= MAX_PERMUTED:
        raise ValueError(f"a permutation has 0 to {MAX_PERMUTED} elements, got {count}")
    return places_in_order(hash64(key, np.arange(count, dtype=np.uint64)))


def places_in_order(words: UInt64Array) -> Int64Array:
    """Return the places of ``words`` (uint64, shape (n,), distinct) in ascending order of words (int64, shape (n,)).

    It is ``np.argsort``, in a third of the time if the words are hashes: numpy sorts 16-bit numbers by counting, so
    the upper two 16-bit digits are sorted one after the other, from the lower to the upper one. The few neighbours that
    do not differ in these digits are sorted by the whole words afterwards.
    """
    places = np.argsort((words >> np.uint64(32)).astype(np.uint16), kind="stable")
    places = places[np.argsort((words >> np.uint64(48)).astype(np.uint16)[places], kind="stable")]
    in_order = words[places]
    digits = in_order >> np.uint64(32)
    left = np.flatnonzero(digits[1:] == digits[:-1])
    tied = np.union1d(left, left + 1)
    places[tied] = places[tied][np.argsort(in_order[tied])]
    return places

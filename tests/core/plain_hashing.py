"""Version 1 of the permutation, written once more from its description in plain Python."""

from __future__ import annotations

import hashlib

MASK = 2**64 - 1


def plain_key(domain: str, *numbers: int) -> tuple[int, int]:
    message = domain.encode() + b"\0" + b"".join((n % 2**64).to_bytes(8, "little") for n in numbers)
    digest = hashlib.blake2b(message, digest_size=16, person=b"lakeckpt-order1").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def plain_mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def plain_hash(key: tuple[int, int], number: int) -> int:
    return plain_mix(plain_mix(number ^ key[0]) + key[1] & MASK)


def plain_permutation(key: tuple[int, int], count: int) -> list[int]:
    return sorted(range(count), key=lambda number: plain_hash(key, number))

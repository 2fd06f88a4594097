"""Are these the bytes that were captured?  Content digests that can be computed piece by piece, on several threads.

The digest of a content is XXH3-128 over the XXH3-128 digests of its leaves of 1 MiB (the last may be shorter; an empty
content has one empty leaf), with other seeds for leaves and whole. It runs at the speed of memory, so that digesting
costs less than writing; and leaves are what an arena has a checksum of, so that what was captured is digested already.
In parts of version 1 it was BLAKE2b-128 over leaves of 16 MiB. Threads are started and joined inside `leaves_of_all`:
both let go of the interpreter's lock. Digests notice accidents and tell replicas apart; they are no signatures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Literal

import xxhash

__all__ = [
    "CURRENT",
    "DIGEST_BYTES",
    "LEAF_BYTES",
    "PIECE_BYTES",
    "Algorithm",
    "ContentDigest",
    "LeafDigests",
    "content_digest",
    "digest_of_pieces",
    "leaf_digests",
    "leaves_of_all",
    "piece_digest",
    "short_digest",
]

Algorithm = Literal["xxh3", "blake2b"]
CURRENT: Algorithm = "xxh3"
"""How contents are digested that are written now."""
DIGEST_BYTES = 16
LEAF_BYTES = 2**20
PIECE_BYTES = 16 * 2**20
"""What is read or digested at once by one of several threads: whole leaves of either algorithm."""
_BLAKE_LEAF_BYTES = 16 * 2**20
_MOST_THREADS = 8
_ALONE_BYTES = 2**20


def short_digest(*parts: bytes | memoryview) -> bytes:
    """BLAKE2b-128 of the parts, each preceded by its length (8 bytes, big-endian), so that borders count."""
    found = blake2b(digest_size=DIGEST_BYTES, person=b"lakeckpt-parts")
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


def _leaf_bytes(algorithm: Algorithm) -> int:
    return LEAF_BYTES if algorithm == "xxh3" else _BLAKE_LEAF_BYTES


def _leaf(algorithm: Algorithm) -> Any:
    if algorithm == "xxh3":
        return xxhash.xxh3_128(seed=1)
    return blake2b(digest_size=DIGEST_BYTES, person=b"lakeckpt-piece")


def _whole(algorithm: Algorithm) -> Any:
    if algorithm == "xxh3":
        return xxhash.xxh3_128(seed=2)
    return blake2b(digest_size=DIGEST_BYTES, person=b"lakeckpt-whole")


def content_digest(data: bytes | memoryview, algorithm: Algorithm = CURRENT) -> bytes:
    """The digest of ``data`` (16 bytes)."""
    found = ContentDigest(algorithm)
    found.update(data)
    return found.digest()


def piece_digest(piece: bytes | memoryview, algorithm: Algorithm = CURRENT) -> bytes:
    """What `digest_of_pieces` needs of one of the pieces of `PIECE_BYTES` that a content consists of."""
    if algorithm == "xxh3":
        return leaf_digests(piece, LEAF_BYTES)
    found = _leaf(algorithm)
    found.update(piece)
    digest: bytes = found.digest()
    return digest


def leaf_digests(data: bytes | memoryview, leaf_bytes: int) -> bytes:
    """The digests of the leaves of ``data``, of ``leaf_bytes`` each but for the last, one behind the other."""
    view = memoryview(data)
    starts = range(0, max(len(view), 1), leaf_bytes)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + leaf_bytes], 1) for at in starts)


class LeafDigests:
    """`leaf_digests` of what comes in runs of any length; of leaves of ``leaf_bytes`` each but for the last."""

    __slots__ = ("_algorithm", "_found", "_in_leaf", "_leaf", "_leaf_bytes")

    def __init__(self, leaf_bytes: int, algorithm: Algorithm = CURRENT) -> None:
        self._algorithm: Algorithm = algorithm
        self._leaf_bytes, self._in_leaf = leaf_bytes, 0
        self._leaf, self._found = _leaf(algorithm), bytearray()

    def update(self, data: bytes | memoryview) -> None:
        """Take the next run of bytes."""
        view = memoryview(data)
        while len(view):
            taken = view[: self._leaf_bytes - self._in_leaf]
            self._leaf.update(taken)
            self._in_leaf += len(taken)
            view = view[len(taken) :]
            if self._in_leaf == self._leaf_bytes:
                self._found += self._leaf.digest()
                self._leaf, self._in_leaf = _leaf(self._algorithm), 0

    def digests(self) -> bytes:
        """The digests of all that came; nothing may come after it. Nothing at all is one empty leaf."""
        if self._in_leaf or not self._found:
            self._found += self._leaf.digest()
        return bytes(self._found)


class ContentDigest:
    """The digest of a content that comes in runs of any length."""

    __slots__ = ("_leaves", "_whole")

    def __init__(self, algorithm: Algorithm = CURRENT) -> None:
        self._whole, self._leaves = _whole(algorithm), LeafDigests(_leaf_bytes(algorithm), algorithm)

    def update(self, data: bytes | memoryview) -> None:
        """Take the next run of bytes."""
        self._leaves.update(data)

    def digest(self) -> bytes:
        """The digest of all that came (16 bytes); nothing may come after it."""
        self._whole.update(self._leaves.digests())
        found: bytes = self._whole.digest()
        return found


def digest_of_pieces(pieces: Sequence[bytes], algorithm: Algorithm = CURRENT) -> bytes:
    """The digest of a content by what `piece_digest` found in its pieces, in their order; at least one."""
    assert pieces
    found = _whole(algorithm)
    found.update(b"".join(pieces))
    digest: bytes = found.digest()
    return digest


def leaves_of_all(contents: Sequence[memoryview], *, threads: int | None = None) -> list[bytes]:
    """What `leaf_digests` says of each of ``contents``, in their order, on ``threads`` threads (by default as many as
    help)."""
    threads = min(os.cpu_count() or 1, _MOST_THREADS) if threads is None else threads
    if threads == 1 or sum(len(content) for content in contents) < _ALONE_BYTES:
        return [leaf_digests(content, LEAF_BYTES) for content in contents]
    with ThreadPoolExecutor(threads, thread_name_prefix="lakeckpt-digest") as pool:
        # Every content by its pieces: one that is larger than all others together keeps all threads busy, too.
        jobs = [
            [
                pool.submit(leaf_digests, content[at : at + PIECE_BYTES], LEAF_BYTES)
                for at in range(0, max(len(content), 1), PIECE_BYTES)
            ]
            for content in contents
        ]
        return [b"".join(job.result() for job in pieces) for pieces in jobs]

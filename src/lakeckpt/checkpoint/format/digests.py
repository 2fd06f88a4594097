"""This module computes content digests piece by piece, on several threads.

The digest of a content is XXH3-128 over the XXH3-128 digests of its leaves of 1 MiB (the last may be shorter; an empty
content has one empty leaf), with other seeds for leaves and whole. It runs at the speed of memory, so that digesting
costs less than writing. An arena has a checksum of each leaf, so that what was captured is digested already. Threads
are started and joined inside `leaves_of_all`; xxhash releases the interpreter's lock. Digests notice accidents and tell
replicas apart; they are no signatures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import xxhash

__all__ = [
    "DIGEST_BYTES",
    "LEAF_BYTES",
    "PIECE_BYTES",
    "content_digest",
    "digest_of_leaves",
    "leaf_digests",
    "leaves_of_all",
    "short_digest",
]

DIGEST_BYTES = 16
LEAF_BYTES = 2**20
PIECE_BYTES = 16 * 2**20
"""The piece that one of several threads reads or digests at a time: whole leaves."""
_LEAF_SEED, _WHOLE_SEED = 1, 2
_MOST_THREADS = 8
_ALONE_BYTES = 2**20


def short_digest(*parts: bytes | memoryview) -> bytes:
    """Return the BLAKE2b-128 digest of the parts, each preceded by its length (8 bytes, big-endian)."""
    found = blake2b(digest_size=DIGEST_BYTES, person=b"lakeckpt-parts")
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


def content_digest(data: bytes | memoryview) -> bytes:
    """Return the digest of ``data`` (16 bytes)."""
    return digest_of_leaves([leaf_digests(data, LEAF_BYTES)])


def leaf_digests(data: bytes | memoryview, leaf_bytes: int) -> bytes:
    """Return the digests of the leaves of ``data``, of ``leaf_bytes`` each but for the last, one behind the other."""
    view = memoryview(data)
    starts = range(0, max(len(view), 1), leaf_bytes)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + leaf_bytes], _LEAF_SEED) for at in starts)


def digest_of_leaves(leaves: Sequence[bytes]) -> bytes:
    """Return the digest of a content from what `leaf_digests` gave for its pieces, in their order; at least one."""
    assert leaves
    return xxhash.xxh3_128_digest(b"".join(leaves), _WHOLE_SEED)


def leaves_of_all(contents: Sequence[memoryview], *, threads: int | None = None) -> list[bytes]:
    """Return `leaf_digests` of each content, in order, computed on ``threads`` threads (None: as many as help)."""
    threads = min(os.cpu_count() or 1, _MOST_THREADS) if threads is None else threads
    if threads == 1 or sum(len(content) for content in contents) < _ALONE_BYTES:
        return [leaf_digests(content, LEAF_BYTES) for content in contents]
    with ThreadPoolExecutor(threads, thread_name_prefix="lakeckpt-digest") as pool:
        # Contents are divided into pieces, so that one large content keeps all threads busy.
        jobs = [
            [
                pool.submit(leaf_digests, content[at : at + PIECE_BYTES], LEAF_BYTES)
                for at in range(0, max(len(content), 1), PIECE_BYTES)
            ]
            for content in contents
        ]
        return [b"".join(job.result() for job in pieces) for pieces in jobs]

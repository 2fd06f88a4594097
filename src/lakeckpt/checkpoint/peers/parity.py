"""This module defines parity: which leaves of a rank's share go where, how they are joined, and what lies beside them.

A group of ranks, one of each node, has parity in stripes. Piece n of a share is its leaf n (1 MiB). Each member but one
gives one piece to a stripe. The node of that one keeps the XOR of these pieces, one leaf
(`lakeckpt.recovery.placement.PeerGroup`). Leaves that a smaller share does not have count as zeros. So a group of four
keeps parity of a third of a share on each node, and any one share is computed from the others and the parity.

The parity on a node begins with the first stripe that is kept there, and so on. `Contribution` is what lies beside it
of each share: the size, the documents and the checksums, so that a share that was computed is verified leaf by leaf.
The module is pure but for `xor_into`, which writes to a buffer. It starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.recovery.placement import PeerGroup
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "Contribution",
    "contributions_from",
    "contributions_to_bytes",
    "group_of",
    "kept_leaves",
    "pieces_for",
    "xor_into",
]

_KIND, _VERSION = "parity", (1, 0)
_CHUNK_BYTES = 256 * 2**10
"""So much is joined at a time, which stays in the cache of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What the share of a ``rank`` has beside the data that it gave to the parity, of which it has ``data_bytes``. No
    documents: another node captures the same share."""

    rank: Count
    data_bytes: Count
    documents: bytes
    checksums: bytes


def contributions_to_bytes(given: Sequence[Contribution]) -> bytes:
    """Return the document of what all members gave."""
    return dumps(to_plain(given, tuple[Contribution, ...]), kind=_KIND, version=_VERSION)


def contributions_from(data: bytes) -> Mapping[int, Contribution]:
    """Return rank → what it gave, from a document of `contributions_to_bytes`. Raises `WireError`."""
    plain = loads(data, kind=_KIND, supported=_VERSION)
    several: tuple[Contribution, ...] = from_plain(tuple[Contribution, ...], plain, "what members gave to parity")
    return {one.rank: one for one in several}


def group_of(members: Sequence[int]) -> PeerGroup:
    """Return the group of these ranks, whose members are their texts."""
    return PeerGroup(mode="3+1", members=tuple(map(str, members)))


def pieces_for(members: Sequence[int], giver: int, keeper: int, data_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces that the rank ``giver`` gives to the node of ``keeper``, and the leaf of the parity that each
    goes into. The share of the giver has so many bytes.

    >>> list(pieces_for([4, 5, 6, 7], 5, 7, 5 * 2**20))
    [(2, 0)]
    >>> list(pieces_for([4, 5, 6, 7], 5, 4, 5 * 2**20))
    [(0, 0), (3, 1)]
    """
    group, count = group_of(members), -(-data_bytes // LEAF_BYTES)
    first, step = members.index(keeper), len(members)
    for turn in range(-(-count // (step - 1))):
        piece = group.piece_of(str(giver), first + turn * step)
        assert piece is not None, "nobody gives pieces to itself"
        if piece < count:
            yield piece, turn


def kept_leaves(members: Sequence[int], data_bytes: int) -> int:
    """Return how many leaves of parity a node keeps of shares of at most ``data_bytes``.

    >>> kept_leaves([0, 1, 2, 3], 7 * 2**20)
    3
    """
    return -(-data_bytes // (LEAF_BYTES * (len(members) - 1)))


def xor_into(target: memoryview, data: memoryview) -> None:
    """Join ``data`` to as many bytes of ``target``, by XOR."""
    into, more = np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8)
    for at in range(0, len(more), _CHUNK_BYTES):
        piece = into[at : at + _CHUNK_BYTES]
        np.bitwise_xor(piece[: len(more) - at], more[at : at + _CHUNK_BYTES], out=piece[: len(more) - at])

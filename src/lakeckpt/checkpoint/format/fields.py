"""This module defines the types of fields that several documents of a checkpoint have: ranks and digests.

`Ranks` are ranges of ranks, with the few functions that join and ask them. `lakeckpt.wire.documents` compares types
when a document is read. The values are trusted: the bytes of a document have passed their checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from lakeckpt.errors import WireDamaged

__all__ = ["Digest", "Ranks", "fields_of", "holds", "joined", "ranges"]


Ranks: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of ranks, sorted and apart."""
Digest: TypeAlias = bytes
"""A digest of 16 bytes."""


def fields_of(plain: object, what: str) -> Mapping[str, object]:
    """Return ``plain``, which must be a mapping. `WireDamaged` names it as ``what``."""
    if not isinstance(plain, dict):
        raise WireDamaged(f"{what} is a {type(plain).__name__}, not a mapping")
    return plain


def ranges(ranks: Iterable[int]) -> Ranks:
    """Return numbers of ranks as ranges.

    >>> ranges([4, 0, 1, 5, 7])
    ((0, 2), (4, 6), (7, 8))
    """
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and found[-1][1] == rank:
            found[-1][1] += 1
        else:
            found.append([rank, rank + 1])
    return tuple((start, stop) for start, stop in found)


def joined(several: Iterable[Ranks]) -> Ranks:
    """Return the ranks that are in any of ``several``.

    >>> joined([((0, 2),), ((1, 3), (5, 6))])
    ((0, 3), (5, 6))
    """
    return ranges(rank for ranks in several for start, stop in ranks for rank in range(start, stop))


def holds(ranks: Ranks, rank: int) -> bool:
    """Return whether ``rank`` is in one of these ranges."""
    return any(start <= rank < stop for start, stop in ranks)

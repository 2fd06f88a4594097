"""Is a field of a record of the type that it must have?  Small checks for what was read, with one error for them all.

The bytes have passed their checksum, so that a wrong field means a document made by hand, or a defect of its writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lakeckpt.errors import WireDamaged

__all__ = ["Ranks", "confined", "fields_of", "holds", "joined", "number", "ranges", "ranks_of", "taken"]

Ranks = tuple[tuple[int, int], ...]
"""Half-open ranges of ranks, sorted and apart."""

_T = TypeVar("_T")
_KEY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", re.ASCII)


def fields_of(plain: object, what: str) -> Mapping[str, object]:
    """``plain`` as a mapping."""
    if not isinstance(plain, dict):
        raise WireDamaged(f"{what} is a {type(plain).__name__}, not a mapping")
    return plain


def taken(plain: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    """The field ``name``, which must be exactly of type ``kind``."""
    value = plain.get(name)
    if type(value) is not kind:
        raise WireDamaged(f"field {name!r} must be a {kind.__name__}, got {value!r:.80}")
    return value


def number(plain: Mapping[str, object], name: str, *, least: int = 0) -> int:
    """The field ``name``, an integer of at least ``least`` and below 2^63."""
    value = taken(plain, name, int)
    if not least <= value < 2**63:
        raise WireDamaged(f"field {name!r} must be at least {least}, got {value}")
    return value


def confined(path: object, *, below: str) -> str:
    """``path``, which must be a plain key in the folder ``below``: no ``..``, nothing absolute."""
    good = isinstance(path, str) and _KEY.fullmatch(path) and path.startswith(below + "/")
    if not good or ".." in str(path).split("/") or "." in str(path).split("/"):
        raise WireDamaged(f"{path!r:.120} is not the path of an object in {below!r}")
    return str(path)


def ranks_of(value: object) -> Ranks:
    """``value`` as ranges of ranks."""
    if not isinstance(value, (list, tuple)):
        raise WireDamaged(f"ranges of ranks are a list, got {value!r:.80}")
    found, last = [], -1
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(type(rank) is int for rank in pair):
            raise WireDamaged(f"a range of ranks is [start, stop], got {pair!r:.80}")
        start, stop = pair
        if not last < start < stop < 2**31:
            raise WireDamaged(f"ranges of ranks must be sorted and apart, got {value!r:.80}")
        last = stop
        found.append((start, stop))
    return tuple(found)


def ranges(ranks: Iterable[int]) -> Ranks:
    """Numbers of ranks as ranges.

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
    """The ranks in any of ``several``.

    >>> joined([((0, 2),), ((1, 3), (5, 6))])
    ((0, 3), (5, 6))
    """
    return ranges(rank for ranks in several for start, stop in ranks for rank in range(start, stop))


def holds(ranks: Ranks, rank: int) -> bool:
    """Whether ``rank`` is in one of these ranges."""
    return any(start <= rank < stop for start, stop in ranks)

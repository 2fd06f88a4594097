"""This module defines the types of fields that several documents of a checkpoint have: ranks, digests and paths.

`Ranks` are ranges of ranks, with the few functions that join and ask them. Types check themselves when a document is
read (`lakeckpt.wire.documents`). The bytes of a document have passed their checksum, so that a wrong field means a
document made by hand, or a defect of its writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES
from lakeckpt.errors import WireDamaged

__all__ = ["Digest", "Ranks", "confined", "fields_of", "holds", "joined", "number", "ranges", "taken"]

_T = TypeVar("_T")
_KEY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", re.ASCII)


def fields_of(plain: object, what: str) -> Mapping[str, object]:
    """Return ``plain``, which must be a mapping. `WireDamaged` names it as ``what``."""
    if not isinstance(plain, dict):
        raise WireDamaged(f"{what} is a {type(plain).__name__}, not a mapping")
    return plain


def taken(plain: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    """Return the field ``name``, which must have exactly the type ``kind``. `WireDamaged`."""
    value = plain.get(name)
    if type(value) is not kind:
        raise WireDamaged(f"field {name!r} must be a {kind.__name__}, got {value!r:.80}")
    return value


def number(plain: Mapping[str, object], name: str, *, least: int = 0) -> int:
    """Return the field ``name``, an integer of at least ``least`` and below 2^63. `WireDamaged`."""
    value = taken(plain, name, int)
    if not least <= value < 2**63:
        raise WireDamaged(f"field {name!r} must be at least {least}, got {value}")
    return value


def confined(path: object, *, below: str) -> str:
    """Return ``path``, which must be a plain key in the folder ``below``: not absolute, no ``..``. `WireDamaged`."""
    good = isinstance(path, str) and _KEY.fullmatch(path) and path.startswith(below + "/")
    if not good or ".." in str(path).split("/") or "." in str(path).split("/"):
        raise WireDamaged(f"{path!r:.120} is not the path of an object in {below!r}")
    return str(path)


def _apart(found: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    last = -1
    for start, stop in found:
        if not last < start < stop < 2**31:
            raise ValueError(f"ranges of ranks must be sorted and apart, got {found!r:.80}")
        last = stop
    return found


def _digest(found: bytes) -> bytes:
    if len(found) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, got {len(found)}")
    return found


Ranks = Annotated[tuple[tuple[int, int], ...], _apart]
"""Half-open ranges of ranks, sorted and apart."""
Digest = Annotated[bytes, _digest]
"""A digest of 16 bytes."""


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

"""This module records which ranks hold one tensor between them, and by which of its dimensions it is divided.

Ranks can have different tensors under one name: every rank may number its experts from 0, for example. So the ranks of
each tensor's mesh are saved beside the parts of the tensor. Parts belong together if name, shape, dtype and these ranks
are equal. The key of a part names the tensor, its shape, and the place of the part (`part_key`).

The module holds values and their document only. It never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.errors import CheckpointDamaged
from lakeckpt.wire.documents import as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "PART_MARK",
    "PartPlace",
    "Sharing",
    "is_part_key",
    "part_key",
    "place_of",
    "say_ranks",
    "sharing_from_bytes",
    "sharing_to_bytes",
]

_KIND, _VERSION = "tree", (1, 0)
"""The document is stored like the tree of an item."""
PART_MARK = "::at "
"""In the key of a part of a tensor: between the key of the tensor and the offsets of the part."""
_KEY = re.compile(rf"(.*){PART_MARK}([0-9,]*) of ([0-9,]*)", re.ASCII | re.DOTALL)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How ranks share a tensor."""

    ranks: Ranks
    """The ranks of the tensor's mesh, as torch numbers them in the whole job, not in the group that saves."""
    dims: tuple[int, ...]
    """For each dimension of the mesh, the dimension of the tensor that it divides; -1: its ranks hold replicas."""

    @property
    def size(self) -> int:
        """How many ranks share the tensor."""
        return sum(stop - start for start, stop in self.ranks)


def say_ranks(ranks: Ranks) -> str:
    """Return a text for messages.

    >>> say_ranks(((0, 2), (7, 8)))
    'ranks 0-1, 7'
    """
    texts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in ranks]
    one = len(ranks) == 1 and ranks[0][1] == ranks[0][0] + 1
    return f"rank{'' if one else 's'} {', '.join(texts)}"


_Rows = tuple[tuple[Sharing, tuple[str, ...]], ...]


def sharing_to_bytes(shared: Mapping[str, Sharing]) -> bytes:
    """Return the document that says how each tensor is shared, by its key in the trees."""
    rows: dict[Sharing, list[str]] = {}
    for key, sharing in shared.items():
        rows.setdefault(sharing, []).append(key)
    return dumps(to_plain(tuple(rows.items()), _Rows), kind=_KIND, version=_VERSION)


def sharing_from_bytes(data: bytes) -> dict[str, Sharing]:
    """Return the value that `sharing_to_bytes` wrote. `WireError`."""
    rows: _Rows = from_plain(_Rows, loads(data, kind=_KIND, supported=_VERSION), "how tensors are shared")
    return {key: sharing for sharing, keys in rows for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """The content of a part's key: the whole tensor's name and shape, and where the part begins."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def part_key(key: str, offsets: Sequence[int], shape: Sequence[int]) -> str:
    """Return the key of the part of ``key`` that begins at ``offsets``.

    >>> part_key("model/weight", (4, 0), (7, 10))
    'model/weight::at 4,0 of 7,10'
    """
    return f"{key}{PART_MARK}{','.join(map(str, offsets))} of {','.join(map(str, shape))}"


def is_part_key(key: str) -> bool:
    """Return whether a key is that of a part."""
    return _KEY.fullmatch(key) is not None


def place_of(key: str) -> PartPlace | None:
    """Return what the key of a part says; None for another key. `CheckpointDamaged` if its numbers make no sense."""
    match = _KEY.fullmatch(key) if PART_MARK in key else None
    return None if match is None else PartPlace(name=match[1], offsets=_numbers(match[2]), shape=_numbers(match[3]))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(",")) if text else ()
    except ValueError:
        raise CheckpointDamaged(f"{text!r:.80} are no sizes") from None

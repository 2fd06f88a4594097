"""This module records which ranks hold one tensor between them, and by which of its dimensions it is divided.

Ranks can have different tensors under one name: every rank may number its experts from 0, for example. So the ranks of
each tensor's mesh are saved beside the parts of the tensor. Parts belong together if name, shape, dtype and these ranks
are equal. The key of a part names the tensor, its shape, and the place of the part (`part_key`).

`are_tiled` proves that the parts make up whole tensors, from two numbers of each rank (`tilings_of`), however many
tensors and ranks there are. Give each coordinate x a random weight w(x), and a box from a to b, of one dimension, the
value w(a) - w(b). Boxes that follow one another add up to the value of their union, and others do not, but by chance
(less than 2^-120). In several dimensions the value is the product over the dimensions, and each tensor has a random
factor, so that one sum serves all tensors. The weights are digests: they are the same on all ranks.

The module holds values, their document and this arithmetic. It never imports torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.errors import CheckpointDamaged
from lakeckpt.wire.documents import as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "PART_MARK",
    "PartPlace",
    "Sharing",
    "Tiling",
    "are_tiled",
    "is_part_key",
    "part_key",
    "place_of",
    "say_ranks",
    "sharing_from_bytes",
    "sharing_to_bytes",
    "tilings_of",
]

_KIND, _VERSION = "tree", (1, 0)
"""The document is stored like the tree of an item."""
PART_MARK = "::at "
"""In the key of a part of a tensor: between the key of the tensor and the offsets of the part."""
_PRIME = 2**127 - 1
_WEIGHTS = 2**16
"""So many weights of coordinates are kept: many parts begin where others end."""
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
    """The shape of the whole."""


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


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Two sums of one rank over all tensors that ranks share in one way."""

    sharing: Sharing
    held: int
    """Of the parts that this rank holds."""
    whole: int
    """Of the whole tensors. It is the same on all ranks that share them."""


def tilings_of(specs: Iterable[TensorSpec], shared: Mapping[str, Sharing]) -> tuple[Tiling, ...]:
    """Return the sums over the parts of tensors among ``specs``; ``shared`` says how each tensor is divided."""
    found: defaultdict[Sharing, list[int]] = defaultdict(lambda: [0, 0])
    for spec in specs:
        place = place_of(spec.key)
        if place is not None and place.name in shared:
            sums = found[shared[place.name]]
            sums[0] += _value(spec.dtype, place, place.offsets, spec.shape)
            sums[1] += _value(spec.dtype, place, (0,) * len(place.shape), place.shape)
    return tuple(
        Tiling(sharing=sharing, held=held % _PRIME, whole=whole % _PRIME) for sharing, (held, whole) in found.items()
    )


def are_tiled(tilings: Iterable[Tiling]) -> bool:
    """Return whether each element of each tensor lies in one part and none in two, by the tilings of all ranks. If a
    dimension of the mesh holds replicas, each element lies in as many parts."""
    held: defaultdict[Sharing, int] = defaultdict(int)
    wholes: defaultdict[Sharing, set[int]] = defaultdict(set)
    for one in tilings:
        held[one.sharing] += one.held
        wholes[one.sharing].add(one.whole)
    for sharing, (whole, *others) in wholes.items():
        most = sharing.size if -1 in sharing.dims else 1
        if others or all((held[sharing] - times * whole) % _PRIME for times in range(1, most + 1)):
            return False
    return True


def _value(dtype: str, place: PartPlace, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the value of a box of the tensor that ``place`` names."""
    found = int.from_bytes(short_digest(place.name.encode(), f"{dtype}{place.shape}".encode()), "big")
    for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        found = found * (_weight(dim, first) - _weight(dim, first + size)) % _PRIME
    return found


@lru_cache(_WEIGHTS)
def _weight(dim: int, at: int) -> int:
    return int.from_bytes(short_digest(f"{dim} {at}".encode()), "big") % _PRIME

"""This module identifies tensors and trees by name and content, so that ranks can compare what they hold.

The dtype and shape of a tensor are part of its content: zeros of another shape can have the same bytes. The module is
pure, and never imports torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.core.intervals import Intervals

__all__ = ["SUMS", "TENSOR", "Held", "Shares", "Unit", "UnitId", "spread", "sum_of", "tensor_unit", "tree_unit"]

SUMS: int = 2 ** (8 * DIGEST_BYTES)
"""The modulus of sums of units."""
TENSOR = "tensor:"
"""The name of a tensor's unit begins with it."""

UnitId: TypeAlias = tuple[str, bytes]
"""A name, and an identifier of the content under that name."""
Held = Mapping[UnitId, tuple[int, Intervals]]
"""A unit → its size in bytes, and the ranks that hold it."""
Shares = Mapping[UnitId, tuple[int, Ranks]]
"""A unit → the rank that writes it, and the ranks that hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A tensor or a tree, as it is on this rank."""

    id: UnitId
    size_bytes: int
    bundle: Hashable = None
    """Units with equal ``bundle`` lie on the same ranks, and are compared by one common digest. None: the unit is
    compared alone."""


def tensor_unit(spec: TensorSpec, digest: bytes) -> UnitId:
    """Return the unit of a tensor whose bytes have the ``digest`` (16 bytes).

    >>> tensor_unit(TensorSpec(key="model/w", dtype="int8", shape=(2, 1)), b"0123456789abcdef")
    ('tensor:model/w', b'0123456789abcdefint8(2, 1)')
    """
    return f"{TENSOR}{spec.key}", digest + f"{spec.dtype}{spec.shape}".encode()


def tree_unit(item: str, digest: bytes) -> UnitId:
    """Return the unit of the tree of an item whose document has the ``digest`` (16 bytes)."""
    return f"tree:{item}", digest


def sum_of(units: Iterable[UnitId]) -> int:
    """Return one number for units in any order: the sum of their digests modulo 2^128."""
    every = (short_digest(name.encode(), content) for name, content in units)
    return sum(int.from_bytes(one, "big") for one in every) % SUMS


def spread(held: Held, loads: list[int]) -> Shares:
    """Give each content to the least loaded of the ranks that hold it: the largest first, ties to the lowest rank.

    ``loads``: the bytes that each rank writes anyway."""
    world_size = len(loads)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = {}
    for what, (size, ranks) in sorted(held.items(), key=lambda item: (-item[1][0], item[0])):
        if ranks.size == world_size:
            load, owner = heapq.heappop(heap)
            while load != loads[owner]:  # an old entry: the rank has been given more since
                load, owner = heapq.heappop(heap)
        else:
            owner = min(_each(ranks), key=lambda rank: (loads[rank], rank))
        loads[owner] += size
        heapq.heappush(heap, (loads[owner], owner))
        owners[what] = (owner, tuple(ranks.pairs()))
    return owners


def _each(ranks: Intervals) -> Iterable[int]:
    return (rank for start, stop in ranks for rank in range(start, stop))

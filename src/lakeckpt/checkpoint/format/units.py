"""This module identifies tensors and trees by name and content, so that ranks can compare what they hold.

The dtype and shape of a tensor are part of its content: zeros of another shape can have the same bytes. The module is
pure, and never imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec

__all__ = ["SUMS", "TENSOR", "Unit", "UnitId", "sum_of", "tensor_unit", "tree_unit"]

SUMS: int = 2 ** (8 * DIGEST_BYTES)
"""The modulus of sums of units."""
TENSOR = "tensor:"
"""The name of a tensor's unit begins with it."""

UnitId: TypeAlias = tuple[str, bytes]
"""A name, and an identifier of the content under that name."""


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

"""This module identifies tensors and trees by name and content, so that ranks can compare what they hold.

The dtype and shape of a tensor are part of its content: zeros of another shape can have the same bytes. The module is
pure, and never imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from lakeckpt.checkpoint.format.dtypes import TensorSpec

__all__ = ["Unit", "UnitId", "tensor_unit", "tree_unit"]

UnitId: TypeAlias = tuple[str, bytes]
"""A name, and an identifier of the content under that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A tensor or a tree, as it is on this rank."""

    id: UnitId
    size_bytes: int
    bundle: Hashable = None
    """Which units are compared as one: the units of one bundle are on the same ranks. None: the unit is compared
    alone."""


def tensor_unit(spec: TensorSpec, digest: bytes) -> UnitId:
    """Return the unit of a tensor whose bytes have the ``digest`` (16 bytes).

    >>> tensor_unit(TensorSpec(key="model/w", dtype="int8", shape=(2, 1)), b"0123456789abcdef")
    ('tensor:model/w', b'0123456789abcdefint8(2, 1)')
    """
    return f"tensor:{spec.key}", digest + f"{spec.dtype}{spec.shape}".encode()


def tree_unit(item: str, digest: bytes) -> UnitId:
    """Return the unit of the tree of an item whose document has the ``digest`` (16 bytes)."""
    return f"tree:{item}", digest

"""This module identifies tensors and trees by name and content, so that ranks can compare what they hold.

The dtype and shape of a tensor are part of its content: zeros of another shape can have the same bytes. The module is
pure, and never imports torch.
"""

from __future__ import annotations

from typing import TypeAlias

from lakeckpt.checkpoint.format.dtypes import TensorSpec

__all__ = ["UnitId", "tensor_unit", "tree_unit"]

UnitId: TypeAlias = tuple[str, bytes]
"""A name, and an identifier of the content under that name."""


def tensor_unit(spec: TensorSpec, digest: bytes) -> UnitId:
    """Return the unit of a tensor whose bytes have the ``digest`` (16 bytes).

    >>> tensor_unit(TensorSpec(key="model/w", dtype="int8", shape=(2, 1)), b"0123456789abcdef")
    ('tensor:model/w', b'0123456789abcdefint8(2, 1)')
    """
    return f"tensor:{spec.key}", digest + f"{spec.dtype}{spec.shape}".encode()


def tree_unit(item: str, digest: bytes) -> UnitId:
    """Return the unit of the tree of an item whose document has the ``digest`` (16 bytes)."""
    return f"tree:{item}", digest

"""What do ranks compare, to know that they hold the same?  The name and content of a tensor or a tree.

Of a tensor its dtype and shape are part of the content: zeros of another shape can have the same bytes. Pure. Imports
without torch.
"""

from __future__ import annotations

from typing import TypeAlias

from lakeckpt.checkpoint.format.dtypes import TensorSpec

__all__ = ["UnitId", "tensor_unit", "tree_unit"]

UnitId: TypeAlias = tuple[str, bytes]
"""A name, and what tells contents under it apart."""


def tensor_unit(spec: TensorSpec, digest: bytes) -> UnitId:
    """Of a tensor whose bytes have the ``digest`` (16 bytes).

    >>> tensor_unit(TensorSpec(key="model/w", dtype="int8", shape=(2, 1)), b"0123456789abcdef")
    ('tensor:model/w', b'0123456789abcdefint8(2, 1)')
    """
    return f"tensor:{spec.key}", digest + f"{spec.dtype}{spec.shape}".encode()


def tree_unit(item: str, digest: bytes) -> UnitId:
    """Of the tree of an item whose document has the ``digest`` (16 bytes)."""
    return f"tree:{item}", digest

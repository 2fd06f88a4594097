"""How do columns become tensors?  Sharing their memory.

The arrays of `lakeckpt.reading.convert` are writable and belong to one batch alone, so a tensor over the same memory
may be written to, and stays valid as long as somebody holds it. It never copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lakeckpt.reading.ragged import Namespace, Ragged, map_namespace

__all__ = ["jagged", "to_tensors"]


def to_tensors(columns: Namespace[np.ndarray[Any, Any]], *, nested: bool = False) -> dict[str, Any]:
    """Return ``columns`` with tensors in the place of arrays; with ``nested``, jagged tensors of lists of numbers."""
    converted: dict[str, Any] = dict(map_namespace(columns, torch.from_numpy))
    return {name: jagged(column) for name, column in converted.items()} if nested else converted


def jagged(column: Any) -> Any:
    """Return a `Ragged` of numbers as a nested tensor (``torch.jagged``), shape (rows, *, …), sharing its values.

    Anything else (text, lists of lists, lists whose elements may be null) is returned as it is.
    """
    if not isinstance(column, Ragged) or column.kind != "list" or column.masks:
        return column
    if not isinstance(column.values, torch.Tensor):
        return column
    return torch.nested.nested_tensor_from_jagged(column.values, column.offsets)

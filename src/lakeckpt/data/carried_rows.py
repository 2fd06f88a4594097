"""This module warns of transforms that may keep rows for a later call.

A packer holds back the rows that do not fill a sequence yet. The receipt of their micro-batch says that they were
delivered, so a checkpoint counts them as consumed, and a restored run never sees them. The warning compares the number
of rows that a transform got with the number that it returned. It cannot tell a transform that keeps rows from one that
drops or multiplies them within its call, and it does not see one that happens to return as many rows as it got. Each
dataset gives it once, in the process that delivers the batches. It starts no threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from lakeckpt.core.receipts import Receipt
from lakeckpt.reading.ragged import Ragged

__all__ = ["CarriedRows", "leading_sizes"]


class CarriedRows:
    """Looks at what the transform of one dataset returned, until it has warned. ``looks``: whether there is anything to
    look at, which is a transform of micro-batches."""

    def __init__(self, *, looks: bool) -> None:
        self._looks = looks

    def check(self, found: Any, receipt: Receipt) -> None:
        """Warn where ``found``, which the transform made of the rows of ``receipt``, has another number of rows."""
        if not self._looks:
            return
        rows = receipt.rows - receipt.skipped
        sizes = leading_sizes(found)
        if not sizes or rows in sizes:
            return
        self._looks = False
        shown = ", ".join(map(str, sorted(sizes)[:3]))
        warnings.warn(
            f"the transform= of a LakeDataset got {rows} rows and returned {shown} (epoch {receipt.epoch}, step "
            f"{receipt.step} of rank {receipt.rank}). A transform must keep nothing between calls: rows that it holds "
            "back for a later call count as consumed, no checkpoint has them, and a restored run never sees them. "
            "Pack within one call. If the transform keeps nothing (it drops rows or cuts them up within one call), "
            "ignore this; filters= is the exact way to leave rows out. This is said once.",
            UserWarning,
            stacklevel=3,
        )


def leading_sizes(found: Any) -> set[int]:
    """Return the numbers of rows that ``found`` may have: the sizes of the first dimensions of its columns.

    Columns are the values of a mapping and the elements of a tuple. A list is rows, or columns where its elements are
    tensors or arrays: both are returned. Of other objects nothing can be told: the set is empty.
    """
    if isinstance(found, Mapping | tuple):
        columns = found.values() if isinstance(found, Mapping) else found
        return set().union(*(_size(one) for one in columns))
    if isinstance(found, list):
        return _size(found).union(*(_size(one) for one in found if isinstance(one, torch.Tensor | np.ndarray)))
    return _size(found)


def _size(column: Any) -> set[int]:
    if isinstance(column, torch.Tensor):
        return {column.size(0)} if column.dim() else set()
    if isinstance(column, np.ndarray):
        return {column.shape[0]} if column.ndim else set()
    if isinstance(column, pa.Table | pa.RecordBatch):
        return {column.num_rows}
    if isinstance(column, Mapping | tuple):
        return leading_sizes(column)
    return {len(column)} if isinstance(column, list | Ragged) else set()

"""How do rows that come one by one become a batch?  The collate function of every reader that works by rows.

It is the least that such a function can do: one array for a column, one copy for a list's or an image's contents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, Ragged

__all__ = ["Collate"]


class Collate:
    """Makes tensors of rows, which are dicts or lists in the order of the columns; picklable."""

    def __init__(self, case: Case) -> None:
        schema = pq.read_schema(case.files[0])
        self._columns: dict[str, tuple[str, bool]] = {}
        for field in schema:
            if pa.types.is_binary(field.type):
                self._columns[field.name] = ("uint8", True)
            elif pa.types.is_list(field.type):
                self._columns[field.name] = (_name(field.type.value_type), True)
            else:
                self._columns[field.name] = (_name(field.type), False)

    def __call__(self, rows: list[Any]) -> Batch:
        return self.finish(self.arrays(rows))

    def arrays(self, rows: list[Any]) -> dict[str, Any]:
        """numpy arrays; of what differs in length, a pair of contents and offsets."""
        if not isinstance(rows[0], dict):
            columns = dict(zip(self._columns, zip(*rows, strict=True), strict=True))
        else:
            columns = {name: [row[name] for row in rows] for name in self._columns}
        return {name: _array(columns[name], *kind) for name, kind in self._columns.items()}

    def finish(self, arrays: dict[str, Any]) -> Batch:
        """Tensors of what `arrays` returned, a fixed-width column first: MosaicML takes the length of the first value
        for that of the batch, and counts its place by it."""
        return {
            name: Ragged(*map(torch.from_numpy, array)) if isinstance(array, tuple) else torch.from_numpy(array)
            for name, array in sorted(arrays.items(), key=lambda item: isinstance(item[1], tuple))
        }


def _name(kind: pa.DataType) -> str:
    return str(np.dtype(kind.to_pandas_dtype()))


def _array(column: Any, dtype: str, ragged: bool) -> Any:
    if not ragged:
        return np.array(column, dtype)
    parts = [np.frombuffer(one, np.uint8) if isinstance(one, bytes) else np.asarray(one, dtype) for one in column]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts), offsets

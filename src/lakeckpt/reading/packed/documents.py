"""This module takes the documents of a row group out of its decoded rows.

A document is one row of a column of lists of integers, or of bytes: the tokens as little-endian integers of one type.
Tokens of the delivered type are a view of Arrow's memory, and others are converted once, in the thread that decodes.
So **the rows that `documents_of` gets must be nobody else's**. The module knows nothing of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import DataFileDamaged, NullValueError
from lakeckpt.reading.columns.forms import join, view
from lakeckpt.reading.packed.packing import Packing

__all__ = ["Documents", "documents_of", "lengths_of"]

Int64Array = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of a row group that have tokens."""

    tokens: Array
    """Shape (tokens,): those of one document after another. The tokens that `Packing` adds are in their places."""
    ends: Int64Array
    """Where each document begins, and their end: int64, shape (documents + 1,)."""
    rows: Int64Array
    """The row of each: int64, shape (documents,)."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the arrays."""
        return int(self.tokens.nbytes + self.ends.nbytes + self.rows.nbytes)


def documents_of(table: pa.Table, packing: Packing, place: tuple[str, int], *, first: int = 0) -> Documents:
    """Return the documents of ``table``.

    The table holds a row group, or its rows from the ``first`` on: ``place`` is its file, and its number there. Raises
    `NullValueError` for a null token, and `DataFileDamaged` for bytes that are no whole number of tokens.
    """
    column = join(table.column(packing.column))
    offsets, values = _of_bytes(column, packing, place, first) if packing.dtype else _of_lists(column, packing, place)
    tokens = values[offsets[0] : offsets[-1]].astype(packing.dtype_in(table.schema), copy=False)
    lengths = np.diff(offsets)
    if len(lengths) and lengths.all():
        rows, ends = np.arange(len(lengths)), np.subtract(offsets, offsets[0], dtype=np.int64)
    else:
        rows = np.flatnonzero(lengths)
        ends = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths[rows], out=ends[1:])
    if packing.added:
        tokens, ends = _with_added(tokens, ends, packing)
    return Documents(tokens=tokens, ends=ends, rows=rows)


def lengths_of(table: pa.Table, packing: Packing, place: tuple[str, int]) -> Int64Array:
    """Return how many tokens each row of ``table`` has, without those that packing adds: int64, shape (rows,)."""
    column = join(table.column(packing.column))
    offsets, _ = _of_bytes(column, packing, place) if packing.dtype else _of_lists(column, packing, place)
    return np.diff(offsets).astype(np.int64)


def _of_lists(column: pa.Array, packing: Packing, place: tuple[str, int]) -> tuple[Array, Array]:
    """Return where the rows of ``column`` begin among its values, and their end; and the values."""
    if column.null_count or pa.types.is_fixed_size_list(column.type):  # Arrow lets values lie under nulls
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets, values = np.append(0, np.cumsum(lengths, dtype=np.int64)), column.flatten()
    else:
        offsets, values = _raw_offsets(column), column.values
    if values.null_count and (nulls := values.slice(offsets[0], offsets[-1] - offsets[0]).null_count):
        file, row_group = place
        raise NullValueError(
            f"column {packing.column!r} has {nulls} null tokens in row group {row_group} of the data file "
            f"{file!r}: packing needs a value for each token. Write the lists without nulls",
            file=file,
            row_group=row_group,
            column=packing.column,
        )
    dtype = column.type.value_type.to_pandas_dtype()
    return offsets, view(values.buffers()[1], dtype, values.offset, values.offset + len(values))


def _of_bytes(column: pa.Array, packing: Packing, place: tuple[str, int], first: int = 0) -> tuple[Array, Array]:
    """Return the same for a column of bytes."""
    assert packing.dtype is not None
    dtype = np.dtype(packing.dtype).newbyteorder("<")
    kind = column.type
    if column.null_count:
        kind = pa.binary() if pa.types.is_fixed_size_binary(kind) else kind
        column = pc.fill_null(column.cast(kind), b"")
    if pa.types.is_fixed_size_binary(kind):
        offsets: Array = (column.offset + np.arange(len(column) + 1)) * kind.byte_width
    else:
        offsets = _raw_offsets(column)
    lengths = np.diff(offsets)
    if (lengths % dtype.itemsize).any():
        row = int(np.flatnonzero(lengths % dtype.itemsize)[0])
        file, row_group = place
        raise DataFileDamaged(
            f"row {first + row} of row group {row_group} of the data file {file!r} has {lengths[row]} bytes in column "
            f"{packing.column!r}, which are no whole number of {packing.dtype} tokens: write the file again, or give "
            "pack(…, dtype=…) the type that it was written with"
        )
    octets = view(column.buffers()[-1], np.uint8, int(offsets[0]), int(offsets[-1]))
    aligned = octets.copy() if octets.ctypes.data % dtype.itemsize else octets
    return (offsets - offsets[0]) // dtype.itemsize, aligned.view(dtype)


def _raw_offsets(column: pa.Array) -> Array:
    """Return where the rows of ``column`` begin in its child or bytes, and their end, as Arrow has them."""
    kind, buffer = column.type, column.buffers()[1]
    if buffer is None or not buffer.size or not len(column):
        return np.zeros(len(column) + 1, np.int64)
    is_wide = pa.types.is_large_list(kind) or pa.types.is_large_binary(kind)
    return view(buffer, np.int64 if is_wide else np.int32, column.offset, column.offset + len(column) + 1)


def _with_added(tokens: Array, ends: Int64Array, packing: Packing) -> tuple[Array, Int64Array]:
    """Put the tokens before and after each document into their places."""
    documents = np.arange(len(ends) - 1)
    wider = ends + np.arange(len(ends)) * packing.added
    found = np.empty(int(wider[-1]), tokens.dtype)
    shift = documents * packing.added + len(packing.before)
    found[np.arange(len(tokens)) + np.repeat(shift, np.diff(ends))] = tokens
    for place, token in enumerate(packing.before):
        found[wider[:-1] + place] = token
    for place, token in enumerate(reversed(packing.after), 1):
        found[wider[1:] - place] = token
    return found, wider

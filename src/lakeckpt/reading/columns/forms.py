"""This module joins chunked Arrow arrays and shows Arrow buffers to numpy.

*Joined*: a chunked array becomes one array, with 64-bit offsets if 32 bits would overflow. *Viewed*: an Arrow buffer
becomes a numpy array over the same memory, which keeps the buffer alive.

Views are writable although Arrow means its buffers to be constant, so the caller must be the only user of the rows. The
module knows nothing of column names, the policy for nulls, or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.errors import DataFileDamaged
from lakeckpt.lake.parquet.types import plain, resized, wide_type

__all__ = [
    "MAX_NARROW_BYTES",
    "bits",
    "join",
    "narrowed",
    "view",
]

MAX_NARROW_BYTES = 2**31 - 1
"""The most bytes that 32-bit offsets can address."""


def join(column: pa.ChunkedArray) -> pa.Array:
    """Return the rows of ``column`` as one array: no copy if it has one chunk, else one copy.

    Joined rows are in the `plain` type of ``column`` (a pyarrow before 25 cannot measure views), or in its `wide_type`
    if the bytes would not fit 32-bit offsets.
    """
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.nulls(0, column.type)
    column = pa.chunked_array([plain(chunk) for chunk in column.chunks])
    if column.nbytes > MAX_NARROW_BYTES:
        column = pa.chunked_array([resized(chunk, wide_type(column.type)) for chunk in column.chunks])
    return pa.concat_arrays(column.chunks)


def narrowed(array: pa.Array, kind: pa.DataType) -> pa.ChunkedArray:
    """Return ``array``, which may be in the `wide_type` of ``kind``, as ``kind``: in as many chunks as that needs."""
    if array.type == kind:
        return pa.chunked_array([array])
    if array.nbytes <= MAX_NARROW_BYTES or len(array) <= 1:
        return pa.chunked_array([resized(array, kind)])
    half = len(array) // 2
    halves = (array.take(pa.array(np.arange(a, b))) for a, b in ((0, half), (half, len(array))))
    return pa.chunked_array([chunk for part in halves for chunk in narrowed(part, kind).chunks], kind)


class _Exposed:
    """The interface by which numpy looks at a buffer's memory; it holds the buffer."""

    __slots__ = ("__array_interface__", "buffer")

    def __init__(self, buffer: pa.Buffer, dtype: np.dtype[Any], count: int, start_bytes: int) -> None:
        self.buffer = buffer
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": (count,),
            "data": (buffer.address + start_bytes, False),
        }


def view(buffer: pa.Buffer | None, dtype: npt.DTypeLike, start: int, stop: int) -> npt.NDArray[Any]:
    """Return elements [start, stop) of ``buffer`` seen as ``dtype``: a writable array over the same memory, shape (n,).

    The array keeps the buffer alive. Writing to it writes to the Arrow array: only for rows that nobody else will read.
    Raises `DataFileDamaged` if the elements lie outside of the buffer: no array ever shows other memory.
    """
    dtype = np.dtype(dtype)
    if start == stop:
        return np.empty(0, dtype)
    size = 0 if buffer is None else buffer.size
    if not 0 <= start < stop or stop * dtype.itemsize > size:
        raise DataFileDamaged(
            f"a decoded column names elements {start} to {stop} of type {dtype}, and its buffer has {size} bytes: the "
            "data file is damaged. Write it again, or leave the column out"
        )
    return np.asarray(_Exposed(buffer, dtype, stop - start, start * dtype.itemsize))


def bits(buffer: pa.Buffer, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Return bits [start, stop) of ``buffer``, least significant first, as a new bool array of shape (n,)."""
    if start == stop:
        return np.empty(0, np.bool_)
    octets = view(buffer, np.uint8, start // 8, (stop + 7) // 8)
    skipped = start % 8
    return np.unpackbits(octets, count=skipped + stop - start, bitorder="little")[skipped:].view(np.bool_)

"""How do Arrow columns become tensors with the least work?  For the bare limits and for readers that deliver Arrow.

Fixed-width columns and the contents of lists and bytes are views of Arrow's memory; offsets are rebased. There are no
nulls in the data sets, and nothing here looks for them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch

from benchmarks.readers.reader import Batch, Ragged

__all__ = ["slices", "tensors"]

# Arrow's buffers are read-only, and torch says so for each; nobody writes to these.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def _tensor(array: pa.Array) -> torch.Tensor:
    return torch.from_numpy(array.to_numpy(zero_copy_only=True))


def _column(column: pa.ChunkedArray | pa.Array) -> torch.Tensor | Ragged:
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = column.offsets.to_numpy()
        return Ragged(_tensor(column.flatten()), torch.from_numpy(offsets.astype(np.int64) - offsets[0]))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wide = np.int64 if pa.types.is_large_binary(kind) else np.int32
        offsets = np.frombuffer(column.buffers()[1], wide)[column.offset : column.offset + len(column) + 1]
        octets = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
        return Ragged(torch.from_numpy(octets), torch.from_numpy(offsets.astype(np.int64) - offsets[0]))
    return _tensor(column)


def tensors(table: pa.Table | pa.RecordBatch) -> dict[str, torch.Tensor | Ragged]:
    """The columns of ``table`` as tensors, without a copy where its columns are of one chunk."""
    return {name: _column(table.column(number)) for number, name in enumerate(table.schema.names)}


def slices(batch: Batch, rows: int, size: int) -> Iterator[dict[str, torch.Tensor | Ragged]]:
    """Cut ``batch`` of ``rows`` rows into batches of ``size`` (the last may be shorter), as views."""
    parts = {}
    for name, column in batch.items():
        if isinstance(column, Ragged):
            ends = column.offsets[::size].tolist()
            if (rows % size) or len(ends) == rows // size:
                ends.append(int(column.offsets[-1]))
            lengths = [end - begin for begin, end in itertools.pairwise(ends)]
            parts[name] = column.values.split(lengths)
        else:
            parts[name] = column.split(size)
    ragged = {name: column.offsets for name, column in batch.items() if isinstance(column, Ragged)}
    for number in range(-(-rows // size)):
        begin = number * size
        found: dict[str, torch.Tensor | Ragged] = {}
        for name, pieces in parts.items():
            if name in ragged:
                offsets = ragged[name][begin : begin + size + 1]
                found[name] = Ragged(pieces[number], offsets - offsets[0])
            else:
                found[name] = pieces[number]
        yield found


_tensor(pa.array([0]))  # pyarrow's first conversion imports pandas where there is one: not on a reader's clock

"""This module packs a micro-batch into one run of bytes, and makes the same micro-batch of it in another process.

`pack` pickles a value without the contents of its dense tensors, numpy arrays and Arrow tables: each becomes a *leaf*,
and the pickle holds its dtype, its shape and where it lies. `Packed.copy_to` copies the leaves one after another into a
slab, and the pickle behind them. `unpack` unpickles the value, whose tensors and arrays are views of the slab. Our own
process wrote the pickle, so unpickling it is safe.

A value that is a `Batch` of tensors crosses as one list of leaves, because it may have hundreds of columns. All else
that is no leaf costs what pickling costs. An array that is in a value twice stays one array; arrays that only overlap
do not overlap any more. The module knows no process, starts no threads, and never writes to what it is given.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lakeckpt.core.receipts import Receipt
from lakeckpt.data.base.batch import Batch
from lakeckpt.data.workers.slots import ALIGNMENT
from lakeckpt.reading.columns.ragged import Ragged, trusted

__all__ = ["Packed", "pack", "unpack"]

_CPU = torch.device("cpu")
_PROTOCOL = 5


class Packed:
    """A value taken apart: its leaves, and the pickle that makes the value of them."""

    __slots__ = ("_holds", "_leaves", "pickle_at", "size_bytes")

    def __init__(self) -> None:
        self._holds: list[Any] = []
        """The objects that own the memory of the leaves."""
        self._leaves: list[tuple[int, int]] = []
        """(address, bytes) of each."""
        self.size_bytes = 0
        self.pickle_at = 0
        """The place in the slab where the pickle begins."""

    def add(self, address: int, size_bytes: int, *holds: Any) -> int:
        """Note the leaf at ``address``, which is valid as long as ``holds``; return where it lies in the slab."""
        at = self.size_bytes
        self._leaves.append((address, size_bytes))
        self._holds.append(holds)
        self.size_bytes += (size_bytes + ALIGNMENT - 1) & -ALIGNMENT
        return at

    def add_pickle(self, content: bytes) -> None:
        """Note the pickle, which is the last leaf."""
        held = np.frombuffer(content, np.uint8)
        self.pickle_at = self.add(held.__array_interface__["data"][0], held.nbytes, held)

    def copy_to(self, address: int) -> None:
        """Copy the leaves to ``size_bytes`` bytes of memory at ``address``."""
        for source, size in self._leaves:
            if size:
                ctypes.memmove(address, source, size)
                address += (size + ALIGNMENT - 1) & -ALIGNMENT


def pack(value: Any, receipt: Receipt | None) -> Packed:
    """Take ``value`` apart; ``receipt`` is known at the other end, None: none is. Raises what pickling raises."""
    packed, file = Packed(), io.BytesIO()
    _Pickler(file, packed, receipt, value).dump(value)
    packed.add_pickle(file.getvalue())
    return packed


def unpack(slab: npt.NDArray[np.uint8] | torch.Tensor, pickle_at: int, receipt: Receipt) -> Any:
    """Return the value that lies in ``slab``. Its tensors and arrays are views of the slab, and as writable as it is.

    If the slab is a tensor, in pinned memory, tensors share its storage: so the allocator knows of copies that are
    under way.
    """
    return _Unpickler(_Leaves(slab, receipt), pickle_at).load()


class _Pickler(pickle.Pickler):
    """Pickles a value; a leaf becomes a call of the method of `_Leaves` that finds it again."""

    def __init__(self, file: io.BytesIO, packed: Packed, receipt: Receipt | None, whole: Any) -> None:
        super().__init__(file, _PROTOCOL)
        self._packed, self._receipt, self._whole = packed, receipt, whole

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is Batch and value is self._whole:  # a batch within a value may share tensors with the rest of it
            return self._batch(value)
        if kind is torch.Tensor:
            return self._tensor(value) if _is_plain(value) else NotImplemented
        if kind is np.ndarray:
            return self._array(value) if _is_flat(value) else NotImplemented
        if kind is pa.Table:
            return self._table(value)
        if value is self._receipt:
            return _Leaves.receipt, ()
        return NotImplemented

    def _batch(self, batch: Batch) -> Any:
        """Take all columns out of a batch of plain tensors; any other batch is pickled column by column."""
        columns = [(name, *_tensors_of(one)) for name, one in batch.items()]
        tensors = [tensor for _, _, column in columns for tensor in column]
        are_plain = all(type(one) is torch.Tensor and _is_plain(one) and one.is_contiguous() for one in tensors)
        if not are_plain or len(set(map(id, tensors))) < len(tensors):
            return NotImplemented
        add = self._packed.add
        leaves = [
            (name, kind, [(add(one.data_ptr(), one.nbytes, one), one.dtype, tuple(one.shape)) for one in column])
            for name, kind, column in columns
        ]
        return _Leaves.batch, (leaves, batch.__dict__.get("receipt"))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        strides = None
        if not tensor.is_contiguous():
            order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
            tensor = tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()
            strides = tensor.stride()
        at = self._packed.add(tensor.data_ptr(), tensor.nbytes, tensor)
        return _Leaves.tensor, (at, tensor.dtype, tuple(tensor.shape), strides)

    def _array(self, array: npt.NDArray[Any]) -> Any:
        is_turned = array.flags.f_contiguous and not array.flags.c_contiguous
        laid = array.T if is_turned else np.ascontiguousarray(array)
        at = self._packed.add(laid.__array_interface__["data"][0], laid.nbytes, laid)
        return _Leaves.array, (at, array.dtype, array.shape, "F" if is_turned else "C")

    def _table(self, table: pa.Table) -> Any:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        written = sink.getvalue()
        return _Leaves.table, (self._packed.add(written.address, written.size, written), written.size)


class _Leaves:
    """The leaves in ``slab``, and the ``receipt``. A pickle calls the methods by their names."""

    def __init__(self, slab: npt.NDArray[np.uint8] | torch.Tensor, receipt: Receipt) -> None:
        self._pinned = slab if isinstance(slab, torch.Tensor) else None
        self.slab: npt.NDArray[np.uint8] = slab.numpy() if isinstance(slab, torch.Tensor) else slab
        self._receipt = receipt

    def batch(self, columns: list[tuple[str, str, list[tuple[int, Any, Any]]]], receipt: Receipt | None) -> Batch:
        found = {}
        for name, kind, leaves in columns:
            tensors = [self.tensor(*one) for one in leaves]
            found[name] = trusted(tensors[0], tensors[1], kind, {}) if kind else tensors[0]
        return Batch(found, receipt)

    def tensor(self, at: int, dtype: torch.dtype, shape: tuple[int, ...], strides: Any = None) -> Any:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._pinned is None:
            flat = torch.frombuffer(self.slab, dtype=dtype, count=count, offset=at)
        else:
            flat = self._pinned.narrow(0, at, count * dtype.itemsize).view(dtype)
        if strides is not None:
            return flat.as_strided(shape, strides)
        return flat if len(shape) == 1 else flat.view(shape)

    def array(self, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, self.slab, at, order=order)

    def table(self, at: int, size_bytes: int) -> pa.Table:
        return pa.ipc.open_stream(pa.py_buffer(self.slab[at : at + size_bytes])).read_all()

    def receipt(self) -> Receipt:
        return self._receipt


class _Unpickler(pickle.Unpickler):
    """Unpickles a value. It gives the pickle the methods of ``leaves``, which refer to no unpickler: so memory is free
    as soon as the last view of it has died, without the garbage collector."""

    def __init__(self, leaves: _Leaves, pickle_at: int) -> None:
        super().__init__(io.BytesIO(leaves.slab[pickle_at:].tobytes()))
        self._leaves = leaves

    def find_class(self, module: str, name: str) -> Any:
        owner, _, method = name.partition(".")
        if module == __name__ and owner == _Leaves.__name__:
            return getattr(self._leaves, method)
        return super().find_class(module, name)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is nothing but numbers in memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device == _CPU
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensors_of(column: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the kind of a `Ragged` column, or "", and its arrays; any other column as it is."""
    if type(column) is Ragged and not column.masks:
        return column.kind, (column.values, column.offsets)
    return "", (column,)


def _is_flat(array: npt.NDArray[Any]) -> bool:
    return not array.dtype.hasobject and array.dtype.itemsize > 0

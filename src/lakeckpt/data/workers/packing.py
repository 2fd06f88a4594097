"""This module packs a micro-batch into one run of bytes, and makes the same micro-batch of it in another process.

`pack` takes a value apart into a *form* (what it is made of: names, kinds, dtypes) and *leaves* (the memory of its
arrays), which are copied one after another into a slab. `Layout` makes the value again, of views of the slab. Forms are
the same from one micro-batch to the next, so a form crosses once, and after that a micro-batch costs its sizes.

Tensors, numpy arrays, Arrow tables, `Batch`, `Ragged`, jagged tensors, dicts, lists, tuples and lists of str are known.
All else is pickled, and unpickled by the other process, which is ours as well; dense arrays inside of it lie in the
slab all the same. An array that is in a value twice stays one array; arrays that only overlap do not overlap any more.

The module knows no process, starts no threads, and never writes to what it is given.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lakeckpt.core.receipts import Receipt
from lakeckpt.data.batch import Batch, is_text, pinned
from lakeckpt.data.workers.slots import ALIGNMENT
from lakeckpt.reading.columns.plain import PlainRows
from lakeckpt.reading.columns.ragged import Ragged

__all__ = ["Form", "Layout", "Packed", "PlainPacking", "pack"]

Form = tuple[Any, ...]
"""(the structure, the leaves), in tuples: hashable, and equal for micro-batches of one kind."""

_TENSOR, _ARRAY, _BYTES, _TABLE = "tensor", "array", "bytes", "table"
_BATCH, _DICT, _LIST, _TUPLE, _RAGGED, _JAGGED, _OBJECT = "batch", "dict", "list", "tuple", "ragged", "jagged", "object"
_TEXTS = "texts"
_RECEIPT = "receipt"
_CPU = torch.device("cpu")
_PROTOCOL = 5


class Packed:
    """A value taken apart: its form, its sizes (the shapes of all leaves, one after another), and what to copy."""

    __slots__ = ("_holds", "form", "leaves", "size_bytes", "sizes")

    def __init__(self, form: Form, sizes: list[int], leaves: list[tuple[int, int]], holds: list[Any]) -> None:
        self.form, self.sizes = form, sizes
        self.leaves = leaves
        """(address, bytes) of each, valid as long as this object is."""
        self._holds = holds
        self.size_bytes = sum([(size + ALIGNMENT - 1) & -ALIGNMENT for _, size in leaves])


def pack(value: Any, receipt: Receipt) -> Packed:
    """Take ``value`` apart; ``receipt`` is known at the other end. Raises what pickling raises."""
    packing = _Packing(receipt)
    try:
        structure = packing.structure(value)
    except RecursionError:  # it holds itself, which pickling knows how to tell
        packing = _Packing(receipt)
        packing.objects.append(value)
        structure = (_OBJECT, 0)
    if packing.objects:
        packing.pickle_objects()
    return Packed((structure, tuple(packing.kinds)), packing.sizes, packing.leaves, packing.holds)


class PlainPacking:
    """How batches of rows of a window are packed whose columns are plain: as `pack` does it, without the batches.

    ``arrays``: batches are of numpy's arrays, not of tensors. It holds no rows, which would keep the window in memory.
    """

    __slots__ = ("_form", "_shapes")

    def __init__(self, rows: PlainRows, *, arrays: bool) -> None:
        columns = rows.columns
        kinds = tuple(
            [
                (_ARRAY, one.dtype, one.ndim, False) if arrays else (_TENSOR, _dtype_of(one), one.ndim, None)
                for one in columns.values()
            ]
        )
        self._form: Form = ((_BATCH, tuple(columns), tuple(range(len(columns)))), kinds)
        self._shapes = [one.shape[1:] for one in columns.values()]

    def pack(self, rows: PlainRows, start: int, stop: int) -> Packed:
        """Rows [start, stop) of ``rows``, from which this was made."""
        count = stop - start
        sizes = [size for shape in self._shapes for size in (count, *shape)]
        return Packed(self._form, sizes, rows.leaves(start, stop), [rows])


def _dtype_of(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class _Packing:
    """The taking apart of one value. A structure is the number of a leaf, or a tuple that begins with what it is."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self.kinds: list[tuple[Any, ...]] = []
        self.sizes: list[int] = []
        self.leaves: list[tuple[int, int]] = []
        self.holds: list[Any] = []
        self.objects: list[Any] = []
        self._seen: dict[int, int] = {}

    def structure(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            if _is_plain(value):
                return self.tensor(value)
        elif kind is np.ndarray:
            if _is_flat(value):
                return self.array(value)
        elif kind is Batch and getattr(value, "receipt", None) is self.receipt:
            return (_BATCH, *self._named(value))
        elif kind is dict:
            if all(type(name) is str for name in value):
                return (_DICT, *self._named(value))
        elif kind is Ragged:
            masks = (_DICT, *self._named(value.masks))
            return (_RAGGED, value.kind, self.structure(value.values), self.structure(value.offsets), masks)
        elif kind is list or kind is tuple:
            return self._sequence(value, _LIST if kind is list else _TUPLE)
        elif kind is pa.Table:
            return self.table(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.jagged and (parts := _jagged(value)):
            return (_JAGGED, *[self.tensor(part) for part in parts])
        self.objects.append(value)
        return (_OBJECT, len(self.objects) - 1)

    def _sequence(self, values: Any, kind: str) -> tuple[Any, ...]:
        if kind == _LIST and is_text(values) and (text := _joined(values)) is not None:
            lengths = np.fromiter(map(len, values), np.int64, len(values))
            return (_TEXTS, self.array(np.frombuffer(text, np.uint8)), self.array(lengths))
        before = len(self.objects)
        parts = tuple([self.structure(one) for one in values])
        if any(type(part) is int or part[0] != _OBJECT for part in parts):
            return (kind, parts)
        # Without arrays it is an object: of another length (texts, say) it is not another form.
        self.objects[before:] = [values]
        return (_OBJECT, before)

    def _named(self, columns: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        parts: list[Any] = []
        seen, kinds, sizes, leaves, holds = self._seen, self.kinds, self.sizes, self.leaves, self.holds
        for column in columns.values():
            if not (
                type(column) is torch.Tensor and column.is_contiguous() and id(column) not in seen and _is_plain(column)
            ):
                parts.append(self.structure(column))
                continue
            # As `tensor` does it, without a call: there may be hundreds of columns in each micro-batch.
            shape = column.shape
            seen[id(column)] = len(kinds)
            parts.append(len(kinds))
            kinds.append((_TENSOR, column.dtype, len(shape), None))
            sizes.extend(shape)
            leaves.append((column.data_ptr(), column.nbytes))
            holds.append(column)
        return tuple(columns), tuple(parts)

    def tensor(self, tensor: torch.Tensor) -> int:
        known = self._seen.get(id(tensor))
        if known is not None:
            return known
        if tensor.is_contiguous():
            shape = tensor.shape
            plain = (_TENSOR, tensor.dtype, len(shape), None)
            return self._leaf(plain, shape, tensor.data_ptr(), tensor.nbytes, tensor, None)
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
        laid = tensor.permute(order)
        dense = laid.is_contiguous()
        if not dense:
            laid = tensor.contiguous()
        kind = (_TENSOR, tensor.dtype, tensor.ndim, order if dense else None)
        return self._leaf(kind, laid.shape, laid.data_ptr(), laid.nbytes, tensor, laid)

    def array(self, array: npt.NDArray[Any]) -> int:
        known = self._seen.get(id(array))
        if known is not None:
            return known
        laid, turned = array, False
        if not array.flags.c_contiguous:
            turned = array.flags.f_contiguous
            laid = array.T if turned else array.copy(order="C")
        address = laid.__array_interface__["data"][0]
        return self._leaf((_ARRAY, array.dtype, array.ndim, turned), laid.shape, address, laid.nbytes, array, laid)

    def table(self, table: pa.Table) -> int:
        known = self._seen.get(id(table))
        if known is not None:
            return known
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        written = sink.getvalue()
        return self._leaf((_TABLE,), (written.size,), written.address, written.size, table, written)

    def bytes(self, content: memoryview) -> int:
        held = np.frombuffer(content, np.uint8)
        return self._leaf((_BYTES,), (held.nbytes,), held.__array_interface__["data"][0], held.nbytes, content, held)

    def pickle_objects(self) -> None:
        file = io.BytesIO()
        _Pickler(file, self).dump(self.objects)
        self.bytes(file.getbuffer())

    def _leaf(
        self, kind: tuple[Any, ...], shape: Sequence[int], address: int, size_bytes: int, value: Any, laid: Any
    ) -> int:
        """Note the leaf that ``value`` is; its memory is that of ``laid``, or its own."""
        number = len(self.kinds)
        self._seen[id(value)] = number
        self.kinds.append(kind)
        self.sizes.extend(shape)
        self.leaves.append((address, size_bytes))
        self.holds.append(value)
        if laid is not None:
            self.holds.append(laid)
        return number


class _Pickler(pickle.Pickler):
    """Pickles what has no form of its own; arrays in it become leaves, and so do buffers that pickle out of band."""

    def __init__(self, file: io.BytesIO, packing: _Packing) -> None:
        super().__init__(file, _PROTOCOL, buffer_callback=self._out_of_band)
        self._packing = packing

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor and _is_plain(value):
            return self._packing.tensor(value)
        if kind is np.ndarray and _is_flat(value):
            return self._packing.array(value)
        if kind is pa.Table:
            return self._packing.table(value)
        if value is self._packing.receipt:
            return _RECEIPT
        return None

    def _out_of_band(self, buffer: pickle.PickleBuffer) -> bool:
        self._packing.bytes(buffer.raw())
        return False


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[Any], receipt: Receipt, buffers: Iterator[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._leaves, self._receipt = leaves, receipt

    def persistent_load(self, pid: Any) -> Any:
        return self._receipt if pid == _RECEIPT else self._leaves[pid]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but numbers in memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device == _CPU
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_flat(array: npt.NDArray[Any]) -> bool:
    return not array.dtype.hasobject and array.dtype.itemsize > 0


def _joined(texts: list[Any]) -> bytes | None:
    """Return the texts in UTF-8, one after another; None where there is something else among them."""
    if any(type(one) is not str for one in texts):
        return None
    try:
        return "".join(texts).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def _split(text: Any, lengths: Any) -> list[str]:
    """Return what `_joined` was given; ``lengths`` count characters."""
    whole, ends = str(text.data, "utf-8"), np.cumsum(lengths).tolist()
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _jagged(tensor: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(values, offsets) of a jagged tensor as we make them; None for one that is more than that."""
    if tensor.requires_grad or tensor.lengths() is not None or getattr(tensor, "_ragged_idx", None) != 1:
        return None
    values, offsets = tensor.values(), tensor.offsets()
    return (values, offsets) if _is_plain(values) and _is_plain(offsets) else None


class Layout:
    """How micro-batches of one form lie in their slabs."""

    def __init__(self, form: Form) -> None:
        self._structure, kinds = form
        self._kinds = kinds
        self._steps = [_step(kind) for kind in kinds]
        self._names = _plain_names(self._structure, len(kinds))

    def build(self, slab: npt.NDArray[np.uint8], sizes: Sequence[int], receipt: Receipt) -> Any:
        """Return the value whose leaves lie in ``slab``: views of it, writable where the original was an array."""
        return self._built(slab, sizes, receipt, None)

    def build_pinned(self, slab: torch.Tensor, sizes: Sequence[int], receipt: Receipt) -> Any:
        """Return the value whose leaves lie in ``slab``, uint8 in pinned memory; objects are pinned as torch does it.

        Tensors are views that share its storage: only so does the allocator hear of copies that are still under way.
        """
        value = self._built(slab.numpy(), sizes, receipt, slab)
        is_plain = self._names is not None or not self._kinds or self._kinds[-1] != (_BYTES,)
        return value if is_plain else pinned(value)

    def _built(
        self, slab: npt.NDArray[np.uint8], sizes: Sequence[int], receipt: Receipt, in_pinned: torch.Tensor | None
    ) -> Any:
        leaves: list[Any] = []
        place = at = 0
        for dtype, width, ndim, step in self._steps:
            if step is None and ndim == 1 and in_pinned is None and (count := sizes[at]):
                leaf = torch.frombuffer(slab, dtype=dtype, count=count, offset=place)
                size = count * width
            else:
                shape = tuple(sizes[at : at + ndim])
                size = math.prod(shape) * width
                if in_pinned is not None and size and (step is None or step[0] == _TENSOR):
                    leaf = in_pinned.narrow(0, place, size).view(dtype).view(shape)
                    leaf = leaf if step is None else leaf.permute(step[1])
                else:
                    leaf = _leaf(slab[place : place + size], dtype, shape, step)
            leaves.append(leaf)
            at += ndim
            place += (size + ALIGNMENT - 1) & -ALIGNMENT
        if self._names is not None:
            return Batch(dict(zip(self._names, leaves, strict=True)), receipt)
        return _assembled(self._structure, leaves, self._objects(leaves, receipt), receipt)

    def _objects(self, leaves: list[Any], receipt: Receipt) -> list[Any]:
        if not self._kinds or self._kinds[-1] != (_BYTES,):
            return []
        buffers = iter([leaf for leaf, kind in zip(leaves[:-1], self._kinds[:-1], strict=True) if kind[0] == _BYTES])
        return cast("list[Any]", _Unpickler(io.BytesIO(leaves[-1]), leaves, receipt, buffers).load())


def _step(kind: tuple[Any, ...]) -> tuple[Any, int, int, Any]:
    """(dtype, bytes of an element, dimensions, how it is more than a tensor of that) for the kind of a leaf."""
    if kind[0] == _TENSOR:
        _, dtype, ndim, order = kind
        back = None if order is None else (_TENSOR, tuple(int(one) for one in np.argsort(order)))
        return dtype, dtype.itemsize, ndim, back
    if kind[0] == _ARRAY:
        _, dtype, ndim, turned = kind
        return dtype, dtype.itemsize, ndim, (_ARRAY, turned)
    return np.dtype(np.uint8), 1, 1, kind


def _leaf(content: npt.NDArray[np.uint8], dtype: Any, shape: tuple[int, ...], step: Any) -> Any:
    """The leaf that lies in ``content``."""
    if step is None or step[0] == _TENSOR:
        if not len(content):
            leaf = torch.empty(shape, dtype=dtype)
        else:
            leaf = torch.frombuffer(content, dtype=dtype).view(shape)
        return leaf if step is None else leaf.permute(step[1])
    if step[0] == _ARRAY:
        array = np.frombuffer(content, dtype).reshape(shape) if len(content) else np.empty(shape, dtype)
        return array.T if step[1] else array
    return pa.ipc.open_stream(pa.py_buffer(content)).read_all() if step[0] == _TABLE else content


def _plain_names(structure: Any, leaves: int) -> tuple[str, ...] | None:
    """The names of a `Batch` of nothing but its leaves, in their order: what most micro-batches are."""
    is_plain = type(structure) is tuple and structure[0] == _BATCH and structure[2] == tuple(range(leaves))
    return structure[1] if is_plain else None


def _assembled(structure: Any, leaves: list[Any], objects: list[Any], receipt: Receipt) -> Any:
    if type(structure) is int:
        return leaves[structure]
    kind, *rest = structure
    if kind == _OBJECT:
        return objects[rest[0]]
    if kind == _TEXTS:
        return _split(leaves[rest[0]], leaves[rest[1]])
    if kind in (_LIST, _TUPLE):
        found = [_assembled(one, leaves, objects, receipt) for one in rest[0]]
        return found if kind == _LIST else tuple(found)
    if kind == _RAGGED:
        values, offsets, masks = (_assembled(one, leaves, objects, receipt) for one in rest[1:])
        return Ragged(values=values, offsets=offsets, kind=rest[0], masks=masks)
    if kind == _JAGGED:
        return torch.nested.nested_tensor_from_jagged(leaves[rest[0]], leaves[rest[1]])
    names, children = rest
    columns = {
        name: leaves[child] if type(child) is int else _assembled(child, leaves, objects, receipt)
        for name, child in zip(names, children, strict=True)
    }
    return Batch(columns, receipt) if kind == _BATCH else columns

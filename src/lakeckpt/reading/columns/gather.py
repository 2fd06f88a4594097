"""This module gathers, cuts and joins the rows of `lakeckpt.reading.columns.ragged` columns.

*Gathered* rows are copies in memory of their own; *cut* rows are views, save that offsets are new; *joined* rows are
copies. All three are made column by column, and keep the structure that a column has. Columns come in *parts*, as they
were decoded: rows are gathered from the parts, which are not joined before.

The rows of a `Ragged` of fixed-width elements are runs of bytes to Arrow: views of them are put in order, 16 bytes a
row, and then every row is copied once to where it belongs. Elements that are columns of columns are gathered element by
element. Nothing here runs Python per row, and nothing knows of Arrow's types, nulls policy or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.reading.columns.forms import MAX_NARROW_BYTES, view
from lakeckpt.reading.columns.ragged import Column, Ragged, map_column, trusted

__all__ = ["column_bytes", "copy_runs", "cut", "gather", "join_rows", "new_array"]

Array: TypeAlias = npt.NDArray[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]
New: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Makes an array of a shape and dtype, with unspecified values."""


def cut(columns: Mapping[str, Column[Array]], start: int, stop: int, make: Callable[[Array], Any]) -> dict[str, Any]:
    """Return rows [start, stop) of ``columns``, with ``make`` applied to every array of them.

    A column may be anything whose slice [start:stop] is a column.
    """
    # This runs for every column of every micro-batch, so plain arrays come first.
    return {
        name: make(column[start:stop]) if type(column) is np.ndarray else _cut(column, start, stop, make)
        for name, column in columns.items()
    }


def _cut(column: Column[Array], start: int, stop: int, make: Callable[[Array], Any]) -> Any:
    if isinstance(column, Ragged):
        offsets, values, masks = column.offsets, column.values, column.masks
        begin, end = offsets.item(start), offsets.item(stop)
        return trusted(
            make(values[begin:end]) if type(values) is np.ndarray else _cut(values, begin, end, make),
            make(offsets[start : stop + 1] - begin),
            column.kind,
            {name: make(mask[begin:end]) for name, mask in masks.items()} if masks else {},
        )
    if isinstance(column, dict):
        return cut(column, start, stop, make)
    return map_column(column[start:stop], make)


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in memory of Arrow's pool. The pool keeps freed memory, and new pages cost more."""
    count = int(np.prod(shape))
    if not count:
        return np.empty(shape, dtype)
    return view(pa.allocate_buffer(count * dtype.itemsize), dtype, 0, count).reshape(shape)


def gather(parts: Sequence[Column[Array]], rows: Int64Array, new: New = new_array) -> Column[Array]:
    """Return the rows ``rows``, in this order, of ``parts`` one after another. ``parts`` have the same structure.

    ``new`` makes the arrays of fixed width.
    """
    first = parts[0]
    if isinstance(first, dict):
        every = cast("Sequence[dict[str, Column[Array]]]", parts)
        return {name: gather([part[name] for part in every], rows, new) for name in first}
    if isinstance(first, Ragged):
        return _gather_ragged(cast("Sequence[Ragged[Array]]", parts), rows, new)
    column = _joined(cast("Sequence[Array]", parts), new)
    found = new((len(rows), *column.shape[1:]), column.dtype)
    # Every row is within bounds; in the mode "raise" numpy would make a copy first.
    return np.take(column, rows, axis=0, out=found, mode="wrap") if len(rows) else found


def _gather_ragged(parts: Sequence[Ragged[Array]], rows: Int64Array, new: New) -> Ragged[Array]:
    first = parts[0]
    if isinstance(first.values, np.ndarray) and not first.masks:
        runs, offsets = _gather_runs(parts, rows)
        return Ragged(values=runs, offsets=offsets, kind=first.kind)
    column = cast("Ragged[Array]", join_rows(parts))
    begins = column.offsets[rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(column.offsets[rows + 1] - begins, out=offsets[1:])
    elements = np.repeat(begins - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
    values = gather([column.values], elements, new)
    masks = {name: cast("Array", gather([mask], elements, new)) for name, mask in column.masks.items()}
    return Ragged(values=values, offsets=offsets, kind=column.kind, masks=masks)


def _gather_runs(parts: Sequence[Ragged[Array]], rows: Int64Array) -> tuple[Array, Int64Array]:
    """Return rows of fixed-width elements, and their offsets. To Arrow each row is a run of bytes."""
    first = cast("Array", parts[0].values)
    item = first.dtype.itemsize * int(np.prod(first.shape[1:]))
    sizes = [len(cast("Array", part.values)) * item for part in parts]
    if not item or not sum(sizes):
        return first[:0], np.zeros(len(rows) + 1, np.int64)
    if sum(sizes) < _SHORT_RUN * len(rows) or max(sizes) > MAX_NARROW_BYTES:
        taken = pc.take(_as_runs(cast("Ragged[Array]", join_rows(parts)), item), pa.array(rows), boundscheck=False)
    else:
        views = np.concatenate([_views(part.offsets * item, place) for place, part in enumerate(parts)])[rows]
        taken = _copied(views, [_octets(cast("Array", part.values)) for part in parts])
    bounds = view(taken.buffers()[1], np.int64, taken.offset, taken.offset + len(rows) + 1) // item
    found = view(taken.buffers()[2], first.dtype, 0, int(bounds[-1]) * (item // first.dtype.itemsize))
    return found.reshape(-1, *first.shape[1:]), bounds


def copy_runs(parts: Sequence[Array], places: Int64Array, starts: Int64Array, lengths: Int64Array) -> Array:
    """Return elements [starts[i], starts[i] + lengths[i]) of ``parts[places[i]]``, run after run, in new memory.

    ``parts`` are 1-D and of one dtype; the other arrays are int64, shape (runs,), and no length is 0.
    """
    item = parts[0].dtype.itemsize
    if max(map(len, parts)) * item > MAX_NARROW_BYTES:
        begins = np.cumsum([0, *map(len, parts)])[places] + starts - (np.cumsum(lengths) - lengths)
        return np.concatenate(parts)[np.repeat(begins, lengths) + np.arange(int(lengths.sum()))]
    views = np.zeros((len(places), 4), np.int32)
    views[:, 0], views[:, 2], views[:, 3] = lengths * item, places, starts * item
    taken = _copied(views, [_octets(part) for part in parts])
    return view(taken.buffers()[2], parts[0].dtype, 0, int(lengths.sum()))


def _copied(views: npt.NDArray[np.int32], contents: Sequence[pa.Buffer]) -> pa.Array:
    """Return the bytes that ``views`` name, as Arrow's large binary."""
    _inline(views, contents)
    stored = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *contents])
    return pc.cast(stored, pa.large_binary())


_SHORT_RUN = 64
"""A row of so many bytes is copied as fast as a view of it is made."""
_INLINE = 12
"""Arrow keeps the contents in the view itself, up to so many bytes."""


def _octets(values: Array) -> pa.Buffer:
    return pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _as_runs(column: Ragged[Array], item: int) -> pa.Array:
    buffers = [None, pa.py_buffer(column.offsets * item), _octets(cast("Array", column.values))]
    return pa.Array.from_buffers(pa.large_binary(), len(column), buffers)


def _views(offsets: Int64Array, place: int) -> npt.NDArray[np.int32]:
    """Return Arrow's views of the rows of content ``place``: int32, shape (rows, 4): length, 0, place, offset."""
    views = np.zeros((len(offsets) - 1, 4), np.int32)
    views[:, 0], views[:, 2], views[:, 3] = np.diff(offsets), place, offsets[:-1]
    return views


def _inline(views: npt.NDArray[np.int32], contents: Sequence[pa.Buffer]) -> None:
    """Put short contents into their views, as Arrow requires."""
    short = np.flatnonzero((views[:, 0] > 0) & (views[:, 0] <= _INLINE))
    if not len(short):
        return
    lengths, places, begins = views[short, 0], views[short, 2], views[short, 3].astype(np.int64)
    within = np.arange(_INLINE) < lengths[:, None]
    found = np.zeros((len(short), _INLINE), np.uint8)
    for place in np.unique(places):
        content, mine = np.frombuffer(contents[place], np.uint8), places == place
        at = np.where(within[mine], begins[mine, None] + np.arange(_INLINE), 0)
        found[mine] = np.where(within[mine], content[at], 0)
    views[short, 1:] = found.view(np.int32)


def join_rows(parts: Sequence[Column[Array]]) -> Column[Array]:
    """Return the rows of ``parts`` one after another, in new memory; a single part is returned as it is.

    ``parts`` have the same structure.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        every = cast("Sequence[dict[str, Column[Array]]]", parts)
        return {name: join_rows([part[name] for part in every]) for name in first}
    if isinstance(first, Ragged):
        return _join_ragged(cast("Sequence[Ragged[Array]]", parts))
    return _joined(cast("Sequence[Array]", parts), new_array)


def _joined(parts: Sequence[Array], new: New) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, out=new((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype))


def _join_ragged(parts: Sequence[Ragged[Array]]) -> Ragged[Array]:
    ends = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    return Ragged(
        values=join_rows([part.values for part in parts]),
        offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        kind=parts[0].kind,
        masks={name: cast("Array", join_rows([part.masks[name] for part in parts])) for name in parts[0].masks},
    )


def column_bytes(columns: Mapping[str, Column[Array]]) -> int:
    """Return the bytes of all arrays of ``columns``."""
    sizes: list[int] = []

    def add(array: Array) -> Array:
        sizes.append(array.nbytes)
        return array

    for column in columns.values():
        map_column(column, add)
    return sum(sizes)

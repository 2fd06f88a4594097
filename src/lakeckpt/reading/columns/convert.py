"""This module converts Arrow columns to numpy columns, and nulls to masks. A null is never silently a zero.

=====================================================  ==============================================================
Arrow                                                  column
=====================================================  ==============================================================
int8 … int64, uint8 … uint64, float16 … float64        array of the same dtype, shape (rows,)
bool                                                   bool (unpacked)
timestamp (any zone: UTC), duration, time64, date64    int64, in the unit of the type (date64: milliseconds since 1970)
date32, time32                                         int32, in the unit of the type (date32: days since 1970)
decimal                                                float64: the nearest
fixed_size_binary(k)                                   uint8, shape (rows, k)
string, binary (large, view)                           `Ragged` of uint8, kind "str" or "bytes"
list (large, view)                                     `Ragged` of the elements' column
fixed_size_list(k) of what converts to an array        array of shape (rows, k, …); of anything else: `Ragged`
struct                                                 dict of columns
map                                                    `Ragged` of a struct of ``key`` and ``value``
dictionary, run-end-encoded, extension                 as their values, or their storage
null                                                   bool, all False
=====================================================  ==============================================================

Fixed-width columns without nulls, and the contents of text and lists, are views of Arrow's own memory: no copy, and
writable, so **the rows of a table given to `convert` must be nobody else's**. Offsets and masks are always new.

A column's structure follows from its type and the policy alone, never from the rows, so that batches of zero rows look
like all others. In the mode "mask" every field that may be null has its mask, also when nothing is; a field inside of a
struct or a fixed_size_list that may be null may be null too. Values at nulls are zero, empty or all null inside.

It does no I/O, runs no Python per row, and never changes what it is given.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import NullValueError, SchemaError
from lakeckpt.lake.parquet.types import DECIMALS, canonical, plain
from lakeckpt.reading.columns.decimals import nearest
from lakeckpt.reading.columns.forms import bits, join, view
from lakeckpt.reading.columns.ragged import MASK, Column, Namespace, Ragged

__all__ = ["Nulls", "check_convertible", "convert", "convert_parts"]

Array: TypeAlias = npt.NDArray[Any]
Nulls: TypeAlias = Literal["error", "mask"]
"""The policy for nulls: raise, or say where they are in a mask beside the column."""

_DTYPES: dict[int, np.dtype[Any]] = {
    kind.id: np.dtype(dtype)
    for kind, dtype in (
        *((pa.from_numpy_dtype(name), name) for name in ("int8", "int16", "int32", "int64")),
        *((pa.from_numpy_dtype(name), name) for name in ("uint8", "uint16", "uint32", "uint64")),
        *((pa.from_numpy_dtype(name), name) for name in ("float16", "float32", "float64", "bool")),
        *((pa.timestamp("s"), "int64"), (pa.duration("s"), "int64"), (pa.time64("us"), "int64")),
        *((pa.date64(), "int64"), (pa.date32(), "int32"), (pa.time32("s"), "int32")),
        *((kind, "float64") for kind in DECIMALS),
        *((pa.binary(1), "uint8"), (pa.null(), "bool")),
    )
}
"""The dtype of the column of each type of fixed width, by the type's id."""

_TEXT = {pa.string().id, pa.large_string().id, pa.binary().id, pa.large_binary().id}
_LISTS = {pa.list_(pa.null()).id, pa.large_list(pa.null()).id, pa.map_(pa.int8(), pa.int8()).id}
_FIXED_SIZE_LIST, _STRUCT = pa.list_(pa.null(), 1).id, pa.struct([]).id
_BITS, _OCTETS, _NULL = pa.bool_().id, pa.binary(1).id, pa.null().id


def convert(table: pa.Table, *, nulls: Nulls = "error") -> Namespace[Array]:
    """Return the columns of ``table``, and in the mode "mask" their masks, by name and in the table's order.

    The arrays are the caller's to write to, and share memory with ``table``. Raises `NullValueError` if there are
    nulls and ``nulls`` is "error" (or the schema declares that there are none), `SchemaError` for a type that has no
    column form or for names that clash with those of masks.
    """
    if nulls not in ("error", "mask"):
        raise ValueError(f"nulls must be 'error' or 'mask', got {nulls!r}")
    fields = [table.schema.field(i) for i in range(table.num_columns)]
    arrays = (join(column) for column in table.itercolumns())
    return _namespace(fields, arrays, "", nulls=nulls, within_null=False)


def convert_parts(table: pa.Table, *, nulls: Nulls = "error") -> dict[str, list[Column[Array]]]:
    """Do what `convert` does, but return one part for each chunk of a column, at least one. No chunks are joined."""
    found: dict[str, list[Column[Array]]] = {}
    for field, column in zip(table.schema, table.itercolumns(), strict=True):
        for chunk in column.chunks or [pa.nulls(0, field.type)]:
            part, masks = _column(chunk, field.name, nullable=field.nullable, nulls=nulls)
            found.setdefault(field.name, []).append(part)
            for suffix, mask in masks.items():
                found.setdefault(field.name + suffix, []).append(mask)
    return found


def check_convertible(schema: pa.Schema, *, nulls: Nulls = "error") -> None:
    """Raise `SchemaError`, naming column and type, unless tables of ``schema`` can be converted. Reads nothing."""
    convert(pa.Table.from_batches([], schema), nulls=nulls)


def _namespace(
    fields: list[pa.Field], arrays: Any, prefix: str, *, nulls: Nulls, within_null: bool
) -> Namespace[Array]:
    found: Namespace[Array] = {}
    for field, array in zip(fields, arrays, strict=True):
        nullable = field.nullable or within_null
        column, masks = _column(array, prefix + field.name, nullable=nullable, nulls=nulls)
        for name, part in ((field.name, column), *((field.name + suffix, mask) for suffix, mask in masks.items())):
            if name in found:
                raise SchemaError(
                    f"column {prefix + name!r} is there twice (masks of nulls are named after their column): "
                    "select columns whose names are distinct, or use nulls='error'"
                )
            found[name] = part
    return found


def _column(array: pa.Array, path: str, *, nullable: bool, nulls: Nulls) -> tuple[Column[Array], dict[str, Array]]:
    """Return the column of ``array`` and its masks by the suffix of their name."""
    kind = array.type
    try:
        array = canonical(array)
    except pa.ArrowNotImplementedError as error:
        raise _unsupported(path, kind) from error
    form = array.type.id
    null = _nulls_of(array, path, nullable=nullable, nulls=nulls)
    masks: dict[str, Array] = {}
    column: Column[Array]
    if (dtype := _DTYPES.get(form)) is not None:
        column = _zeroed(_fixed_width(array, dtype), null)
    elif form in _TEXT:
        column = _text(array, null)
    elif form in _LISTS:
        column = _list(array, null, path, nulls)
    elif form == _FIXED_SIZE_LIST:
        column, masks = _fixed_size_list(array, null, path, nullable, nulls)
    elif form == _STRUCT:
        column = _struct(array, path, nullable, nulls)
    else:
        raise _unsupported(path, kind)
    if nullable and nulls == "mask":
        masks[MASK] = np.zeros(len(array), np.bool_) if null is None else null
    return column, masks


def _unsupported(path: str, kind: pa.DataType) -> SchemaError:
    return SchemaError(
        f"column {path!r} is of type {kind}, which has no form as arrays: leave it out, or store it otherwise"
    )


def _nulls_of(array: pa.Array, path: str, *, nullable: bool, nulls: Nulls) -> Array | None:
    """Return where ``array`` is null (a new array), or None if it has no nulls.

    Raises `NullValueError` if ``nulls`` is "error", or the schema declares that there are no nulls.
    """
    count = array.null_count
    if count == 0:
        return None
    if nulls == "error":
        raise NullValueError(
            f"column {path!r} has {count} null(s) in {len(array)} values: ask for masks (nulls='mask'), "
            "filter them out, or leave the column out",
            column=path,
        )
    if not nullable:
        raise NullValueError(
            f"column {path!r} has {count} null(s), but its schema declares that it has none", column=path
        )
    if pa.types.is_null(array.type):
        return np.ones(len(array), np.bool_)
    return ~bits(array.buffers()[0], array.offset, array.offset + len(array))


def _fixed_width(array: pa.Array, dtype: np.dtype[Any]) -> Array:
    form, start, stop = array.type.id, array.offset, array.offset + len(array)
    if form == _NULL:
        return np.zeros(len(array), dtype)
    values = array.buffers()[1]
    if form == _BITS:
        return bits(values, start, stop)
    if form == _OCTETS:
        width = array.type.byte_width
        return view(values, dtype, start * width, stop * width).reshape(len(array), width)
    if dtype == np.float64 and pa.types.is_decimal(array.type):
        return nearest(array)
    return view(values, dtype, start, stop)


def _zeroed(values: Array, null: Array | None) -> Array:
    """Return ``values`` with zero at nulls: a copy, since Arrow may show one block of zeros as many columns."""
    if null is None:
        return values
    values = values.copy()
    values[null] = 0
    return values


def _offsets(array: pa.Array, buffer: pa.Buffer | None, *, wide: bool) -> tuple[Array, int, int]:
    """Return offsets that begin with 0 (a new array), and the range of the child or data that they span."""
    if buffer is None or buffer.size == 0 or len(array) == 0:
        return np.zeros(len(array) + 1, np.int64), 0, 0
    raw = view(buffer, np.int64 if wide else np.int32, array.offset, array.offset + len(array) + 1)
    # A new array even when it is 64 bits wide from 0 on: neighbours in a row group share the offset at their border.
    return raw.astype(np.int64) - np.int64(raw[0]), int(raw[0]), int(raw[-1])


def _text(array: pa.Array, null: Array | None) -> Ragged[Array]:
    is_str = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets, first, last = _offsets(array, array.buffers()[1], wide=wide)
    if null is not None and np.diff(offsets)[null].any():
        return _text(pc.fill_null(array, "" if is_str else b""), None)  # Arrow lets bytes lie under nulls
    values = view(array.buffers()[2], np.uint8, first, last)
    return Ragged(values=values, offsets=offsets, kind="str" if is_str else "bytes")


def _list(array: pa.Array, null: Array | None, path: str, nulls: Nulls) -> Ragged[Array]:
    offsets, first, last = _offsets(array, array.buffers()[1], wide=pa.types.is_large_list(array.type))
    elements = array.values.slice(first, last - first)
    if null is not None:
        sizes = np.diff(offsets)
        if sizes[null].any():  # Arrow lets elements lie under nulls
            elements = plain(elements).filter(pa.array(np.repeat(~null, sizes)))
            sizes[null] = 0
            np.cumsum(sizes, out=offsets[1:])
    field = array.type.field(0)
    if pa.types.is_map(array.type):
        elements = _named_as_map(elements)
    values, masks = _column(elements, path + "[]", nullable=field.nullable, nulls=nulls)
    return Ragged(values=values, offsets=offsets, masks={"values" + suffix: mask for suffix, mask in masks.items()})


def _named_as_map(entries: pa.StructArray) -> pa.StructArray:
    """Return the entries of a map under the names ``key`` and ``value``; writers call them differently."""
    fields = [entries.type.field(place).with_name(name) for place, name in enumerate(("key", "value"))]
    return pa.StructArray.from_arrays(entries.flatten(), fields=fields)


def _fixed_size_list(
    array: pa.Array, null: Array | None, path: str, nullable: bool, nulls: Nulls
) -> tuple[Column[Array], dict[str, Array]]:
    rows, size = len(array), array.type.list_size
    elements = array.values.slice(array.offset * size, rows * size)
    if null is not None:  # what lies under nulls must not show: null elements in its place
        places = np.arange(rows * size, dtype=np.int64)
        elements = plain(elements).take(pa.array(places, mask=np.repeat(null, size)))
    inner = array.type.value_field
    values, masks = _column(elements, path + "[]", nullable=inner.nullable or nullable, nulls=nulls)
    if isinstance(values, np.ndarray):
        masks = {".values" + suffix: mask.reshape(rows, size, *mask.shape[1:]) for suffix, mask in masks.items()}
        return values.reshape(rows, size, *values.shape[1:]), masks
    offsets = np.arange(rows + 1, dtype=np.int64) * size
    return Ragged(values=values, offsets=offsets, masks={"values" + suffix: m for suffix, m in masks.items()}), {}


def _struct(array: pa.Array, path: str, nullable: bool, nulls: Nulls) -> dict[str, Column[Array]]:
    fields = [array.type.field(i) for i in range(array.type.num_fields)]
    return _namespace(fields, array.flatten(), path + ".", nulls=nulls, within_null=nullable)

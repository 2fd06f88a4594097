"""This module brings Arrow types and arrays into the forms in which columns are delivered.

A *plain* type has no dictionaries, views or extension types at any depth, because these only encode values.
`plain` brings an array into its plain type. `resized` changes the width of the offsets of lists. The module never
changes an array that it is given, and never copies an array that already has the wanted type.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import SchemaError

__all__ = ["DECIMALS", "canonical", "narrow_type", "plain", "plain_type", "resized", "wide_type"]

DECIMALS = tuple(
    make(1)
    for name in ("decimal32", "decimal64", "decimal128", "decimal256")  # pyarrow 17 lacks the first two
    if (make := getattr(pa, name, None)) is not None
)
"""A type of each kind of decimals."""
_CANONICAL = frozenset(
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.null(), *DECIMALS),
        *(pa.timestamp("s"), pa.duration("s"), pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us")),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(1), pa.struct([])),
        *(pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 1), pa.map_(pa.int8(), pa.int8())),
    )
)
"""The ids of types that stay as they are: looked up for every column of every batch."""


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of ``kind``, without what only encodes them, and without metadata of fields.

    Raises `SchemaError` for list views, which no writer but pyarrow puts into Parquet files.
    """
    return _rebuilt(kind, _value_type)


def narrow_type(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with 32-bit offsets at any depth, and extension types as what they are stored as."""
    return _rebuilt(kind, _narrow)


def wide_type(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with 64-bit offsets at every level that has offsets, except maps: Arrow has no wide maps."""
    return _rebuilt(kind, _widened)


def _rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return ``kind`` with ``change`` applied to every level, from the outside in."""

    def field(one: pa.Field) -> pa.Field:
        return pa.field(one.name, _rebuilt(one.type, change), nullable=one.nullable)

    kind = change(kind)
    if pa.types.is_struct(kind):
        return pa.struct([field(kind.field(i)) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(field(kind.key_field), field(kind.item_field), keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(field(kind.value_field))
    return pa.list_(field(kind.value_field)) if pa.types.is_list(kind) else kind


def _value_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _value_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _value_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        raise SchemaError(f"the type {kind} is not read: write the file again with lists instead of list views")
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _narrow(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _narrow(kind.storage_type)
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    return pa.list_(kind.value_field) if pa.types.is_large_list(kind) else kind


def _widened(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(kind.value_field) if pa.types.is_list(kind) else kind


def canonical(array: pa.Array) -> pa.Array:
    """Return ``array`` in its canonical form: no copy if it already is, else a copy (of the rows it shows)."""
    if array.type.id in _CANONICAL:
        return array
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        return _looked_up(plain(array.dictionary), array.indices)  # views cannot be gathered from: hence plain
    return array.cast(_value_type(array.type))


def _looked_up(values: pa.Array, indices: pa.Array) -> pa.Array:
    try:
        return values.take(indices)
    except pa.ArrowIndexError:  # under nulls of a parent there may be any index
        known = pc.and_(pc.greater_equal(indices, 0), pc.less(indices, len(values)))
        return values.take(pc.if_else(known, indices, None))


def plain(array: pa.Array) -> pa.Array:
    """Return ``array`` in its `plain_type`, without a copy if it already has this type."""
    array = canonical(array)
    kind = plain_type(array.type)
    if kind == array.type:
        return array
    if pa.types.is_struct(kind):
        children = [plain(array.field(i)) for i in range(kind.num_fields)]
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null() if array.null_count else None)
    own = array.buffers()[: 1 if pa.types.is_fixed_size_list(kind) else 2]
    children = [plain(array.values)]
    return pa.Array.from_buffers(kind, len(array), own, array.null_count, array.offset, children=children)


def resized(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return ``array`` as ``kind``, level by level if lists differ in the width of their offsets.

    Arrow's cast of such lists goes through a view of their elements, and refuses fixed-size lists that are null over
    elements which are not nullable: all of them have elements, null or not. `pa.ArrowInvalid` if offsets overflow.
    """
    if array.type == kind or not (_has_offsets(kind) and _has_offsets(array.type)):
        return array if array.type == kind else array.cast(kind)
    offsets = pa.array(array.offsets.to_numpy()).cast(pa.int64() if pa.types.is_large_list(kind) else pa.int32())
    lists = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    mask = pa.array(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None
    return lists.from_arrays(offsets, resized(array.values, kind.value_type), type=kind, mask=mask)


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))

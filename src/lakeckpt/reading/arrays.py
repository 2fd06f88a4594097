"""Which Arrow array holds the same values in a layout that we can address?  Forms, joins and views of Arrow arrays.

*Canonical*: extension arrays become their storage; dictionary and run-end-encoded arrays their values; views of text,
bytes and lists their offset-based forms. *Joined*: a chunked array becomes one array, with 64-bit offsets where 32 bits
would overflow. *Viewed*: an Arrow buffer becomes a numpy array over the same memory, which keeps the buffer alive.

Views are writable although Arrow means its buffers to be constant: whoever asks for one must be the only user of those
rows. Nothing here knows of columns' names, nulls policy or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import DataFileDamaged

__all__ = [
    "DECIMALS",
    "MAX_NARROW_BYTES",
    "bits",
    "canonical",
    "canonical_type",
    "join",
    "looked_up_bytes",
    "narrowed",
    "plain",
    "plain_type",
    "resized",
    "view",
    "wide",
]

MAX_NARROW_BYTES = 2**31 - 1
"""What 32-bit offsets can address."""


DECIMALS = tuple(
    make(1)
    for name in ("decimal32", "decimal64", "decimal128", "decimal256")  # pyarrow 17 has not the first two
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


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """Return what `canonical` turns arrays of ``kind`` into; of nested types their own level, if that will do."""
    if isinstance(kind, pa.BaseExtensionType):
        return canonical_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if _is_view(kind, "is_string_view"):
        return pa.large_string()
    if _is_view(kind, "is_binary_view"):
        return pa.large_binary()
    if _is_list_view(kind):
        return pa.large_list(_plain_field(kind.value_field))
    return kind


def canonical(array: pa.Array) -> pa.Array:
    """Return ``array`` in its canonical form: no copy where it already is, else a copy (of the rows it shows)."""
    if array.type.id in _CANONICAL:
        return array
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        return _looked_up(plain(array.dictionary), array.indices)  # views cannot be gathered from: hence plain
    if pa.types.is_run_end_encoded(array.type):
        return plain(pc.run_end_decode(array))
    if _is_list_view(array.type):
        return _from_list_view(array)
    kind = canonical_type(array.type)
    return array if kind == array.type else array.cast(kind)


def _looked_up(values: pa.Array, indices: pa.Array) -> pa.Array:
    try:
        return values.take(indices)
    except pa.ArrowIndexError:  # under nulls of a parent there may be any index
        known = pc.and_(pc.greater_equal(indices, 0), pc.less(indices, len(values)))
        return values.take(pc.if_else(known, indices, None))


def _from_list_view(array: pa.Array) -> pa.Array:
    """Return a list view as a large list: Arrow 26 casts those without nulls to lists that lack their last offset."""
    null = array.is_null().to_numpy(zero_copy_only=False)
    starts = array.offsets.to_numpy().astype(np.int64)
    sizes = np.where(null, 0, array.sizes.to_numpy())
    ends = np.cumsum(sizes)
    begins = ends - sizes
    places = np.repeat(starts - begins, sizes) + np.arange(ends[-1] if len(ends) else 0)
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    elements = plain(array.values).take(pa.array(places))
    kind = canonical_type(array.type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), elements, type=kind, mask=pa.array(null))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with every level of it canonical: the type in which decoded columns are delivered."""
    kind = canonical_type(kind)
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(i)) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def plain(array: pa.Array) -> pa.Array:
    """Return ``array`` in its `plain_type`: no copy of what has it already."""
    array = canonical(array)
    kind = plain_type(array.type)
    if kind == array.type:
        return array
    if pa.types.is_struct(kind):
        children = [plain(array.field(i)) for i in range(kind.num_fields)]
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    own = array.buffers()[: 1 if pa.types.is_fixed_size_list(kind) else 2]
    children = [plain(array.values)]
    return pa.Array.from_buffers(kind, len(array), own, array.null_count, array.offset, children=children)


def wide(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with 64-bit offsets at every level that has offsets, save maps: Arrow has no wide ones."""
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_wide_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_wide_field(kind.value_field), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([_wide_field(kind.field(i)) for i in range(kind.num_fields)])
    return kind


def _wide_field(field: pa.Field) -> pa.Field:
    return field.with_type(wide(field.type))


def join(column: pa.ChunkedArray) -> pa.Array:
    """Return the rows of ``column`` as one array: no copy where it has one chunk, else one copy.

    The type is that of ``column``, or its `wide` form where the bytes would not fit 32-bit offsets.
    """
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.nulls(0, column.type)
    if column.nbytes > MAX_NARROW_BYTES:
        column = pa.chunked_array([resized(chunk, wide(column.type)) for chunk in column.chunks])
    return pa.concat_arrays(column.chunks)


def narrowed(array: pa.Array, kind: pa.DataType) -> pa.ChunkedArray:
    """Return ``array``, which may be in the `wide` form of ``kind``, as ``kind``: in as many chunks as that needs."""
    if array.type == kind:
        return pa.chunked_array([array])
    if array.nbytes <= MAX_NARROW_BYTES or len(array) <= 1:
        return pa.chunked_array([resized(array, kind)])
    half = len(array) // 2
    halves = (array.take(pa.array(np.arange(a, b))) for a, b in ((0, half), (half, len(array))))
    return pa.chunked_array([chunk for part in halves for chunk in narrowed(part, kind).chunks], kind)


def resized(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return ``array`` as ``kind``, level by level where lists differ in the width of their offsets.

    Arrow's cast of such lists goes through a view of their elements, and refuses fixed-size lists that are null over
    elements which are not nullable: all of them have elements, null or not. `pa.ArrowInvalid` where offsets overflow.
    """
    if array.type == kind or not (_has_offsets(kind) and _has_offsets(array.type)):
        return array if array.type == kind else array.cast(kind)
    offsets = pa.array(array.offsets.to_numpy()).cast(pa.int64() if pa.types.is_large_list(kind) else pa.int32())
    lists = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    mask = pa.array(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None
    return lists.from_arrays(offsets, resized(array.values, kind.value_type), type=kind, mask=mask)


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def looked_up_bytes(array: pa.Array) -> int:
    """Return the bytes of the texts that the dictionaries in ``array``, at any depth, stand for."""
    if pa.types.is_dictionary(array.type):
        lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
        return int(pc.sum(lengths.cast(pa.int64())).as_py() or 0)
    if pa.types.is_struct(array.type):
        return sum(looked_up_bytes(array.field(number)) for number in range(array.type.num_fields))
    if pa.types.is_map(array.type):
        return looked_up_bytes(array.keys) + looked_up_bytes(array.items)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return looked_up_bytes(array.values)
    return 0


def _is_list_view(kind: pa.DataType) -> bool:
    return _is_view(kind, "is_list_view") or _is_view(kind, "is_large_list_view")


def _is_view(kind: pa.DataType, test: str) -> bool:
    found = getattr(pa.types, test, None)  # not every pyarrow that we support can name every view type
    return found is not None and bool(found(kind))


class _Exposed:
    """What numpy needs to know to look at a buffer's memory; it holds the buffer."""

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
    Raises `DataFileDamaged` where the elements lie outside of the buffer: no array ever shows other memory.
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

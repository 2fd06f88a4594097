"""This module holds columns outside of Arrow: a column is an array, a `Ragged`, or a dict of columns.

Columns live in a *namespace*, a dict from name to column. A fixed-width column is one array of shape (rows, …); a
struct is a dict, a namespace of its own; anything of varying length is a `Ragged`: the rows' contents one after
another, and int64 offsets of where each row begins. If nulls are asked for as masks, the mask of column ``x`` stands
beside it under the name ``x.is_null`` (bool, shape (rows,)); the masks of the elements of a 2-D column under
``x.values.is_null``; those of a `Ragged` in its ``masks``, named as if its values were a column called ``values``.

It is generic over the array type (numpy in ``reading``, torch in ``data``), of which it asks only slicing and
subtraction, and of tensors what moves them. Nothing here runs per row, save ``tolist`` and `to_pylist`, which exist to
look at data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar, Union, cast, overload

import numpy as np

__all__ = [
    "MASK",
    "Column",
    "Namespace",
    "Ragged",
    "map_column",
    "map_namespace",
    "slice_column",
    "to_pylist",
    "trusted",
]

A = TypeVar("A")
B = TypeVar("B")

Column: TypeAlias = Union[A, "Ragged[A]", dict[str, "Column[A]"]]
"""An array, a `Ragged`, or (a struct) a dict of columns."""

Namespace: TypeAlias = dict[str, "Column[A]"]
"""Columns and masks by name."""

MASK = ".is_null"
"""The mask of column ``x`` is named ``x.is_null``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ragged(Generic[A]):
    """A column whose rows differ in length: row i is ``values[offsets[i]:offsets[i + 1]]``.

    >>> words = Ragged(values=np.frombuffer(b"heyyou", np.uint8), offsets=np.array([0, 3, 3, 6]), kind="str")
    >>> len(words), words[2], words.tolist()
    (3, 'you', ['hey', '', 'you'])
    """

    values: Column[A]
    """The contents of all rows, one after another: for text and bytes an array of uint8, shape (offsets[-1],)."""
    offsets: A
    """int64, shape (rows + 1,); it begins with 0 and never falls."""
    kind: Literal["list", "str", "bytes"] = "list"
    """The kind of a row: a list, UTF-8 text, or bytes."""
    masks: Mapping[str, A] = field(default_factory=dict)
    """The masks of ``values`` by name (``values.is_null``): bool, one per element. Empty if nulls are errors."""

    def __post_init__(self) -> None:
        if self.kind not in ("list", "str", "bytes"):
            raise ValueError(f"kind must be 'list', 'str' or 'bytes', got {self.kind!r}")
        if len(cast("Any", self.offsets)) < 1:
            raise ValueError("offsets must have one entry more than there are rows, got none")

    def __len__(self) -> int:
        return len(cast("Any", self.offsets)) - 1

    @overload
    def __getitem__(self, row: int) -> Any: ...
    @overload
    def __getitem__(self, row: slice) -> Ragged[A]: ...
    def __getitem__(self, row: int | slice) -> Any:
        """Return the contents of one row (str, bytes, or the column of its elements), or a `Ragged` of some rows.

        Contents are views, not copies; elements that are null are zero (see ``masks``). A slice must have step 1.
        """
        if isinstance(row, slice):
            return self._rows(row)
        rows = len(self)
        if not -rows <= row < rows:
            raise IndexError(f"row {row} of a column of {rows} rows")
        row += rows if row < 0 else 0
        begin, end = self._bounds(row, row + 1)
        found = slice_column(self.values, begin, end)
        if self.kind == "list":
            return found
        content = _bytes_of(found)
        return content.decode() if self.kind == "str" else content

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def _bounds(self, start: int, stop: int) -> tuple[int, int]:
        offsets = cast("Any", self.offsets)
        return int(offsets[start]), int(offsets[stop])

    def _rows(self, rows: slice) -> Ragged[A]:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows of a ragged column can be sliced in steps of 1 only, got {step}")
        stop = max(start, stop)
        begin, end = self._bounds(start, stop)
        offsets = cast("Any", self.offsets)[start : stop + 1] - begin
        masks = {name: cast("Any", mask)[begin:end] for name, mask in self.masks.items()}
        return Ragged(values=slice_column(self.values, begin, end), offsets=offsets, kind=self.kind, masks=masks)

    def map_arrays(self, function: Callable[[A], B]) -> Ragged[B]:
        """Return the same column with ``function`` applied to every array: values, offsets and masks."""
        return Ragged(
            values=map_column(self.values, function),
            offsets=function(self.offsets),
            kind=self.kind,
            masks={name: function(mask) for name, mask in self.masks.items()},
        )

    def pin_memory(self) -> Ragged[A]:
        """Return the same column in pinned memory, if its arrays are tensors: torch's pinning asks for this."""
        return self.map_arrays(lambda array: cast("Any", array).pin_memory() if hasattr(array, "pin_memory") else array)

    def to(self, device: Any, *, non_blocking: bool = False) -> Ragged[A]:
        """Return the same column on ``device``, if its arrays are tensors: what moves batches asks for this."""
        return self.map_arrays(
            lambda array: cast("Any", array).to(device, non_blocking=non_blocking) if hasattr(array, "to") else array
        )

    @property
    def lengths(self) -> A:
        """How many elements (of text and bytes: bytes) each row has: int64, shape (rows,)."""
        offsets = cast("Any", self.offsets)
        return cast("A", offsets[1:] - offsets[:-1])

    def to_padded(self, value: Any) -> A:
        """Return one array of shape (rows, longest row, …), in which ``value`` stands behind the end of each row.

        Array, dtype and device are those of ``values``. `TypeError` if the elements are themselves ragged or
        structs.

        >>> Ragged(values=np.array([1, 2, 3]), offsets=np.array([0, 1, 3])).to_padded(-1).tolist()
        [[1, -1], [2, 3]]
        """
        values, lengths = cast("Any", self.values), cast("Any", self.lengths)
        if isinstance(values, (dict, Ragged)):
            raise TypeError("only rows of numbers can be padded, and the elements of these rows are columns themselves")
        shape = (len(self), int(lengths.max()) if len(self) else 0, *values.shape[1:])
        if hasattr(values, "new_full"):  # a tensor
            padded, places = values.new_full(shape, value), lengths.new_ones(shape[1]).cumsum(0) - 1
        else:
            padded, places = np.full(shape, value, values.dtype), np.arange(shape[1])
        padded[places < lengths[:, None]] = values
        return cast("A", padded)

    def tolist(self) -> list[Any]:
        """Return the rows as Python values: str, bytes or lists, with None for elements that are null."""
        offsets = cast("Any", self.offsets).tolist()
        if self.kind == "list":
            elements = to_pylist({"values": self.values, **self.masks}, "values")
            return [elements[a:b] for a, b in itertools.pairwise(offsets)]
        content = _bytes_of(self.values)
        if self.kind == "str" and content.isascii():  # one call decodes all rows
            text = content.decode("ascii")
            return [text[a:b] for a, b in itertools.pairwise(offsets)]
        rows = [content[a:b] for a, b in itertools.pairwise(offsets)]
        return [row.decode() for row in rows] if self.kind == "str" else list(rows)


_SET_VALUES, _SET_OFFSETS, _SET_KIND, _SET_MASKS = (
    Ragged.__dict__[name].__set__ for name in ("values", "offsets", "kind", "masks")
)


def trusted(values: Any, offsets: Any, kind: str, masks: Mapping[str, Any]) -> Ragged[Any]:
    """Return the `Ragged` of parts that are known to fit: made once for every micro-batch, so nothing is checked."""
    found: Ragged[Any] = object.__new__(Ragged)
    _SET_VALUES(found, values)
    _SET_OFFSETS(found, offsets)
    _SET_KIND(found, kind)
    _SET_MASKS(found, masks)
    return found


def slice_column(column: Column[A], start: int, stop: int) -> Column[A]:
    """Return rows [start, stop) of ``column``: views, not copies."""
    if isinstance(column, dict):
        return {name: slice_column(child, start, stop) for name, child in column.items()}
    if isinstance(column, Ragged):
        return column[start:stop]
    return cast("A", cast("Any", column)[start:stop])


def map_column(column: Column[A], function: Callable[[A], B]) -> Column[B]:
    """Return ``column`` with ``function`` applied to every array in it."""
    if isinstance(column, dict):
        return map_namespace(column, function)
    if isinstance(column, Ragged):
        return column.map_arrays(function)
    return function(column)


def map_namespace(columns: Mapping[str, Column[A]], function: Callable[[A], B]) -> Namespace[B]:
    """Return ``columns`` with ``function`` applied to every array in them."""
    return {name: map_column(column, function) for name, column in columns.items()}


def to_pylist(columns: Mapping[str, Column[A]], name: str) -> list[Any]:
    """Return column ``name`` as a list of Python values, None if its masks say null: for looking at data.

    Structs become dicts (without the entries of masks), text becomes str, numbers are raw (a timestamp is an integer).
    """
    column = columns[name]
    if isinstance(column, dict):
        rows = _struct_rows(column)
    elif isinstance(column, Ragged):
        rows = column.tolist()
    elif isinstance(column, list):  # texts, as batches have them
        rows = column
    else:
        rows = _array_rows(columns, name)
    mask = columns.get(name + MASK)
    if mask is None:
        return rows
    return [None if null else row for null, row in zip(cast("Any", mask).tolist(), rows, strict=True)]


def _struct_rows(struct: dict[str, Column[A]]) -> list[Any]:
    fields = [name for name in struct if not _is_mask(name, struct)]
    if not fields:
        raise ValueError("a struct without fields says nothing of how many rows it has")
    rows = zip(*(to_pylist(struct, name) for name in fields), strict=True)
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _is_mask(name: str, columns: Mapping[str, Column[A]]) -> bool:
    if not name.endswith(MASK):
        return False
    of = name.removesuffix(MASK)
    while of not in columns and of.endswith(".values"):
        of = of.removesuffix(".values")
    return of in columns


def _array_rows(columns: Mapping[str, Column[A]], name: str) -> list[Any]:
    array = cast("Any", columns[name])
    rows: list[Any] = array.tolist()
    for depth in range(array.ndim - 1, 0, -1):
        mask = columns.get(name + ".values" * depth + MASK)
        if mask is not None:
            rows = _punch(rows, cast("Any", mask).tolist())
    return rows


def _punch(row: Any, nulls: Any) -> Any:
    if isinstance(nulls, list):
        return [_punch(one, null) for one, null in zip(row, nulls, strict=True)]
    return None if nulls else row


def _bytes_of(array: Any) -> bytes:
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array).tobytes()

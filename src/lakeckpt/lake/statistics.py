"""Between which bounds do the values of a column lie in each row group, as far as the file's statistics can be trusted?

`stored_bounds` reads them from a footer's bytes with a parser of our own (`lakeckpt.lake.thrift`): pyarrow shows too
little of them, and ends the process over some damaged ones. A bound is used only where its meaning is sure:

* the newer fields where the file says that their order is the type's; the older ones, whose order was signed bytes,
  for signed numbers and times alone;
* unsigned numbers and decimals stored as bytes only from writers that compare them rightly;
* no bounds of NaN, none that cross, none of a wrong width; INT96, float16, intervals, nested columns and unknown
  logical types have none;
* bounds may be cut short, as writers do with long text: they are taken for bounds, never for values that occur;
* a column of floating-point numbers may hold NaN, whatever its bounds are.

What cannot be used is unknown, never an error.
"""

from __future__ import annotations

import decimal
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.lake.thrift import read_struct
from lakeckpt.lake.values import Value, arrow_scalar

__all__ = ["Bounds", "constant_bounds", "stored_bounds"]

Int64Array = npt.NDArray[np.int64]
# Numbers of fields in Parquet's format: FileMetaData (schema, row groups, creator, column orders), then below it.
_WANTED = {2: None, 4: {1: {3: {5: None, 12: None}}}, 6: None, 7: None}
_BOOLEAN, _INT32, _INT64, _FLOAT, _DOUBLE, _BYTES, _FIXED = 0, 1, 2, 4, 5, 6, 7
_REQUIRED, _REPEATED = 0, 2
_TYPE_ORDER = 1
_CREATOR = re.compile(r"\s*(\S+) version (\d+)\.(\d+)")
_COMPARES_RIGHTLY = {"parquet-cpp-arrow": (4, 0), "parquet-mr": (1, 10), "parquet-rs": (30, 0)}
_UNITS = {1: "ms", 2: "us", 3: "ns"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """What is known of one column in each of G row groups."""

    low: pa.Array
    """No value is below: G values of the table's type (text as bytes); null: unknown."""
    high: pa.Array
    nulls: Int64Array
    """How many values are null; -1: unknown."""
    rows: Int64Array
    may_be_nan: bool = False


def constant_bounds(value: Value, kind: pa.DataType, rows: Int64Array) -> Bounds:
    """The bounds of a column that is ``value`` in every row, or null in every row."""
    kind = _comparable(kind)
    if isinstance(value, str) and pa.types.is_binary(kind):
        value = value.encode()
    same = pa.nulls(len(rows), kind) if value is None else pa.repeat(arrow_scalar(value, kind), len(rows))
    nan = isinstance(value, float) and value != value
    same = pa.nulls(len(rows), kind) if nan else same
    return Bounds(low=same, high=same, nulls=rows if value is None else np.zeros_like(rows), rows=rows, may_be_nan=nan)


def stored_bounds(footer: bytes, columns: Mapping[str, pa.DataType], rows: Int64Array) -> dict[str, Bounds]:
    """Bounds of those ``columns`` (stored name → type in the table) of which something is known.

    ``footer`` are the bytes of a Parquet footer, ``rows`` the rows that its row groups store.
    """
    try:
        head = read_struct(memoryview(footer), 0, wanted=_WANTED)[0]
        leaves, groups = _leaves(head[2], columns), head[4]
        if len(groups) != len(rows):
            return {}
        creator, orders = _text(head.get(6)), head.get(7) or []
        found = {}
        for name, (place, element) in leaves.items():
            ordered = place < len(orders) and _TYPE_ORDER in orders[place]
            chunks = [group[1][place].get(3) or {} for group in groups]
            bounds = _bounds_of(element, chunks, columns[name], rows, _Trust(creator, ordered, bool(orders)))
            if bounds is not None:
                found[name] = bounds
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return {}
    return found


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else ""


def _leaves(elements: list[dict[int, Any]], wanted: Collection[str]) -> dict[str, tuple[int, dict[int, Any]]]:
    """Name → (ordinal among the leaves, element) of the ``wanted`` columns that are neither nested nor repeated."""
    found: dict[str, tuple[int, dict[int, Any]]] = {}
    leaf = 0
    pending = [elements[0].get(5, 0)]  # children that are still to come, at each depth
    for element in elements[1:]:
        while pending and pending[-1] == 0:
            pending.pop()
        pending[-1] -= 1
        if element.get(5):
            pending.append(element[5])
            continue
        name = _text(element[4])
        if len(pending) == 1 and element.get(3) != _REPEATED and name in wanted:
            found[name] = (leaf, element)
        leaf += 1
    return found


@dataclass(frozen=True, slots=True)
class _Trust:
    """What the file says of its statistics."""

    creator: str
    type_ordered: bool
    """Whether this column's order is said to be its type's."""
    says_orders: bool

    @property
    def compares_rightly(self) -> bool:
        """Whether the writer is known to compare unsigned numbers and decimals in bytes as they should be."""
        match = _CREATOR.match(self.creator)
        least = _COMPARES_RIGHTLY.get(match.group(1)) if match else None
        return match is not None and least is not None and (int(match.group(2)), int(match.group(3))) >= least


@dataclass(frozen=True, slots=True)
class _Reads:
    """How the bytes of a bound become a value of ``kind``; ``signed``: whether older fields mean the same order."""

    kind: pa.DataType
    value: Callable[[bytes], Any]
    signed: bool = True
    needs_trust: bool = False


def _bounds_of(
    element: Mapping[int, Any], chunks: list[dict[int, Any]], kind: pa.DataType, rows: Int64Array, trust: _Trust
) -> Bounds | None:
    statistics = [
        chunk.get(12) or {} if chunk.get(5) == count else {} for chunk, count in zip(chunks, rows, strict=True)
    ]
    nulls = np.array(
        [_nulls(one, element, count) for one, count in zip(statistics, rows.tolist(), strict=True)], np.int64
    )
    kind = _comparable(kind)
    lows, highs = pa.nulls(len(rows), kind), pa.nulls(len(rows), kind)
    reads = _reads(element)
    if reads is not None and _widens(reads.kind, kind):
        pairs = [_pair(one, reads, trust) for one in statistics]
        try:
            lows = pa.array([low for low, _ in pairs], reads.kind).cast(kind)
            highs = pa.array([high for _, high in pairs], reads.kind).cast(kind)
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            lows, highs = pa.nulls(len(rows), kind), pa.nulls(len(rows), kind)
    return Bounds(low=lows, high=highs, nulls=nulls, rows=rows, may_be_nan=pa.types.is_floating(kind))


def _nulls(statistics: Mapping[int, Any], element: Mapping[int, Any], rows: int) -> int:
    if element.get(3) == _REQUIRED:
        return 0
    count = statistics.get(3)
    return count if isinstance(count, int) and 0 <= count <= rows else -1


def _pair(statistics: Mapping[int, Any], reads: _Reads, trust: _Trust) -> tuple[Any, Any]:
    """(low, high), or (None, None)."""
    newer = (statistics.get(6), statistics.get(5))
    older = (statistics.get(2), statistics.get(1))
    if None not in newer and (trust.type_ordered or (reads.signed and not trust.says_orders)):
        raw = newer
    elif None not in older and reads.signed and not trust.says_orders:
        raw = older
    else:
        return None, None
    if reads.needs_trust and not trust.compares_rightly:
        return None, None
    try:
        low, high = reads.value(raw[0]), reads.value(raw[1])  # type: ignore[arg-type]
    except (struct.error, ValueError, decimal.DecimalException):
        return None, None
    return (low, high) if low <= high else (None, None)  # false of NaN


def _reads(element: Mapping[int, Any]) -> _Reads | None:
    """How the column's bounds are read; None: not at all."""
    physical, logical, converted = element.get(1), element.get(10) or {}, element.get(6)
    which = next(iter(logical), None)
    if which == 5 or converted == 5:
        return _decimals(element, physical)
    if physical == _BOOLEAN and not logical and converted is None:
        return _Reads(pa.bool_(), lambda raw: struct.unpack("<?", raw)[0])
    if physical in (_FLOAT, _DOUBLE) and not logical:
        single = physical == _FLOAT
        return _Reads(pa.float32() if single else pa.float64(), _unpack("<f" if single else "<d"))
    if physical == _BYTES and (which in (None, 1, 4) and converted in (None, 0, 4)):
        return _Reads(pa.binary(), bytes, signed=False)
    if physical in (_INT32, _INT64):
        return _integers(physical, which, logical, converted)
    return None


def _integers(physical: int, which: int | None, logical: Mapping[int, Any], converted: int | None) -> _Reads | None:
    width = 32 if physical == _INT32 else 64
    signed, unsigned = _unpack("<i" if width == 32 else "<q"), _unpack("<I" if width == 32 else "<Q")
    plain = pa.int32() if width == 32 else pa.int64()
    if which is None and converted is None:
        return _Reads(plain, signed)
    if which == 6 or (which is None and converted == 6):
        return _Reads(pa.date32(), signed) if width == 32 else None
    if which == 8 or (which is None and converted in (9, 10)):
        unit = _unit(logical.get(8)) if which == 8 else {9: "ms", 10: "us"}[converted or 0]
        utc = logical[8].get(1, False) if which == 8 else True
        return _Reads(pa.timestamp(unit, "UTC" if utc else None), signed) if unit and width == 64 else None
    if which == 7 or (which is None and converted in (7, 8)):
        unit = _unit(logical.get(7)) if which == 7 else {7: "ms", 8: "us"}[converted or 0]
        if unit is None or (unit == "ms") != (width == 32):
            return None
        return _Reads(pa.time32(unit) if width == 32 else pa.time64(unit), signed)
    if which == 10 or (which is None and converted in range(11, 19)):
        is_signed = bool(logical[10].get(2, False)) if which == 10 else (converted or 0) >= 15
        if is_signed:
            return _Reads(plain, signed)
        kind = pa.uint32() if width == 32 else pa.uint64()
        return _Reads(kind, unsigned, signed=False, needs_trust=True)
    return None


def _decimals(element: Mapping[int, Any], physical: int | None) -> _Reads | None:
    scale, precision = element.get(7, 0), element.get(8, 0)
    if not 1 <= precision <= 76 or not 0 <= scale <= precision:
        return None
    kind = pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)
    if physical in (_INT32, _INT64):
        number = _unpack("<i" if physical == _INT32 else "<q")
        return _Reads(kind, lambda raw: _scaled(number(raw), scale))
    if physical == _FIXED:
        width = element.get(2)
        return _Reads(kind, lambda raw: _scaled(_big_endian(raw, width), scale), signed=False, needs_trust=True)
    return None


def _scaled(number: int, scale: int) -> decimal.Decimal:
    sign, digits = int(number < 0), tuple(map(int, str(abs(number))))
    return decimal.Decimal((sign, digits, -scale))


def _big_endian(raw: bytes, width: int | None) -> int:
    if len(raw) != width:
        raise ValueError(f"{len(raw)} bytes in place of {width}")
    return int.from_bytes(raw, "big", signed=True)


def _unpack(form: str) -> Callable[[bytes], Any]:
    return lambda raw: struct.unpack(form, raw)[0]


def _unit(time: Mapping[int, Any] | None) -> str | None:
    return _UNITS.get(next(iter((time or {}).get(2) or {}), 0))


def _comparable(kind: pa.DataType) -> pa.DataType:
    """The type in which bounds are kept: text, whose bounds may be cut inside of a character, as bytes."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    return pa.binary() if text else kind


def _widens(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Whether casting from one type to the other keeps the order of values."""
    types = pa.types
    if stored == kind:
        return True
    if types.is_integer(stored):
        return bool(types.is_integer(kind) or (types.is_floating(kind) and kind.bit_width > 16))
    if types.is_timestamp(stored):
        return bool(types.is_timestamp(kind) and (stored.tz is None) == (kind.tz is None))
    if types.is_float32(stored):
        return bool(types.is_float64(kind))
    return bool(
        (types.is_decimal(stored) and types.is_decimal(kind)) or (types.is_time(stored) and types.is_time(kind))
    )

"""This module turns single values of a table (a partition's, a default) into values of the wire, and back.

A value is what ``pyarrow.scalar(value, type)`` takes: as ``as_py`` gives it, except nanoseconds (and other units that
Python's clock types cannot hold), which are integers. On the wire, times and dates are integers in the unit of their
type, decimals are text, and floats are text in hex, so that a value comes back the same to the bit. Nested values have
no plain form.
"""

from __future__ import annotations

import datetime
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa

__all__ = ["Value", "arrow_scalar", "from_plain", "to_plain", "type_text"]

Value = bool | int | float | str | bytes | Decimal | datetime.date | datetime.datetime | datetime.time | None
Plain = bool | int | str | bytes | None


def arrow_scalar(value: Value, kind: pa.DataType) -> pa.Scalar:
    """Return the value as an Arrow scalar; an Arrow error, ``TypeError`` or ``ValueError`` if it does not fit."""
    if isinstance(value, Decimal) and pa.types.is_decimal(kind):
        with localcontext() as context:
            context.prec = 100
            value = value.quantize(Decimal(1).scaleb(-kind.scale))
    return pa.scalar(value, kind)


def to_plain(value: Value, kind: pa.DataType) -> Plain:
    """Return the value of type ``kind`` in a form that the wire can carry; ``TypeError`` if it has none."""
    if value is None or pa.types.is_null(kind):
        return None
    if pa.types.is_boolean(kind):
        return bool(value)
    if pa.types.is_integer(kind):
        return int(value)  # type: ignore[arg-type]
    if pa.types.is_floating(kind):
        return float(value).hex()  # type: ignore[arg-type]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str(value)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return bytes(value)  # type: ignore[arg-type]
    if pa.types.is_decimal(kind):
        return str(arrow_scalar(value, kind).as_py())
    width = _clock_width(kind)
    if width is not None:
        return int(arrow_scalar(value, kind).cast(width).as_py())
    raise TypeError(f"a value of the type {kind} cannot be kept in an index")


def from_plain(plain: Any, kind: pa.DataType) -> Value:
    """Return the value that `to_plain` made into ``plain``."""
    if plain is None:
        return None
    width = _clock_width(kind)
    if width is not None:
        return _of_clock(plain, kind, width)
    if pa.types.is_floating(kind):
        return float.fromhex(plain)
    if pa.types.is_decimal(kind):
        return Decimal(plain)
    value: Value = plain
    return value


def _clock_width(kind: pa.DataType) -> pa.DataType | None:
    """Return the integers that the dates or times of a type are stored as."""
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return pa.int32()
    if (
        pa.types.is_date64(kind)
        or pa.types.is_time64(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_duration(kind)
    ):
        return pa.int64()
    return None


def _of_clock(ticks: int, kind: pa.DataType, width: pa.DataType) -> Value:
    scalar = pa.scalar(ticks, width).cast(kind)
    if getattr(kind, "unit", None) == "ns":
        return ticks
    try:
        value: Value = scalar.as_py()
        return value
    except (OverflowError, ValueError):
        return ticks


def type_text(kind: pa.DataType) -> str:
    """Return a type as text that does not depend on how pyarrow shows nested ones; for digests."""
    if pa.types.is_struct(kind):
        return f"struct<{','.join(_field_text(kind.field(i)) for i in range(kind.num_fields))}>"
    if pa.types.is_map(kind):
        return f"map<{_field_text(kind.key_field)},{_field_text(kind.item_field)}>"
    if pa.types.is_fixed_size_list(kind):
        return f"list[{kind.list_size}]<{_field_text(kind.value_field)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_field_text(kind.value_field)}>"
    return str(kind)


def _field_text(field: pa.Field) -> str:
    return f"{field.name!r}:{type_text(field.type)}{'' if field.nullable else '!'}"

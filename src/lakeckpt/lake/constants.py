"""Which constants of a filter are the same?  Scalars of Arrow as plain values, by what they are and not how wide.

An integer is an integer in whatever type it came, text is text; times keep their unit and zone, since they decide how
they compare. `fitted` gives a constant the type of the column that it is compared with, where that changes nothing.
"""

from __future__ import annotations

import decimal
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lakeckpt.errors import ConfigError

__all__ = ["Constant", "constant", "fitted", "plain_of", "spelled"]

_EXACT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A constant; two are equal where ``plain`` is. ``scalar`` is it, in the type in which it is compared."""

    plain: tuple[object, ...]
    scalar: pa.Scalar = field(compare=False, repr=False)


def constant(scalar: pa.Scalar) -> Constant:
    """The constant of a scalar; `ConfigError` for nested types. Columns are no views, and compare with none."""
    if pa.types.is_string_view(scalar.type) or pa.types.is_binary_view(scalar.type):
        scalar = scalar.cast(pa.string() if pa.types.is_string_view(scalar.type) else pa.binary())
    return Constant(plain=plain_of(scalar), scalar=scalar)


def plain_of(scalar: pa.Scalar) -> tuple[object, ...]:
    """What a scalar is: (kind, value, …), values that the wire can carry. `ConfigError` for nested types."""
    kind, types = scalar.type, pa.types
    if isinstance(scalar, pa.ExtensionScalar):
        return plain_of(scalar.value)
    if isinstance(scalar, pa.DictionaryScalar):
        return plain_of(scalar.value)
    if not scalar.is_valid:
        return ("null",)
    if types.is_boolean(kind):
        return ("bool", scalar.as_py())
    if types.is_integer(kind):
        return ("int", scalar.as_py())
    if types.is_floating(kind):
        value = float(scalar.as_py())
        return ("float", kind.bit_width, "nan" if value != value else value.hex())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return ("text", scalar.as_py())
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return ("bytes", scalar.as_py())
    if types.is_decimal(kind):
        return ("decimal", str(scalar.as_py().normalize()))
    if types.is_timestamp(kind):
        return ("timestamp", kind.unit, kind.tz or "", int(scalar.value))
    if types.is_date32(kind) or types.is_date64(kind) or types.is_time(kind) or types.is_duration(kind):
        return (str(kind), int(scalar.value))
    raise ConfigError(f"a filter cannot hold the constant {scalar} of type {kind}: use numbers, text, bytes and times")


def spelled(one: Constant) -> str:
    """A constant, for people."""
    if one.plain[0] == "null":
        return "null"
    if pa.types.is_temporal(one.scalar.type):  # nanoseconds have no Python value without pandas
        said = _cast(one.scalar, pa.string())
        return str(one.plain[-1]) if said is None else str(said)
    return f'"{one.plain[1]}"' if one.plain[0] == "text" else str(one.scalar)


def fitted(one: Constant, kind: pa.DataType) -> Constant:
    """The same constant in the type ``kind`` of a column, where it has a value of that type; else as it is.

    pyarrow compares columns and constants of different types in a third one, and fails where a value of the column does
    not fit that: uint64 above 2^63, decimals and integers. The same comparison in the column's type cannot fail.
    """
    value = _as(one.scalar, kind)
    return one if value is None else Constant(plain=plain_of(value), scalar=value)


def _as(scalar: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    types = pa.types
    if not scalar.is_valid or scalar.type == kind:
        return None
    given = scalar.type
    value: Any = None if types.is_temporal(given) else scalar.as_py()
    if types.is_floating(given) and types.is_integer(kind):
        if value != value or abs(value) >= _EXACT or value != int(value):
            return None
        value = int(value)
    elif types.is_integer(given) and types.is_floating(kind):
        if abs(value) > {16: 2**11, 32: 2**24, 64: _EXACT}[kind.bit_width]:
            return None
        value = float(value)
    elif types.is_decimal(kind) and (types.is_integer(given) or types.is_decimal(given)):
        value = decimal.Decimal(value)
    elif types.is_timestamp(kind) and types.is_timestamp(given) and (kind.tz is None) == (given.tz is None):
        return _cast(scalar, kind)
    elif not (types.is_integer(given) and types.is_integer(kind)) and not (_is_text(given) and _is_text(kind)):
        return None
    try:
        return pa.scalar(value, kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None


def _cast(scalar: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    try:
        return scalar.cast(kind)
    except pa.ArrowException:
        return None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

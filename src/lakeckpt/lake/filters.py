"""Which rows does the user want?  A filter, checked against the table's schema, with a digest that outlives releases.

`row_filter` takes a pyarrow expression, or tuples in disjunctive normal form as `pyarrow.parquet` takes them, and gives
a `RowFilter`: the columns that it reads, its digest, and `RowFilter.mask`, which says of each row whether it stays.
Null semantics are pyarrow's: a row stays where the expression is true, and goes where it is false or null. So a
comparison with a null drops the row, and ``("a", "not in", [1])`` keeps a null: ``in`` is false of it and not null.

Never reads a file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import and_, or_
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc

from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.lake.expressions import Node, columns_of, compiled, digest_of, joined, parse, text_of

__all__ = ["Filters", "RowFilter", "row_filter"]

Filters: TypeAlias = pc.Expression | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]
"""What a user may give: an expression; a list of (column, operator, value), all of which must hold; or a list of such
lists, one of which must."""

_OPERATORS: dict[str, Callable[[pc.Expression, Any], pc.Expression]] = {
    "=": lambda column, value: column == value,
    "==": lambda column, value: column == value,
    "!=": lambda column, value: column != value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
    "in": lambda column, value: column.isin(value),
    "not in": lambda column, value: ~column.isin(value),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """A filter over tables of one schema; equal if the digests are."""

    expression: pc.Expression = field(compare=False, repr=False)
    """What is evaluated."""
    node: Node = field(compare=False, repr=False)
    columns: tuple[str, ...] = field(compare=False)
    """The columns that it reads, sorted: at least one."""
    digest: str
    """BLAKE2b-128 (hex) of what the filter says, in normal form."""

    def __str__(self) -> str:
        return text_of(self.node)

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """Which rows of ``table`` stay: bool without nulls, in as many rows.

        Raises `SchemaError` where values of the rows cannot be compared (numbers that do not fit, say).
        """
        source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table.select(list(self.columns))))
        chosen = acero.Declaration("project", acero.ProjectNodeOptions([self.expression], ["stays"]))
        try:
            # On one thread: batches come in their order.
            found = acero.Declaration.from_sequence([source, chosen]).to_table(use_threads=False)
        except pa.ArrowException as error:
            raise SchemaError(
                f"the filter {self} cannot be evaluated ({_one_line(error)}): cast the column, or compare it with a "
                "value of its own type"
            ) from error
        return found.column(0).fill_null(False)


def row_filter(filters: Filters, schema: pa.Schema) -> RowFilter:
    """The filter that ``filters`` say, of tables of ``schema``.

    Raises `ConfigError` for what is no filter, or calls a function that a filter cannot (`lakeckpt.lake.expressions`);
    `SchemaError` for columns that there are not, and types that cannot be compared.
    """
    return _bound(filters if isinstance(filters, pc.Expression) else _of_tuples(filters, schema), schema)


def _bound(given: pc.Expression, schema: pa.Schema) -> RowFilter:
    node = parse(given, schema)
    columns = columns_of(node)
    if not columns:
        raise ConfigError(f"the filter {text_of(node)} names no column: it keeps every row or none")
    _check_columns(columns, schema)
    rebuilt = compiled(node)
    found = RowFilter(
        expression=given if rebuilt is None else rebuilt, node=node, columns=columns, digest=digest_of(node)
    )
    _check_types(found, schema)
    return found


def _check_columns(columns: Collection[str], schema: pa.Schema) -> None:
    for name in columns:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=3) or schema.names[:10]
            raise SchemaError(
                f"the filter names the column {name!r}, and the table has none; it has {', '.join(map(repr, near))}, …"
            )


def _check_types(found: RowFilter, schema: pa.Schema) -> None:
    """Try the filter on a row of nulls; what pyarrow says of types that do not go together is put in the user's words.

    (On no row at all, it does not notice all of them.)
    """
    nulls = pa.table({name: pa.nulls(1, schema.field(name).type) for name in found.columns})
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(nulls))
    chosen = acero.Declaration("project", acero.ProjectNodeOptions([found.expression], ["stays"]))
    types = ", ".join(f"{name} is {schema.field(name).type}" for name in found.columns)
    try:
        kind = acero.Declaration.from_sequence([source, chosen]).to_table(use_threads=False).schema.field(0).type
    except (pa.ArrowException, TypeError) as error:
        raise SchemaError(f"the filter {found} does not fit the table, in which {types}: {_one_line(error)}") from error
    if not pa.types.is_boolean(kind):
        raise SchemaError(f"the filter {found} gives {kind} and not true or false; in the table {types}")


# --- tuples


def _of_tuples(filters: Any, schema: pa.Schema) -> pc.Expression:
    if isinstance(filters, str | bytes | dict) or not isinstance(filters, Sequence):
        raise _no_filter(filters)
    if not filters:
        raise ConfigError("filters=[] says nothing: leave filters out to read every row")
    if all(_is_predicate(one) for one in filters):
        groups: list[Any] = [filters]
    else:
        groups = list(filters)
    for group in groups:
        if isinstance(group, str) or not isinstance(group, Sequence) or not group or not all(map(_is_predicate, group)):
            raise _no_filter(filters)
    return joined(or_, [joined(and_, [_predicate(one, schema) for one in group]) for group in groups])


def _is_predicate(one: object) -> bool:
    return isinstance(one, tuple | list) and len(one) == 3 and isinstance(one[0], str)


def _predicate(one: Sequence[Any], schema: pa.Schema) -> pc.Expression:
    name, operation, value = one
    if operation not in _OPERATORS:
        raise ConfigError(f"the filter {one!r} has the operator {operation!r}; there are {', '.join(_OPERATORS)}")
    _check_columns([name], schema)
    kind = schema.field(name).type
    try:
        if operation in ("in", "not in"):
            return _OPERATORS[operation](pc.field(name), _values(one, kind))
        if value is None:
            raise ConfigError(
                f"the filter {one!r} compares with None, which is true of no row: use "
                f"pyarrow.compute.field({name!r}).is_null() or .is_valid()"
            )
        expression = _OPERATORS[operation](pc.field(name), _held(value, kind))
    except ConfigError:
        raise
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        raise ConfigError(f"the filter {one!r} has a value that pyarrow cannot hold: {_one_line(error)}") from error
    try:
        _bound(expression, schema)
    except SchemaError as error:
        raise SchemaError(
            f"the filter {one!r} compares the column {name!r}, which is {kind}, with {value!r}: {error}"
        ) from error
    return expression


def _held(value: Any, kind: pa.DataType) -> Any:
    """``value`` as pyarrow can hold it: integers above int64 in the type of their column alone."""
    if _has_nanoseconds(value):
        return _given([value])[0]
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return value
    if pa.types.is_floating(kind):
        if float(value) != value:
            raise ValueError(f"{value} is no floating-point number")
        return float(value)
    return pa.scalar(value, kind)


def _values(one: Sequence[Any], kind: pa.DataType) -> pa.Array:
    values = one[2]
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise ConfigError(f"the filter {one!r} needs a list of values after {one[1]!r}, got {values!r}")
    listed = [_held(one, kind) if pa.types.is_floating(kind) else one for one in values]
    try:
        fitted = pa.array(listed, kind)
    except (pa.ArrowException, TypeError, OverflowError, ValueError):
        given = _given(listed)
        if not (pa.types.is_decimal(kind) and pa.types.is_floating(given.type)):
            return given
        fitted = given.cast(kind)  # as pyarrow does
    if pa.types.is_floating(kind):  # pyarrow compares with the nearest number of the column's type
        return fitted
    if strange := [value for value in listed if _differs_in_zone(value, kind)]:
        return _given(strange[:1])  # is refused, as by ==
    # pyarrow.array makes 1 of 1.5 for a column of integers, and cuts times to the column's unit. What is not the same
    # then equals the value of no row.
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return fitted.filter(pa.array(list(map(_is_same, listed, fitted.to_pylist())), pa.bool_()))
    if not pa.types.is_temporal(kind):
        return fitted
    if _are_alike(listed) and (same := _same_time(listed, kind)) is not None:
        return fitted.filter(same)
    every = [_same_time([value], kind) for value in listed]
    return fitted.filter(pa.array([same is None or same[0].as_py() for same in every], pa.bool_()))


def _differs_in_zone(value: Any, kind: pa.DataType) -> bool:
    """Whether one of the two is a moment in some zone, and the other one says of none which."""
    if not pa.types.is_timestamp(kind) or not isinstance(value, datetime | np.datetime64):
        return False
    return (getattr(value, "tzinfo", None) is None) != (kind.tz is None)


def _is_same(value: Any, held: Any) -> bool:
    """Whether ``value`` is what a column holds as ``held``: floats, the nearest of it."""
    plain = value.as_py() if isinstance(value, pa.Scalar) else value.item() if isinstance(value, np.generic) else value
    return held is None or bool((float(held) if isinstance(plain, float) else held) == plain)


def _are_alike(values: list[Any]) -> bool:
    """Whether one type of Arrow is the right one for all of them."""
    return len({(type(one), getattr(one, "tzinfo", None) is None) for one in values}) == 1


def _same_time(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    """Which of ``values`` are the same in the temporal type ``kind`` (bool); None where nobody can say of all."""
    try:
        given = _given(values)
        return pc.fill_null(pc.equal(given.cast(kind).cast(given.type), given), True)
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        is_cut = len(values) == 1 and type(error) is pa.ArrowInvalid
        return pa.array([False]) if is_cut else None


def _given(values: list[Any]) -> pa.Array:
    """``values`` in the type that pyarrow gives them, save that pandas' nanoseconds, which it leaves out, stay."""
    found = pa.array(values)
    if pa.types.is_timestamp(found.type) and any(map(_has_nanoseconds, values)):
        return pa.array(values, pa.timestamp("ns", found.type.tz))
    if pa.types.is_duration(found.type) and any(map(_has_nanoseconds, values)):
        return pa.array(values, pa.duration("ns"))
    return found


def _has_nanoseconds(value: Any) -> bool:
    """Whether it is a Timestamp or Timedelta of pandas that microseconds cannot hold."""
    return bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))


def _no_filter(filters: object) -> ConfigError:
    return ConfigError(
        "filters are a pyarrow expression, a list of (column, operator, value), or a list of such lists, got "
        f"{filters!r:.200}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

"""This module checks filters against the schema of a table.

`row_filter` takes a pyarrow expression, or the tuples that ``pyarrow.parquet`` takes. pyarrow itself turns tuples into
an expression. The result is a `RowFilter`: the columns that the expression reads, a digest of the expression, and
`RowFilter.mask`, which evaluates it. pyarrow decides which rows stay: a row stays if the expression is true, and is
dropped if the expression is false or null.

The module never reads a file, and never looks inside an expression.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeckpt.errors import ConfigError, SchemaError, one_line
from lakeckpt.lake.table.schema import check_agreed, is_agreed

__all__ = ["Filters", "RowFilter", "row_filter"]

Filters: TypeAlias = pc.Expression | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]
"""The filters that a user may give: an expression; a list of (column, operator, value), all of which must hold; or a
list of such lists, one of which must hold."""

_PROTOCOL = 5  # the digest covers pickled bytes: the protocol must not follow Python's default
_SHOWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """A filter over tables of one schema. Two filters are equal if pyarrow serialises them to the same bytes."""

    expression: pc.Expression = field(compare=False, repr=False)
    columns: tuple[str, ...] = field(compare=False)
    """The top-level columns that the expression reads, in the order of the schema: at least one."""
    digest: str
    """BLAKE2b-128 (hex) of the expression as this release of pyarrow serialises it."""

    def __str__(self) -> str:
        return _text(self.expression)

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """Return for each row of ``table`` whether it stays: bool without nulls.

        Raises `SchemaError` if pyarrow cannot evaluate the filter for these values.
        """
        try:
            found = _evaluated(self.expression, table.select(list(self.columns)))
        except pa.ArrowException as error:
            raise SchemaError(
                f"the filter {self} cannot be evaluated ({one_line(error)}): cast the column, or compare it with a "
                "value of its own type"
            ) from error
        return found.fill_null(False)


def row_filter(filters: Filters, schema: pa.Schema) -> RowFilter:
    """Return the filter that ``filters`` describe, for tables of ``schema``.

    Raises `ConfigError` for what is no filter, `SchemaError` for columns that the schema does not have and for types
    that pyarrow cannot compare.
    """
    expression = filters if isinstance(filters, pc.Expression) else _of_tuples(filters)
    digest = _digest(expression)
    _check_binds(expression, schema)
    columns = tuple(_columns_among(schema.names, expression, schema))
    if not columns:
        raise ConfigError(f"the filter {_text(expression)} names no column: it keeps every row or none")
    _check_type(expression, pa.schema([schema.field(name) for name in columns]))
    return RowFilter(expression=expression, columns=columns, digest=digest)


def _of_tuples(filters: Any) -> pc.Expression:
    try:
        for predicate in _predicates(filters):
            _check_predicate(*predicate)
        return pq.filters_to_expression(filters)
    except ConfigError:
        raise
    except Exception as error:  # pyarrow raises TypeError, ValueError, IndexError, ArrowException, AssertionError …
        raise ConfigError(
            "filters are a pyarrow expression, a list of (column, operator, value), or a list of such lists, got "
            f"{filters!r:.200} ({one_line(error)})"
        ) from error


def _predicates(filters: Any) -> Iterator[Any]:
    if isinstance(filters, str | bytes) or not filters:
        raise TypeError("to read every row, leave filters out")
    for one in filters:
        yield from [one] if isinstance(one[0], str) else one


def _check_predicate(name: str, operation: str, value: Any) -> None:
    """Refuse predicates that pyarrow accepts but that match nothing, such as a comparison with None."""
    given = f"the filter {(name, operation, value)!r:.200}"
    if operation in ("in", "not in"):
        if isinstance(value, str | bytes):
            raise ConfigError(f"{given} needs a list of values after {operation!r}, got a text")
    elif value is None:
        raise ConfigError(
            f"{given} compares with None, which is true of no row: use pyarrow.compute.field({name!r}).is_null() or "
            ".is_valid()"
        )


def _digest(expression: pc.Expression) -> str:
    try:
        return blake2b(pickle.dumps(expression, _PROTOCOL), digest_size=16).hexdigest()
    except (pa.ArrowException, NotImplementedError) as error:
        raise ConfigError(
            f"the filter {_text(expression)} cannot be serialised ({one_line(error)}): refer to columns by their names"
        ) from error


def _check_binds(expression: pc.Expression, schema: pa.Schema) -> None:
    """Raise `SchemaError` if the expression does not fit the columns of ``schema`` that all files agree about."""
    agreed = pa.schema([field for field in schema if is_agreed(field)])
    try:
        _evaluated(expression, agreed.empty_table())
    except (pa.ArrowException, TypeError) as error:
        check_agreed(schema, [name for name in schema.names if f"FieldRef.Name({name})" in str(error)])
        raise _misfit(expression, agreed, one_line(error)) from error


def _columns_among(names: Sequence[str], expression: pc.Expression, schema: pa.Schema) -> list[str]:
    """Return those of ``names`` without which the expression does not bind; halves are searched if any is needed.

    pyarrow does not list the columns of an expression, so each answer comes from an attempt to bind it.
    """
    rest = pa.schema([one for one in schema if one.name not in set(names)])
    try:
        _evaluated(expression, rest.empty_table())
        return []
    except (pa.ArrowException, TypeError):
        if len(names) == 1:
            return list(names)
    half = len(names) // 2
    return [*_columns_among(names[:half], expression, schema), *_columns_among(names[half:], expression, schema)]


def _check_type(expression: pc.Expression, schema: pa.Schema) -> None:
    """Try the expression on a row of nulls: on no row, pyarrow does not notice all types that do not go together."""
    nulls = pa.table(
        [pa.nulls(1, one.type) for one in schema], schema=pa.schema([one.with_nullable(True) for one in schema])
    )
    try:
        kind = _evaluated(expression, nulls).type
    except (pa.ArrowException, TypeError) as error:
        raise _misfit(expression, schema, one_line(error)) from error
    if not pa.types.is_boolean(kind):
        raise _misfit(expression, schema, f"it gives {kind} and not true or false")


def _evaluated(expression: pc.Expression, table: pa.Table) -> pa.ChunkedArray:
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    chosen = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["stays"]))
    # One thread: batches come in their order.
    return acero.Declaration.from_sequence([source, chosen]).to_table(use_threads=False).column(0)


def _misfit(expression: pc.Expression, schema: pa.Schema, why: str) -> SchemaError:
    types = ", ".join(f"{one.name} is {one.type}" for one in list(schema)[:10])
    return SchemaError(
        f"the filter {_text(expression)} does not fit the table, in which {types}: {why}. Name columns of the table, "
        "and compare each with values of its own type"
    )


def _text(expression: pc.Expression) -> str:
    return " ".join(str(expression).split())[:_SHOWN]

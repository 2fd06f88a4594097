"""This module turns the columns that one file stores into columns of the table's types.

`FileFits` makes one `FileFit` for all files of one schema, from the table's column mapping and the schema. A `FileFit`
says which columns of the file are read and how each becomes a column of the table. Fields are found by id or by name
and come in the table's order. A field that the file lacks is null, or has its default. A field of another type is cast,
and a cast never loses information. `constant` makes the column of a partition.

The module does no I/O, knows neither row groups nor deletes, and never changes an array that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.lake.parquet.types import plain, resized
from lakeckpt.lake.table.column_mapping import ColumnMapping, FieldPlan, fields_of, resolve
from lakeckpt.lake.table.scalars import Value, arrow_scalar

__all__ = ["FileFit", "FileFits", "constant"]

_SCHEMAS_KEPT = 8
_UNITS = ("ns", "us", "ms", "s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFit:
    """The columns to read of a file, and how they become columns of the table.

    ``plans`` has one plan for each column of the table. ``stored`` names the file's own columns to read, each once.
    ``int96_unit`` is the unit in which legacy 96-bit timestamps are read, so that no timestamp overflows that the
    table's type can hold.
    """

    plans: Mapping[str, FieldPlan]
    stored: tuple[str, ...]
    int96_unit: str = "ns"

    def column(self, field: pa.Field, found: Mapping[str, pa.ChunkedArray], rows: int) -> pa.ChunkedArray | pa.Array:
        """Return the column ``field`` of the table, made of the columns ``found`` by the file's names.

        Raises ``pyarrow.ArrowException`` or ``ValueError`` if values do not fit the type.
        """
        plan = self.plans[field.name]
        if plan.index is None:
            return constant(field.type, plan.default, rows)
        column = found[plan.name]
        if plan.same and column.type == field.type:
            return column
        return pa.chunked_array([_fit(plain(chunk), plan, field.type) for chunk in column.chunks], field.type)


class FileFits:
    """The fits of a table's files: one `FileFit` for all files of one schema. Threads may share it."""

    def __init__(self, schema: pa.Schema, mapping: ColumnMapping) -> None:
        self._schema, self._mapping = schema, mapping
        self._known: tuple[tuple[pa.Schema, tuple[str, ...], FileFit], ...] = ()

    def fit(self, columns: Iterable[str], metadata: pq.FileMetaData, path: str) -> FileFit:
        """Return how ``columns`` of the table are read from the file with this footer. Raises `SchemaError`."""
        wanted, stored = tuple(columns), metadata.schema.to_arrow_schema()
        for known, names, fit in self._known:
            if names == wanted and known.equals(stored, check_metadata=True):
                return fit
        plans = resolve(self._schema, wanted, self._mapping, stored, path)
        units = {unit for name in wanted for unit in _units(self._schema.field(name).type)}
        unit = next((unit for unit in _UNITS if unit in units), "ns")
        names = tuple(dict.fromkeys(plan.name for plan in plans.values() if plan.index is not None))
        fit = FileFit(plans=plans, stored=names, int96_unit=unit)
        self._known = ((stored, wanted, fit), *self._known)[:_SCHEMAS_KEPT]
        return fit


def constant(kind: pa.DataType, value: Value, rows: int) -> pa.Array:
    """Return an array of the type ``kind`` that repeats one value (None: null) ``rows`` times."""
    return pa.nulls(rows, kind) if value is None else pa.repeat(arrow_scalar(value, kind), rows)


def _fit(array: pa.Array, plan: FieldPlan, kind: pa.DataType) -> pa.Array:
    """Return ``array`` in its plain form, with its fields as ``plan`` says, in the type ``kind``."""
    if plan.same and array.type == kind:
        return array
    if pa.types.is_struct(kind) and pa.types.is_struct(array.type):
        children = [_child(array, below, kind.field(i).type) for i, below in enumerate(plan.children)]
        fields = [kind.field(i) for i in range(kind.num_fields)]
        if not children:
            return array.cast(kind)
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    inner = fields_of(kind)
    if len(inner) == len(plan.children) == 1:
        below = _fit(array.values, plan.children[0], inner[0].type)
        made = _relisted(array, _list_like(array.type, inner[0].with_type(below.type)), below)
        return resized(made, kind)
    if pa.types.is_map(kind) and pa.types.is_map(array.type):
        entries = array.values
        pairs = [_fit(entries.field(i), plan.children[i], inner[i].type) for i in range(2)]
        # A map's entries are a struct whose key is never null.
        fields = [inner[0].with_nullable(False), inner[1]]
        return _relisted(array, kind, pa.StructArray.from_arrays(pairs, fields=fields))
    return resized(array, kind)


def _child(array: pa.StructArray, plan: FieldPlan, kind: pa.DataType) -> pa.Array:
    return constant(kind, plan.default, len(array)) if plan.index is None else _fit(array.field(plan.index), plan, kind)


def _relisted(array: pa.Array, kind: pa.DataType, values: pa.Array) -> pa.Array:
    """Return the lists of ``array`` with the same offsets over other ``values``."""
    own = array.buffers()[: 1 if pa.types.is_fixed_size_list(array.type) else 2]
    return pa.Array.from_buffers(kind, len(array), own, array.null_count, array.offset, children=[values])


def _list_like(kind: pa.DataType, element: pa.Field) -> pa.DataType:
    """Return the list type like ``kind`` whose elements are ``element``."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(element, kind.list_size)
    return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element)


def _units(kind: pa.DataType) -> set[str]:
    """Return the units of the timestamps in a type, at any depth."""
    if pa.types.is_timestamp(kind):
        return {kind.unit}
    return {unit for field in fields_of(kind) for unit in _units(field.type)}

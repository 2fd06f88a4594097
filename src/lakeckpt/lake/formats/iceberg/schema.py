"""This module turns an Iceberg schema into an Arrow schema, and finds how data files identify each column.

Iceberg finds columns by field id, at every depth: renamed, reordered, added and dropped columns keep their ids. A file
without ids (written before the table was Iceberg's) is read by the table's name mapping, and refused if there is
none. A column that a file lacks has its initial default, or is null. Texts, bytes and lists are of Arrow's ordinary
types, UUIDs are their 16 bytes, geometries their WKB.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyiceberg.conversions import from_json
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.types import (
    IcebergType,
    ListType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
)

from lakeckpt.errors import TableError
from lakeckpt.lake.parquet.types import narrow_type
from lakeckpt.lake.table.column_mapping import ColumnMapping, StoredField
from lakeckpt.lake.table.scalars import Value

__all__ = ["arrow_schema", "arrow_value", "column_mapping"]

_TICKS = (pa.types.is_date, pa.types.is_time, pa.types.is_timestamp)
_NEVER = ("",)
"""The names of a column that a name mapping does not have: no file without ids stores such a column."""


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of an Iceberg schema, without metadata. `TableError` if it has no such type."""
    try:
        whole = schema_to_pyarrow(schema, include_field_ids=False)
    except Exception as error:  # of types that it does not know, pyiceberg raises what its visitor meets
        raise TableError(
            f"the table has columns whose types pyiceberg cannot turn into Arrow's ({error}): copy it without them"
        ) from error
    return pa.schema([pa.field(one.name, narrow_type(one.type), nullable=one.nullable) for one in whole])


def column_mapping(schema: Schema, names: NameMapping | None) -> ColumnMapping:
    """Return by which field ids (and names, in files without ids) the columns of ``schema`` are stored."""
    return ColumnMapping(fields={one.name: _stored(one, names.root if names else None) for one in schema.fields})


def arrow_value(value: Any, kind: IcebergType) -> Value:
    """Return a value of a manifest (a partition's) or schema (a default) as `pyarrow.scalar` takes it."""
    if isinstance(value, str) and not isinstance(kind, StringType) and isinstance(kind, PrimitiveType):
        value = from_json(kind, value)  # a default, as the schema's JSON has it
    if isinstance(value, uuid.UUID):
        return value.bytes
    if value is None or not isinstance(value, int) or isinstance(value, bool):
        return value
    arrow = schema_to_pyarrow(kind)
    nanoseconds = getattr(arrow, "unit", None) == "ns"
    return value if nanoseconds or not any(test(arrow) for test in _TICKS) else pa.scalar(value, arrow).as_py()


def _stored(one: NestedField, mapped: list[MappedField] | None) -> StoredField:
    own = next((m for m in mapped if m.field_id == one.field_id), None) if mapped is not None else None
    below = None if mapped is None else (own.fields if own is not None else [])
    default = one.initial_default
    if default is not None and not isinstance(one.field_type, PrimitiveType):
        raise TableError(
            f"the nested column {one.name!r} has an initial default, which is not read: write the files anew with it"
        )
    return StoredField(
        field_id=one.field_id,
        names=() if mapped is None else (tuple(own.names) if own is not None else _NEVER),
        children=tuple(_stored(child, below) for child in _children(one.field_type)),
        default=None if default is None else arrow_value(default, one.field_type),
    )


def _children(kind: IcebergType) -> Iterable[NestedField]:
    """Return the fields below a type in Arrow's order: a struct's fields, a list's element, a map's key and value."""
    if isinstance(kind, StructType):
        return kind.fields
    if isinstance(kind, ListType):
        return (kind.element_field,)
    if isinstance(kind, MapType):
        return (kind.key_field, kind.value_field)
    return ()

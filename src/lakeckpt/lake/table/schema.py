"""This module unifies the schemas of files that were written at different times.

The types of all files are unified permissively (widened, columns added), in the order of the files. A column that some
file lacks is nullable. Partition columns come last, and replace a file's own column of that name. Encodings are
dropped: dictionaries and views become their values, extension types become their storage. A column whose types in two
files cannot be unified has the type null, and its metadata hold the error that names both files. `check_agreed` raises
this error when the column is read; a table whose other columns are read is not refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from lakeckpt.errors import SchemaError
from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.table.partitions import PartitionColumn

__all__ = ["check_agreed", "is_agreed", "plain_schema", "table_schema"]

_DISAGREEMENT = b"lakeckpt.disagreement"


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A table format's schema in the types of its values, without metadata. `SchemaError` if a name comes twice."""
    names = schema.names
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise SchemaError(f"the table has more than one column named {', '.join(map(repr, twice))}: rename them")
    return pa.schema([_plain_field(field) for field in schema])


def table_schema(files: Sequence[tuple[str, pa.Schema]], partitions: Sequence[PartitionColumn]) -> pa.Schema:
    """Return the schema of a table whose files have these paths and schemas. `SchemaError`: a type is not supported."""
    # To hash a schema takes the longer the more columns it has, and most files share the object that the first has.
    objects: dict[int, tuple[str, pa.Schema]] = {}
    for path, schema in files:
        objects.setdefault(id(schema), (path, schema))
    distinct: dict[pa.Schema, str] = {}
    for path, schema in objects.values():
        distinct.setdefault(schema, path)
    names = {column.name for column in partitions}
    plain = [
        (path, pa.schema([_plain_field(field) for field in schema if field.name not in names]))
        for schema, path in distinct.items()
    ]
    try:
        unified = pa.unify_schemas([schema for _, schema in plain], promote_options="permissive")
    except (pa.ArrowException, TypeError):
        unified = _unified_by_column(plain)
    everywhere = set(unified.names).intersection(*(schema.names for _, schema in plain))
    fields = [field if field.name in everywhere else field.with_nullable(True) for field in unified]
    return pa.schema([*fields, *(column.field for column in partitions)])


def _plain_field(field: pa.Field) -> pa.Field:
    try:
        kind = plain_type(field.type)
    except SchemaError as error:
        raise SchemaError(f"column {field.name!r}: {error}") from None
    return pa.field(field.name, kind, nullable=field.nullable)


def _unified_by_column(files: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return the columns of all files, in which a column that two files cannot agree about holds the error."""
    agreed: dict[str, tuple[str, pa.Field]] = {}
    for path, schema in files:
        for field in schema:
            other, known = agreed.setdefault(field.name, (path, field))
            if field == known or not is_agreed(known):
                continue
            try:
                both = pa.unify_schemas([pa.schema([known]), pa.schema([field])], promote_options="permissive").field(0)
            except (pa.ArrowException, TypeError):
                text = (
                    f"the column {field.name!r} is {known.type} in {other!r}, but {field.type} in {path!r}: leave it "
                    "out of columns= and filters=, write one of the files again, or open tables of files that agree"
                )
                both = pa.field(field.name, pa.null(), metadata={_DISAGREEMENT: text})
            agreed[field.name] = (other, both)
    return pa.schema([field for _, field in agreed.values()])


def is_agreed(field: pa.Field) -> bool:
    """Return whether the files of the table agree about the column ``field`` of its schema."""
    return _DISAGREEMENT not in (field.metadata or {})


def check_agreed(schema: pa.Schema, names: Iterable[str]) -> None:
    """Raise the `SchemaError` of the first of the columns ``names`` that two files cannot agree about."""
    for field in map(schema.field, names):
        if not is_agreed(field):
            raise SchemaError(field.metadata[_DISAGREEMENT].decode())

"""This module unifies the schemas of files that were written at different times.

The types of all files are unified permissively (widened, columns added), in the order of the files. A column that some
file lacks is nullable. Partition columns come last, and replace a file's own column of that name. Encodings are
dropped: dictionaries and views become their values, extension types become their storage. Where two files cannot agree,
the error names both.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lakeckpt.errors import SchemaError
from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.table.partitions import PartitionColumn

__all__ = ["plain_schema", "table_schema"]


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A table format's schema in the types of its values, without metadata. `SchemaError` where a name comes twice."""
    names = schema.names
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise SchemaError(f"the table has more than one column named {', '.join(map(repr, twice))}: rename them")
    return pa.schema([_plain_field(field) for field in schema])


def table_schema(files: Sequence[tuple[str, pa.Schema]], partitions: Sequence[PartitionColumn]) -> pa.Schema:
    """Return the schema of a table whose files have these paths and schemas. `SchemaError` where they cannot agree."""
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
    except (pa.ArrowException, TypeError) as error:
        raise _disagreement(plain) or SchemaError(f"the files' schemas cannot be unified: {error}") from error
    everywhere = set(unified.names).intersection(*(schema.names for _, schema in plain))
    fields = [field if field.name in everywhere else field.with_nullable(True) for field in unified]
    return pa.schema([*fields, *(column.field for column in partitions)])


def _plain_field(field: pa.Field) -> pa.Field:
    try:
        kind = plain_type(field.type)
    except SchemaError as error:
        raise SchemaError(f"column {field.name!r}: {error}") from None
    return pa.field(field.name, kind, nullable=field.nullable)


def _disagreement(files: Sequence[tuple[str, pa.Schema]]) -> SchemaError | None:
    """Return the first column that two files cannot agree about."""
    agreed: dict[str, tuple[str, pa.Field]] = {}
    for path, schema in files:
        for field in schema:
            other, known = agreed.setdefault(field.name, (path, field))
            try:
                both = pa.unify_schemas([pa.schema([known]), pa.schema([field])], promote_options="permissive")
            except (pa.ArrowException, TypeError):
                return SchemaError(
                    f"the column {field.name!r} is {known.type} in {other!r}, but {field.type} in {path!r}: "
                    "write one of them again, or open tables of files that agree"
                )
            agreed[field.name] = (other, both.field(0))
    return None

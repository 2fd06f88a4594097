"""This module finds where a data file stores the columns of a table, when the file was written under another schema.

A table format defines for each column of its schema, nested fields too, how files identify it: by a Parquet field id,
or by a name that the column had. `ColumnMapping` keeps that. `resolve` compares it with the schema of one file and
returns a `FieldPlan` for each column: which field of the file holds it, and the same for its children. A field that the
file lacks is null, or has the default of the column. Other fields of the file are not read, and their order does not
matter. A column that the mapping does not name is stored under its own name, as in plain Parquet tables.

The module knows schemas only. `lakeckpt.lake.parquet.fit` puts values into another shape and casts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lakeckpt.errors import SchemaError
from lakeckpt.lake.table.scalars import Value, from_plain, to_plain

__all__ = ["ColumnMapping", "FieldPlan", "StoredField", "fields_of", "resolve"]

_FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredField:
    """How a file identifies a column, or a field inside of one.

    By ``field_id``, in files that have field ids; else by the first of ``names`` that is there. ``children`` are in the
    order of the column's type: a struct's fields, a list's element, a map's key and value; empty: by their own names.
    ``default`` is the value in files that lack the field (null for most), as `pyarrow.scalar` takes it.
    """

    field_id: int | None = None
    names: tuple[str, ...] = ()
    children: tuple[StoredField, ...] = ()
    default: Value = None

    def __post_init__(self) -> None:
        if self.field_id is None and not self.names:
            raise ValueError("a stored field has a field id, or names, or both")

    def to_plain(self, kind: pa.DataType) -> list[object]:
        """Return values that the wire can carry; ``kind`` is the column's type."""
        below = [c.to_plain(f.type) for c, f in zip(self.children, fields_of(kind), strict=False)]
        return [self.field_id, list(self.names), below, to_plain(self.default, kind)]

    @classmethod
    def from_plain(cls, plain: Any, kind: pa.DataType) -> StoredField:
        """Return the field that `to_plain` made into ``plain``."""
        field_id, names, children, default = plain
        below = zip(children, fields_of(kind), strict=False)
        return cls(
            field_id=field_id,
            names=tuple(names),
            children=tuple(cls.from_plain(child, one.type) for child, one in below),
            default=from_plain(default, kind),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMapping:
    """The `StoredField` of each column of the table's schema. Other columns are stored under their own names."""

    fields: Mapping[str, StoredField] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.fields)

    def to_plain(self, schema: pa.Schema) -> list[object]:
        """Return values that the wire can carry."""
        return [[name, stored.to_plain(schema.field(name).type)] for name, stored in sorted(self.fields.items())]

    @classmethod
    def from_plain(cls, plain: Any, schema: pa.Schema) -> ColumnMapping:
        """Return the mapping that `to_plain` made into ``plain``."""
        return cls(fields={name: StoredField.from_plain(stored, schema.field(name).type) for name, stored in plain})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlan:
    """Where one file holds a column, or a field inside of one.

    ``index``: its place among the file's fields at that level (None: the file lacks it, and each row has ``default``).
    ``name``: its name there. ``children``: the same of its children, in the order of the column's type. ``same``: the
    file's field has the column's names and order at every level, so that only types can differ.
    """

    index: int | None = None
    name: str = ""
    children: tuple[FieldPlan, ...] = ()
    default: Value = None
    same: bool = True


def fields_of(kind: pa.DataType) -> list[pa.Field]:
    """Return the children of a type: a struct's fields, a list's element, a map's key and value; of others none."""
    if isinstance(kind, pa.BaseExtensionType):
        return fields_of(kind.storage_type)
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(place) for place in range(kind.num_fields)]


def resolve(
    schema: pa.Schema, columns: Iterable[str], mapping: ColumnMapping, file: pa.Schema, path: str
) -> dict[str, FieldPlan]:
    """Return where a file of the Arrow schema ``file`` (field ids in its fields' metadata) holds each of ``columns``.

    Raises `SchemaError`, naming ``path``, if a column cannot be identified, or must not be null and has no value.
    """
    has_ids = any(_field_id(one) is not None for one in _all_fields(file))
    whole = _File(path=path, has_ids=has_ids)
    return {name: whole.plan(schema.field(name), mapping.fields.get(name), list(file), name) for name in columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: str
    has_ids: bool

    def plan(self, wanted: pa.Field, stored: StoredField | None, there: Sequence[pa.Field], column: str) -> FieldPlan:
        index = self._find(wanted, stored, there, column)
        default = None if stored is None else stored.default
        if index is None:
            if not wanted.nullable and default is None:
                raise SchemaError(
                    f"{self.path!r} lacks {column!r}, which must not be null and has no default: write that file again"
                )
            return FieldPlan(default=default)
        return self._below(wanted, stored, there[index], index, column)

    def _below(
        self, wanted: pa.Field, stored: StoredField | None, found: pa.Field, index: int, column: str
    ) -> FieldPlan:
        inner, fields = fields_of(wanted.type), fields_of(found.type)
        children = stored.children if stored is not None and stored.children else (None,) * len(inner)
        plans: list[FieldPlan] = []
        same = True
        if pa.types.is_struct(wanted.type) and pa.types.is_struct(_storage(found.type)):
            for child, below in zip(inner, children, strict=True):
                plans.append(self.plan(child, below, fields, f"{column}.{child.name}"))
            same = [(p.index, p.name) for p in plans] == [(i, f.name) for i, f in enumerate(inner)]
            same = same and len(inner) == len(fields)
        elif len(inner) == len(fields):  # elements, keys and values are identified by their place
            for place, (child, below) in enumerate(zip(inner, children, strict=True)):
                plans.append(self._below(child, below, fields[place], place, f"{column}.{child.name}"))
        same = same and all(plan.same for plan in plans)
        return FieldPlan(index=index, name=found.name, children=tuple(plans), same=same)

    def _find(self, wanted: pa.Field, stored: StoredField | None, there: Sequence[pa.Field], column: str) -> int | None:
        if stored is not None and stored.field_id is not None and (self.has_ids or not stored.names):
            if not self.has_ids:
                raise SchemaError(
                    f"{self.path!r} has no Parquet field ids, and the table finds its column {column!r} by field id "
                    f"{stored.field_id} alone: write that file again, or give the table a mapping of names"
                )
            found = [i for i, one in enumerate(there) if _field_id(one) == stored.field_id]
            if len(found) > 1:
                raise SchemaError(f"{self.path!r} has the field id {stored.field_id} of {column!r} more than once")
            return found[0] if found else None
        for name in (wanted.name,) if stored is None else stored.names:
            for i, one in enumerate(there):
                if one.name == name:
                    return i
        return None


def _field_id(one: pa.Field) -> int | None:
    raw: Any = (one.metadata or {}).get(_FIELD_ID)
    return None if raw is None or int(raw) < 0 else int(raw)


def _all_fields(fields: Iterable[pa.Field]) -> Iterable[pa.Field]:
    for one in fields:
        yield one
        yield from _all_fields(fields_of(one.type))


def _storage(kind: pa.DataType) -> pa.DataType:
    return _storage(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind

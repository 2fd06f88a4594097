"""This module joins files of several indexes of one table into one index, and marks the files that a reader knows.

A table that grows is read in tranches. The index of a tranche has the files that were added, and the files of the
tranche before that have rows left, whose other rows are deleted there. `joined` makes it; the schema is that of the
first index, so that batches keep their columns. `marks_of` makes short marks of files, by which a listing of plain
Parquet files is compared with all files that were known before. The module reads no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.errors import SchemaError
from lakeckpt.lake.storage.base import ObjectInfo
from lakeckpt.lake.table.column_mapping import ColumnMapping
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import MARK_BYTES, TableIndex
from lakeckpt.lake.table.partitions import PartitionColumn, Value, coded
from lakeckpt.lake.table.schema import is_agreed
from lakeckpt.lake.table.version import TableVersion

__all__ = ["Added", "SomeFiles", "joined", "known_marks", "mark_of", "marks_of"]

Int64Array = npt.NDArray[np.int64]
_PATH_BYTES = MARK_BYTES - 4


def mark_of(file: ObjectInfo) -> bytes:
    """Return the mark of a file, `MARK_BYTES` long: a digest of its path, then the low 32 bits of its size."""
    path = blake2b(file.path.encode(), digest_size=_PATH_BYTES).digest()
    return path + (file.size_bytes % 2**32).to_bytes(4, "little")


def marks_of(index: TableIndex) -> set[bytes]:
    """Return the marks of the files of an index."""
    return {mark_of(index.file(ordinal)) for ordinal in range(len(index.paths))}


def known_marks(index: TableIndex) -> set[bytes]:
    """Return the marks of the files of an index, and of those that were known before."""
    known = index.known
    return marks_of(index) | {known[at : at + MARK_BYTES] for at in range(0, len(known), MARK_BYTES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The files that newer versions of a table have added to a known one."""

    indexes: tuple[TableIndex, ...]
    """The added files, by the versions that added them, oldest first; empty: nothing was added."""
    version: TableVersion
    """The newest version that was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeFiles:
    """Files of one index, all of them or some."""

    index: TableIndex
    left: Mapping[int, Int64Array] | None = None
    """File → its stored rows that are left (int64, counted from the file's start); None: all files with all rows."""

    def files(self) -> list[int]:
        """Return the ordinals of the files."""
        return list(range(len(self.index.paths))) if self.left is None else sorted(self.left)

    def deleted(self, file: int) -> Int64Array:
        """Return the stored rows of a file that do not count."""
        index = self.index
        if self.left is None:
            return index.deletes.rows(file)
        first, end = index.first_group[file : file + 2].tolist()
        gone = np.ones(int(index.stored_rows[first:end].sum()), np.bool_)
        gone[self.left[file]] = False
        return np.asarray(np.flatnonzero(gone), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    part: SomeFiles
    ordinal: int

    @property
    def path(self) -> str:
        return self.part.index.paths[self.ordinal]

    @property
    def groups(self) -> slice:
        return slice(*self.part.index.first_group[self.ordinal : self.ordinal + 2].tolist())

    def partition(self, name: str) -> tuple[Value, bool]:
        """Return the file's value of a partition column, and whether the file stores the column itself."""
        column = next((one for one in self.part.index.partitions if one.name == name), None)
        if column is None or column.is_stored(self.ordinal):
            return None, True
        return column.value_of(self.ordinal), False


def joined(
    parts: Sequence[SomeFiles], *, version: TableVersion, known: set[bytes], needed: Collection[str] | None
) -> TableIndex:
    """Return one index of the files of ``parts``, at least one, which have no file in common.

    ``known`` are the marks to keep (`TableIndex.known`). The schema has the columns of the first part. `SchemaError`
    if a later part lacks one of them that is ``needed`` (None: all are), or has it in a wider or another type.
    """
    schema = _schema(parts, needed)
    files = sorted(
        (_File(part=part, ordinal=file) for part in parts for file in part.files()), key=lambda one: one.path
    )
    groups = [one.groups for one in files]
    counts = np.array([one.stop - one.start for one in groups], np.int64)
    names = dict.fromkeys(column.name for part in parts for column in part.index.partitions)
    return TableIndex(
        paths=tuple(one.path for one in files),
        size_bytes=np.array([one.part.index.size_bytes[one.ordinal] for one in files], np.int64),
        etags=tuple(one.part.index.etags[one.ordinal] for one in files),
        mtime_ns=np.array([one.part.index.mtime_ns[one.ordinal] for one in files], np.int64),
        footer_digests=b"".join(one.part.index.footer_digest(one.ordinal) for one in files),
        first_group=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        stored_rows=_each([one.part.index.stored_rows[rows] for one, rows in zip(files, groups, strict=True)]),
        group_bytes=_each([one.part.index.group_bytes[rows] for one, rows in zip(files, groups, strict=True)]),
        partitions=tuple(_partition(name, schema, files) for name in names if name in schema.names),
        schema=schema,
        version=version,
        deletes=Deletes.of({place: one.part.deleted(one.ordinal) for place, one in enumerate(files)}),
        columns=_columns(parts, schema),
        known=b"".join(sorted(known)),
    )


def _each(arrays: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _partition(name: str, schema: pa.Schema, files: Sequence[_File]) -> PartitionColumn:
    values = [one.partition(name) for one in files]
    return coded(name, schema.field(name).type, [value for value, _ in values], [stored for _, stored in values])


def _columns(parts: Sequence[SomeFiles], schema: pa.Schema) -> ColumnMapping:
    newest = parts[-1].index.columns.fields
    return ColumnMapping(fields={name: stored for name, stored in newest.items() if name in schema.names})


def _schema(parts: Sequence[SomeFiles], needed: Collection[str] | None) -> pa.Schema:
    """Return the columns of the first part that all parts have; one is nullable if it is nullable in any part."""
    found = []
    for column in parts[0].index.schema:
        others = [part.index.schema.field(column.name) for part in parts if column.name in part.index.schema.names]
        problem = _problem(column, others, len(parts))
        if not problem:
            found.append(column.with_nullable(any(one.nullable for one in others)))
        elif needed is None or column.name in needed:
            raise SchemaError(
                f"column {column.name!r} of the files that were added ({parts[-1].index.version}) is not as before: "
                f"{problem}. Leave it out of columns=, or begin a new run"
            )
    return pa.schema(found)


def _problem(column: pa.Field, others: Sequence[pa.Field], count: int) -> str:
    if len(others) < count:
        return "it is missing"
    if not all(map(is_agreed, (column, *others))):
        return "files do not agree on its type"
    other = next((one.type for one in others if not _fits(one, column)), None)
    return "" if other is None else f"it is {other}, and {column.type} in earlier files"


def _fits(other: pa.Field, column: pa.Field) -> bool:
    """Return whether the type of ``column`` holds all values of the type of ``other``, as in a table of both files."""
    if other.type == column.type:
        return True
    try:
        both = pa.unify_schemas([pa.schema([column]), pa.schema([other])], promote_options="permissive")
    except (pa.ArrowException, TypeError):
        return False
    return bool(both.field(0).type == column.type)

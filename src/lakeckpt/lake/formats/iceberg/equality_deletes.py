"""This module finds the rows of each data file that the equality deletes of an Iceberg snapshot delete.

An equality delete file lists values of some columns: rows that have them are deleted. Null equals null, and floats are
equal as their bits are (NaN to NaN, 0.0 not to -0.0). Only the data files know these rows: pyiceberg reads the
compared columns, and no others, of every data file that such deletes apply to, with its rules for columns that were
renamed, added or dropped since. This is the one case in which opening a table reads data. The threads are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField, PrimitiveType

from lakeckpt.errors import DataFileDamaged, LakeckptError, TableError, one_line
from lakeckpt.lake.formats.iceberg.plan import Entry, PlannedFile
from lakeckpt.lake.table.deletes import Int64Array

__all__ = ["rows_deleted_by_value"]


def rows_deleted_by_value(
    planned: Sequence[PlannedFile], metadata: TableMetadata, io: FileIO, *, threads: int
) -> dict[str, Int64Array]:
    """Return the rows that equality deletes name (int64, ascending), by location of the data file; no rows: no entry.

    `TableError` if columns are compared that cannot be, `DataFileDamaged` names a file that cannot be
    read.
    """
    affected = [one for one in planned if one.equalities]
    deletes = {delete.location: delete for one in affected for delete in one.equalities}
    schemas = {delete.equality_ids: _compared(delete, metadata) for delete in deletes.values()}

    def read(file: DataFile, ids: tuple[int, ...]) -> pa.Table:
        return _read(file, schemas[ids], metadata, io)

    def by_file(one: PlannedFile) -> Int64Array:
        stored: dict[tuple[int, ...], pa.Table] = {}
        found = []
        for delete in one.equalities:
            ids = delete.equality_ids
            if ids not in stored:
                stored[ids] = _checked(read(one.file, ids), one.rows, one.location)
            found.append(np.flatnonzero(_is_in(stored[ids], values[delete.location])))
        return np.unique(np.concatenate(found))

    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="lakeckpt-equality") as pool:
        tables = pool.map(
            lambda one: _checked(read(one.file, one.equality_ids), one.count, one.location), deletes.values()
        )
        values: Mapping[str, pa.Table] = dict(zip(deletes, tables, strict=True))
        rows = dict(zip((one.location for one in affected), pool.map(by_file, affected), strict=True))
    return {location: ordinals for location, ordinals in rows.items() if len(ordinals)}


def _compared(delete: Entry, metadata: TableMetadata) -> Schema:
    """Return the columns that a delete file compares, as they are now, or as they were before they were dropped."""
    if delete.file.file_format != FileFormat.PARQUET:
        raise TableError(
            f"the equality delete file {delete.location!r} is {delete.file.file_format.value}: only Parquet is read "
            "here. Compact the table (rewrite_data_files)"
        )
    schemas = [metadata.schema(), *sorted(metadata.schemas, key=lambda one: -one.schema_id)]
    fields = []
    for field_id in delete.equality_ids:
        field = next((field for one in schemas for field in one.fields if field.field_id == field_id), None)
        if field is None or not isinstance(field.field_type, PrimitiveType):
            raise TableError(
                f"the equality delete file {delete.location!r} compares the field {field_id}, which is "
                f"{'in no schema of the table' if field is None else 'nested'}: compact the table (rewrite_data_files)"
            )
        # Names need not be unique among schemas; ids are.
        fields.append(
            NestedField(field_id, f"f{field_id}", field.field_type, False, initial_default=field.initial_default)
        )
    if not fields:
        raise TableError(
            f"the equality delete file {delete.location!r} does not name the columns it compares: compact the table"
        )
    return Schema(*fields)


def _read(file: DataFile, schema: Schema, metadata: TableMetadata, io: FileIO) -> pa.Table:
    try:
        scan = ArrowScan(metadata, io, schema, AlwaysTrue())
        return scan.to_table([FileScanTask(file)])
    except LakeckptError:
        raise
    except Exception as error:  # whatever damaged Parquet and the stores' clients make pyarrow and pyiceberg raise
        what = one_line(f"{type(error).__name__}: {error}")
        raise DataFileDamaged(
            f"{file.file_path!r} cannot be read for the table's equality deletes ({what}): restore it from a good copy",
            file=file.file_path,
        ) from error


def _checked(table: pa.Table, rows: int, location: str) -> pa.Table:
    if table.num_rows != rows:
        raise DataFileDamaged(
            f"{location!r} holds {table.num_rows} rows, but its manifest has {rows}: restore it from a good copy",
            file=location,
        )
    return table


def _is_in(rows: pa.Table, values: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows equal one of ``values`` in all columns: bool, one per row."""
    count = rows.num_rows
    codes = np.zeros(count + values.num_rows, np.int64)
    for place in range(rows.num_columns):
        mine = _stored(rows.column(place))
        both = pa.chunked_array([*mine.chunks, *_stored(values.column(place)).cast(mine.type).chunks])
        encoded = both.combine_chunks().dictionary_encode(null_encoding="encode")
        pairs = np.stack([codes, np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)])
        codes = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
    return np.isin(codes[:count], codes[count:])


def _stored(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of an extension type (UUIDs) as they are stored."""
    kind = column.type
    return column.cast(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else column

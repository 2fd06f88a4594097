"""This module sums the sizes of the columns asked for by row group.

The sizes come from the footers. They are read again, because `open_table` does not keep sizes by column. The table's
column mapping says what each file calls a column. Row groups whose rows are all deleted are never read and count
nothing.

`column_bytes` starts and joins threads. The module decodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.lake.parquet.column_chunks import column_chunks, leaves_of
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.column_mapping import resolve
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.reading.windows.decode import select_columns

__all__ = ["ColumnBytes", "column_bytes"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnBytes:
    """The bytes of the columns ``names`` in each row group, on disk and in memory: int64, shape (row groups,) each."""

    names: tuple[str, ...]
    stored: Int64Array
    decoded: Int64Array


def column_bytes(
    table: Table, columns: Sequence[str] | None, *, progress: Callable[[int, int], None] | None = None
) -> ColumnBytes:
    """Return the sizes of ``columns`` (None: all) by row group; ``progress(files done, files)``.

    Raises `SchemaError` for a column that the table does not have, `DataFileChanged` if a file was written again.
    """
    names = _stored_names(table, columns)
    files = len(table.index.paths)
    parts: list[Int64Array] = [np.zeros((2, 0), np.int64)]
    threads = THREADS_LOCAL if isinstance(table.storage, LocalStorage) else THREADS_REMOTE
    with ThreadPoolExecutor(max(1, min(threads, files)), thread_name_prefix="lakeckpt-plan") as pool:
        for done, found in enumerate(pool.map(partial(_of_file, table, names), range(files)), start=1):
            parts.append(found)
            if progress is not None:
                progress(done, files)
    sizes = np.concatenate(parts, axis=1)
    sizes[:, table.index.group_rows == 0] = 0
    return ColumnBytes(names=tuple(names), stored=sizes[0], decoded=sizes[1])


def _stored_names(table: Table, columns: Sequence[str] | None) -> list[str]:
    """Return the columns that files store, in the table's order."""
    wanted = set(select_columns(table.schema, columns).names) - {one.name for one in table.index.partitions}
    return [name for name in table.schema.names if name in wanted]


def _of_file(table: Table, names: Sequence[str], file: int) -> Int64Array:
    """Return stored and decoded bytes, int64, shape (2, row groups)."""
    metadata, path = table.footer(file), table.index.paths[file]
    rows = table.index.stored_rows[table.index.first_group[file] : table.index.first_group[file + 1]]
    plans = resolve(table.schema, names, table.index.columns, metadata.schema.to_arrow_schema(), path)
    widths = {name: _fixed_width(table.schema.field(name).type) for name in names}
    leaves = leaves_of(metadata.schema, [plan.name for plan in plans.values() if plan.index is not None])
    chunks = [column_chunks(metadata, group, leaves) for group in range(len(rows))]
    varying = {plans[name].name for name in names if widths[name] is None}
    sizes = np.zeros((2, len(rows)), np.int64)
    sizes[0] = [sum(chunk.stop - chunk.start for chunk in group) for group in chunks]
    sizes[1] = [sum(chunk.uncompressed_bytes for chunk in group if chunk.column in varying) for group in chunks]
    offsets = 4 * sum(column in varying for column in leaves.values())
    sizes[1] += rows * (offsets + sum(width or 0 for width in widths.values()))
    return sizes


def _fixed_width(kind: pa.DataType) -> int | None:
    """Return the bytes of one value as it is delivered; None if the width varies."""
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_decimal(kind):
        return 8
    if pa.types.is_fixed_size_list(kind):
        inner = _fixed_width(kind.value_type)
        return None if inner is None else inner * int(kind.list_size)
    if pa.types.is_struct(kind):
        widths = [_fixed_width(kind.field(i).type) for i in range(kind.num_fields)]
        return None if None in widths else sum(width for width in widths if width is not None)
    return int(kind.byte_width) if pa.types.is_primitive(kind) else None

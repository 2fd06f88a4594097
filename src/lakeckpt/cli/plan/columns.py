"""This module sums the sizes of the columns asked for by row group, and looks for page checksums.

The sizes come from the footers. They are read again, because `open_table` does not keep sizes by column. The table's
column mapping says what each file calls a column. Row groups whose rows are all deleted are never read and count
nothing. Page headers alone say whether pages have checksums, so the first page of some files is looked at.

`column_bytes` starts and joins threads. The module decodes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.errors import SchemaError
from lakeckpt.lake.parquet.column_chunks import ColumnChunk, column_chunks, leaves_of
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.column_mapping import resolve
from lakeckpt.lake.table.table import Table

__all__ = ["ColumnBytes", "column_bytes"]

Int64Array = npt.NDArray[np.int64]
_THREADS_LOCAL, _THREADS_REMOTE = 16, 64
_LOOKED_AT = 64
_HEADER_BYTES = 64
_WITH_CHECKSUM = re.compile(rb"(?:\x15[\x80-\xff]*[\x00-\x7f]){4}")
"""The header of a page begins with three integers (its type and two sizes) and, if it has a checksum, a fourth one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnBytes:
    """The asked columns of each row group: int64, shape (row groups,) each; and of how many files pages were
    ``looked_at``, of which ``with_checksums`` had a checksum in their first page."""

    names: tuple[str, ...]
    stored: Int64Array
    decoded: Int64Array
    looked_at: int = 0
    with_checksums: int = 0


def column_bytes(
    table: Table, columns: Sequence[str] | None, *, progress: Callable[[int, int], None] | None = None
) -> ColumnBytes:
    """Sizes of ``columns`` (None: all) by row group; ``progress(files done, files)``.

    Raises `SchemaError` for a column that there is not, `DataFileChanged` where a file was written again.
    """
    unknown = [name for name in columns or () if name not in table.schema.names]
    if unknown:
        raise SchemaError(
            f"the table has no column {', '.join(map(repr, unknown))}; it has {', '.join(table.schema.names)}"
        )
    partitions = {one.name for one in table.index.partitions}
    names = [name for name in table.schema.names if name not in partitions and (columns is None or name in columns)]
    files = len(table.index.paths)
    looked_at = set(np.linspace(0, files - 1, min(files, _LOOKED_AT)).astype(int).tolist()) if names else set()
    parts: list[tuple[Int64Array, bool | None]] = []
    threads = _THREADS_LOCAL if isinstance(table.storage, LocalStorage) else _THREADS_REMOTE
    with ThreadPoolExecutor(max(1, min(threads, files)), thread_name_prefix="lakeckpt-plan") as pool:
        of_file = pool.map(lambda file: _of_file(table, file, names, file in looked_at), range(files))
        for done, found in enumerate(of_file, start=1):
            parts.append(found)
            if progress is not None:
                progress(done, files)
    sizes = np.concatenate([np.zeros((2, 0), np.int64), *(found for found, _ in parts)], axis=1)
    sizes[:, table.index.group_rows == 0] = 0
    looked = [has for _, has in parts if has is not None]
    return ColumnBytes(
        names=tuple(names), stored=sizes[0], decoded=sizes[1], looked_at=len(looked), with_checksums=sum(looked)
    )


def _of_file(table: Table, file: int, names: Sequence[str], look: bool) -> tuple[Int64Array, bool | None]:
    """Return stored and decoded bytes, int64, shape (2, row groups), and whether pages have checksums.

    The second is None where ``look`` is false, or where the first page does not show it.
    """
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
    stored = [chunk for group, count in zip(chunks, rows.tolist(), strict=True) if count for chunk in group]
    return sizes, _has_checksums(table, file, stored[0]) if look and stored else None


def _fixed_width(kind: pa.DataType) -> int | None:
    """Bytes of one value as it is delivered; None where it varies."""
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


def _has_checksums(table: Table, file: int, chunk: ColumnChunk) -> bool:
    """Return whether the first page of a column chunk has a checksum."""
    stop = min(chunk.stop, chunk.start + _HEADER_BYTES)
    return _WITH_CHECKSUM.match(table.storage.read(table.index.paths[file], chunk.start, stop)) is not None

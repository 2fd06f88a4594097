"""How large are the columns that are asked for, row group by row group, and do their pages have checksums?

Sizes are told from the footers, which are read again (`open_table` does not keep sizes by column), file by file through
the table's mapping of columns: what a file calls a column, and what it lacks, is that file's own. Row groups whose rows
are all deleted are never read: they cost nothing. Whether pages have checksums stands in the pages' headers alone: the
first page of some files is looked at. A few threads, which `column_bytes` starts and joins. Decodes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import DataFileDamaged, SchemaError
from lakeckpt.lake.column_chunks import ChunkFacts, chunk_facts
from lakeckpt.lake.columns import fields_of, resolve
from lakeckpt.lake.local import LocalStorage
from lakeckpt.lake.table import Table
from lakeckpt.lake.thrift import read_struct

__all__ = ["ColumnBytes", "column_bytes"]

Int64Array = npt.NDArray[np.int64]
_THREADS_LOCAL, _THREADS_REMOTE = 16, 64
_LOOKED_AT = 64
_HEADER_BYTES = 64 * 1024
_CRC = 4
"""The number of the field of a page's header that holds its checksum."""


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

    Raises `SchemaError` for a column that there is not, `DataFileChanged` where a file was written again,
    `DataFileDamaged` where a footer is malformed.
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
    told = [has for _, has in parts if has is not None]
    return ColumnBytes(
        names=tuple(names), stored=sizes[0], decoded=sizes[1], looked_at=len(told), with_checksums=sum(told)
    )


def _of_file(table: Table, file: int, names: Sequence[str], look: bool) -> tuple[Int64Array, bool | None]:
    """Stored and decoded bytes, int64, shape (2, row groups); whether pages have checksums, None: not looked at."""
    footer = table.whole_footer(file)
    path = table.index.paths[file]
    rows = table.index.stored_rows[table.index.first_group[file] : table.index.first_group[file + 1]]
    leaves = _leaves(footer.metadata, table, names, path)
    widths = {name: _fixed_width(table.schema.field(name).type) for name in names}
    sizes = np.zeros((2, len(rows)), np.int64)
    for name in names:
        width = widths[name]
        if width is not None:
            sizes[1] += rows * width
    wanted = [leaf for found in leaves.values() for leaf in found]
    if not wanted:
        return sizes, None
    try:
        facts = chunk_facts(footer.encoded, wanted)
    except ValueError as error:
        raise DataFileDamaged(f"the data file {path!r} has a footer that is malformed: {error}", file=path) from error
    numbers = {name: place for place, name in enumerate(ChunkFacts.__slots__)}
    stored, plain = (np.maximum(facts[:, :, numbers[which]], 0) for which in ("compressed_bytes", "uncompressed_bytes"))
    sizes[0] += stored.sum(axis=1)
    varies = [widths[name] is None for name, found in leaves.items() for _ in found]
    sizes[1] += plain[:, varies].sum(axis=1) + 4 * rows * sum(varies)
    return sizes, _has_checksums(table, file, facts) if look else None


def _leaves(metadata: pq.FileMetaData, table: Table, names: Sequence[str], path: str) -> dict[str, list[int]]:
    """The columns of the lowest level of each column, by their ordinals in the file; none where it lacks the column."""
    schema = metadata.schema.to_arrow_schema()
    ends = np.cumsum([0, *(_leaf_count(one.type) for one in schema)]).tolist()
    if ends[-1] != metadata.num_columns:  # types that pyarrow shows otherwise than they are stored
        tops = [metadata.schema.column(leaf).path.split(".")[0] for leaf in range(metadata.num_columns)]
        ranges = [[leaf for leaf, top in enumerate(tops) if top == one.name] for one in schema]
    else:
        ranges = [list(range(start, end)) for start, end in itertools.pairwise(ends)]
    plans = resolve(table.schema, names, table.index.columns, schema, path)
    return {name: ranges[plan.index] for name, plan in plans.items() if plan.index is not None}


def _leaf_count(kind: pa.DataType) -> int:
    if pa.types.is_dictionary(kind):
        return _leaf_count(kind.value_type)
    if pa.types.is_struct(kind) and not kind.num_fields:
        return 0
    return sum(_leaf_count(one.type) for one in fields_of(kind)) or 1


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


def _has_checksums(table: Table, file: int, facts: Int64Array) -> bool | None:
    """Whether the first page of the file's first column chunk that has any has one; None where that cannot be told."""
    for row in facts.reshape(-1, facts.shape[2]).tolist():
        chunk = ChunkFacts(**dict(zip(ChunkFacts.__slots__, row, strict=True)))
        stop = min(chunk.stop, chunk.start + _HEADER_BYTES)
        if not chunk.values or not 0 < chunk.start < stop <= int(table.index.size_bytes[file]):
            continue
        head = table.storage.read(table.index.paths[file], chunk.start, stop)
        try:
            return _CRC in read_struct(memoryview(head), 0, wanted={_CRC: None})[0]
        except ValueError:
            return None
    return None

"""This module finds the column chunks of the wanted columns in a Parquet footer.

It asks pyarrow about the wanted columns only, because asking about every column of a wide file takes longer than
decoding a few of them. pyarrow ends the process for some damaged or encrypted column chunks, so callers pass footers
that `lakeckpt.lake.parquet.footer` has read and whose digest is the pinned one. The module reads no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

import pyarrow.parquet as pq

__all__ = ["ColumnChunk", "column_chunks", "leaves_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChunk:
    """The place and the sizes of one column chunk, in bytes, as the footer states them."""

    column: str
    """The column of the file that the chunk is part of."""
    start: int
    stop: int
    """The bytes [start, stop) of the file hold the pages."""
    uncompressed_bytes: int
    codec: str
    """The codec's name in pyarrow, such as ``SNAPPY``."""


def leaves_of(schema: pq.ParquetSchema, columns: Collection[str]) -> dict[int, str]:
    """Return the leaf columns that pyarrow reads for ``columns``: ordinal in the file → name of the column.

    pyarrow selects by path: a column called "a.b" comes with the field b of a struct a, and a struct a with a column
    called "a.b".
    """
    wanted, found = frozenset(columns), {}
    for ordinal in range(len(schema)):
        path = schema.column(ordinal).path
        column = path if path in wanted else _first_prefix(path, wanted)
        if column is not None:
            found[ordinal] = column
    return found


def _first_prefix(path: str, wanted: frozenset[str]) -> str | None:
    prefixes = accumulate(path.split("."), "{}.{}".format)
    return next((prefix for prefix in prefixes if prefix in wanted), None)


def column_chunks(metadata: pq.FileMetaData, row_group: int, leaves: Mapping[int, str]) -> list[ColumnChunk]:
    """Return the column chunks of ``leaves`` (as `leaves_of` returns them) in one row group."""
    group = metadata.row_group(row_group)
    return [_column_chunk(group.column(ordinal), column) for ordinal, column in leaves.items()]


def _column_chunk(found: pq.ColumnChunkMetaData, column: str) -> ColumnChunk:
    start, dictionary = found.data_page_offset, found.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < start:
        start = dictionary
    return ColumnChunk(
        column=column,
        start=start,
        stop=start + found.total_compressed_size,
        uncompressed_bytes=found.total_uncompressed_size,
        codec=found.compression,
    )

"""This module reads and decodes row groups of one Parquet file.

1. `RowGroupReader.plan` finds the column chunks of the wanted columns in the footer and the few ranges of the file that
   hold them. It refuses a row group whose columns exceed the limit on uncompressed bytes.
2. `RowGroupReader.decode` lets pyarrow decode the bytes from a file that holds the ranges: a mapped local file, or what
   was fetched from a store. pyarrow compares every page with its checksum, if the page has one.

If decoding fails, the columns are decoded one after the other to find the damaged column. The module trusts the
sizes in a footer, but a dictionary of long texts may decode to more bytes than the footer states.

Legacy 96-bit timestamps count days and nanoseconds. pyarrow turns them into nanoseconds since 1970 without an overflow
check: 9999-12-31 becomes a day in 1816. So the reader decodes such columns a second time in milliseconds, which hold
every such timestamp, and refuses timestamps that nanoseconds cannot hold.

Threads may share a reader. It starts no threads and keeps no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeckpt.errors import DataFileDamaged, SchemaError, TableError
from lakeckpt.lake.parquet.column_chunks import ColumnChunk, column_chunks, leaves_of
from lakeckpt.lake.parquet.ranges import Range, coalesced

__all__ = ["DEFAULT_MAX_ROW_GROUP_BYTES", "RowGroupPlan", "RowGroupReader"]

DEFAULT_MAX_ROW_GROUP_BYTES = 8 * 2**30
"""The default limit on the uncompressed bytes of the wanted columns of one row group."""

_MISSING_CODECS = frozenset(("LZO", "UNKNOWN"))
_MOST_MS = (2**63 - 1) // 10**6
"""Nanoseconds of 64 bits hold timestamps of fewer milliseconds than this, before and after 1970."""
_DECODING_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)
"""The exceptions that pyarrow raises for damaged bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroupPlan:
    """The ranges of the file that hold the wanted columns of a row group."""

    row_group: int
    columns: Sequence[str]
    ranges: Sequence[Range]

    @property
    def size_bytes(self) -> int:
        """The memory that the bytes of the ranges take."""
        return sum(stop - start for start, stop in self.ranges)


class RowGroupReader:
    """Decodes row groups of the file ``path``, which has ``size_bytes`` bytes.

    ``metadata`` is the file's pinned footer; ``columns`` are the columns that may be wanted, by the file's names.
    ``int96_unit`` is the unit in which legacy 96-bit timestamps are read. ``most_bytes`` is the limit on the
    uncompressed bytes of the wanted columns of a row group. Threads may share a reader.
    """

    def __init__(
        self,
        metadata: pq.FileMetaData,
        *,
        path: str,
        size_bytes: int,
        columns: Sequence[str],
        int96_unit: str,
        most_bytes: int,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self._size_bytes = size_bytes
        self._most_bytes = most_bytes
        self._int96_unit = int96_unit
        self._leaves = leaves_of(metadata.schema, columns)

    def plan(self, row_group: int, columns: Sequence[str]) -> RowGroupPlan:
        """Return where ``columns`` lie. Raises `DataFileDamaged`, or `TableError` (too large, unknown codec)."""
        wanted = frozenset(columns)
        leaves = {leaf: name for leaf, name in self._leaves.items() if name in wanted}
        chunks = column_chunks(self.metadata, row_group, leaves)
        for chunk in chunks:
            self._check_chunk(row_group, chunk)
        self._check_size(row_group, chunks)
        ranges = coalesced((chunk.start, chunk.stop) for chunk in chunks)
        return RowGroupPlan(row_group=row_group, columns=columns, ranges=ranges)

    def decode(
        self, source: pa.NativeFile, plan: RowGroupPlan, rows: int, *, use_threads: bool
    ) -> dict[str, pa.ChunkedArray]:
        """Return the columns that were planned, by name, of a row group that has ``rows`` rows, read from ``source``.

        Raises `DataFileDamaged` with the row group and, if it is known, the column; `SchemaError` if
        timestamps do not fit; ``MemoryError``.
        """
        if not plan.columns:
            return {}
        try:
            found = self._decoded(
                source, plan.row_group, plan.columns, use_threads=use_threads, int96_unit=self._int96_unit
            )
        except MemoryError:
            raise
        except _DECODING_ERRORS as error:
            raise self._blamed(source, plan, error) from error
        for name, column in found.items():
            if len(column) != rows:
                what = f"it holds {len(column)} rows, but its footer says {rows}"
                raise self._damaged(plan.row_group, name, what)
        if self._int96_unit == "ns":
            self._check_times(source, plan)
        return found

    def _decoded(
        self, source: pa.NativeFile, row_group: int, columns: Sequence[str], *, use_threads: bool, int96_unit: str
    ) -> dict[str, pa.ChunkedArray]:
        opened = pq.ParquetFile(
            source,
            metadata=self.metadata,
            pre_buffer=False,
            coerce_int96_timestamp_unit=int96_unit,
            page_checksum_verification=True,
        )
        table = opened.read_row_group(row_group, columns=list(columns), use_threads=use_threads)
        # By name: a column called "a.b" also selects the field b of a struct a.
        return {name: table.column(name) for name in columns}

    def _check_chunk(self, row_group: int, chunk: ColumnChunk) -> None:
        if not 0 <= chunk.start <= chunk.stop <= self._size_bytes:
            what = f"its footer says that bytes {chunk.start} to {chunk.stop} of {self._size_bytes} hold it"
            raise self._damaged(row_group, chunk.column, what)
        if chunk.codec in _MISSING_CODECS:
            raise TableError(
                f"column {chunk.column!r} of row group {row_group} of the data file {self.path!r} is compressed with "
                f"the codec {chunk.codec}, which pyarrow {pa.__version__} cannot read: write the file again with "
                "another codec, or leave the column out"
            )

    def _check_size(self, row_group: int, chunks: Sequence[ColumnChunk]) -> None:
        size = sum(chunk.uncompressed_bytes for chunk in chunks)
        if size > self._most_bytes:
            largest = max(chunks, key=lambda chunk: chunk.uncompressed_bytes).column
            raise TableError(
                f"row group {row_group} of the data file {self.path!r} has {size:,} uncompressed bytes in the columns "
                f"asked for, most of them in column {largest!r}, and at most {self._most_bytes:,} may be: read fewer "
                "columns, or write the file again in smaller row groups"
            )

    def _check_times(self, source: pa.NativeFile, plan: RowGroupPlan) -> None:
        schema = self.metadata.schema
        legacy = {name for leaf, name in self._leaves.items() if schema.column(leaf).physical_type == "INT96"}
        for name in legacy.intersection(plan.columns):
            column = self._decoded(source, plan.row_group, [name], use_threads=False, int96_unit="ms")[name]
            if not all(map(_fit_nanoseconds, column.chunks)):
                raise SchemaError(
                    f"column {name!r} of row group {plan.row_group} of the data file {self.path!r} holds 96-bit "
                    "timestamps before 1677-09-21 or after 2262-04-11, which nanoseconds cannot hold: write the file "
                    "again with timestamps in microseconds, or leave the column out"
                )

    def _blamed(self, source: pa.NativeFile, plan: RowGroupPlan, error: Exception) -> DataFileDamaged:
        """Return the error that names the first column that cannot be decoded alone."""
        for name in plan.columns:
            try:
                self._decoded(source, plan.row_group, [name], use_threads=False, int96_unit=self._int96_unit)
            except _DECODING_ERRORS as its_own:
                return self._damaged(plan.row_group, name, str(its_own))
        return self._damaged(plan.row_group, None, str(error))

    def _damaged(self, row_group: int, column: str | None, what: str) -> DataFileDamaged:
        which = "" if column is None else f"column {column!r} of "
        return DataFileDamaged(
            f"{which}row group {row_group} of the data file {self.path!r} cannot be decoded "
            f"({' '.join(what.split())[:300]}): restore the file from a good copy, or go on without its "
            f"rows by `open_table(…, exclude=[({self.path!r}, {row_group})])`: docs/how-to/damaged-files.md says what "
            "else is excluded of the current epoch. A run with follow= refuses it inside of a tranche",
            file=self.path,
            row_group=row_group,
            column=column,
        )


def _fit_nanoseconds(array: pa.Array) -> bool:
    """Return whether every timestamp of ``array``, in milliseconds and at any depth, fits nanoseconds since 1970.

    >>> far = pa.array([[0, None], [253402214400000]], pa.list_(pa.timestamp("ms")))
    >>> _fit_nanoseconds(far), _fit_nanoseconds(far[:1])
    (False, True)
    """
    if pa.types.is_timestamp(array.type):
        bounds = pc.min_max(array.cast(pa.int64()))
        least, most = bounds["min"].as_py(), bounds["max"].as_py()
        return least is None or (least > -_MOST_MS and most < _MOST_MS)
    if pa.types.is_map(array.type):
        return _fit_nanoseconds(array.keys) and _fit_nanoseconds(array.items)
    if pa.types.is_struct(array.type):
        return all(map(_fit_nanoseconds, array.flatten()))
    return not pa.types.is_nested(array.type) or _fit_nanoseconds(array.flatten())

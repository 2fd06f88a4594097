"""This module reads and decodes row groups of one Parquet file.

1. `RowGroupReader.plan` finds the column chunks of the wanted columns in the footer and the few ranges of the file that
   hold them. It refuses a row group whose columns exceed the limit on uncompressed bytes.
2. `RowGroupReader.begin` and `RowGroupReader.arrived` read the ranges. A failure up to here is a failure of the store.
3. `RowGroupReader.decode` lets pyarrow decode the bytes. pyarrow compares every page with its checksum, where the page
   has one. Decoding touches no store.

Where decoding fails, the columns are decoded one after the other to find the damaged column. The module trusts the
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

from lakeckpt.errors import (
    DataFileChanged,
    DataFileDamaged,
    LakeckptError,
    SchemaError,
    StorageError,
    TableError,
)
from lakeckpt.lake.parquet.column_chunks import ColumnChunk, column_chunks, leaves_of
from lakeckpt.lake.parquet.held_file import HeldFile
from lakeckpt.lake.parquet.ranges import Arriving, PinnedBytes, Range, coalesced

__all__ = ["DEFAULT_MAX_ROW_GROUP_BYTES", "HeldRowGroup", "RowGroupPlan", "RowGroupReader"]

DEFAULT_MAX_ROW_GROUP_BYTES = 8 * 2**30
"""The default limit on the uncompressed bytes of the wanted columns of one row group."""

_MISSING_CODECS = frozenset(("LZO", "UNKNOWN"))
_HEADER_MISCOUNT = 100
"""Old versions of parquet-mr did not count the header of the dictionary page, which is no longer than this."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRowGroup:
    """The bytes of a row group in memory, as they are stored."""

    row_group: int
    columns: Sequence[str]
    file: HeldFile
    arriving: Arriving

    def release(self) -> None:
        """Release the memory; the bytes may not be read afterwards."""
        self.file.close()
        self.arriving.abandon()


class RowGroupReader:
    """Reads row groups of the file ``path``, which is opened as ``source`` and has ``size_bytes`` bytes.

    ``metadata`` is the file's pinned footer; ``columns`` are the columns that may be wanted, by the file's names.
    ``int96_unit`` is the unit in which legacy 96-bit timestamps are read. ``most_bytes`` is the limit on the
    uncompressed bytes of the wanted columns of a row group. Threads may share a reader.
    """

    def __init__(
        self,
        source: PinnedBytes,
        metadata: pq.FileMetaData,
        *,
        path: str,
        size_bytes: int,
        columns: Sequence[str],
        int96_unit: str,
        most_bytes: int,
    ) -> None:
        self.source = source
        self.path = path
        self.metadata = metadata
        self._size_bytes = size_bytes
        self._most_bytes = most_bytes
        self._int96_unit = int96_unit
        self._leaves = leaves_of(metadata.schema, columns)
        self._slack = _HEADER_MISCOUNT if str(metadata.created_by).startswith("parquet-mr") else 0

    def plan(self, row_group: int, columns: Sequence[str]) -> RowGroupPlan:
        """Return where ``columns`` lie. Raises `DataFileDamaged`, or `TableError` (too large, unknown codec)."""
        wanted = frozenset(columns)
        leaves = {leaf: name for leaf, name in self._leaves.items() if name in wanted}
        chunks = column_chunks(self.metadata, row_group, leaves)
        for chunk in chunks:
            self._check_chunk(row_group, chunk)
        self._check_size(row_group, chunks)
        pieces = ((chunk.start, min(self._size_bytes, chunk.stop + self._slack)) for chunk in chunks)
        ranges = coalesced(pieces, hole_bytes=self.source.hole_bytes)
        return RowGroupPlan(row_group=row_group, columns=columns, ranges=ranges)

    def begin(self, plan: RowGroupPlan) -> Arriving:
        """Start to read the ranges of ``plan``, without waiting for them."""
        return self.source.begin(plan.ranges)

    def arrived(self, plan: RowGroupPlan, arriving: Arriving) -> HeldRowGroup:
        """Wait for the ranges that `begin` started to read. Raises `StorageError`, `DataFileChanged`."""
        try:
            parts = self._parts(plan, arriving)
        except BaseException:
            arriving.abandon()
            raise
        file = HeldFile(self._size_bytes, parts, whole=arriving.whole)
        return HeldRowGroup(row_group=plan.row_group, columns=plan.columns, file=file, arriving=arriving)

    def decode(self, held: HeldRowGroup, rows: int, *, use_threads: bool) -> dict[str, pa.ChunkedArray]:
        """Return the columns that were planned, by name, of a row group that has ``rows`` rows.

        Raises `DataFileDamaged` with the row group and, where it is known, the column; `SchemaError` where
        timestamps do not fit; ``MemoryError``.
        """
        if not held.columns:
            return {}
        try:
            found = self._decoded(held, held.columns, use_threads=use_threads)
        except MemoryError:
            raise
        except _DECODING_ERRORS as error:
            raise self._blamed(held, error) from error
        for name, column in found.items():
            if len(column) != rows:
                what = f"it holds {len(column)} rows, but its footer says {rows}"
                raise self._damaged(held.row_group, name, what)
        if self._int96_unit == "ns":
            self._check_times(held)
        return found

    def _parts(self, plan: RowGroupPlan, arriving: Arriving) -> list[tuple[int, pa.Buffer]]:
        try:
            found = arriving.wait()
        except LakeckptError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StorageError(f"row group {plan.row_group} of {self.path!r} could not be read: {error}") from error
        for (start, stop), part in zip(plan.ranges, found, strict=True):
            if part.size != stop - start:
                raise DataFileChanged(
                    f"the data file {self.path!r} ends at byte {start + part.size}, not at {self._size_bytes}: it was "
                    "cut or written again since it was pinned. Restore it, or open the table again"
                )
        return [(start, part) for (start, _), part in zip(plan.ranges, found, strict=True)]

    def _decoded(
        self, held: HeldRowGroup, columns: Sequence[str], *, use_threads: bool = False, int96_unit: str | None = None
    ) -> dict[str, pa.ChunkedArray]:
        opened = pq.ParquetFile(
            held.file.opened(),
            metadata=self.metadata,
            pre_buffer=False,
            coerce_int96_timestamp_unit=int96_unit or self._int96_unit,
            page_checksum_verification=True,
        )
        table = opened.read_row_group(held.row_group, columns=list(columns), use_threads=use_threads)
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

    def _check_times(self, held: HeldRowGroup) -> None:
        schema = self.metadata.schema
        legacy = {name for leaf, name in self._leaves.items() if schema.column(leaf).physical_type == "INT96"}
        for name in legacy.intersection(held.columns):
            column = self._decoded(held, [name], int96_unit="ms")[name]
            if not all(map(_fit_nanoseconds, column.chunks)):
                raise SchemaError(
                    f"column {name!r} of row group {held.row_group} of the data file {self.path!r} holds 96-bit "
                    "timestamps before 1677-09-21 or after 2262-04-11, which nanoseconds cannot hold: write the file "
                    "again with timestamps in microseconds, or leave the column out"
                )

    def _blamed(self, held: HeldRowGroup, error: Exception) -> DataFileDamaged:
        """Return the error that names the first column that cannot be decoded alone."""
        for name in held.columns:
            try:
                self._decoded(held, [name])
            except _DECODING_ERRORS as its_own:
                return self._damaged(held.row_group, name, str(its_own))
        return self._damaged(held.row_group, None, str(error))

    def _damaged(self, row_group: int, column: str | None, what: str) -> DataFileDamaged:
        which = "" if column is None else f"column {column!r} of "
        return DataFileDamaged(
            f"{which}row group {row_group} of the data file {self.path!r} cannot be decoded "
            f"({' '.join(what.split())[:300]}): restore the file from a good copy, or go on without its "
            f"rows by `open_table(…, exclude=[({self.path!r}, {row_group})])`",
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

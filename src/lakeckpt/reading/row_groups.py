"""What do these columns of a stored row group hold?  Read once, surveyed, then decoded in no more memory than allowed.

1. The bytes of the column chunks are read, in few ranges (`lakeckpt.lake.ranges`), and held: what fails so far is the
   store's failure, and what follows touches no store. Where a digest of them was recorded, they must have it.
2. Every chunk's pages are surveyed (`lakeckpt.reading.pages`): what is certainly too large is refused before anything
   is decompressed.
3. Where all of it is certainly small enough, pyarrow decodes the row group at once. Else (texts by dictionary: one long
   entry may be repeated in every row) it is decoded in slices of so few rows that one slice alone cannot be larger
   than what is allowed, and refused as soon as their sum is. So it never takes more than twice as much.
4. Where decoding fails, the columns are decoded one after the other to find which one is damaged.
5. Legacy 96-bit timestamps are decoded once more, coarsely: of those that nanoseconds cannot hold pyarrow makes others.

Threads may share a reader. It holds the footer's numbers of the columns wanted, and never rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeckpt.errors import (
    DataFileChanged,
    DataFileDamaged,
    LakeckptError,
    RowGroupTooLarge,
    SchemaError,
    StorageError,
    TableFeatureUnsupported,
)
from lakeckpt.lake.chunk_digests import Uint64Array, chunk_digest
from lakeckpt.lake.column_chunks import ChunkFacts, chunk_facts
from lakeckpt.lake.footer import Footer
from lakeckpt.lake.ranges import Arriving, PinnedBytes, Range, coalesced
from lakeckpt.reading.arrays import looked_up_bytes
from lakeckpt.reading.held_file import HeldFile
from lakeckpt.reading.leaves import leaves_of
from lakeckpt.reading.legacy_times import fit_nanoseconds
from lakeckpt.reading.pages import Leaf, Survey, survey

__all__ = ["DEFAULT_MAX_ROW_GROUP_BYTES", "HeldRowGroup", "RowGroupPlan", "RowGroupReader"]

DEFAULT_MAX_ROW_GROUP_BYTES = 8 * 2**30
"""What the wanted columns of one row group may decode to, if not told otherwise."""

_INT96 = 3
_CODECS, _LZO = frozenset((0, 1, 2, 4, 5, 6, 7)), 3
_MOST_ROWS, _FEW_ROWS = 65536, 64
"""Rows of a slice; where they must be fewer than these few, the dictionaries are looked at first."""
_HEADER_MISCOUNT = 100
"""Old writers (parquet-mr) did not count the header of the dictionary page, which is no longer than that."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroupPlan:
    """Where the wanted column chunks of a row group lie, and the ranges in which they are read."""

    row_group: int
    facts: Sequence[ChunkFacts]
    ranges: Sequence[Range]

    @property
    def size_bytes(self) -> int:
        """What their bytes take in memory."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRowGroup:
    """The bytes of a row group, as they are stored."""

    row_group: int
    facts: Sequence[ChunkFacts]
    file: HeldFile
    arriving: Arriving

    def release(self) -> None:
        """The bytes are not looked at any more."""
        self.file.close()
        self.arriving.abandon()


class RowGroupReader:
    """Reads row groups of one file of ``size_bytes`` bytes, opened as ``source``; ``columns`` are what is wanted of it.

    ``int96_unit``: the unit in which legacy 96-bit timestamps are read; ``most``: bytes that a row group may decode to;
    ``digests``: those recorded, uint64[row groups, leaves], 0 for none.
    """

    def __init__(
        self,
        source: PinnedBytes,
        footer: Footer,
        *,
        path: str,
        size_bytes: int,
        columns: Sequence[str],
        int96_unit: str | None,
        most: int,
        digests: Uint64Array | None = None,
    ) -> None:
        self.source = source
        self.path = path
        self._metadata = footer.metadata
        self._size = size_bytes
        self._most = most
        schema = footer.metadata.schema.to_arrow_schema()
        self.columns = list(columns)
        self._int96_unit = int96_unit
        self._digests = digests
        self._num_leaves = footer.metadata.num_columns
        self._leaves = leaves_of(footer.metadata, schema, self.columns)
        self._slack = _HEADER_MISCOUNT if _writer(footer.metadata).startswith("parquet-mr") else 0
        try:
            self._facts = chunk_facts(footer.encoded, list(self._leaves))
        except ValueError as error:
            what = f"the data file {path!r} has a footer that is malformed: {error}"
            raise DataFileDamaged(what, file=path) from error

    def plan(self, row_group: int) -> RowGroupPlan:
        """Where the bytes of the columns lie. `DataFileDamaged`, `RowGroupTooLarge`, `TableFeatureUnsupported`."""
        found = self._facts[row_group].tolist()
        facts = [ChunkFacts(**dict(zip(ChunkFacts.__slots__, row, strict=True))) for row in found]
        self._check_places(row_group, facts)
        pieces = ((chunk.start, min(self._size, chunk.stop + self._slack)) for chunk in facts)
        ranges = coalesced(pieces, hole_bytes=self.source.hole_bytes)
        return RowGroupPlan(row_group=row_group, facts=facts, ranges=ranges)

    def begin(self, plan: RowGroupPlan) -> Arriving:
        """Set out for the bytes of a row group; never waits."""
        return self.source.begin(plan.ranges)

    def arrived(self, plan: RowGroupPlan, arriving: Arriving) -> HeldRowGroup:
        """The bytes that `begin` set out for, once all are here. `StorageError`, `DataFileChanged`."""
        row_group, parts = plan.row_group, []
        try:
            found = arriving.wait()
        except LakeckptError:
            arriving.abandon()
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            arriving.abandon()
            raise StorageError(f"row group {row_group} of {self.path!r} could not be read: {error}") from error
        for (start, stop), part in zip(plan.ranges, found, strict=True):
            if part.size != stop - start:
                arriving.abandon()
                raise DataFileChanged(
                    f"the data file {self.path!r} ends at byte {start + part.size}, not at {self._size}: it was cut or "
                    "written again since it was pinned. Restore it, or open the table again"
                )
            parts.append((start, part))
        file = HeldFile(self._size, parts, whole=arriving.whole)
        return HeldRowGroup(row_group=row_group, facts=plan.facts, file=file, arriving=arriving)

    def decode(self, held: HeldRowGroup, rows: int, *, use_threads: bool) -> dict[str, pa.ChunkedArray]:
        """The wanted columns of a row group that has ``rows`` rows, by name; touches no store.

        Raises `DataFileDamaged` with the row group and, where one can be told, the column; `RowGroupTooLarge`;
        `SchemaError` where timestamps do not fit.
        """
        if not self.columns:
            return {}
        row_group, facts, source = held.row_group, held.facts, held.file
        if self._digests is not None:
            self._check_digests(row_group, facts, source, self._digests[row_group])
        surveys = self._survey(row_group, facts, source, rows)
        try:
            found = self._decoded(source, row_group, surveys, self.columns, use_threads)
        except _DECODING as error:
            self._blame(source, row_group, surveys, error)
        for name, column in found.items():
            if len(column) != rows:
                raise self._damaged(row_group, name, f"it holds {len(column)} rows, but its footer says {rows}")
        if self._int96_unit == "ns":
            self._check_times(row_group, facts, source)
        return found

    def digests(self, row_group: int, rows: int) -> Uint64Array:
        """The digests of the wanted column chunks, when they have been decoded; uint64[leaves of the file], else 0.

        Raises as `arrived` and `decode`.
        """
        found = np.zeros(self._num_leaves, np.uint64)
        if rows and self.columns:
            plan = self.plan(row_group)
            held = self.arrived(plan, self.begin(plan))
            try:
                self.decode(held, rows, use_threads=False)
                for leaf, chunk in zip(self._leaves, held.facts, strict=True):
                    found[leaf] = chunk_digest(memoryview(held.file.held(chunk.start, chunk.stop)).cast("B"))
            finally:
                held.release()
        return found

    # --- before decoding

    def _check_places(self, row_group: int, facts: Sequence[ChunkFacts]) -> None:
        for leaf, chunk in zip(self._leaves.values(), facts, strict=True):
            if min(chunk.data_page, chunk.compressed_bytes) < 0 or chunk.stop > self._size:
                raise self._damaged(
                    row_group,
                    leaf.name,
                    f"its footer says that bytes {chunk.start} to {chunk.stop} of {self._size} hold it",
                )
            if chunk.codec not in _CODECS:
                raise TableFeatureUnsupported(
                    f"column {leaf.name!r} of row group {row_group} of the data file {self.path!r} is compressed with "
                    f"{'LZO' if chunk.codec == _LZO else f'the codec number {chunk.codec}'}, which pyarrow "
                    f"{pa.__version__} cannot read: write the file again with another codec, or leave the column out"
                )
        stored = sum(chunk.compressed_bytes for chunk in facts)
        if stored > self._most:
            raise self._too_large(row_group, None, stored, "is stored in")

    def _check_digests(
        self, row_group: int, facts: Sequence[ChunkFacts], source: HeldFile, recorded: Uint64Array
    ) -> None:
        for (ordinal, leaf), chunk in zip(self._leaves.items(), facts, strict=True):
            expected = int(recorded[ordinal])
            if expected and chunk_digest(memoryview(source.held(chunk.start, chunk.stop)).cast("B")) != expected:
                raise self._damaged(row_group, leaf.name, "its bytes are not those of which a digest was recorded")

    def _check_times(self, row_group: int, facts: Sequence[ChunkFacts], source: HeldFile) -> None:
        pairs = zip(self._leaves.values(), facts, strict=True)
        for name in dict.fromkeys(leaf.name for leaf, chunk in pairs if chunk.physical_type == _INT96):
            opened = self._opened(source, unit="ms")
            column = opened.read_row_group(row_group, columns=[name], use_threads=False).column(name)
            if not all(map(fit_nanoseconds, column.chunks)):
                raise SchemaError(
                    f"column {name!r} of row group {row_group} of the data file {self.path!r} holds 96-bit timestamps "
                    "before 1677-09-21 or after 2262-04-11, which nanoseconds cannot hold: write the file again with "
                    "timestamps in microseconds, or leave the column out"
                )

    def _survey(self, row_group: int, facts: Sequence[ChunkFacts], source: HeldFile, rows: int) -> list[Survey]:
        plenty = self._most // max(1, len(facts))
        surveys = []
        for leaf, chunk in zip(self._leaves.values(), facts, strict=True):
            try:
                held = source.held(chunk.start, min(self._size, chunk.stop + self._slack))
                pages = memoryview(held).cast("B")
                surveys.append(survey(chunk, leaf, pages, rows=rows, plenty=plenty))
            except ValueError as error:
                raise self._damaged(row_group, leaf.name, str(error)) from error
        certain = sum(one.certain_bytes + one.page_bytes * (one.page_bytes > plenty) for one in surveys)
        if certain > self._most:
            largest = max(zip(surveys, self._leaves.values(), strict=True), key=lambda pair: pair[0].certain_bytes)
            raise self._too_large(row_group, largest[1].name, certain, "decodes to at least")
        return surveys

    # --- decoding

    def _opened(
        self, source: HeldFile, read_dictionary: list[str] | None = None, *, unit: str | None = None
    ) -> pq.ParquetFile:
        return pq.ParquetFile(
            source.opened(),
            metadata=self._metadata,
            pre_buffer=False,
            read_dictionary=read_dictionary,
            coerce_int96_timestamp_unit=unit or self._int96_unit,
            page_checksum_verification=True,
        )

    def _decoded(
        self,
        source: HeldFile,
        row_group: int,
        surveys: Sequence[Survey],
        columns: list[str],
        use_threads: bool,
    ) -> dict[str, pa.ChunkedArray]:
        mine = [(one, leaf.name) for one, leaf in self._surveyed(surveys) if leaf.name in columns]
        sliced, size = [], _MOST_ROWS
        if sum(one.most_bytes for one, _ in mine) > self._most:
            sliced = list(dict.fromkeys(name for one, name in mine if one.looked_up))
            for name in sliced:
                self._check_lists(source, row_group, surveys, name)
            a_row = sum(one.longest_bytes for one, _ in mine if one.looked_up)
            if self._most < a_row * _FEW_ROWS:
                longest = self._longest(source, row_group, surveys, sliced)
                a_row = sum(min(one.longest_bytes, longest.get(one, one.longest_bytes)) for one, _ in mine)
            size = max(1, min(size, self._most // max(1, a_row)))
        found: dict[str, pa.ChunkedArray] = {}
        if at_once := [name for name in columns if name not in sliced]:
            table = self._opened(source).read_row_group(row_group, columns=at_once, use_threads=use_threads)
            # By name: a column called "a.b" also selects the field b of a struct a.
            found = {name: table.column(name) for name in at_once}
        if sliced:
            total = sum(column.nbytes for column in found.values())
            found |= self._in_slices(source, row_group, size, sliced, total, use_threads)
        return {name: found[name] for name in columns}

    def _in_slices(
        self, source: HeldFile, row_group: int, size: int, columns: list[str], total: int, use_threads: bool
    ) -> dict[str, pa.ChunkedArray]:
        opened = self._opened(source)
        batches = []
        for batch in opened.iter_batches(size, row_groups=[row_group], columns=columns, use_threads=use_threads):
            total += batch.nbytes
            if total > self._most:
                raise self._too_large(row_group, _largest(batch), total, "decodes to more than")
            batches.append(batch)
        if not batches:
            raise self._damaged(row_group, columns[0], "it holds no rows")
        table = pa.Table.from_batches(batches)
        return {name: table.column(name) for name in columns}

    def _surveyed(self, surveys: Sequence[Survey]) -> Iterator[tuple[Survey, Leaf]]:
        return zip(surveys, self._leaves.values(), strict=True)

    def _check_lists(self, source: HeldFile, row_group: int, surveys: Sequence[Survey], name: str) -> None:
        """Refuse texts in lists that are too large: any number of them may be in one row, so slices bound nothing.

        They are decoded as numbers of their dictionary (those without one are not), and their lengths added up.
        """
        for place, (one, leaf) in enumerate(self._surveyed(surveys)):
            if leaf.name == name and leaf.nested and one.most_bytes > self._most:
                if not one.by_dictionary:
                    raise self._too_large(row_group, name, one.most_bytes, "could decode to")
                path = self._metadata.schema.column(list(self._leaves)[place]).path
                opened = self._opened(source, [path])
                column = opened.read_row_group(row_group, columns=[path], use_threads=False).column(0)
                size = one.certain_bytes + sum(looked_up_bytes(chunk) for chunk in column.chunks)
                if size > self._most:
                    raise self._too_large(row_group, name, size, "decodes to")

    def _longest(
        self, source: HeldFile, row_group: int, surveys: Sequence[Survey], columns: Sequence[str]
    ) -> dict[Survey, int]:
        """For texts by dictionary: the longest of the dictionary's entries, in bytes."""
        found: dict[Survey, int] = {}
        for one, leaf in self._surveyed(surveys):
            if leaf.name in columns and one.looked_up and one.by_dictionary and not leaf.nested:
                try:
                    opened = self._opened(source, [leaf.name])
                    first = opened.iter_batches(1, row_groups=[row_group], columns=[leaf.name], use_threads=False)
                    batch = next(first, None)
                except _DECODING:
                    continue  # decoding it will say so
                if batch is not None and batch.num_columns and pa.types.is_dictionary(batch.column(0).type):
                    longest = int(pc.max(pc.binary_length(batch.column(0).dictionary)).as_py() or 0)
                    found[one] = max(longest, found.get(one, 0))
        return found

    # --- what went wrong

    def _blame(self, source: HeldFile, row_group: int, surveys: Sequence[Survey], error: Exception) -> NoReturn:
        """Say which column it was: the first that cannot be decoded alone."""
        for name in self.columns if len(self.columns) > 1 else []:
            try:
                self._decoded(source, row_group, surveys, [name], False)
            except _DECODING as its_own:
                raise self._damaged(row_group, name, str(its_own)) from its_own
        only = self.columns[0] if len(self.columns) == 1 else None
        raise self._damaged(row_group, only, str(error)) from error

    def _damaged(self, row_group: int, column: str | None, what: str) -> DataFileDamaged:
        which = "" if column is None else f"column {column!r} of "
        return DataFileDamaged(
            f"{which}row group {row_group} of the data file {self.path!r} cannot be decoded "
            f"({' '.join(what.split())[:300]}): restore the file from a good copy, or open the table without it",
            file=self.path,
            row_group=row_group,
            column=column,
        )

    def _too_large(self, row_group: int, column: str | None, size: int, verb: str) -> RowGroupTooLarge:
        which = "" if column is None else f", most of it in column {column!r}"
        return RowGroupTooLarge(
            f"row group {row_group} of the data file {self.path!r} {verb} {size:,} bytes{which}, and at most "
            f"{self._most:,} may be: read fewer columns, or write the file again in smaller row groups",
            file=self.path,
            row_group=row_group,
            column=column,
        )


_DECODING = (pa.ArrowException, OSError, ValueError, UnicodeDecodeError, OverflowError)
"""What pyarrow raises of damaged bytes."""


def _writer(metadata: pq.FileMetaData) -> str:
    try:
        return str(metadata.created_by or "")
    except UnicodeDecodeError:  # of a damaged footer
        return ""


def _largest(batch: pa.RecordBatch) -> str:
    return str(max(zip(batch.schema.names, batch.columns, strict=True), key=lambda pair: int(pair[1].nbytes))[0])

"""This module counts the rows that a filter keeps of each row group, and digests which rows they are.

Row groups are counted in *units*: a few consecutive row groups of one file. For each unit, the values of partition
columns come first: they may settle the unit before the file is opened. Then the file's footer is read, and its
statistics may settle row groups (`lakeckpt.reading.filters.prune`). The other row groups are decoded: only the filter's
columns, and the filter is evaluated on the rows that are not deleted. Bloom filters are not used: pyarrow does not read
them.

`count_units` starts and joins the threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.column_mapping import resolve
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.reading.filters.prune import Pruner, Values, Verdicts, constant_values, stored_values
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import EVERY, NONE, RowSelection, digested
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["Counted", "Unit", "count_rows", "count_units", "joined", "selection_of", "units_of"]

Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]
Progress = Callable[[int, int], None]
Unit = range
"""Consecutive row groups of one file, by their ordinals in the table."""

_GROUPS_PER_UNIT = 16
_FILES_KEPT = 64
"""More than there are threads, so that threads that count one file share its footer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counted:
    """What was counted of some row groups, and how."""

    group_rows: Int64Array
    """For each row group, the number of rows that stay."""
    group_digests: Uint64Array
    """For each row group, the digest of the rows that stay."""
    by_partition: int = 0
    """Row groups of which no row stays, by the values of partition columns."""
    by_statistics: int = 0
    """Row groups of which no row stays, by statistics."""
    whole: int = 0
    """Row groups of which every row stays, by partition values or statistics."""
    decoded: int = 0
    """Row groups of which the filter's columns were decoded."""


def count_rows(
    table: Table, keep: RowFilter, *, threads: int | None = None, progress: Progress | None = None
) -> tuple[RowSelection, Counted]:
    """Count the rows of ``table`` that ``keep`` keeps; ``progress(row groups done, row groups)`` is called meanwhile.

    Raises as `RowGroupDecoder.decode` does.
    """
    units = units_of(table.index)
    counted = joined([one for _, one in sorted(count_units(table, keep, units, threads=threads, progress=progress))])
    return selection_of(table.index, keep, counted), counted


def selection_of(index: TableIndex, keep: RowFilter, counted: Counted) -> RowSelection:
    """Return the selection of a table of which every row group was counted."""
    return RowSelection(
        table=index.digest,
        text=str(keep),
        expression=keep.digest,
        pyarrow=pa.__version__,
        group_rows=counted.group_rows,
        group_digests=counted.group_digests,
    )


def units_of(index: TableIndex) -> list[Unit]:
    """Return the units of a table, in its order."""
    bounds = index.first_group.tolist()
    return [
        range(first, min(first + _GROUPS_PER_UNIT, end))
        for start, end in itertools.pairwise(bounds)
        for first in range(start, end, _GROUPS_PER_UNIT)
    ]


def joined(parts: Sequence[Counted]) -> Counted:
    """Return what was counted of units, one after the other."""
    return Counted(
        group_rows=np.concatenate([np.zeros(0, np.int64), *(one.group_rows for one in parts)]),
        group_digests=np.concatenate([np.zeros(0, np.uint64), *(one.group_digests for one in parts)]),
        by_partition=sum(one.by_partition for one in parts),
        by_statistics=sum(one.by_statistics for one in parts),
        whole=sum(one.whole for one in parts),
        decoded=sum(one.decoded for one in parts),
    )


def count_units(
    table: Table,
    keep: RowFilter,
    units: Sequence[Unit],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Counted]]:
    """Yield (place in ``units``, what was counted) of each unit as it is done, by ``threads`` threads.

    None: 16 threads for local folders, else 48, of which most wait for the store.
    """
    threads = threads or (THREADS_LOCAL if isinstance(table.storage, LocalStorage) else THREADS_REMOTE)
    total, done = sum(map(len, units)), 0
    counter = _Counter(table, keep)
    with ThreadPoolExecutor(max(1, min(threads, len(units))), thread_name_prefix="lakeckpt-count") as pool:
        futures = {pool.submit(counter.count, unit): place for place, unit in enumerate(units)}
        try:
            for future in as_completed(futures):
                counted = future.result()
                done += len(counted.group_rows)
                if progress is not None:
                    progress(done, total)
                yield futures[future], counted
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            counter.close()


class _Counter:
    """Counts units of a table. Threads share its decoder, which opens each file once."""

    def __init__(self, table: Table, keep: RowFilter) -> None:
        self._table = table
        self._keep = keep
        self._pruner = Pruner(keep, table.schema)
        self._decoder = RowGroupDecoder(table, keep.columns, open_files=_FILES_KEPT, use_threads=False)
        self._partitions = [one for one in table.index.partitions if one.name in keep.columns]

    def close(self) -> None:
        """Close the files that the threads have opened; the threads have ended."""
        self._decoder.close()

    def count(self, unit: Unit) -> Counted:
        """Count the row groups of one unit."""
        existing = self._table.index.group_rows[unit.start : unit.stop]
        constants = self._partition_values(unit)
        found = self._by_partition(constants, len(unit))
        by_partition = int((found.none & (existing > 0)).sum())
        if not (found.none | found.every | (existing == 0)).all():
            stored = self._stored_values(unit, {one.name for one in constants})
            found = self._pruner.verdicts([[*constants, *one] for one in stored])
        none, whole = found.none | (existing == 0), found.every & (existing > 0) & ~found.none
        rows = np.where(whole, existing, 0)
        digests = np.where(whole, np.uint64(EVERY), np.uint64(NONE))
        undecided = np.flatnonzero(~none & ~whole).tolist()
        for place in undecided:
            rows[place], digests[place] = self._evaluated(unit[place], int(existing[place]))
        return Counted(
            group_rows=rows,
            group_digests=digests,
            by_partition=by_partition,
            by_statistics=int((found.none & (existing > 0)).sum()) - by_partition,
            whole=int(whole.sum()),
            decoded=len(undecided),
        )

    def _partition_values(self, unit: Unit) -> list[Values]:
        """Return what is known of the partition columns that are constant in the unit's file."""
        file, _ = self._table.index.group(unit.start)
        return [
            constant_values(one.name, one.value_of(file), self._table.schema.field(one.name).type)
            for one in self._partitions
            if not one.is_stored(file)
        ]

    def _by_partition(self, constants: list[Values], groups: int) -> Verdicts:
        """Return what partition columns alone settle: the same for each row group of a file."""
        if not constants:
            return Verdicts(none=np.zeros(groups, np.bool_), every=np.zeros(groups, np.bool_))
        found = self._pruner.verdicts([constants])
        return Verdicts(none=found.none.repeat(groups), every=found.every.repeat(groups))

    def _stored_values(self, unit: Unit, constants: set[str]) -> list[list[Values]]:
        """For each row group of ``unit``, what is known of the other columns of the filter."""
        index = self._table.index
        file, first = index.group(unit.start)
        metadata = self._decoder.footer(file)
        schema = metadata.schema.to_arrow_schema()
        asked = [name for name in self._keep.columns if name not in constants]
        plans = resolve(index.schema, asked, index.columns, schema, index.paths[file])
        leaves = _leaves(metadata)
        found: list[list[Values]] = [[] for _ in unit]
        for name, plan in plans.items():
            kind = index.schema.field(name).type
            if plan.index is None:
                for known in found:
                    known.append(constant_values(name, plan.default, kind))
            elif plan.name in leaves:
                stored = plain_type(schema.field(plan.index).type)
                for group, known in enumerate(found, first):
                    values = stored_values(name, kind, stored, metadata, group, leaves[plan.name])
                    known += [] if values is None else [values]
        return found

    def _evaluated(self, group: int, existing: int) -> tuple[int, int]:
        """Return how many rows of a row group stay, and the digest of which."""
        return digested(self._keep.mask(self._decoder.decode(group, 0, existing)))


def _leaves(metadata: pq.FileMetaData) -> dict[str, int]:
    """Return the place of each column of a file that is not nested."""
    leaves = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    return {leaf.name: place for place, leaf in enumerate(leaves) if leaf.path == leaf.name}

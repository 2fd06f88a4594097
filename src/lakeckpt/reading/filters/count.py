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
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.column_mapping import resolve
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.reading.filters.prune import Cases, constant_cases, stored_cases, verdicts
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
    """The count of some row groups."""

    group_rows: Int64Array
    """For each row group, the number of rows that stay."""
    group_digests: Uint64Array
    """For each row group, the digest of the rows that stay."""
    decoded: int = 0
    """How many of the row groups were decoded. Partition values and statistics settled the others."""


def count_rows(table: Table, keep: RowFilter, *, progress: Progress | None = None) -> tuple[RowSelection, Counted]:
    """Count the rows of ``table`` that ``keep`` keeps; ``progress(row groups done, row groups)`` is called meanwhile.

    Raises as `RowGroupDecoder.decode` does.
    """
    counted = joined([one for _, one in count_units(table, keep, units_of(table.index), progress=progress)])
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
    """Return the counts of units, one after the other."""
    return Counted(
        group_rows=np.concatenate([np.zeros(0, np.int64), *(one.group_rows for one in parts)]),
        group_digests=np.concatenate([np.zeros(0, np.uint64), *(one.group_digests for one in parts)]),
        decoded=sum(one.decoded for one in parts),
    )


def count_units(
    table: Table, keep: RowFilter, units: Sequence[Unit], *, progress: Progress | None = None
) -> Iterator[tuple[int, Counted]]:
    """Yield (place in ``units``, count) of each unit, in their order.

    16 threads count in local folders, else 48, of which most wait for the store.
    """
    threads = THREADS_LOCAL if isinstance(table.storage, LocalStorage) else THREADS_REMOTE
    total, done = sum(map(len, units)), 0
    with (
        closing(_Counter(table, keep)) as counter,
        ThreadPoolExecutor(max(1, min(threads, len(units))), thread_name_prefix="lakeckpt-count") as pool,
    ):
        for place, counted in enumerate(pool.map(counter.count, units)):  # at an error, it cancels what has not begun
            done += len(counted.group_rows)
            if progress is not None:
                progress(done, total)
            yield place, counted


class _Counter:
    """Counts units of a table. Threads share its decoder, which opens each file once."""

    def __init__(self, table: Table, keep: RowFilter) -> None:
        self._table = table
        self._keep = keep
        self._decoder = RowGroupDecoder(table, keep.columns, open_files=_FILES_KEPT, use_threads=False)
        self._partitions = [one for one in table.index.partitions if one.name in keep.columns]

    def close(self) -> None:
        """Close the files that the threads have opened; the threads have ended."""
        self._decoder.close()

    def count(self, unit: Unit) -> Counted:
        """Count the row groups of one unit."""
        existing = self._table.index.group_rows[unit.start : unit.stop]
        constants = self._partition_cases(unit)
        none, every = verdicts(self._keep, self._table.schema, [list(constants.values())] * len(unit))
        if not (none | every | (existing == 0)).all():
            none, every = verdicts(self._keep, self._table.schema, self._known_cases(unit, constants))
        none = none | (existing == 0)
        every = every & ~none
        rows = np.where(every, existing, 0)
        digests = np.where(every, np.uint64(EVERY), np.uint64(NONE))
        undecided = np.flatnonzero(~none & ~every).tolist()
        for place in undecided:
            mask = self._keep.mask(self._decoder.decode(unit[place], 0, int(existing[place])))
            rows[place], digests[place] = digested(mask)
        return Counted(group_rows=rows, group_digests=digests, decoded=len(undecided))

    def _partition_cases(self, unit: Unit) -> dict[str, Cases]:
        """Return the cases of the partition columns that are constant in the unit's file."""
        file, _ = self._table.index.group(unit.start)
        return {
            one.name: constant_cases(one.name, one.value_of(file), self._table.schema.field(one.name).type)
            for one in self._partitions
            if not one.is_stored(file)
        }

    def _known_cases(self, unit: Unit, constants: dict[str, Cases]) -> list[list[Cases]]:
        """For each row group of ``unit``, return the cases of all columns of which something is known."""
        index = self._table.index
        file, first = index.group(unit.start)
        metadata = self._decoder.footer(file)
        schema = metadata.schema.to_arrow_schema()
        asked = [name for name in self._keep.columns if name not in constants]
        plans = resolve(index.schema, asked, index.columns, schema, index.paths[file])
        paths = [metadata.schema.column(place).path for place in range(metadata.num_columns)]
        found = [list(constants.values()) for _ in unit]
        for name, plan in plans.items():
            kind = index.schema.field(name).type
            if plan.index is None:
                for known in found:
                    known.append(constant_cases(name, plan.default, kind))
            elif plan.name in paths:  # else the column is nested
                stored = plain_type(schema.field(plan.index).type)
                for group, known in enumerate(found, first):
                    cases = stored_cases(name, kind, stored, metadata, group, paths.index(plan.name))
                    known += [] if cases is None else [cases]
        return found

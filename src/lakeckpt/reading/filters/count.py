"""This module counts the rows that a filter keeps of each row group, and digests which rows they are.

Row groups are counted in *units*: a few consecutive row groups of one file. For each unit, the values of partition
columns come first: they may settle the unit before the file is opened. Then the file's footer is read, and its
statistics may settle row groups (`lakeckpt.reading.filters.prune`). The other row groups are decoded: only the filter's
columns, and the filter is evaluated on the rows that are not deleted. Bloom filters are not used: pyarrow does not read
them.

`count_rows` starts and joins the threads.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.column_mapping import resolve
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.progress import Progress
from lakeckpt.reading.filters.prune import Cases, constant_cases, stored_cases, verdicts
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import EVERY, NONE, RowSelection, digested
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["Unit", "count_rows", "units_of"]

Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]
Unit = range
"""Consecutive row groups of one file, by their ordinals in the table."""

_GROUPS_PER_UNIT = 16


def count_rows(table: Table, keep: RowFilter, *, progress: Progress | None = None) -> tuple[RowSelection, int]:
    """Count the rows of ``table`` that ``keep`` keeps, and return how many row groups had to be decoded as well.

    16 threads count in local folders; else 48, most of which wait for the store. ``progress`` counts row groups, on the
    calling thread. Raises as `RowGroupDecoder.decode` does.
    """
    index, units = table.index, units_of(table.index)
    rows, digests = np.zeros(len(index.group_rows), np.int64), np.zeros(len(index.group_rows), np.uint64)
    threads = THREADS_LOCAL if isinstance(table.storage, LocalStorage) else THREADS_REMOTE
    decoded = 0
    with (
        closing(_Counter(table, keep)) as counter,
        ThreadPoolExecutor(max(1, min(threads, len(units))), thread_name_prefix="lakeckpt-count") as pool,
    ):
        found = pool.map(counter.count, units)  # at an error, it cancels what has not begun
        for unit, counted in zip(units, found, strict=True):
            rows[unit.start : unit.stop], digests[unit.start : unit.stop] = counted.rows, counted.digests
            decoded += counted.decoded
            if progress is not None:
                progress(unit.stop, len(rows), "row groups counted")
    return _selection_of(index, keep, rows, digests), decoded


def _selection_of(index: TableIndex, keep: RowFilter, rows: Int64Array, digests: Uint64Array) -> RowSelection:
    return RowSelection(
        table=index.digest,
        text=str(keep),
        expression=keep.digest,
        pyarrow=pa.__version__,
        group_rows=rows,
        group_digests=digests,
    )


def units_of(index: TableIndex) -> list[Unit]:
    """Return the units of a table, in its order."""
    bounds = index.first_group.tolist()
    return [
        range(first, min(first + _GROUPS_PER_UNIT, end))
        for start, end in itertools.pairwise(bounds)
        for first in range(start, end, _GROUPS_PER_UNIT)
    ]


class _Counted(NamedTuple):
    """The number and the digest of the rows that stay, for each row group of a unit; how many groups were decoded."""

    rows: Int64Array
    digests: Uint64Array
    decoded: int


class _Counter:
    """Counts units of a table. Threads share its decoder, which opens each file once."""

    def __init__(self, table: Table, keep: RowFilter) -> None:
        self._table = table
        self._keep = keep
        self._decoder = RowGroupDecoder(table, keep.columns, use_threads=False)
        self._partitions = [one for one in table.index.partitions if one.name in keep.columns]

    def close(self) -> None:
        """Close the files that the threads have opened; the threads have ended."""
        self._decoder.close()

    def count(self, unit: Unit) -> _Counted:
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
        return _Counted(rows, digests, len(undecided))

    def _partition_cases(self, unit: Unit) -> dict[str, Cases]:
        """Return the cases of the partition columns that are constant in the unit's file."""
        file, _ = self._table.index.group(unit.start)
        return {
            one.name: constant_cases(one.name, one.value_of(file), self._table.schema.field(one.name).type)
            for one in self._partitions
            if not one.is_stored(file)
        }

    def _known_cases(self, unit: Unit, constants: dict[str, Cases]) -> list[list[Cases]]:
        """For each row group of ``unit``, return the cases of all columns with known facts."""
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

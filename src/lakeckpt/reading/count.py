"""How many rows does a filter keep?  One parallel pass over the filter's columns, spared where bounds tell the answer.

Row groups are counted in *units*, a few consecutive ones of one file. Of a unit, the values of partition columns are
tried first: they may rule out the file without a look at it. Then its footer is read, and its statistics tell of which
row groups every row stays, or none. Only what is left is decoded, the filter's columns of it and no others, and its
rows that are not deleted are tried one by one. pyarrow tells where a file's Bloom filters lie, but does not read them.

Threads live in `count_units`, which starts and joins them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from lakeckpt.lake.columns import resolve
from lakeckpt.lake.filters import RowFilter
from lakeckpt.lake.footer import Footer
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.local import LocalStorage
from lakeckpt.lake.prune import Verdicts, verdicts
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.statistics import Bounds, constant_bounds, stored_bounds
from lakeckpt.lake.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.reading.decode import RowGroupDecoder

__all__ = ["Counted", "Unit", "count_rows", "count_units", "joined", "selection_of", "units_of"]

Int64Array = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
Unit = range
"""Consecutive row groups of one file, by their ordinals in the table."""

_GROUPS_PER_UNIT = 16
_FILES_KEPT = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counted:
    """What was counted of some row groups, and how."""

    group_rows: Int64Array
    """Surviving rows of each."""
    by_partition: int = 0
    """Row groups without a surviving row, by the values of partition columns."""
    by_statistics: int = 0
    """Row groups without a surviving row, by statistics."""
    whole: int = 0
    """Row groups whose every row stays, by partition values or statistics."""
    decoded: int = 0
    """Row groups of which the filter's columns were decoded."""

    def to_plain(self) -> list[object]:
        """Values that the wire can carry."""
        return [self.group_rows, self.by_partition, self.by_statistics, self.whole, self.decoded]

    @classmethod
    def from_plain(cls, plain: list[object]) -> Counted:
        """What `to_plain` gave."""
        rows, by_partition, by_statistics, whole, decoded = plain
        return cls(
            group_rows=np.asarray(rows, np.int64),
            by_partition=int(by_partition),  # type: ignore[call-overload]
            by_statistics=int(by_statistics),  # type: ignore[call-overload]
            whole=int(whole),  # type: ignore[call-overload]
            decoded=int(decoded),  # type: ignore[call-overload]
        )


def count_rows(
    table: Table, keep: RowFilter, *, threads: int | None = None, progress: Progress | None = None
) -> tuple[RowSelection, Counted]:
    """Count the rows of ``table`` that ``keep`` keeps; ``progress(row groups done, row groups)`` as it goes on.

    Raises as `RowGroupDecoder.decode` does.
    """
    units = units_of(table.index)
    counted = joined([one for _, one in sorted(count_units(table, keep, units, threads=threads, progress=progress))])
    return selection_of(table.index, keep, counted), counted


def selection_of(index: TableIndex, keep: RowFilter, counted: Counted) -> RowSelection:
    """The selection of a table of which every row group was counted."""
    return RowSelection(table=index.digest, filter=keep.digest, text=str(keep), group_rows=counted.group_rows)


def units_of(index: TableIndex) -> list[Unit]:
    """The units of a table, in its order."""
    bounds = index.first_group.tolist()
    return [
        range(first, min(first + _GROUPS_PER_UNIT, end))
        for start, end in itertools.pairwise(bounds)
        for first in range(start, end, _GROUPS_PER_UNIT)
    ]


def joined(parts: Sequence[Counted]) -> Counted:
    """What was counted of units, one after the other."""
    return Counted(
        group_rows=np.concatenate([np.zeros(0, np.int64), *(one.group_rows for one in parts)]),
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
    """Yield (place in ``units``, what was counted) of each, as they are done, by ``threads`` threads.

    None: 16 for local folders, else 64, of which most wait for the store.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FootersOnce(Table):
    """A table that reads each footer once for all threads; it keeps those used last."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    locks: dict[int, threading.Lock] = field(default_factory=dict)
    footers: dict[int, Footer] = field(default_factory=dict)

    def whole_footer(self, ordinal: int) -> Footer:
        """See `Table.whole_footer`."""
        with self.lock:
            mine = self.locks.setdefault(ordinal, threading.Lock())
        with mine:
            found = self.footers.get(ordinal) or Table.whole_footer(self, ordinal)
            with self.lock:
                self.footers[ordinal] = found
                while len(self.footers) > _FILES_KEPT:
                    del self.footers[next(iter(self.footers))]
        return found


class _Counter:
    """Counts units; each thread has a decoder of its own."""

    def __init__(self, table: Table, keep: RowFilter) -> None:
        self._table = _FootersOnce(uri=table.uri, storage=table.storage, index=table.index)
        self._keep = keep
        self._local = threading.local()
        self._decoders: list[RowGroupDecoder] = []
        self._lock = threading.Lock()
        self._bounds: dict[int, dict[str, Bounds]] = {}
        self._partitions = [one for one in table.index.partitions if one.name in keep.columns]

    def close(self) -> None:
        """Close what the threads have opened; they have ended."""
        for decoder in self._decoders:
            decoder.close()

    def count(self, unit: Unit) -> Counted:
        index = self._table.index
        existing = index.group_rows[unit.start : unit.stop]
        stored = index.stored_rows[unit.start : unit.stop]
        file, first = index.group(unit.start)
        bounds = self._partition_bounds(file, stored)
        found = verdicts(self._keep.node, bounds, len(unit))
        rows, by_partition = self._settled(found, existing), int((found.none & (existing > 0)).sum())
        if not (rows < 0).any():
            whole = int((found.every & (existing > 0)).sum())
            return Counted(group_rows=rows, by_partition=by_partition, whole=whole)
        bounds |= {name: _cut(one, first, first + len(unit)) for name, one in self._file_bounds(file).items()}
        found = verdicts(self._keep.node, bounds, len(unit))
        rows = self._settled(found, existing)
        undecided = np.flatnonzero(rows < 0).tolist()
        if undecided:
            decoder = self._decoder()
            for place in undecided:
                rows[place] = self._tried(decoder, unit[place], int(existing[place]))
        return Counted(
            group_rows=rows,
            by_partition=by_partition,
            by_statistics=int((found.none & (existing > 0)).sum()) - by_partition,
            whole=int((found.every & (existing > 0)).sum()),
            decoded=len(undecided),
        )

    def _settled(self, found: Verdicts, existing: Int64Array) -> Int64Array:
        """Rows by the verdicts; -1 where they do not tell."""
        rows = np.where(found.none | (existing == 0), 0, np.where(found.every, existing, -1))
        return np.asarray(rows, np.int64)

    def _partition_bounds(self, file: int, rows: Int64Array) -> dict[str, Bounds]:
        return {
            one.name: constant_bounds(one.value_of(file), self._table.schema.field(one.name).type, rows)
            for one in self._partitions
            if not one.is_stored(file)
        }

    def _file_bounds(self, file: int) -> dict[str, Bounds]:
        """The bounds of the columns that a file stores, in all of its row groups; what it lacks is constant there."""
        with self._lock:
            found = self._bounds.get(file)
        if found is None:
            index, footer = self._table.index, self._table.whole_footer(file)
            rows = index.stored_rows[int(index.first_group[file]) : int(index.first_group[file + 1])]
            constants = {one.name for one in self._partitions if not one.is_stored(file)}
            asked = [name for name in self._keep.columns if name not in constants]
            stored = footer.metadata.schema.to_arrow_schema()
            plans = resolve(index.schema, asked, index.columns, stored, index.paths[file])
            types = {name: index.schema.field(name).type for name in asked}
            names = {plan.name: types[name] for name, plan in plans.items() if plan.index is not None}
            told = stored_bounds(footer.encoded, names, rows)
            found = {
                name: told[plan.name] for name, plan in plans.items() if plan.index is not None and plan.name in told
            }
            found |= {
                name: constant_bounds(plan.default, types[name], rows)
                for name, plan in plans.items()
                if plan.index is None
            }
            with self._lock:
                self._bounds[file] = found
                while len(self._bounds) > _FILES_KEPT:
                    del self._bounds[next(iter(self._bounds))]
        return found

    def _tried(self, decoder: RowGroupDecoder, group: int, existing: int) -> int:
        kept = pc.sum(self._keep.mask(decoder.decode(group, 0, existing))).as_py()
        return int(kept or 0)

    def _decoder(self) -> RowGroupDecoder:
        decoder: RowGroupDecoder | None = getattr(self._local, "decoder", None)
        if decoder is None:
            decoder = RowGroupDecoder(self._table, self._keep.columns, open_files=1, use_threads=False)
            self._local.decoder = decoder
            self._decoders.append(decoder)
        return decoder


def _cut(one: Bounds, start: int, stop: int) -> Bounds:
    return Bounds(
        low=one.low.slice(start, stop - start),
        high=one.high.slice(start, stop - start),
        nulls=one.nulls[start:stop],
        rows=one.rows[start:stop],
        may_be_nan=one.may_be_nan,
    )

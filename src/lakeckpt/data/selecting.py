"""Who counts the rows that a filter keeps, and when?  Once for a job where that can be, never twice in a process.

`Selecting` knows the filter of a dataset and counts when the counts are first needed. Whoever has them already may
offer them (a checkpoint manager reloads what the run has saved). The process that made the dataset and its loader
workers share what one of them counted through a `SharedFile`, so a worker never counts what another has. The ranks of a
job share the work through the store of torch.distributed: each takes the next batch of units off a board, publishes
what it counted, and reads what others did. Nobody waits for all: a rank that is alone counts everything, and what
another took and does not deliver is counted again. So any rank may need the counts at any time, and none hangs.

Threads are those of `lakeckpt.reading.count`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lakeckpt.data.shared_file import SharedFile
from lakeckpt.errors import WireError
from lakeckpt.lake.filters import RowFilter
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.table import Table
from lakeckpt.reading.count import Counted, Unit, count_rows, count_units, joined, selection_of, units_of
from lakeckpt.reading.filtered import KeptRows
from lakeckpt.wire.codec import dumps, loads

__all__ = ["Board", "Selecting", "StoreBoard", "count_together"]

Progress = Callable[[int, int], None]
_PATIENCE_S = 60.0
_BATCHES_PER_RANK = 8
_KIND, _VERSION = "counted", (1, 0)


class _SelectionFile(SharedFile):
    prefix = "selection"


class Selecting:
    """The rows that ``keep`` keeps of ``table``; counted when `get` is first called, in whichever process."""

    def __init__(self, table: Table, keep: RowFilter, *, progress: Progress | None = None) -> None:
        self.table = table
        self.filter = keep
        self._progress = progress
        self._file = _SelectionFile()
        self._found: RowSelection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}  # which a process that is started could not call

    @property
    def kept(self) -> KeptRows:
        """What a decoder needs."""
        return KeptRows(filter=self.filter, counts=self.get())

    def get(self) -> RowSelection:
        """The selection: known, shared by another process, or counted now."""
        if self._found is None:
            with self._file.opened() as file:
                raw = file.read()
                self._found = RowSelection.loads(raw) if raw else self._count()
                if not raw:
                    file.write(self._found.dumps())
        return self._found

    def offer(self, found: RowSelection) -> bool:
        """Take ``found`` for counted, unless it is of another filter or table, or counts are known; tells whether."""
        index = self.table.index
        if self._found is not None or (found.table, found.filter) != (index.digest, self.filter.digest):
            return False
        found.check(table=index.digest, existing=index.group_rows)
        with self._file.opened() as file:
            if not file.read():
                file.write(found.dumps())
        self._found = found
        return True

    def _count(self) -> RowSelection:
        board = None if get_worker_info() is not None else _board(self.table, self.filter)
        if board is None:
            return count_rows(self.table, self.filter, progress=self._progress)[0]
        return count_together(self.table, self.filter, board, ranks=dist.get_world_size(), progress=self._progress)


def _board(table: Table, keep: RowFilter) -> StoreBoard | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    with contextlib.suppress(RuntimeError, ValueError):
        return StoreBoard(f"{table.index.digest}/{keep.digest}")
    return None


class Board(Protocol):
    """What ranks share while they count: who takes which batch, and what was counted. Any rank, at any time."""

    def take(self) -> int:
        """The number of a batch that nobody has taken yet, from 0 on."""
        ...

    def publish(self, batch: int, data: bytes) -> None:
        """Show what was counted of a batch."""
        ...

    def fetch(self, batch: int, timeout_s: float) -> bytes | None:
        """What somebody published; None where nobody has within ``timeout_s``."""
        ...


class StoreBoard:
    """A board in the default store of torch.distributed. ``name`` tells what is counted, by content."""

    def __init__(self, name: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"lakeckpt/selection/{name}", store)

    def take(self) -> int:
        """See `Board`."""
        return int(self._store.add("taken", 1)) - 1

    def publish(self, batch: int, data: bytes) -> None:
        """See `Board`."""
        self._store.set(str(batch), data.hex())

    def fetch(self, batch: int, timeout_s: float) -> bytes | None:
        """See `Board`."""
        try:
            self._store.wait([str(batch)], timedelta(seconds=timeout_s))
            return bytes.fromhex(self._store.get(str(batch)).decode("ascii"))
        except (RuntimeError, ValueError):
            return None


def count_together(
    table: Table,
    keep: RowFilter,
    board: Board,
    *,
    ranks: int,
    progress: Progress | None = None,
    patience_s: float = _PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
) -> RowSelection:
    """Count with the other ranks at ``board``; what none of them shows for ``patience_s`` is counted here."""
    units = units_of(table.index)
    size = max(1, -(-len(units) // (_BATCHES_PER_RANK * ranks)))
    batches = [units[start : start + size] for start in range(0, len(units), size)]
    found: dict[int, Counted] = {}
    meter = _Meter(progress, sum(map(len, units)))

    def count(batch: int) -> None:
        found[batch] = _counted(table, keep, batches[batch])
        board.publish(batch, dumps(found[batch].to_plain(), kind=_KIND, version=_VERSION))
        meter.add(batches[batch])

    while (mine := board.take()) < len(batches):
        count(mine)
    heard = clock()
    for batch in range(len(batches)):
        if batch in found:
            continue
        shown = _shown(board, batch, max(0.001, heard + patience_s - clock()))
        if shown is None:
            count(batch)
        else:
            found[batch], heard = shown, clock()
            meter.add(batches[batch])
    return selection_of(table.index, keep, joined([found[batch] for batch in range(len(batches))]))


def _counted(table: Table, keep: RowFilter, units: list[Unit]) -> Counted:
    each = dict(count_units(table, keep, units))
    return joined([each[place] for place in range(len(units))])


def _shown(board: Board, batch: int, timeout_s: float) -> Counted | None:
    data = board.fetch(batch, timeout_s)
    try:
        return None if data is None else Counted.from_plain(loads(data, kind=_KIND, supported=_VERSION).value)
    except (WireError, TypeError, ValueError):
        return None


class _Meter:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, units: list[Unit]) -> None:
        """Note that the row groups of ``units`` are counted, here or elsewhere."""
        self._done += sum(map(len, units))
        if self._progress is not None:
            self._progress(self._done, self._total)

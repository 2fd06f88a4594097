"""This module decides who counts the rows that a filter keeps, and when.

`Selecting` counts when the counts are first needed. A checkpoint manager may offer counts that the run has saved. The
process that made the dataset and its loader workers share counts through a `SharedFile`. The ranks of a job share the
work through the store of torch.distributed: `count_together` begins at this rank's share, publishes each piece, and
takes the pieces that other ranks have published by then. No rank ever waits for another one, so any rank may need the
counts alone and at any time.

The threads are those of `lakeckpt.reading.filters.count`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch.utils.data import get_worker_info

from lakeckpt.data.foreign.shared_file import SharedFile
from lakeckpt.errors import WireError
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.filters.count import Counted, Unit, count_rows, count_units, joined, selection_of, units_of
from lakeckpt.reading.filters.decoder import KeptRows
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Board", "Selecting", "count_together"]

Progress = Callable[[int, int], None]
_PIECES_PER_RANK = 4
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
        return {**self.__dict__, "_progress": None}  # a process that is started could not call it

    @property
    def kept(self) -> KeptRows:
        """What a decoder needs."""
        return KeptRows(filter=self.filter, counts=self.get())

    def get(self) -> RowSelection:
        """Return the selection: known, shared by another process, or counted now."""
        if self._found is None:
            with self._file.opened() as file:
                raw = file.read()
                self._found = RowSelection.loads(raw) if raw else self._count()
                if not raw:
                    file.write(self._found.dumps())
        return self._found

    def offer(self, found: RowSelection) -> bool:
        """Take ``found`` instead of counting, and say whether it was taken.

        It is not taken where counts are known, or where ``found`` was counted over another table, by another
        expression, or by another release of pyarrow.
        """
        index = self.table.index
        if self._found is not None or found.table != index.digest or not found.was_counted_by(self.filter):
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
        ranks, rank = dist.get_world_size(), dist.get_rank()
        return count_together(self.table, self.filter, board, rank=rank, ranks=ranks, progress=self._progress)


class Board(Protocol):
    """Where ranks publish what they counted: a store of torch.distributed."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all ``keys`` were published."""
        ...

    def get(self, key: str) -> bytes:
        """Return what was published."""
        ...

    def set(self, key: str, value: str) -> None:
        """Publish."""
        ...


def _board(table: Table, keep: RowFilter) -> Board | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        return dist.distributed_c10d.PrefixStore(f"lakeckpt/selection/{table.index.digest}/{keep.digest}", store)
    return None


def count_together(
    table: Table, keep: RowFilter, board: Board, *, rank: int, ranks: int, progress: Progress | None = None
) -> RowSelection:
    """Count, with other ranks at ``board``: first the share of ``rank``, then what nobody has published by then."""
    units = units_of(table.index)
    number = min(_PIECES_PER_RANK * ranks, len(units)) or 1
    pieces = [units[len(units) * at // number : len(units) * (at + 1) // number] for at in range(number)]
    found: dict[int, Counted] = {}
    done, first = 0, number * rank // ranks
    for place in [*range(first, number), *range(first)]:
        found[place] = _published(board, place) or _counted(table, keep, pieces[place], board, place)
        done += len(found[place].group_rows)
        if progress is not None:
            progress(done, sum(map(len, units)))
    return selection_of(table.index, keep, joined([found[place] for place in range(number)]))


def _counted(table: Table, keep: RowFilter, units: list[Unit], board: Board, place: int) -> Counted:
    each = dict(count_units(table, keep, units))
    found = joined([each[at] for at in range(len(units))])
    plain = [found.group_rows, found.group_digests]
    with contextlib.suppress(RuntimeError):  # the store may be gone: the others count for themselves
        board.set(str(place), dumps(plain, kind=_KIND, version=_VERSION).hex())
    return found


def _published(board: Board, place: int) -> Counted | None:
    with contextlib.suppress(RuntimeError, ValueError, TypeError, WireError):
        if board.check([str(place)]):
            data = bytes.fromhex(board.get(str(place)).decode("ascii"))
            rows, digests = loads(data, kind=_KIND, supported=_VERSION).value
            return Counted(group_rows=np.asarray(rows, np.int64), group_digests=np.asarray(digests, np.uint64))
    return None

"""This module finds the next tranche of a table that grows.

A tranche is a table version of its own: the files that were added, and the files of the tranche before that have rows
left, without their other rows. So each tranche is read like an epoch, and its rows that fill no step are carried over
to the next one. A tranche begins when it has at least one full step, or when the stream is about to end.

The first data-parallel rank looks at the table and broadcasts what it found; all ranks sleep between two looks. The
module reads metadata, the footers of added files, and with a filter the filter's columns of the rows that are left. It
starts no threads of its own.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.lanes import Left
from lakeckpt.core.order import EpochLayout
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.options import Follow
from lakeckpt.data.position.broadcast import found_by_first
from lakeckpt.data.position.progress import Progress
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.joined import Added, SomeFiles, joined, known_marks
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["Look", "next_tranche", "rows_left"]

Int64Array = npt.NDArray[np.int64]
_NOTHING, _END, _TRANCHE, _LAST = b"n", b"e", b"t", b"l"


def next_tranche(look: Look, *, explicit: tuple[int, int] | None, dp_group: Any) -> Pinned | None:
    """Return the tranche that ``look`` finds on the first rank, once there is one; None if the stream ends.

    It is collective. Raises on all ranks what the first rank raised.
    """
    while True:
        found = found_by_first(look, explicit=explicit, dp_group=dp_group)
        kind, data = found[:1], found[1:]
        if kind == _END:
            return None
        if kind != _NOTHING:
            made = replace(look.at_hand.at(TableIndex.loads(data)), tail="short" if kind == _LAST else "carry")
            if look.counted is not None:
                made.offer(look.counted)
            return made
        time.sleep(look.follow.poll_every_s)


class Look:
    """Looks for the tranche after ``at_hand``, of which no full step is left."""

    def __init__(self, follow: Follow, at_hand: Pinned, progress: Progress) -> None:
        self.follow, self.at_hand, self._progress = follow, at_hand, progress
        self._known: list[str] | None = None
        """The digests of what was found to be added at the last look, at which it was new at ``_since``."""
        self._since = 0.0
        self._index: TableIndex | None = None
        self._rows = 0
        self.counted: RowSelection | None = None
        """On the first rank, the rows that the filter keeps of what was found."""

    def __call__(self) -> bytes:
        """Return what was found, as one byte and the index of a tranche if there is one."""
        table = self.at_hand.table
        assert table.added is not None
        added = table.added(table.index, self.follow.ignore_deletes)
        if self._known != (digests := [one.digest for one in added.indexes]):
            self._known, self._since = digests, time.monotonic()
            self._index = self._tranche(added)
            found = None if self._index is None else self.at_hand.at(self._index)
            self._rows, self.counted = (0, None) if found is None else (found.identity().rows, found.selection)
        if self._index is not None and self._progress.fills_step(self._rows):
            return _TRANCHE + self._index.dumps()
        most = self.follow.stop_after_idle_s
        if most is None or time.monotonic() - self._since < most:
            return _NOTHING
        return _END if self._index is None or not self._rows else _LAST + self._index.dumps()

    def _tranche(self, added: Added) -> TableIndex | None:
        """Return the index of all rows that are left or new; None if there are none."""
        table, before = self.at_hand.table, self.at_hand
        left = rows_left(before, self._progress.plan.rest(self._progress.state.step).begun[0])
        if not left and not added.indexes:
            return None
        parts = [SomeFiles(index=table.index, left=left), *(SomeFiles(index=one) for one in added.indexes)]
        is_plain = table.index.version.format == "parquet"
        known = known_marks(table.index).union(*map(known_marks, added.indexes)) if is_plain else set()
        found = joined(parts, version=added.version, known=known, needed=_needed(before))
        return found.excluding(table.exclude)


def _needed(pinned: Pinned) -> set[str] | None:
    """Return the columns that are read; None: all."""
    keep = pinned.row_filter
    return None if pinned.columns is None else {*pinned.columns, *(() if keep is None else keep.columns)}


def rows_left(pinned: Pinned, left: Left) -> dict[int, Int64Array]:
    """Return file → the stored rows (int64, from the file's start) at the positions ``left`` of the version ``pinned``.

    With a filter, its columns are decoded of the row groups that hold these rows.
    """
    index = pinned.table.index
    layout = EpochLayout.build(pinned.counted[0], pinned.spec, left.epoch, left.num_lanes, left.rotation)
    positions = np.concatenate([np.zeros(0, np.int64), *(np.arange(*pair) for pair in left.positions.pairs())])
    groups, rows = layout.locate(positions)
    found: dict[int, list[Int64Array]] = {}
    for group in np.unique(groups).tolist():
        stored = _stored(pinned, group, np.sort(rows[groups == group])) + index.stored_start(group)
        found.setdefault(index.group(group)[0], []).append(stored)
    return {file: np.concatenate(parts) for file, parts in found.items()}


def _stored(pinned: Pinned, group: int, rows: Int64Array) -> Int64Array:
    """Return the stored rows of a row group at ``rows``, which count those that exist and that the filter keeps."""
    index, keep, selection = pinned.table.index, pinned.row_filter, pinned.selection
    if keep is not None and selection is not None and selection.group_rows[group] < index.group_rows[group]:
        with closing(RowGroupDecoder(pinned.table, list(keep.columns))) as decoder:
            table = decoder.decode(group, 0, int(index.group_rows[group]))
        rows = np.flatnonzero(keep.mask(table).to_numpy())[rows]
    surviving = index.surviving(group)
    return rows if surviving is None else np.asarray(np.flatnonzero(surviving)[rows], np.int64)

"""This module makes the rest of an epoch a selection of a table version.

`rows_consumed` finds the stored rows that a reader state has consumed. `rest_of_epoch` returns the index of a version
without those rows (`lakeckpt.lake.table.index.RestOfEpoch`), and the state at its start: a reader goes on with both as
with any other table. `excluding` does so for the same files with other excluded row groups.

The module imports no torch, and starts no threads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lakeckpt.checkpoint.consumed.rows import RowOrder
from lakeckpt.core.changes import start
from lakeckpt.core.consumption import consumed
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import RestOfEpoch, TableIndex

__all__ = ["excluding", "rest_of_epoch", "rows_consumed"]


def excluding(state: State, index: TableIndex, there: TableIndex) -> tuple[TableIndex, State]:
    """Return the index and the state with which the epoch of ``state`` goes on.

    ``index`` is the index of ``state``; ``there`` is the same with other excluded row groups.
    """
    if state.step or state.bases:
        return rest_of_epoch(state, there.whole, rows_consumed(state, index))
    lanes, batch_size, world_size = state.segment.topology
    identity = _identity(state, there)
    return there, start(identity, epoch=state.epoch, num_lanes=lanes, batch_size=batch_size, world_size=world_size)


def rest_of_epoch(state: State, there: TableIndex, taken: Deletes) -> tuple[TableIndex, State]:
    """Return the index of the rest of the epoch of ``state`` in the version ``there``, and the state at its start.

    ``taken`` are the rows of ``there`` that had been consumed.
    """
    rest = replace(there, rest=RestOfEpoch(epoch=state.epoch, taken=taken))
    lanes, _, _ = state.segment.topology
    left = Left(epoch=state.epoch, positions=Intervals.whole(rest.num_rows), num_lanes=lanes, rotation=0)
    found = State(
        orders=(_identity(state, rest),),
        epoch=state.epoch,
        segments=(replace(state.segment, micro_batch=0, step=0),),
        step=0,
        bases=(Rest(begun=(left,), next_epoch=state.epoch + 1),),
    )
    return rest, found


def rows_consumed(state: State, index: TableIndex) -> Deletes:
    """Return the stored rows of ``index`` that ``state`` has consumed, and those that its rest had consumed before."""
    positions = consumed(state).get(state.epoch, Intervals.empty())
    order = RowOrder(index)
    rows = order.table_rows(state.identity.spec, Plan(state).layout(state.epoch), positions)
    found = {}
    for file in range(len(index.paths)):
        stored = index.existing(file)
        first = int(order.starts[index.first_group[file]])
        mine = rows.intersection(Intervals.of([(first, first + len(stored))] if len(stored) else []))
        if mine:
            found[file] = np.concatenate([stored[start - first : stop - first] for start, stop in mine.pairs()])
    return Deletes.of(found).union(Deletes() if index.rest is None else index.rest.taken)


def _identity(state: State, index: TableIndex) -> Identity:
    version = str(index.version) if index.version.name else ""
    return replace(state.identity, table=index.digest, selection="", rows=index.num_rows, version=version)

"""This module makes the rest of an epoch a selection of a table version, and carries a place over to a new version.

`rows_consumed` finds the stored rows that a reader state has consumed. `rest_of_epoch` returns the index of a version
without those rows (`lakeckpt.lake.table.index.RestOfEpoch`), and the state at its start: a reader goes on with both as
with any other table. `excluding` does so for the same files with other excluded row groups.

`carry_over` does so for a version whose files were only compacted or clustered, which holds the same rows in other
files. A unique key finds the consumed rows there (`lakeckpt.reading.by_key`), and proves that both versions hold the
same keys. The index and the state are put into the run, beside the checkpoint that they belong to (`carried_over`). The
next restore of that checkpoint goes on from there; the next epoch reads the whole new version. If the versions do not
hold the same keys, nothing is written.

The module imports no torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.checkpoint.consumed.rows import Order
from lakeckpt.checkpoint.format.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.format.verified_reads import read_object
from lakeckpt.checkpoint.persist.history import index_path, read_history
from lakeckpt.core.changes import start
from lakeckpt.core.consumption import consumed
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State, depends_on_data
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ObjectMissing, WireDamaged
from lakeckpt.lake.parquet.footer import Progress
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import RestOfEpoch, TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.by_key import find_by_key
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "CarriedOver",
    "carried_over",
    "carry_over",
    "excluding",
    "in_lockstep",
    "is_carried_over",
    "rest_of_epoch",
    "rows_consumed",
]

_KIND, _VERSION = "carried-over", (1, 0)


def in_lockstep(plain: Mapping[str, Any], what: str) -> State:
    """Return the state that ``plain`` was made of. Raises `ConfigError`, which says that ``what`` cannot be done in
    mid-epoch, if its consumption depends on the data, and `StateError` if it is none."""
    if depends_on_data(plain):
        raise ConfigError(
            f"{what} cannot go on in the middle of an epoch: what it consumes depends on the data, and a row may be "
            "consumed in part. Let the epoch end first"
        )
    return State.from_plain(plain)


def excluding(state: State, index: TableIndex, there: TableIndex) -> tuple[TableIndex, State]:
    """Return the index and the state with which the epoch of ``state`` goes on.

    ``index`` is the index of ``state``; ``there`` is the same with other excluded row groups.
    """
    if (state.step, state.base) != (0, None):
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
        identity=_identity(state, rest),
        epoch=state.epoch,
        segments=(replace(state.segment, micro_batch=0, step=0),),
        step=0,
        base=Rest(begun=(left,), next_epoch=state.epoch + 1),
    )
    return rest, found


def rows_consumed(state: State, index: TableIndex) -> Deletes:
    """Return the stored rows of ``index`` that ``state`` has consumed, and those that its rest had consumed before."""
    positions = consumed(state).get(state.epoch, Intervals.empty())
    order = Order(index)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOver:
    """A place that was carried over: that of ``reader`` in the checkpoint in ``slot``."""

    slot: int
    reader: str
    epoch: int
    key: tuple[str, ...]
    consumed: int
    """Rows of the epoch that had been consumed."""
    left: int
    """Rows of the epoch that are left."""
    compared: int
    """Rows whose keys were read, in the new version."""
    version: str
    """The version with which the reader goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a reader goes on: its state, and the digest (hex) of the index of the rest of the epoch."""

    state: State
    index: str


_Places = Mapping[str, _Place]
"""The document of a checkpoint: reader → its place."""


def carry_over(
    storage: Storage, table: Table, *, key: Sequence[str], reader: str | None = None, progress: Progress | None = None
) -> CarriedOver:
    """Carry the place of ``reader`` in the newest checkpoint of the run at ``storage`` over to ``table``.

    ``key`` names the columns that tell rows apart. ``reader`` may be omitted if the run has one. ``progress(row groups
    done, row groups)`` is called while keys are read. The job must not be running. Raises `ConfigError` for a call that
    makes no sense, `TableError` if the versions do not hold the same keys, each once, `DataFileChanged` if files of
    either version cannot be read any more, `CheckpointNotFound` and `CheckpointDamaged`.
    """
    manifest, name, record = _newest(storage, reader)
    state = in_lockstep(record.state, f"reader {name!r} with another version of its table")
    old = table.at(_saved_index(storage, state.identity.table))
    if old.index.whole.digest == table.index.digest:
        raise ConfigError(
            f"{name!r} reads {table.index.version} of {table.uri!r} already: there is nothing to carry over"
        )
    _check(state, name, key, old, table)
    old.verify()
    was = rows_consumed(state, old.index)
    taken, compared = find_by_key(old.at(old.index.whole), table, was, key=key, progress=progress)
    rest, there = rest_of_epoch(state, table.index, taken)
    assert rest.num_rows == table.num_rows - was.total, "every consumed row is one row of the new version"
    for index in (rest, table.index):
        storage.put(index_path(index.digest), [index.dumps()])
    places = {**_places(storage, manifest.slot), name: _Place(state=there, index=rest.digest)}
    storage.put(_path(manifest.slot), [dumps(to_plain(places, _Places), kind=_KIND, version=_VERSION)])
    return CarriedOver(
        slot=manifest.slot,
        reader=name,
        epoch=state.epoch,
        key=tuple(key),
        consumed=was.total,
        left=rest.num_rows,
        compared=compared,
        version=str(table.index.version),
    )


def _path(slot: int) -> str:
    return f"remap/{slot:010d}.lkc"


def is_carried_over(storage: Storage, manifest: Manifest) -> bool:
    """Return whether a place of this checkpoint was carried over."""
    return bool(storage.list(_path(manifest.slot)))


def carried_over(storage: Storage, manifest: Manifest) -> Mapping[str, ReaderRecord]:
    """Return the records of a checkpoint's readers; those whose place was carried over, at the place where they are.

    Raises `CheckpointDamaged` if what was put into the run cannot be read.
    """
    places = _places(storage, manifest.slot)
    return {
        name: replace(record, state=places[name].state.to_plain(), index=places[name].index)
        if name in places
        else record
        for name, record in manifest.readers.items()
    }


def _places(storage: Storage, slot: int) -> _Places:
    try:
        data = storage.read(_path(slot))
        found: _Places = from_plain(_Places, loads(data, kind=_KIND, supported=_VERSION), "carried-over places")
    except ObjectMissing:
        return {}
    except WireDamaged as error:
        raise CheckpointDamaged(f"{_path(slot)}: {error}") from error
    return found


def _newest(storage: Storage, reader: str | None) -> tuple[Manifest, str, ReaderRecord]:
    tip = read_history(storage).tip
    if tip is None:
        raise CheckpointNotFound(f"the run at {describe(storage)} has no checkpoint whose place could be carried over")
    records = {name: record for name, record in carried_over(storage, tip).items() if record.index is not None}
    if reader is None and len(records) != 1:
        raise ConfigError(f"the checkpoint has the readers {sorted(records)}: name one of them as the reader")
    name = next(iter(records)) if reader is None else reader
    if name not in records:
        raise ConfigError(f"the checkpoint has no reader {name!r} of a table; it has {sorted(records)}")
    return tip, name, records[name]


def _saved_index(storage: Storage, digest: str) -> TableIndex:
    path = index_path(digest)
    try:
        return TableIndex.loads(read_object(storage, path))
    except WireDamaged as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


def _check(state: State, name: str, key: Sequence[str], old: Table, new: Table) -> None:
    if state.identity.endless:
        raise ConfigError(
            f"{name!r} is an endless stream: its epochs overlap, and none of them can be carried over alone"
        )
    if state.identity.tail == "carry" or old.index.known:
        raise ConfigError(f"{name!r} follows a growing table: the place in a tranche cannot be carried over")
    if state.identity.selection:
        raise ConfigError(f"{name!r} reads with a filter: its place cannot be carried over; go on at the next epoch")
    if not key:
        raise ConfigError("name the column, or columns, whose values tell all rows apart")
    for column in key:
        for table in (old, new):
            if column not in table.schema.names:
                raise ConfigError(f"{table.index.version} of {table.uri!r} has no column {column!r}")
        was, now = (table.schema.field(column).type for table in (old, new))
        if pa.types.is_nested(now) or pa.types.is_floating(now) or was != now:
            raise ConfigError(
                f"column {column!r} was {was} and is {now}: a key keeps its type, and has whole numbers, text, bytes, "
                "dates or times"
            )

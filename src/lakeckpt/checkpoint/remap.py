"""Can a place in the midst of an epoch be carried over to another version of the table?  Yes, where a key proves it.

A version whose files were only compacted or clustered holds the same rows in other files. With a unique key:

1. files that both versions have (same path and footer), with the same deleted rows, need no look;
2. of all others, the key's columns are read in both versions: no null, no key twice, and the same keys on both sides;
3. the rows that the state takes for consumed are looked up by their key in the new version. The index of *what is left
   of the epoch* is the new version's without them (`lakeckpt.lake.index.RestOfEpoch`); the new state is of its start.

Both are put into the run, beside the checkpoint that they belong to, and the next restore of that checkpoint goes on
from there; the next epoch reads the whole new version. Where anything does not add up, nothing is written. Values of
other columns are not compared.

Holds the keys of the files that differ in memory, of both versions. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from lakeckpt.checkpoint.fetch import read_object
from lakeckpt.checkpoint.fields import fields_of, number, taken
from lakeckpt.checkpoint.ledger import index_path, read_history
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.rows import Order
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan, consumed
from lakeckpt.core.rest import Left, Rest
from lakeckpt.core.state import Identity, ReaderState, Segment
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ObjectMissing, TableError, WireDamaged
from lakeckpt.lake.deletes import Deletes
from lakeckpt.lake.footer import Progress
from lakeckpt.lake.index import RestOfEpoch, TableIndex
from lakeckpt.lake.storage import Storage, describe
from lakeckpt.lake.table import Table
from lakeckpt.reading.by_key import find_by_key
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.reader_state import dumps_state, loads_state

__all__ = ["Remapped", "has_remapped", "records_remapped", "remap"]

FOLDER = "remap"
_KIND, _VERSION = "remap", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remapped:
    """A place that was carried over."""

    slot: int
    """The checkpoint that it belongs to."""
    reader: str
    epoch: int
    key: tuple[str, ...]
    consumed: int
    """Rows of the epoch that had been consumed."""
    left: int
    """Rows that are left of it."""
    compared: int
    """Rows whose keys were read, in the new version."""
    version: str
    """The version that is gone to."""


def remap(
    storage: Storage, table: Table, *, key: Sequence[str], reader: str | None = None, progress: Progress | None = None
) -> Remapped:
    """Carry the place of ``reader`` in the newest checkpoint of the run at ``storage`` over to ``table``.

    ``key`` names the columns that tell rows apart. ``reader`` may be left out where there is one. ``progress(row groups
    done, row groups)`` is called while keys are read. The job must not be running. Raises `ConfigError` for a call that
    cannot be, `TableError` where the versions do not hold the same keys, each once, `DataFileChanged` where files of
    either version cannot be read any more, `CheckpointNotFound` and `CheckpointDamaged`.
    """
    manifest, name, record = _newest(storage, reader)
    state = ReaderState.from_plain(record.state)
    old = table.at(_saved_index(storage, state.identity.table))
    if old.index.whole.digest == table.index.digest:
        raise ConfigError(
            f"{name!r} reads {table.index.version} of {table.uri!r} already: there is nothing to carry over"
        )
    _check(state, name, key, old, table)
    old.verify()
    was = _rows_consumed(state, old.index)
    found = find_by_key(old.at(old.index.whole), table, was, key=key, progress=progress)
    rest = replace(table.index, rest=RestOfEpoch(epoch=state.epoch, taken=found.rows))
    assert rest.num_rows == table.num_rows - was.total, "every consumed row is one row of the new version"
    there = _state_at(state, rest)
    for index in (rest, table.index):
        storage.put(index_path(index.digest), [index.dumps()])
    document = {
        "slot": manifest.slot,
        "reader": name,
        "state": dumps_state(there),
        "index": rest.digest,
        "key": list(key),
        "consumed": was.total,
    }
    storage.put(_path(manifest.slot, name), [dumps(document, kind=_KIND, version=_VERSION)])
    return Remapped(
        slot=manifest.slot,
        reader=name,
        epoch=state.epoch,
        key=tuple(key),
        consumed=was.total,
        left=rest.num_rows,
        compared=found.compared,
        version=str(table.index.version),
    )


def has_remapped(storage: Storage, manifest: Manifest) -> bool:
    """Whether a place of this checkpoint was carried over."""
    return bool(storage.list(f"{FOLDER}/{manifest.slot:010d}"))


def records_remapped(storage: Storage, manifest: Manifest) -> Mapping[str, ReaderRecord]:
    """The records of a checkpoint's readers; of those whose place was carried over, at the place where they are now.

    Raises `CheckpointDamaged` where what was put into the run cannot be read.
    """
    if not has_remapped(storage, manifest):
        return manifest.readers
    found = {}
    for name, record in manifest.readers.items():
        path = _path(manifest.slot, name)
        try:
            data = storage.read(path)
        except ObjectMissing:
            found[name] = record
            continue
        try:
            plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "a place that was carried over")
            if (number(plain, "slot"), taken(plain, "reader", str)) != (manifest.slot, name):
                raise WireDamaged("it is of another checkpoint")
            state = loads_state(taken(plain, "state", bytes)).to_plain()
            found[name] = replace(record, state=state, index=taken(plain, "index", str))
        except WireDamaged as error:
            raise CheckpointDamaged(f"{path}: {error}") from error
    return found


def _path(slot: int, reader: str) -> str:
    return f"{FOLDER}/{slot:010d}/{blake2b(reader.encode(), digest_size=8).hexdigest()}.lkc"


def _newest(storage: Storage, reader: str | None) -> tuple[Manifest, str, ReaderRecord]:
    tip = read_history(storage).tip
    if tip is None:
        raise CheckpointNotFound(f"the run at {describe(storage)} has no checkpoint whose place could be carried over")
    records = records_remapped(storage, tip)
    tables = [name for name, record in records.items() if record.index is not None]
    if reader is None and len(tables) != 1:
        raise ConfigError(f"the checkpoint has the readers {sorted(tables)}: name one of them as the reader")
    name = tables[0] if reader is None else reader
    if name not in tables:
        raise ConfigError(f"the checkpoint has no reader {name!r} of a table; it has {sorted(tables)}")
    return tip, name, records[name]


def _saved_index(storage: Storage, digest: str) -> TableIndex:
    path = index_path(digest)
    try:
        return TableIndex.loads(read_object(storage, path))
    except WireDamaged as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


def _check(state: ReaderState, name: str, key: Sequence[str], old: Table, new: Table) -> None:
    if state.identity.endless:
        raise ConfigError(
            f"{name!r} is an endless stream: its epochs overlap, and none of them can be carried over alone"
        )
    if state.identity.selection:
        raise ConfigError(f"{name!r} reads with a filter: its place cannot be carried over; go on at the next epoch")
    if not key:
        raise ConfigError("name the column, or columns, whose values tell all rows apart")
    for column in key:
        for table in (old, new):
            if column not in table.schema.names:
                raise ConfigError(f"{table.index.version} of {table.uri!r} has no column {column!r}")
        was, now = (table.schema.field(column).type for table in (old, new))
        if pa.types.is_nested(now) or pa.types.is_floating(now):
            raise ConfigError(f"column {column!r} is {now}: a key has whole numbers, text, bytes, dates or times")
        if was != now:
            raise ConfigError(f"column {column!r} was {was} and is {now}: its values cannot be compared")
    before, now_rows = old.index.whole.num_rows, new.num_rows
    if before != now_rows:
        raise TableError(
            f"{old.index.version} has {before:,} rows and {new.index.version} {now_rows:,}: rows were added or "
            "deleted, not only moved to other files, and the place cannot be carried over; go on at the next epoch"
        )


def _rows_consumed(state: ReaderState, index: TableIndex) -> Deletes:
    """The stored rows of the old version that the state takes for consumed; of a rest, and those taken before."""
    positions = consumed(state).get(state.epoch, Intervals.empty())
    num_lanes, rotation = Plan(state).deal.layout(state.epoch)
    key = LayoutKey(epoch=state.epoch, num_lanes=num_lanes, rotation=rotation)
    order = Order(index)
    rows = order.table_rows(state.identity.spec, key, positions)
    found = {}
    for file in range(len(index.paths)):
        stored = index.existing(file)
        first = int(order.starts[index.first_group[file]])
        mine = rows.intersection(Intervals.of([(first, first + len(stored))] if len(stored) else []))
        if mine:
            found[file] = np.concatenate([stored[start - first : stop - first] for start, stop in mine.pairs()])
    return Deletes.of(found).union(Deletes() if index.rest is None else index.rest.taken)


def _state_at(state: ReaderState, rest: TableIndex) -> ReaderState:
    """The start of what is left of the epoch: told as a rest, since it is not the start of an epoch."""
    version = rest.version
    identity = state.identity.of_version(
        Identity(
            table=rest.digest,
            selection="",
            rows=rest.num_rows,
            spec=state.identity.spec,
            tail=state.identity.tail,
            endless=False,
            version=str(version) if version.name else "",
        )
    )
    lanes, batch_size, world_size = state.segment.topology
    whole = Left(epoch=state.epoch, positions=Intervals.whole(rest.num_rows), num_lanes=lanes, rotation=0)
    return ReaderState(
        identity=identity,
        epoch=state.epoch,
        segments=(Segment(micro_batch=0, step=0, num_lanes=lanes, batch_size=batch_size, world_size=world_size),),
        step=0,
        base=Rest(begun=(whole,), next_epoch=state.epoch + 1),
    )

"""This module carries the place of a run in the midst of an epoch over to another version of its table.

A version whose files were only compacted or clustered holds the same rows in other files. A unique key finds the
consumed rows there (`lakeckpt.reading.by_key`), and proves that both versions hold the same keys. What is left of the
epoch is a selection over the new version (`lakeckpt.checkpoint.restore.rest`). Its index and its state are put into
the run,
beside the checkpoint that they belong to. The next restore of that checkpoint goes on from there; the next epoch reads
the whole new version. Where anything does not add up, nothing is written. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import pyarrow as pa

from lakeckpt.checkpoint.format.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.persist.history import index_path, read_history
from lakeckpt.checkpoint.read.fetch import read_object
from lakeckpt.checkpoint.restore.rest import rest_of_epoch, rows_consumed
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ObjectMissing, TableError, WireDamaged
from lakeckpt.lake.parquet.footer import Progress
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.by_key import find_by_key
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The document of a place that was carried over."""

    slot: Count
    reader: str
    state: ReaderState
    index: str
    """Digest (hex) of the index of what is left of the epoch."""


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
    was = rows_consumed(state, old.index)
    found = find_by_key(old.at(old.index.whole), table, was, key=key, progress=progress)
    rest, there = rest_of_epoch(state, table.index, found.rows)
    assert rest.num_rows == table.num_rows - was.total, "every consumed row is one row of the new version"
    for index in (rest, table.index):
        storage.put(index_path(index.digest), [index.dumps()])
    place = _Place(slot=manifest.slot, reader=name, state=there, index=rest.digest)
    storage.put(_path(manifest.slot, name), [dumps(to_plain(place), kind=_KIND, version=_VERSION)])
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
            plain = loads(data, kind=_KIND, supported=_VERSION).value
            place: _Place = from_plain(_Place, plain, "a place that was carried over")
            if (place.slot, place.reader) != (manifest.slot, name):
                raise WireDamaged("it is of another checkpoint")
            found[name] = replace(record, state=place.state.to_plain(), index=place.index)
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

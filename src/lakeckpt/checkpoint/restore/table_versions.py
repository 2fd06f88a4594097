"""This module decides which version of its table each reader goes on with, when a run is restored.

The version is the one that the checkpoint's state names, if it is still there: its index is read from the run, and rank
0 looks at the table's files before anything is changed (sizes and ETags, by one listing). If it is gone, the reader
refuses, or skips the rest of the epoch, as its user chose. If no state names a version, rank 0's version counts:
other ranks may have opened the table after somebody's commit.

`go_to` alone changes readers. The module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from lakeckpt.checkpoint.consumed.excluded import Change, Opening, begun_at, going_on_with
from lakeckpt.checkpoint.consumed.exclusions import without_exclusions
from lakeckpt.checkpoint.consumed.rest_of_epoch import excluding
from lakeckpt.checkpoint.format.manifest import Exclusion, ReaderRecord
from lakeckpt.checkpoint.format.verified_reads import read_object
from lakeckpt.checkpoint.persist.history import index_path, selection_path
from lakeckpt.core.state import State, depends_on_data
from lakeckpt.errors import CheckpointDamaged, StorageError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.tracking.readers import VersionedReader, index_of, tables_of

__all__ = ["Pins", "fit_readers", "go_to", "opened_versions", "openings_at", "pins_as_on", "records_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What readers, by name, do before their states are loaded."""

    indexes: Mapping[str, TableIndex] = field(default_factory=dict)
    """The version to go to; readers that are not named stay at the current one."""
    states: Mapping[str, State] = field(default_factory=dict)
    """The state to load in place of the one that was saved, if other row groups are excluded than then."""
    changes: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)
    """Reader → what it excludes of each source of a mixture (""; it reads one table), if that is positions."""
    exclusions: tuple[Exclusion, ...] = ()
    """What leaves the deal besides, of all readers."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why the rest of the state's epoch is skipped; found on rank 0 alone."""
    grown: Mapping[str, str] = field(default_factory=dict)
    """How the table that was opened differs from the version that is read."""


def fit_readers(
    storage: Storage,
    objects: Mapping[str, Any],
    records: Mapping[str, ReaderRecord],
    exclusions: tuple[Exclusion, ...] = (),
    *,
    look: bool,
) -> Pins:
    """Return how the readers among ``objects`` go on from their ``records``, without what ``exclusions`` take out of
    the deal; with ``look``, look at their tables.

    Raises what `VersionedReader.fit` raises, and `StateMismatch` if an exclusion that was ordered is of another order.
    """
    records = _without(records, exclusions)
    indexes: dict[str, TableIndex] = {}
    states: dict[str, State] = {}
    changes: dict[str, dict[str, Change]] = {}
    skipped: dict[str, str] = {}
    grown: dict[str, str] = {}
    for at, record in records.items():
        for name, reader in tables_of({at: objects[at]}).items() if record.index is not None else ():
            if not isinstance(reader, VersionedReader):
                continue
            live = index_of(reader)
            saved = partial(_saved, storage, "" if live is None else live.digest)
            fit = reader.fit(record.state, saved, look=look)
            if fit.excluding is not None:
                indexes[name], states[name] = excluding(State.from_plain(record.state), fit.index, fit.excluding)
            elif fit.index is not None:
                indexes[name] = fit.index
            if fit.order is not None:
                changes.setdefault(at, {})[name[len(at) + 1 :]] = fit.order, fit.excluded
            if fit.grown:
                grown[name] = fit.grown
            if fit.skipped:
                skipped[name] = fit.skipped
    return Pins(indexes=indexes, states=states, changes=changes, exclusions=exclusions, skipped=skipped, grown=grown)


def _without(records: Mapping[str, ReaderRecord], exclusions: tuple[Exclusion, ...]) -> Mapping[str, ReaderRecord]:
    """Return the records with their states without exclusions. In memory, the state of a reader whose consumption
    depends on the data is that of one rank, and stays as it is: exclusions wait for the state of the whole job."""
    names = {one.reader for one in exclusions}
    found = dict(records)
    for name in names & records.keys():
        if not depends_on_data(records[name].state):
            _, state, _ = without_exclusions(name, State.from_plain(records[name].state), exclusions, step=0)
            found[name] = replace(records[name], state=state.to_plain())
    return found


def _saved(storage: Storage, live: str, digest: str, selection: str = "") -> TableIndex | RowSelection | None:
    """Return the index that the run keeps under ``digest``, or the ``selection`` of its rows; None if it is damaged or
    missing, or if the store fails and the index ``live`` has the same digest."""
    try:
        if selection:
            counted = RowSelection.loads(read_object(storage, selection_path(digest, selection)))
            return counted if counted.digest == selection else None
        index = TableIndex.loads(read_object(storage, index_path(digest)))
    except (CheckpointDamaged, WireError):
        return None
    except StorageError:
        if digest == live:
            return None
        raise
    return index if index.digest == digest else None


def openings_at(records: Mapping[str, ReaderRecord], pins: Pins, step: int) -> dict[str, Opening]:
    """Return what readers exclude if they go on from their ``records``, at the cut of optimizer step ``step``."""
    names = {one.reader for one in pins.exclusions} & records.keys()
    found = {}
    for name in sorted({*pins.changes, *names}):
        opening = begun_at(records[name].state, pins.exclusions if name in names else (), name, step=step)
        if name in pins.changes:
            opening = going_on_with(opening, pins.changes[name], reason="damaged")
        if name in pins.changes or opening.excluded:
            found[name] = opening
    return found


def go_to(objects: Mapping[str, Any], indexes: Mapping[str, TableIndex]) -> Callable[[], None]:
    """Let readers read these versions; return what undoes it. If one raises, all are as they were."""
    undo: list[Callable[[], None]] = []

    def go_back() -> None:
        for step in reversed(undo):
            step()

    tables = tables_of(objects)
    try:
        for name, index in indexes.items():
            undo.append(tables[name].repin(index))
    except BaseException:
        go_back()
        raise
    return go_back


def records_at(objects: Mapping[str, Any], records: Mapping[str, ReaderRecord], pins: Pins) -> dict[str, ReaderRecord]:
    """Return the records whose states are loaded: of readers that skip the rest of an epoch, the next one's start."""
    found = dict(records)
    for name in pins.skipped:
        found[name] = replace(records[name], state=objects[name].next_epoch(records[name].state))
    states = {**{name: one.state for name, one in openings_at(records, pins, 0).items()}, **pins.states}
    for name, state in states.items():
        found[name] = replace(records[name], state=state.to_plain())
    return found


def opened_versions(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return reader → the table that it opened, and the version: a text that ranks can compare."""
    every = {name: one for name, one in tables_of(objects).items() if isinstance(one, VersionedReader)}
    tables = {name: cast(Any, one).table for name, one in every.items()}
    return {name: json.dumps([table.uri, table.index.digest]) for name, table in tables.items()}


def pins_as_on(storage: Storage, opened: Mapping[str, str], objects: Mapping[str, Any]) -> dict[str, TableIndex]:
    """Return the versions to go to, so as to read what rank 0 has ``opened`` and put into the run.

    A reader of another table stays as it is. Raises `CheckpointDamaged` and `WireError` if an index cannot be read.
    """
    found = {}
    for name, mine in opened_versions(objects).items():
        (uri, first), (my_uri, digest) = json.loads(opened.get(name, mine)), json.loads(mine)
        if uri == my_uri and first != digest:
            found[name] = TableIndex.loads(read_object(storage, index_path(first)))
    return found

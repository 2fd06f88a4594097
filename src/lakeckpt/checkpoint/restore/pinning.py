"""Which version of its table does each reader go on with, when a run is restored?

The one that the checkpoint's state names, if it is still there: its index is read from the run, and rank 0 looks at the
table's files before anything is changed (sizes and ETags, by one listing). Where it is gone, the reader refuses, or
gives the rest of the epoch up, as its user said. Where a run begins, rank 0's version counts: other ranks may have
opened the table after somebody's commit.

Changes readers only in `go_to`. Imports without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from lakeckpt.checkpoint.format.manifest import ReaderRecord
from lakeckpt.checkpoint.persist.history import index_path
from lakeckpt.checkpoint.read.fetch import read_object
from lakeckpt.checkpoint.restore.rest import excluding
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import CheckpointDamaged, StorageError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.tracking.readers import VersionedReader, index_of

__all__ = ["Pins", "fit_readers", "go_to", "pins_of_rank_0", "records_at", "versions_of_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What readers, by name, do before their states are loaded."""

    indexes: Mapping[str, TableIndex] = field(default_factory=dict)
    """The version to go to; readers that are not named stay at the one at hand."""
    states: Mapping[str, ReaderState] = field(default_factory=dict)
    """The state to load in place of the one that was saved, where other row groups are excluded than then."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Why the rest of the state's epoch is given up; found on rank 0 alone."""


def fit_readers(
    storage: Storage, objects: Mapping[str, Any], records: Mapping[str, ReaderRecord], *, look: bool
) -> Pins:
    """How the readers among ``objects`` go on from their ``records``; with ``look``, after a look at their tables.

    Raises what `VersionedReader.fit` raises.
    """
    indexes: dict[str, TableIndex] = {}
    states: dict[str, ReaderState] = {}
    given_up: dict[str, str] = {}
    for name, record in records.items():
        reader = objects[name]
        if record.index is None or not isinstance(reader, VersionedReader):
            continue
        live = index_of(reader)
        saved = partial(_saved, storage, "" if live is None else live.digest)
        fit = reader.fit(record.state, saved, look=look)
        if fit.excluding is not None:
            indexes[name], states[name] = excluding(ReaderState.from_plain(record.state), fit.index, fit.excluding)
        elif fit.index is not None:
            indexes[name] = fit.index
        if fit.given_up:
            given_up[name] = fit.given_up
    return Pins(indexes=indexes, states=states, given_up=given_up)


def _saved(storage: Storage, live: str, digest: str) -> TableIndex | None:
    """The index that the run keeps under ``digest``; None where it is damaged or missing, and where the store fails and
    the index ``live`` does."""
    try:
        index = TableIndex.loads(read_object(storage, index_path(digest)))
    except (CheckpointDamaged, WireError):
        return None
    except StorageError:
        if digest == live:
            return None
        raise
    return index if index.digest == digest else None


def go_to(objects: Mapping[str, Any], indexes: Mapping[str, TableIndex]) -> Callable[[], None]:
    """Let readers read these versions; returns what undoes it. What one raises leaves all as they were."""
    undo: list[Callable[[], None]] = []

    def go_back() -> None:
        for step in reversed(undo):
            step()

    try:
        for name, index in indexes.items():
            undo.append(objects[name].repin(index))
    except BaseException:
        go_back()
        raise
    return go_back


def records_at(objects: Mapping[str, Any], records: Mapping[str, ReaderRecord], pins: Pins) -> dict[str, ReaderRecord]:
    """The records whose states are loaded: of readers that give an epoch up, that of the start of the next one."""
    found = dict(records)
    for name in pins.given_up:
        found[name] = replace(records[name], state=objects[name].next_epoch(records[name].state))
    for name, state in pins.states.items():
        found[name] = replace(records[name], state=state.to_plain())
    return found


def versions_of_ranks(objects: Mapping[str, Any]) -> dict[str, str]:
    """What a rank says of the versions that its readers opened."""
    tables = {name: cast(Any, one).table for name, one in objects.items() if isinstance(one, VersionedReader)}
    return {f"version of {name!r}": json.dumps([name, table.uri, table.index.digest]) for name, table in tables.items()}


def pins_of_rank_0(
    storage: Storage, said: Mapping[str, Mapping[str, Intervals]], *, rank: int
) -> dict[str, TableIndex]:
    """The versions that this rank must go to, so as to read what rank 0 does of the same table.

    ``said``: fact → what ranks said → which did. Raises `CheckpointDamaged` and `WireError` where what rank 0 has put
    into the run cannot be read.
    """
    found = {}
    for fact, values in said.items():
        if not fact.startswith("version of ") or len(values) == 1:
            continue
        by_rank = {who: json.loads(text) for text, ranks in values.items() for who in (0, rank) if _holds(ranks, who)}
        if not {0, rank} <= set(by_rank):
            continue  # a reader that not all ranks have: the first save tells
        (name, uri, first), (_, my_uri, mine) = by_rank[0], by_rank[rank]
        if uri == my_uri and first != mine:
            found[name] = TableIndex.loads(read_object(storage, index_path(first)))
    return found


def _holds(ranks: Intervals, rank: int) -> bool:
    return bool(ranks.intersection(Intervals.of([(rank, rank + 1)])))

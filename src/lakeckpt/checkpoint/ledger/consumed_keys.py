"""This module reads the keys of the rows that a run has consumed of its epoch, so that another run can leave them out.

A table that was compacted, clustered or rewritten has the same rows in other files. A unique key column finds the rows
again: `consumed_keys` returns its values in the rows that the newest checkpoint of a run has consumed, read from the
version that the run reads, while that version can still be read. A new run takes them by ``consumed=(key, values)``.
The module writes nothing, imports no torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lakeckpt.checkpoint.consumed.rest_of_epoch import rows_consumed
from lakeckpt.checkpoint.format.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.format.verified_reads import read_object
from lakeckpt.checkpoint.persist.history import index_path, read_history
from lakeckpt.core.state import State
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, TableError, WireDamaged
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["ConsumedKeys", "consumed_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedKeys:
    """The keys of the rows that ``reader`` has consumed of ``epoch`` up to the checkpoint in ``slot``."""

    slot: int
    step: int
    reader: str
    epoch: int
    values: pa.ChunkedArray
    """The values of the key column, in the order of the table."""
    left: int
    """Rows of the epoch that are left."""


def consumed_keys(
    storage: Storage,
    table: Table,
    *,
    key: str,
    reader: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> ConsumedKeys:
    """Return the values of column ``key`` in the rows that the run at ``storage`` has consumed of its epoch.

    ``table`` is the newest version, which has as many rows. ``reader`` may be omitted if the run has one.
    ``progress(row groups done, row groups)`` is called while keys are read. Raises `ConfigError` for a call that makes
    no sense, `TableError` if the key is not unique or the versions have other numbers of rows, `DataFileChanged` if the
    files of the run's version cannot be read any more, `CheckpointNotFound` and `CheckpointDamaged`.
    """
    manifest, name, record = _newest(storage, reader)
    state = State.from_plain(record.state)
    if state.mixing is not None or state.held is not None:
        why = "it is a mixture" if state.held is None else "what it consumes depends on the data"
        raise ConfigError(
            f"reader {name!r} with another version of its table cannot go on in the middle of an epoch: {why}. Let the "
            "epoch end first"
        )
    old = table.at(_saved_index(storage, state.identity.table))
    _check(state, name, key, old)
    was = rows_consumed(state, old.index)
    old.verify()
    whole = old.at(old.index.whole)
    if whole.num_rows != table.num_rows:
        raise TableError(
            f"{old.index.version} has {whole.num_rows:,} rows and {table.index.version} has {table.num_rows:,}: rows "
            "were added or deleted, not only moved. Begin the next epoch with the new version"
        )
    found = []
    with closing(RowGroupDecoder(whole, [key])) as decoder:
        groups = whole.index.group_rows.tolist()
        for group, rows in enumerate(groups):
            left, start = whole.index.surviving(group), whole.index.stored_start(group)
            stored = start + (np.arange(whole.index.stored_rows[group]) if left is None else np.flatnonzero(left))
            taken = np.isin(stored, was.rows(whole.index.group(group)[0]))
            if taken.any():
                found.append(decoder.decode(group, 0, rows)[key].filter(pa.array(taken)))
            if progress is not None:
                progress(group + 1, len(groups))
    kind = whole.schema.field(key).type
    values = pa.chunked_array([part for one in found for part in getattr(one, "chunks", [one])], type=kind)
    if values.null_count or len(values.unique()) != len(values):
        raise TableError(f"column {key!r} of {table.uri!r} has nulls or values in several rows: name another key")
    return ConsumedKeys(
        slot=manifest.slot,
        step=manifest.step,
        reader=name,
        epoch=state.epoch,
        values=values,
        left=whole.num_rows - len(values),
    )


def _newest(storage: Storage, reader: str | None) -> tuple[Manifest, str, ReaderRecord]:
    tip = read_history(storage).tip
    if tip is None:
        raise CheckpointNotFound(f"the run at {describe(storage)} has no checkpoint that says what it has consumed")
    records = {name: record for name, record in tip.readers.items() if record.index is not None}
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


def _check(state: State, name: str, key: str, old: Table) -> None:
    if state.identity.endless:
        raise ConfigError(
            f"{name!r} is an endless stream: its epochs overlap, and none of them can be left alone for another run"
        )
    if state.identity.tail == "carry" or old.index.known:
        raise ConfigError(f"{name!r} follows a growing table: the place in a tranche is known to its run alone")
    if state.identity.selection:
        raise ConfigError(f"{name!r} reads with a filter: begin the next epoch with the new version")
    if key not in old.schema.names:
        raise ConfigError(f"{old.index.version} of {old.uri!r} has no column {key!r}")

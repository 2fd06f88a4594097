"""Was every row consumed exactly once per epoch?  Proved from the ledger and the footer index of a run, or refuted.

That is proved of what the training loop stated by ``step(batch)``. Where it did not, it is proved of what was
delivered; where something seems to read ahead of the loop, nothing is.

The log gives the history: the chain of manifests from the newest checkpoint back to the first. For each reader the
recorded intervals are added up, compared with what the newest state claims, and held against the table's rows (see
`lakeckpt.checkpoint.account`). Abandoned branches are told apart: their work was rolled back and does not count.

Reads only ``log/`` and ``index/``, and lists ``parts/``: the data of checkpoints, and the table, may be gone. What a
proof rests on is said in the report. Imports without torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lakeckpt.checkpoint.account import account
from lakeckpt.checkpoint.audit_report import AuditReport, Branch
from lakeckpt.checkpoint.ledger import (
    History,
    folders_there,
    index_path,
    read_history,
    removed_by_the_unknown,
    selection_path,
)
from lakeckpt.checkpoint.log import slot_path
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.rows import Order, order_name
from lakeckpt.core.state import Identity, ReaderState
from lakeckpt.errors import CheckpointNotFound, ObjectMissing, StateError, WireError
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.storage import Storage, describe

__all__ = ["audit", "audit_history", "identities_of", "orders_of", "read_run", "tables_of"]

NAMED_GROUPS = 64
"""How many row groups a finding lists, if not told otherwise."""

_STATED = "the training loop: at each cut it had used what it stated by step(batch), and nothing beyond"
_INFERRED = "the training loop: at each cut it had used all that was delivered to it"
_TRUSTED = (
    "the entries of the log: each holds its checksum",
    "the footer index: it has the digest that the states name, and the table was the one pinned by it",
    "the row selection of a filter, likewise: it counted what the filter keeps of each row group",
)


def audit(
    storage: Storage,
    *,
    tip: int | None = None,
    named_groups: int = NAMED_GROUPS,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Audit the run at ``storage``: its history up to the newest checkpoint, or to the one of slot ``tip``.

    A finding lists at most ``named_groups`` row groups. ``progress(readers done, readers)`` is called as it goes on.
    Raises `CheckpointNotFound` where there is no run or no such checkpoint, `NewerFormat` for a log of a newer version,
    `StorageError` where the store fails.
    """
    history = read_run(storage, tip=tip)
    return audit_history(history, orders_of(storage, history), named_groups=named_groups, progress=progress)


def read_run(storage: Storage, *, tip: int | None = None) -> History:
    """The history of the run at ``storage``; raises as `audit`."""
    there = folders_there(storage)  # listed before the log is read: what is removed meanwhile was removed by a commit
    history = read_history(storage, tip=tip)
    if tip is None:
        history = replace(history, lost=removed_by_the_unknown(history, there))
    if not (history.begins or history.chain or history.abandoned or history.damaged):
        raise CheckpointNotFound(f"there is no run at {describe(storage)}: it has no log. Name the place of a run")
    if tip is not None and not history.chain:
        raise CheckpointNotFound(f"{slot_path(tip)} of {describe(storage)} is not a checkpoint that can be read")
    return history


def orders_of(storage: Storage, history: History) -> dict[str, Order]:
    """The orders of the tables that the history's readers read, by `order_name`: of a table its digest, of a selection
    that of the table and its own. Those whose index or selection cannot be read are left out."""
    records = [reader for manifest in history.chain for reader in manifest.readers.values()]
    indexes: dict[str, TableIndex] = {}
    for digest in tables_of(records):
        with contextlib.suppress(WireError, ObjectMissing):
            index = TableIndex.loads(storage.read(index_path(digest)))
            if index.digest == digest:
                indexes[digest] = index
    orders = {digest: Order(index) for digest, index in indexes.items()}
    for identity in identities_of(records):
        if identity.selection and identity.table in indexes:
            with contextlib.suppress(WireError, ObjectMissing, ValueError):
                found = RowSelection.loads(storage.read(selection_path(identity.table, identity.selection)))
                if found.digest == identity.selection:
                    orders[order_name(identity)] = Order(indexes[identity.table], found)
    return orders


def tables_of(records: Iterable[ReaderRecord]) -> set[str]:
    """The digests of the indexes that the records of readers name, those of the versions read before included."""
    found: set[str] = set()
    for one in records:
        if one.index is not None:
            tables = {identity.table for identity in identities_of([one])}
            found |= {one.index, *(tables if one.index in tables else ())}
    return found


def identities_of(records: Iterable[ReaderRecord]) -> set[Identity]:
    """The identities of all states in the records of readers whose states are ours."""
    plains = [plain for one in records for plain in (one.state, *(stretch.begin for stretch in one.stretches))]
    found = set()
    for plain in plains:
        with contextlib.suppress(StateError):
            found.add(ReaderState.from_plain(plain).identity)
    return found


def audit_history(
    history: History,
    orders: Mapping[str, Order],
    *,
    named_groups: int = NAMED_GROUPS,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Audit a history that was read; ``orders`` are those of its tables by digest."""
    doubts, notes = _doubts(history)
    by_reader: dict[str, list[tuple[Manifest, ReaderRecord]]] = {}
    for manifest in history.chain:
        for name, record in manifest.readers.items():
            by_reader.setdefault(name, []).append((manifest, record))
    tip = history.tip
    at = {manifest.attempt for manifest in history.chain}
    readers = []
    for done, (name, records) in enumerate(sorted(by_reader.items()), start=1):
        given_up = [one.given_up[name] for one in history.restores if one.attempt in at and name in one.given_up]
        readers.append(account(name, records, orders, named_groups=named_groups, given_up=given_up))
        last = records[-1][0]
        if tip is not None and last.slot != tip.slot:
            doubts.append(f"reader {name!r} is in no checkpoint after step {last.step:,}: what it read is unknown")
        if progress is not None:
            progress(done, len(by_reader))
    if tip is None:
        doubts.append("the history has no checkpoint: nothing was committed, or the newest attempt began anew")
    elif tip.step and readers and not any(one.stretches for records in by_reader.values() for _, one in records):
        doubts.append(f"{tip.step:,} optimizer steps were taken, and no reader of the run delivered anything for them")
    elif not readers:
        doubts.append("no reader was tracked: the checkpoints hold no record of what was consumed")
    return AuditReport(
        run=history.run or "",
        step=0 if tip is None else tip.step,
        slot=None if tip is None else tip.slot,
        checkpoints=len(history.chain),
        attempts=len(history.begins),
        readers=tuple(readers),
        branches=_branches(history),
        doubts=tuple(doubts),
        notes=tuple(notes),
        trusted=(_INFERRED if any(one.inferred for one in readers) else _STATED, *_TRUSTED),
    )


def _doubts(history: History) -> tuple[list[str], list[str]]:
    """What stands against a proof, and what does not."""
    doubts, notes = [], []
    tip = history.tip
    if history.broken_at is not None:
        first = f"it begins after step {history.chain[0].step:,}" if history.chain else "nothing of it is left"
        doubts.append(f"the history is broken: {slot_path(history.broken_at)} cannot be read, and {first}")
    for damage in history.damaged:
        if history.broken_at is not None and damage.path == slot_path(history.broken_at):
            continue
        if tip is None or damage.path > slot_path(tip.slot):
            doubts.append(f"an entry newer than the newest readable checkpoint cannot be read: {damage}")
        else:
            notes.append(f"damaged, and not in the history: {damage}")
    restored = {one.attempt: one.restored for one in history.restores}
    if history.lost:
        doubts.append(history.lost)
    for before, after in zip([None, *history.chain], history.chain, strict=False):
        if before is not None and after.step < before.step:
            doubts.append(f"slot {after.slot} is of step {after.step:,}, and its parent of step {before.step:,}")
        first_of_attempt = before is None or before.attempt != after.attempt
        if first_of_attempt and after.attempt in restored and restored[after.attempt] != after.parent:
            doubts.append(
                f"attempt {after.attempt} says that it went on from slot {restored[after.attempt]}, and its checkpoint "
                f"in slot {after.slot} from slot {after.parent}"
            )
    return doubts, notes


def _branches(history: History) -> tuple[Branch, ...]:
    by_attempt: dict[int, list[Manifest]] = {}
    for manifest in history.abandoned:
        by_attempt.setdefault(manifest.attempt, []).append(manifest)
    return tuple(
        Branch(
            attempt=attempt,
            parent=manifests[0].parent,
            slots=tuple(one.slot for one in manifests),
            last_step=manifests[-1].step,
            rows=sum(
                positions.size
                for one in manifests
                for reader in one.readers.values()
                for positions in reader.consumed().values()
            ),
        )
        for attempt, manifests in sorted(by_attempt.items())
    )

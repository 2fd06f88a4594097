"""This module proves from the log of a run that each epoch consumed every row exactly once, or lists the errors.

The proof covers the rows that the training loop stated by ``step(batch)``. If the loop did not state rows, the proof
covers the rows that were delivered.

The history is the chain of manifests from the newest checkpoint back to the first. For each reader, the recorded
intervals are added up, compared with what the newest state claims, and compared with the rows of the table
(`lakeckpt.checkpoint.ledger.account`). Work on abandoned branches was rolled back and does not count.

The audit reads ``log/`` and ``index/``. It does not need the data of checkpoints, nor the table.
The report lists the assumptions of the proof. The module never imports torch, and starts no threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from lakeckpt.checkpoint.consumed.rows import RowOrder
from lakeckpt.checkpoint.consumed.source_records import Records, SourceRecord, readers_in
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.ledger.account import account
from lakeckpt.checkpoint.ledger.audit_report import AuditReport, Branch
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.checkpoint.persist.history import History, read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.errors import CheckpointNotFound
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.progress import Progress

__all__ = ["audit", "audit_history", "read_run"]

_STATED = "the training loop: at each save it had used the rows that step(batch) stated, and no others"
_INFERRED = "the training loop: at each save it had used every row that was delivered to it"
_TRUSTED = (
    "the entries of the log: the checksum of each was compared",
    "the footer index (the list of files and row groups): it has the digest that the states name",
    "the row selection, if there is a filter: it has its digest, too, and counted what the filter keeps",
)
_REPEATED = (
    "{} ranks read the same rows of reader {!r}, by an explicit rank=, and trained replicas of one model: each row was "
    "trained {} times"
)
_OTHERS = (
    "beside these readers, a loader that is in no state delivered rows in training, first seen in the checkpoint of "
    "step {:,}: which of its rows were used is not known"
)
_GROUP = "the groups of ranks: {} ranks that read the same rows of reader {!r} are one model-parallel group"


def audit(storage: Storage, *, tip: int | None = None, progress: Progress | None = None) -> AuditReport:
    """Audit the run at ``storage``: its history up to the newest checkpoint, or up to the checkpoint in slot ``tip``.

    ``progress`` counts the entries of the log, and then the records of readers. Raises `CheckpointNotFound` if there is
    no run or no such checkpoint, `NewerFormat` for a log of a newer version, and `StorageError` if the store fails.
    """
    history = read_run(storage, tip=tip, progress=progress)
    return audit_history(history, orders_of(storage, history), progress=progress)


def read_run(storage: Storage, *, tip: int | None = None, progress: Progress | None = None) -> History:
    """Return the history of the run at ``storage``; ``progress`` counts the entries of the log. Raises as `audit`."""
    history = read_history(storage, tip=tip, progress=progress)
    if not (history.begins or history.chain or history.abandoned or history.damaged):
        raise CheckpointNotFound(f"there is no run at {describe(storage)}: it has no log. Name the place of a run")
    if tip is not None and not history.chain:
        raise CheckpointNotFound(f"{slot_path(tip)} of {describe(storage)} is not a checkpoint that can be read")
    return history


def audit_history(history: History, orders: Mapping[str, RowOrder], *, progress: Progress | None = None) -> AuditReport:
    """Audit a history; ``orders`` are the orders of its tables (`lakeckpt.checkpoint.ledger.indexes.orders_of`), and
    ``progress`` counts the records of readers."""
    doubts, notes = _doubts(history)
    by_reader: dict[str, list[tuple[Manifest, SourceRecord]]] = {}
    for manifest in history.chain:
        for name, record in readers_in(manifest).items():
            by_reader.setdefault(name, []).append((manifest, record))
    tip = history.tip
    at = {manifest.attempt for manifest in history.chain}
    count, total = itertools.count(1), sum(map(len, by_reader.values()))

    def advance() -> None:
        if progress is not None:
            progress(next(count), total, "records")

    readers, groups = [], []
    for name, records in sorted(by_reader.items()):
        skipped = [one.skipped[name] for one in history.restores if one.attempt in at and name in one.skipped]
        readers.append(account(name, records, orders, skipped=skipped, advance=advance))
        last = records[-1][0]
        for shared, is_repeated in sorted(_groups(records)):
            if is_repeated:
                doubts.append(_REPEATED.format(shared, name, shared))
            else:
                groups.append(_GROUP.format(shared, name))
        if tip is not None and last.slot != tip.slot:
            doubts.append(f"reader {name!r} is in no checkpoint after step {last.step:,}: its later rows are unknown")
    if tip is None:
        doubts.append("the history has no checkpoint: nothing was committed, or the newest attempt began anew")
    elif tip.step and readers and not any(one.record.stretches for records in by_reader.values() for _, one in records):
        doubts.append(f"{tip.step:,} optimizer steps were taken, and no reader of the run delivered anything for them")
    elif not readers:
        doubts.append("no reader was tracked: the checkpoints hold no record of what was consumed")
    late = [0]
    for name, step, had_others in _late_readers(history):
        late.append(step if had_others else 0)
        notes.append(
            f"reader {name!r} joined the run after step {step:,}: rows that steps used before are not recorded"
        )
    outside = [one.step for one in history.chain if any(record.has_others for record in one.readers.values())]
    if outside:
        notes.append(_OTHERS.format(outside[0]))
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
        trusted=(_INFERRED if any(one.inferred for one in readers) else _STATED, *_TRUSTED, *groups),
        from_step=max(_unrecorded_steps(history), *late, 0),
    )


def _groups(records: Records) -> set[tuple[int, bool]]:
    """Return how many ranks read the same rows, and whether each trains them, if several do."""
    every = {(one.record.shared, one.record.is_repeated) for _, one in records}
    return {(shared, is_repeated) for shared, is_repeated in every if shared > 1}


def _unrecorded_steps(history: History) -> int:
    """Return how many of the first steps recorded no reader's rows: the state had no reader, or none delivered."""
    for manifest in history.chain:
        firsts = [one.steps.runs[0] for one in manifest.readers.values() if one.steps.runs]
        if firsts:
            return 0 if any(run.is_jump for run in firsts) else min(run.first for run in firsts) - 1
    return 0


def _late_readers(history: History) -> Iterator[tuple[str, int, bool]]:
    """Yield the readers that joined others: name, the steps done before, and whether a loader that was in no state
    delivered rows in these steps."""
    known: set[str] = set()
    before, had_others = 0, False
    for manifest in history.chain:
        for name in sorted(manifest.readers.keys() - known) if known else ():
            yield name, before, had_others
        known |= manifest.readers.keys()
        before, had_others = manifest.step, had_others or any(one.has_others for one in manifest.readers.values())


def _doubts(history: History) -> tuple[list[str], list[str]]:
    """Return the reasons against a proof, and the notes that do not matter to it."""
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
    for before, after in zip([None, *history.chain], history.chain, strict=False):
        if before is not None and after.step < before.step:
            doubts.append(f"slot {after.slot} is of step {after.step:,}, and its parent of step {before.step:,}")
        first_of_attempt = before is None or before.attempt != after.attempt
        if first_of_attempt and after.attempt in restored and restored[after.attempt] != after.parent:
            doubts.append(
                f"attempt {after.attempt} recorded that it went on from slot {restored[after.attempt]}, and its "
                f"checkpoint in slot {after.slot} from slot {after.parent}"
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
                for reader in readers_in(one).values()
                for stretch in reader.stretches
                for positions in stretch.consumed.values()
            ),
        )
        for attempt, manifests in sorted(by_attempt.items())
    )

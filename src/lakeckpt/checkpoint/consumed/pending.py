"""This module holds the pending records of a reader: records of consumption that no commit has yet.

A manifest records the rows consumed since its parent. The parent is unknown when a cut is handed over to be persisted:
an earlier save may be under way, may fail, or may be skipped for a newer one. So a rank hands over *pending records*.
Each record covers the time between two handed-over cuts. A rank sends all records with every save, until a commit
contains them. `joined` makes one record of all consumption since the parent.

The values are pure, and can be written as documents. The module never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lakeckpt.cached import cached_property
from lakeckpt.checkpoint.format.manifest import ReaderRecord
from lakeckpt.core.consumption import consumption
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import State
from lakeckpt.errors import CheckpointMismatch, WireDamaged
from lakeckpt.tracking.steps import StepRecord
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "PendingRecord",
    "joined",
    "pending_from_bytes",
    "pending_to_bytes",
    "positions",
    "since",
    "unstated",
]

_KIND, _RECORD, _VERSION = "pending", "pending-record", (1, 0)


@dataclass(frozen=True, kw_only=True)
class PendingRecord:
    """The consumption of one reader from the cut after optimizer step ``first`` to the cut after ``step``.

    Every cut writes all records since the newest commit, so a record keeps its document."""

    first: int
    step: int
    record: ReaderRecord

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.step:
            raise WireDamaged(f"a pending record goes from step {self.first} to {self.step}")

    @cached_property
    def document(self) -> bytes:
        """The record as `pending_to_bytes` writes it."""
        return dumps(to_plain(self), kind=_RECORD, version=_VERSION, compress=True)


def positions(begin: State, end: State) -> Mapping[int, Intervals]:
    """Return the positions that a record states for what was consumed from ``begin`` to ``end``: epoch → positions. Of
    a mixture, none: they follow from the states (`lakeckpt.checkpoint.consumed.source_records`)."""
    return {} if begin.mixing is not None else consumption(begin, end)


def since(pending: Sequence[PendingRecord], recorded: int) -> tuple[PendingRecord, ...]:
    """Return the records that no commit up to step ``recorded`` has; the last record ends at the cut.

    If a commit has the cut itself, the result is one record without consumption. `CheckpointMismatch` if there is a gap
    between records, so that some consumption is recorded nowhere.
    """
    left = tuple(one for one in pending if one.first >= recorded)
    at = recorded
    for one in left:
        if one.first != at:
            raise CheckpointMismatch(f"what was consumed between the steps {at} and {one.first} is recorded nowhere")
        at = one.step
    if not left and pending and pending[-1].step == recorded:
        record = replace(pending[-1].record, stretches=(), steps=StepRecord(runs=()), excluded=())
        return (PendingRecord(first=recorded, step=recorded, record=record),)
    if not left or pending[-1].step != at:
        raise CheckpointMismatch(f"nothing is known of what was consumed after step {recorded}")
    return left


def unstated(readers: Mapping[str, Sequence[PendingRecord]]) -> dict[str, str]:
    """Return the readers of which the training loop of this rank has not stated which rows steps used, as a rank
    announces them to the rank that commits (`joined`)."""
    return {
        _unstated(name): ""
        for name, every in readers.items()
        if any(stretch.basis != "stated" for one in every for stretch in one.record.stretches)
    }


def _unstated(reader: str) -> str:
    return f"rows of {reader!r} are not stated"


def joined(reader: str, pending: Sequence[PendingRecord], announced: Collection[str] = ()) -> ReaderRecord:
    """Return one record of all ``pending`` of a reader; ``announced``: what other ranks announce (`unstated`)."""
    stretches = (stretch for one in pending for stretch in one.record.stretches)
    if _unstated(reader) in announced:
        stretches = (replace(stretch, basis="delivered") for stretch in stretches)
    return replace(
        pending[-1].record,
        stretches=tuple(stretches),
        steps=StepRecord(runs=tuple(run for one in pending for run in one.record.steps.runs)),
        excluded=tuple(excluded for one in pending for excluded in one.record.excluded),
        is_repeated=any(one.record.is_repeated for one in pending),
        has_others=any(one.record.has_others for one in pending),
    )


def pending_to_bytes(pending: Sequence[PendingRecord]) -> bytes:
    """Return the document of the pending records of one reader."""
    return dumps([one.document for one in pending], kind=_KIND, version=_VERSION)


def pending_from_bytes(data: bytes) -> tuple[PendingRecord, ...]:
    """Return the pending records of a document. `WireError`."""
    documents = loads(data, kind=_KIND, supported=_VERSION)
    every: tuple[bytes, ...] = from_plain(tuple[bytes, ...], documents, "the pending records of a reader")
    return tuple(_record(one) for one in every)


def _record(document: bytes) -> PendingRecord:
    plain = loads(document, kind=_RECORD, supported=_VERSION)
    found: PendingRecord = from_plain(PendingRecord, plain, "a pending record")
    return found

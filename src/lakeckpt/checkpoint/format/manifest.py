"""This module defines the entries of a run's log: an attempt begins, names what it restored, commits checkpoints.

A `Begin` claims the run: its slot is the attempt's number and fencing token. A `Restored` says which checkpoint the
history goes on from: an attempt writes it when it has restored that checkpoint, and ``lakeckpt rollback`` writes it as
an order. An attempt that died between the two entries has changed nothing of the history. A `Manifest` is the commit of
a checkpoint: its parent, the digest of its register (`lakeckpt.checkpoint.format.register`), which checkpoints keep
their data, and for every reader its state and what was consumed since the parent, so that the record of a run outlives
the data of its checkpoints. The classes are the formats: `lakeckpt.wire.documents` writes and reads them by the types
of their fields.

Imports without torch. Never touches storage: `lakeckpt.checkpoint.persist.log` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal

from lakeckpt.checkpoint.format.fields import Digest
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.parts import SaveId, SiteWaits
from lakeckpt.core.intervals import Intervals
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.faults import Fault
from lakeckpt.tracking.steps import StepRecord
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain_of, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "Basis",
    "Begin",
    "CheckpointInfo",
    "CutId",
    "Entry",
    "Excluded",
    "ExcludedFor",
    "Exclusion",
    "Facts",
    "Manifest",
    "ReaderRecord",
    "Restored",
    "Stretch",
    "entry_from_bytes",
    "entry_to_bytes",
    "said_of",
]

_KIND = "log"
_VERSION = (1, 0)
Basis = Literal["stated", "delivered"]
"""The training loop of each rank stated by ``step(batch)`` that steps used the rows; or the rows were delivered, and
some loop did not say which rows its steps used."""
Facts = Mapping[str, Mapping[str, str]]
"""Reader → what a script gave to it → a text, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """The fields of all entries: the run, the slot, and who wrote the entry."""

    run: str
    slot: Count
    library: str
    created_s: float
    """When, in seconds since 1970, by the clock of rank 0's machine."""
    write_id: str
    """Unique to this put, so that an entry can be recognised as our own after the answer of a store was lost."""
    host: str = ""
    """The machine of rank 0."""
    pid: Count = 0
    """The process of rank 0 there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(_Signed):
    """An attempt claims the run."""

    world_size: Positive
    facts: Facts = field(default_factory=dict)
    """The settings that its script gave to readers. The next attempt compares them with its own."""
    restarts: Count = 0
    """How often its launcher had started the job again; 0: a person or a scheduler started it."""

    @property
    def attempt(self) -> int:
        """The attempt's number: its slot."""
        return self.slot


ExcludedFor = Literal["trainer", "order", "crash", "damaged"]
"""Why rows are excluded: the training loop skipped them (``manager.skip``), a person ordered it, they ended the job
again and again, or they cannot be read (``exclude=`` of `lakeckpt.open_table`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Positions of one epoch of a reader that are to leave the deal, wherever they are still left of it."""

    reader: str
    source: str | None = None
    """The source of a mixture; None: the reader reads one table."""
    reason: ExcludedFor
    order: str
    """The digest of the order that the positions are of (`lakeckpt.core.identity.Identity.digest`)."""
    epoch: Count
    num_lanes: Positive
    """The lanes of the layout of the epoch."""
    rotation: Count = 0
    """The rotation of the layout of the epoch."""
    positions: Intervals
    attempt: Count
    """The attempt that used them, or died of them."""
    steps: tuple[Count, Count]
    """The optimizer steps that used them, half-open."""
    micro_batch: Count | None = None
    """The number of the micro-batch that they were, if they ended the job again and again; None: they were ordered."""
    withdrawn: str = ""
    """Why they are not excluded any more, in words; empty: they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(_Signed):
    """The history goes on from a checkpoint. The first attempt of a run restores nothing and writes no such entry."""

    attempt: Count | None
    """The attempt that restored it; None: ``lakeckpt rollback`` ordered it, and nobody has restored it yet."""
    restored: Count | None
    """The slot of the checkpoint; None: there was none."""
    skipped: Mapping[str, Count] = field(default_factory=dict)
    """reader → the epoch whose rest it skips, because the table version is gone."""
    captured: CutId | None = None
    """The cut in host memory that it went on from, if that was not older than ``restored``."""
    rolled_back_to: Count | None = None
    """The step of the roll-back that this entry obeys (``restore(step=…)``) or orders (``lakeckpt rollback``)."""
    faults: tuple[Fault, ...] = ()
    """The faults that ended the attempts since the entry of a restore before, in order."""
    exclude_steps: tuple[Count, Count] | None = None
    """The optimizer steps, half-open, whose batches the roll-back leaves out; None: it leaves out nothing."""
    exclusions: tuple[Exclusion, ...] = ()
    """All positions that are to leave the deal of what is restored from here on, until a roll-back."""

    @classmethod
    def by_first(cls, begin: Begin) -> Restored:
        """Return the entry that the first attempt of a run would write, which restores nothing."""
        signed = {one.name: getattr(begin, one.name) for one in fields(_Signed)}
        return cls(**signed, attempt=begin.attempt, restored=None)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The rows that a reader consumed between two states of one order and epoch (or endless stream, or mixture)."""

    begin: Mapping[str, Any]
    """The plain `lakeckpt.core.state.State` that it began with."""
    end: Mapping[str, Any]
    consumed: Mapping[int, Intervals]
    """epoch → positions; empty for a mixture: its two states tell the positions of each source."""
    basis: Basis = "delivered"
    """How it is known that steps used the rows."""
    attempt: int = -1
    """The attempt that consumed the rows; -1: the attempt that committed them."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Rows that count as consumed, and that trained nothing."""

    rank: Count
    """The data-parallel rank to which they were dealt."""
    step: Count
    """The optimizer step with which they count as consumed."""
    reason: ExcludedFor
    positions: Mapping[int, Intervals]
    """epoch → positions; if consumption depends on the data, positions of which some items trained nothing."""
    source: str | None = None
    """The source of a mixture whose positions they are; None: the reader reads one table."""
    steps: tuple[Count, Count] | None = None
    """The optimizer steps of an abandoned history that had used them, half-open; None: no step had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRecord:
    """One reader at the cut."""

    state: Mapping[str, Any]
    """The plain state of the whole job."""
    stretches: tuple[Stretch, ...] = ()
    """The stretches consumed since the parent, in order."""
    steps: StepRecord = field(default_factory=StepRecord)
    """The frontiers after each optimizer step since the parent."""
    index: str | None = None
    """Digest (hex) of the footer index of its table: ``index/<digest>.lkc``."""
    excluded: tuple[Excluded, ...] = ()
    """The rows that were consumed since the parent and trained nothing; of a pending record, those of this rank."""
    shared: Positive = 1
    """How many ranks read each row: 1, or the ranks of a model-parallel group."""
    is_repeated: bool = False
    """True if the ranks that read the same rows train replicas of one model, so that each row is trained by each."""
    has_others: bool = False
    """True if a loader that is in no state delivered rows in training beside this reader."""

    def consumed(self) -> dict[int, Intervals]:
        """epoch → the positions consumed since the parent."""
        found: dict[int, Intervals] = {}
        for stretch in self.stretches:
            for epoch, positions in stretch.consumed.items():
                found[epoch] = found[epoch].union(positions) if epoch in found else positions
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(_Signed):
    """A checkpoint is committed."""

    attempt: Count
    parent: Count | None
    """The slot of the checkpoint before it in its history, or None."""
    step: Count
    """Optimizer steps done."""
    number: Count
    """How many saves the attempt had begun before this one."""
    world_size: Positive
    cut: bytes
    register: Digest
    """`short_digest` of its register."""
    kept: Intervals
    """The slots of its history whose checkpoints keep their data, its own among them. All other data may be gone."""
    readers: Mapping[str, ReaderRecord]
    seed: int
    """The seed from which ranks that are new after a change of the world size derive their random states."""
    keep: Keep = field(default_factory=Keep)
    """The rule by which checkpoints keep their data."""
    metric: float | None = None
    """The metric of the state, if the training loop gave one."""
    waits: tuple[SiteWaits, ...] = ()
    """How long the ranks waited by site, and how much of their captures moved meanwhile."""

    @property
    def save(self) -> SaveId:
        """The save that wrote its parts and objects."""
        return SaveId(attempt=self.attempt, step=self.step, number=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint."""

    slot: int
    """Its slot in the log."""
    step: int
    """Optimizer steps done."""
    attempt: int
    world_size: int
    created_s: float
    """Seconds since 1970."""
    metric: float | None = None
    """The metric that was given to ``manager.step`` or ``save``; None if none was given."""
    waits: tuple[SiteWaits, ...] = ()
    """How long ranks waited by site, and how much of the captures moved meanwhile; empty without ``bubbles=``."""

    @classmethod
    def of(cls, manifest: Manifest) -> CheckpointInfo:
        """Return the values of a manifest that are shown to users."""
        return cls(**{one.name: getattr(manifest, one.name) for one in fields(cls)})


Entry = Begin | Restored | Manifest
_KINDS: dict[str, type[Entry]] = {"begin": Begin, "restored": Restored, "commit": Manifest}


def entry_to_bytes(entry: Entry) -> bytes:
    """Return the document of an entry."""
    name = next(name for name, kind in _KINDS.items() if kind is type(entry))
    return dumps({"entry": name, **to_plain(entry)}, kind=_KIND, version=_VERSION, compress=True)


def entry_from_bytes(data: bytes) -> Entry:
    """Return the entry in a document of `entry_to_bytes`. `WireError`."""
    plain = loads(data, kind=_KIND, supported=_VERSION)
    return from_plain_of(_KINDS, "entry", plain, "an entry of the log")


def said_of(entry: Begin | Restored) -> str:
    """Return the process that wrote the entry, and when, for messages.

    >>> said_of(Begin(run="r", slot=4, world_size=1, library="", created_s=0.0, write_id="", host="node-3", pid=71))
    'attempt 4 (process 71 on node-3, 1970-01-01 00:00:00 UTC)'
    """
    when = datetime.fromtimestamp(entry.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    who = f"a roll-back to step {entry.rolled_back_to}" if isinstance(entry, Restored) else f"attempt {entry.attempt}"
    where = f"process {entry.pid} on {entry.host}, " if entry.host else ""
    return f"{who} ({where}{when})"

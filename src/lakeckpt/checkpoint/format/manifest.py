"""This module defines the entries of a run's log: an attempt begins, names what it restored, commits checkpoints.

A `Begin` and a `Restored` are what an attempt writes first (see ``begins``). A `Manifest` is the commit of a
checkpoint: its parts, its parent, and for every reader its state and what was consumed since the parent, so that the
record of a run outlives the data of its checkpoints. The classes are the formats: `lakeckpt.wire.documents` writes and
reads them by the types of their fields.

Imports without torch. Never touches storage: `lakeckpt.checkpoint.persist.log` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lakeckpt.checkpoint.format.begins import Begin, Captured, Restored
from lakeckpt.checkpoint.format.fields import Digest
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.parts import SaveId, SiteWaits
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.read_ahead import Basis
from lakeckpt.tracking.steps import StepRecord
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain_of, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "Begin",
    "Captured",
    "CheckpointInfo",
    "Entry",
    "Excluded",
    "ExcludedFor",
    "Manifest",
    "PartRef",
    "ReaderRecord",
    "Restored",
    "Stretch",
    "entry_from_bytes",
    "entry_to_bytes",
]

_KIND = "log"
_VERSION = (1, 0)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """A part of a checkpoint: ``digest`` is the BLAKE2b-128 (`short_digest`) of the record's ``size_bytes`` bytes."""

    rank: Count
    path: str
    size_bytes: Count
    digest: Digest


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The rows that a reader consumed between two states of one order and epoch (or endless stream, or mixture)."""

    begin: Mapping[str, Any]
    """The plain `lakeckpt.core.state.State` that it began with."""
    end: Mapping[str, Any]
    consumed: Mapping[int, Intervals]
    """epoch → positions; empty for a mixture, of which the two states tell the positions of each source."""
    basis: Basis = "inferred"
    """How it is known that steps used the rows."""
    reason: str = ""
    """Why it is suspected that no step used the rows."""
    attempt: int = -1
    """The attempt that consumed the rows; -1: the attempt that committed them."""


ExcludedFor = Literal["trainer", "order", "crash", "damaged"]
"""Why rows are excluded: the training loop skipped them (``manager.skip``), a person ordered it, they ended the job
again and again, or they cannot be read (``exclude=`` of `lakeckpt.open_table`)."""


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
    """What was consumed since the parent and trained nothing; of a pending record, on this rank."""
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
class Manifest:
    """A checkpoint is committed."""

    run: str
    slot: Count
    attempt: Count
    parent: Count | None
    """The slot of the checkpoint before it in its history, or None."""
    step: Count
    """Optimizer steps done."""
    number: Count
    """How many saves the attempt had begun before this one."""
    world_size: Positive
    cut: bytes
    parts: tuple[PartRef, ...]
    readers: Mapping[str, ReaderRecord]
    seed: int
    """The seed from which ranks that are new after a change of the world size derive their random states."""
    library: str
    created_s: float
    write_id: str
    keep: Keep | None = None
    """The checkpoints of its history that kept their data; None: not recorded."""
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
        return cls(
            slot=manifest.slot,
            step=manifest.step,
            attempt=manifest.attempt,
            world_size=manifest.world_size,
            created_s=manifest.created_s,
            metric=manifest.metric,
            waits=manifest.waits,
        )


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

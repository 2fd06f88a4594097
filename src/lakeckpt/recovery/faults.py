"""This module defines the faults of a job: the notes that dying ranks leave, and what an attempt lost by a fault.

A rank that dies leaves a `FaultNote`: why, where, and what it was doing. One fault ends all ranks of an attempt, and
most of their notes name symptoms: a connection that was closed, a SIGTERM of the launcher. The table of explicit faults
(`lakeckpt.watch.system.explicit`) tells symptoms from causes, and `first_cause` picks the note of the fault itself. The
next attempt joins it with what the fault cost, as a `Fault`, and writes it into the log. The module defines values and
their documents, and reads nothing but the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lakeckpt.watch.system.explicit import Explicit, FaultTable, fault_table
from lakeckpt.wire.documents import Count, Positive, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "BY_AGENT",
    "PHASES",
    "BatchAt",
    "Cause",
    "Fault",
    "FaultNote",
    "Phases",
    "Tier",
    "cut_off",
    "explained",
    "first_cause",
    "notes_from_text",
    "notes_to_text",
]

_KIND, _NOTES, _VERSION = "fault", "faults", (1, 0)
Cause = Literal["exception", "signal", "exit", "out of memory", "lost node", "hang", "unknown"]
"""An exception ended the loop; a signal or an exit status ended the process; its node is gone; or nobody knows."""
Phases = Literal["perceived", "processes", "imports", "group", "decided", "restored", "first step"]
"""The phases from a fault to the next finished step: the launcher perceives it, starts processes, these import, the
ranks meet and build the model, decide what to restore, restore it, and do a step."""
PHASES: tuple[Phases, ...] = ("perceived", "processes", "imports", "group", "decided", "restored", "first step")
Tier = Literal["memory", "other nodes", "storage", "nothing"]
"""Where the next attempt read its state: from the memory of nodes, that of other nodes too, or from storage."""
_MOST_CHARACTERS = 1000
_ORDERS = frozenset(("preempted", "time limit"))

_STORAGE_TYPES = frozenset(
    [
        "StorageError",
        "ObjectMissing",
        "ObjectExists",
        "ObjectChanged",
        "ConditionalPutUnsupported",
        "SaveFailed",
        "SaveRefused",
        "SaveSkipped",
        "ReplicasDiffer",
        "AttemptSuperseded",
        "RunInUse",
    ]
)
BY_AGENT = "SIGKILL by its agent"
"""What ends a rank that is stuck after another one has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAt:
    """The micro-batch that is dealt to a data-parallel ``rank`` of ``world`` in ``step`` of a reader, in an epoch."""

    reader: str
    epoch: Count
    step: Count
    rank: Count
    world: Positive

    def __str__(self) -> str:
        return f"the micro-batch of rank {self.rank} in step {self.step} of reader {self.reader!r}, epoch {self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultNote:
    """Why one rank of an attempt died."""

    attempt: Count
    rank: Count
    world: Positive
    node: str
    at_s: float
    """When, in seconds since 1970, by the clock of its node."""
    cause: Cause
    what: str = ""
    """The type of the exception, the name of the signal, or the exit status."""
    text: str = ""
    """Evidence: the message of the exception, or what was found."""
    phase: str = ""
    """What it was doing (`lakeckpt.watch.beat.Phase`)."""
    step: Count = 0
    """Optimizer steps that it had finished."""
    begun: Count = 0
    """The optimizer step at which its attempt began."""
    batch: BatchAt | None = None
    """The micro-batch that it worked on, or waited for."""
    batches: Count = 0
    """Micro-batches that it got since the last finished step."""
    rows: Count = 0
    """Rows that its finished steps in this attempt have used."""
    step_s: float = 0.0
    """Seconds of a step on average; 0 if that is not known."""
    stalled_s: float = 0.0
    """For how long saves have held up its training thread in this attempt."""
    explicit: Explicit | None = None
    """What the table of explicit faults says of it; None: no row knows it."""

    @property
    def name(self) -> str:
        """The cause for people.

        >>> FaultNote(attempt=1, rank=3, world=4, node="a", at_s=0.0, cause="signal", what="SIGKILL").name
        'signal SIGKILL'
        """
        return f"{self.cause} {self.what}".strip()

    @property
    def evidence(self) -> str:
        """What it named, and its text, in one."""
        return ": ".join(filter(None, (self.what, self.text)))

    @property
    def because(self) -> str:
        """The cause that the table of explicit faults names; else `cause`."""
        return self.cause if self.explicit is None else self.explicit.cause

    @property
    def is_symptom(self) -> bool:
        """True if another fault, or the order of a launcher or of a person, is the cause."""
        return self.explicit is not None and self.explicit.role == "cascade"

    @property
    def blames_node(self) -> bool:
        """True if its node is to be avoided."""
        return self.explicit is not None and self.explicit.restart == "avoid node"

    @property
    def is_own(self) -> bool:
        """True if it counts as a death of the rank's own: by an exception, a signal or an exit. Not so: a symptom, an
        order of a scheduler, a lost node, and what storage refused."""
        if self.cause in ("lost node", "unknown") or self.is_symptom or self.because in _ORDERS:
            return False
        return self.what.rpartition(".")[2] not in _STORAGE_TYPES

    def to_bytes(self) -> bytes:
        """Return the document of the note."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> FaultNote:
        """Return the note in a document of `to_bytes`. Raises `WireError`."""
        found: FaultNote = from_plain(cls, loads(data, kind=_KIND, supported=_VERSION), "the note of a fault")
        return found


def explained(note: FaultNote, table: FaultTable | None = None) -> FaultNote:
    """Return the note with what the ``table`` (default: the library's own) says of it."""
    rows = table or fault_table()
    if note.cause == "exit":
        status = note.what.removeprefix("status ")
        found = rows.explain(note.text, exit=int(status) if status.isdigit() else None, died=True)
    elif note.cause == "out of memory" and note.what.startswith("SIG"):
        found = rows.explain(f"{note.cause}: {note.evidence}", died=True)
    elif note.cause == "signal":
        found = rows.explain(note.evidence, signal=note.what, died=True)
    else:
        found = None if note.cause in ("lost node", "hang") else rows.explain(note.evidence, died=True)
    return replace(note, explicit=found)


def cut_off(text: object) -> str:
    """Return evidence as one text of a bounded length."""
    found = str(text)
    return found if len(found) <= _MOST_CHARACTERS else found[: _MOST_CHARACTERS - 1] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that ended an attempt, and what the next attempt lost by it."""

    first: FaultNote
    """The note of the first cause."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase (`PHASES`) → seconds, as far as they are known."""
    step: Count = 0
    """The optimizer step that the next attempt went back to."""
    steps_again: Count = 0
    """Finished steps that are done again."""
    rows_again: Count = 0
    """Rows of these steps, on all ranks; an average over the steps of the attempt."""
    tier: Tier = "nothing"
    """Where the next attempt read its state."""
    bytes: Count = 0
    """The bytes of tensors that rank 0 read."""
    deaths: Count = 0
    """How many deaths in a row, this one included, were without progress; 0: it does not count."""

    def to_plain(self) -> dict[str, Any]:
        """Return JSON-able values, as ``lakeckpt faults --json`` prints them."""
        note = self.first
        return {
            "attempt": note.attempt,
            "cause": note.cause,
            "what": note.what,
            "text": note.text,
            "explicit": None if note.explicit is None else to_plain(note.explicit),
            "rank": note.rank,
            "node": note.node,
            "step": note.step,
            "at": note.at_s,
            "doing": note.phase,
            "micro_batch": None if note.batch is None else to_plain(note.batch),
            "phases": {name: round(self.phases[name], 3) for name in PHASES if name in self.phases},
            "back_to": self.step,
            "steps_again": self.steps_again,
            "rows_again": self.rows_again,
            "tier": self.tier,
            "bytes": self.bytes,
            "deaths": self.deaths,
        }


def first_cause(notes: Collection[FaultNote], *, missing: Sequence[int] = ()) -> FaultNote:
    """Return the note of the fault that ended an attempt, from the ``notes`` of its ranks (at least one).

    Causes of a rank's own come first, the earliest of them; then a lost node, if ranks are ``missing`` of whom no node
    knows anything; then deaths without a reason, signals of the launcher, and symptoms.
    """
    first = min(notes, key=lambda note: (_order(note), note.at_s, note.rank))
    if missing and not first.is_own:
        earliest = min(notes, key=lambda note: (note.at_s, note.rank))
        return FaultNote(
            attempt=first.attempt,
            rank=missing[0],
            world=first.world,
            node="",
            at_s=earliest.at_s,
            cause="lost node",
            text=f"no node knows anything of {len(missing)} ranks. First symptom on rank {earliest.rank}: "
            f"{cut_off(earliest.text or earliest.name)}",
            step=first.step,
            begun=first.begun,
            rows=first.rows,
            step_s=first.step_s,
            stalled_s=first.stalled_s,
        )
    return first


def _order(note: FaultNote) -> int:
    if note.is_own:
        return 0
    if note.cause == "signal":
        return 2
    return 3 if note.is_symptom else 1


def notes_to_text(notes: Iterable[FaultNote]) -> str:
    """Return the notes of one node as a text for rank 0."""
    return dumps(to_plain(tuple(notes), tuple[FaultNote, ...]), kind=_NOTES, version=_VERSION).hex()


def notes_from_text(text: str) -> tuple[FaultNote, ...]:
    """Return what `notes_to_text` was given."""
    plain = loads(bytes.fromhex(text), kind=_NOTES, supported=_VERSION)
    found: tuple[FaultNote, ...] = from_plain(tuple[FaultNote, ...], plain, "the notes of a node")
    return found

"""What does an audit say?  Values with counts, findings that name rows, doubts, and what was trusted.

Every row of an epoch is in exactly one count of its `EpochAudit`; the constructor holds that. A report has one of three
verdicts:

* ``"not proved"``: a row counted twice or not at all (``findings``), or something that a proof needs is missing
  (``doubts``), as where something seems to read ahead of the training loop;
* ``"delivered"``: every row was delivered exactly once, and that steps used it is inferred, for some (``inferred``);
* ``"proved"``: every row was used exactly once, as the training loop stated by ``step(batch)``.

Imports without torch; knows neither storage nor the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.rows import GroupRows

__all__ = [
    "AuditReport",
    "Branch",
    "EpochAudit",
    "EpochStatus",
    "Finding",
    "FindingKind",
    "ReaderAudit",
    "SkippedRows",
    "Verdict",
]

Verdict = Literal["proved", "delivered", "not proved"]
EpochStatus = Literal["complete", "in progress", "left behind", "given up", "carried over"]
FindingKind = Literal["repeated", "lost", "again"]
_EXIT = {"proved": 0, "not proved": 1, "delivered": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """The rows of one epoch, each counted in one place: ``rows`` is the sum of all other counts but ``surplus``."""

    epoch: int
    status: EpochStatus
    """Left behind: begun, and the reader has gone back to an earlier epoch since. Given up: its table version was gone
    in its midst, and the user had said to go on with the next one. Carried over: what is ``left`` was found in another
    version of the table, and is what the next entry of the same epoch counts."""
    rows: int
    once: int
    repeated: int
    """Rows consumed more than once."""
    again: int
    """Rows consumed once that the newest state would read again."""
    surplus: int
    """How many times too many rows were consumed, over all rows."""
    lost: int
    """Rows that were not consumed and never will be."""
    skipped: int
    """Rows that were left out because they could not be read (``on_bad_row_group="skip"``), when their turn came."""
    dropped: int
    """Rows left out on purpose: by ``tail="drop"``, or with the rest of an epoch that was given up."""
    left: int
    """Rows still to come."""
    before: int
    """Rows consumed before the ledger begins, by the word of the reader's first state."""

    def __post_init__(self) -> None:
        total = self.once + self.repeated + self.again + self.lost + self.skipped + self.dropped + self.left
        total += self.before
        assert total == self.rows, f"epoch {self.epoch}: {total} of {self.rows} rows accounted for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows that were not consumed exactly once, and where that came in."""

    kind: FindingKind
    """``again``: the ledger has them as consumed, and the newest state would read them again."""
    reader: str
    epoch: int
    rows: int
    slot: int
    """The checkpoint (its slot in the log) in which it first shows."""
    step: int
    """That checkpoint's optimizer step."""
    attempt: int
    where: Sequence[GroupRows]
    """The rows, by file and row group; empty where the index cannot be read."""
    more: int
    """How many of the rows are not listed in ``where``."""

    @property
    def words(self) -> str:
        """One sentence."""
        what = {
            "repeated": "were consumed more than once",
            "lost": "were never consumed, and are no longer to come",
            "again": "were consumed, and the newest state would read them again",
        }[self.kind]
        return (
            f"epoch {self.epoch} of {self.reader!r}: {self.rows:,} rows {what}; "
            f"first seen in the checkpoint of step {self.step:,} (slot {self.slot}, attempt {self.attempt})"
        )

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "kind": self.kind,
            "reader": self.reader,
            "epoch": self.epoch,
            "rows": self.rows,
            "slot": self.slot,
            "step": self.step,
            "attempt": self.attempt,
            "where": [one.to_plain() for one in self.where],
            "more": self.more,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRows:
    """Rows of one row group that were consumed and had not come, being damaged."""

    epoch: int
    file: str
    row_group: int
    """Its ordinal in the file."""
    rows: int
    reason: str

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderAudit:
    """One reader of the run."""

    name: str
    table: str
    """Digest of the pinned table."""
    tail: str
    endless: bool
    topologies: tuple[tuple[int, int, int], ...]
    """(lanes, batch size, ranks), in the order in which they were used."""
    epochs: tuple[EpochAudit, ...]
    findings: tuple[Finding, ...]
    doubts: tuple[str, ...]
    notes: tuple[str, ...] = ()
    skips: tuple[SkippedRows, ...] = ()
    """What could not be read, by row group."""
    inferred: str = ""
    """How many attempts did not state which rows their steps used, so that it is inferred; empty: none."""

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        epochs = [{name: getattr(epoch, name) for name in EpochAudit.__slots__} for epoch in self.epochs]
        return {
            "name": self.name,
            "table": self.table,
            "tail": self.tail,
            "endless": self.endless,
            "topologies": [list(one) for one in self.topologies],
            "epochs": epochs,
            "findings": [one.to_plain() for one in self.findings],
            "doubts": list(self.doubts),
            "notes": list(self.notes),
            "skips": [one.to_plain() for one in self.skips],
            "inferred": self.inferred,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Checkpoints of one attempt that are not in the history: their work was rolled back."""

    attempt: int
    parent: int | None
    """The slot of the checkpoint from which the branch left the history, or another branch."""
    slots: tuple[int, ...]
    last_step: int
    rows: int
    """Rows that it had consumed, over all readers: they do not count."""

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "attempt": self.attempt,
            "parent": self.parent,
            "slots": list(self.slots),
            "last_step": self.last_step,
            "rows": self.rows,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the ledger of a run proves."""

    run: str
    step: int
    """Optimizer steps of the history."""
    slot: int | None
    """The newest checkpoint of the history; None where there is none."""
    checkpoints: int
    """How many checkpoints the history has."""
    attempts: int
    readers: tuple[ReaderAudit, ...]
    branches: tuple[Branch, ...]
    doubts: tuple[str, ...]
    """Why a proof is not possible, beside those of the readers."""
    notes: tuple[str, ...]
    """What was seen and does not matter to the proof."""
    trusted: tuple[str, ...]
    """What the proof rests on."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all readers."""
        return tuple(finding for reader in self.readers for finding in reader.findings)

    @property
    def every_doubt(self) -> tuple[str, ...]:
        """Those of the run and of all readers."""
        return (*self.doubts, *(f"reader {one.name!r}: {text}" for one in self.readers for text in one.doubts))

    @property
    def verdict(self) -> Verdict:
        """See above."""
        if self.findings or self.every_doubt:
            return "not proved"
        return "delivered" if any(one.inferred for one in self.readers) else "proved"

    @property
    def exactly_once(self) -> bool:
        """Whether it is proved."""
        return self.verdict == "proved"

    @property
    def exit_status(self) -> int:
        """0 proved, 1 not proved, 3 proved of what was delivered."""
        return _EXIT[self.verdict]

    def _sum(self, name: str) -> int:
        return sum(getattr(epoch, name) for reader in self.readers for epoch in reader.epochs)

    @property
    def lost(self) -> int:
        """Rows lost, over all readers and epochs."""
        return self._sum("lost")

    @property
    def repeated(self) -> int:
        """Rows repeated, over all readers and epochs."""
        return self._sum("repeated")

    @property
    def surplus(self) -> int:
        """How many times too many rows were consumed, over all readers and epochs."""
        return self._sum("surplus")

    @property
    def again(self) -> int:
        """Rows that would be read again, over all readers and epochs."""
        return self._sum("again")

    @property
    def skipped(self) -> int:
        """Rows left out because they could not be read, over all readers and epochs."""
        return self._sum("skipped")

    @property
    def words(self) -> str:
        """The verdict in one line."""
        done = f"{self.checkpoints:,} checkpoints up to step {self.step:,}"
        if self.verdict != "not proved":
            dropped = f", {self._sum('dropped'):,} dropped on purpose" if self._sum("dropped") else ""
            skipped = f", {self.skipped:,} SKIPPED because they could not be read" if self.skipped else ""
            counted = "counted" if self.verdict == "proved" else "were delivered"
            return f"{done}: {self._sum('once'):,} rows {counted} exactly once, 0 lost, 0 repeated{dropped}{skipped}"
        if self.findings:
            again = f", {self.again:,} more to be read again" if self.again else ""
            return f"{done}: {self.lost:,} rows lost, {self.repeated:,} repeated{again}"
        return f"{done}: no row is known to be lost or repeated, but {self.every_doubt[0]}"

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "run": self.run,
            "verdict": self.verdict,
            "exactly_once": self.exactly_once,
            "words": self.words,
            "step": self.step,
            "slot": self.slot,
            "checkpoints": self.checkpoints,
            "attempts": self.attempts,
            "lost": self.lost,
            "repeated": self.repeated,
            "surplus": self.surplus,
            "again": self.again,
            "skipped": self.skipped,
            "dropped": self._sum("dropped"),
            "readers": [reader.to_plain() for reader in self.readers],
            "branches": [branch.to_plain() for branch in self.branches],
            "doubts": list(self.every_doubt),
            "notes": list(self.notes),
            "trusted": list(self.trusted),
        }

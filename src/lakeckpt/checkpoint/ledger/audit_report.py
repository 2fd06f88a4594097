"""This module holds the values of an audit's report: counts, findings that name rows, and reasons against a proof.

Every row of an epoch is in exactly one count of its `EpochAudit`; the constructor checks this. A report has one of
five verdicts, the first of these that holds:

* ``"not proved"``: a row was counted twice or not at all (``findings``), or a proof is impossible (``doubts``), for
  example because something seems to read ahead of the training loop;
* ``"from step"``: the rows of the first steps were not recorded (``from_step``), and all later rows are proved;
* ``"delivered"``: every row was delivered exactly once, and it is inferred that steps used some of them (``inferred``);
* ``"except"``: every row was used exactly once, except for rows that are excluded on record;
* ``"proved"``: every row was used exactly once, as the training loop stated by ``step(batch)``.

The module never imports torch, and uses neither storage nor the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from lakeckpt.checkpoint.consumed.rows import GroupRows
from lakeckpt.checkpoint.format.manifest import ExcludedFor

__all__ = [
    "EXIT_STATUS",
    "AuditReport",
    "Branch",
    "EpochAudit",
    "EpochStatus",
    "ExcludedRows",
    "Finding",
    "FindingKind",
    "ReaderAudit",
    "Verdict",
    "plain_of",
]

Verdict = Literal["proved", "except", "delivered", "from step", "not proved"]
EpochStatus = Literal["complete", "in progress", "left behind", "skipped", "carried over"]
FindingKind = Literal["repeated", "lost", "again"]
EXIT_STATUS: dict[Verdict, int] = {"proved": 0, "except": 0, "delivered": 3, "from step": 3, "not proved": 1}
"""The exit status of ``lakeckpt audit`` for each verdict. 2: the audit failed."""
_FOUND = {
    "repeated": "were consumed more than once",
    "lost": "were never consumed, and are no longer to come",
    "again": "were consumed, and the newest state would read them again",
}


def plain_of(value: Any) -> Any:
    """Return JSON-able values: for a dataclass its fields, or the result of its ``to_plain``."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if is_dataclass(value):
        return {one.name: plain_of(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain_of(one) for one in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """The rows of one epoch, each counted in one place: ``rows`` is the sum of all other counts but ``surplus``."""

    epoch: int
    status: EpochStatus
    """"left behind": the epoch was begun, and the reader has gone back to an earlier epoch since. "skipped": the rest
    was skipped, because the table version was gone and the user had chosen to go on with the next epoch. "carried
    over": the rows in ``left`` were found in another version of the table, and the next entry of the same epoch counts
    them; of a tranche of a growing table, the next epoch."""
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
    dropped: int
    """Rows skipped on purpose: by ``drop_last=True``, or because the rest of the epoch was skipped."""
    left: int
    """Rows that are not consumed yet."""
    before: int
    """Rows that the reader's first state claims as consumed before the record begins."""
    excluded: int = 0
    """Rows consumed once that trained nothing, on record. Excluded row groups of the table are not in ``rows``."""

    def __post_init__(self) -> None:
        total = self.once + self.repeated + self.again + self.lost + self.dropped + self.left + self.before
        total += self.excluded
        assert total == self.rows, f"epoch {self.epoch}: {total} of {self.rows} rows accounted for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows that were not consumed exactly once, and the first checkpoint that shows it."""

    kind: FindingKind
    """``again``: the rows are recorded as consumed, and the newest state would read them again."""
    reader: str
    epoch: int
    rows: int
    slot: int
    """The checkpoint's slot in the log."""
    step: int
    """The checkpoint's optimizer step."""
    attempt: int
    where: Sequence[GroupRows]
    """The rows, by file and row group; empty if the index cannot be read."""
    more: int
    """How many of the rows are not listed in ``where``."""

    @property
    def words(self) -> str:
        """The finding as one sentence."""
        return (
            f"epoch {self.epoch} of {self.reader!r}: {self.rows:,} rows {_FOUND[self.kind]}; "
            f"first seen in the checkpoint of step {self.step:,} (slot {self.slot}, attempt {self.attempt})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedRows:
    """Rows of one row group that trained nothing in an epoch, and why."""

    epoch: int
    reason: ExcludedFor
    file: str
    """Empty if the rows cannot be named: packed sequences, or rows of a table whose index cannot be read."""
    row_group: int
    """Its ordinal in the file; -1 if the rows cannot be named."""
    rows: int
    """"damaged": the rows of the row group that had not been consumed before; this includes rows that a filter would
    have dropped. Else: the rows (packed: sequences) that the reader consumed."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Half-open, in the row group, as `GroupRows` counts them; empty: the whole row group, or not known."""
    how_counted: str = ""
    """As in `GroupRows`."""
    step: int | None = None
    """The optimizer step with which they count as consumed; None: they were never delivered."""
    rank: int | None = None
    """The data-parallel rank to which they were dealt; None: they were never delivered."""
    steps: tuple[int, int] | None = None
    """The optimizer steps of an abandoned history that had used them, half-open; None: no step had."""

    @property
    def words(self) -> str:
        """The rows as one line."""
        where = f" of row group {self.row_group} of {self.file!r}" if self.file else ""
        ranges = ", ".join(f"{start:,}–{stop - 1:,}" for start, stop in self.ranges[:8])
        more = f" ({ranges}{', …' if len(self.ranges) > 8 else ''}){self.how_counted}" if ranges else ""
        since = "" if self.step is None else f", before or at step {self.step:,} on rank {self.rank}"
        if self.steps is not None:
            first, last = self.steps[0], self.steps[1] - 1
            had = f"step {first:,}" if first == last else f"the steps {first:,} to {last:,}"
            since = f", before step {self.step:,}; {had} of an abandoned history had used them"
        rows = f"{self.rows:,} row{'' if self.rows == 1 else 's'}"
        return f"{self.reason}: {rows}{where}{more} in epoch {self.epoch}{since}"


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
    excluded: tuple[ExcludedRows, ...] = ()
    """The excluded rows, by epoch, step and row group."""
    counted: str = "row"
    """The unit of its epochs: row, packed "sequence", or "window" of whole documents that are packed together."""
    batch_of: str = "row"
    """The unit of its batches: row, "sequence", or "token" of texts that are tokenized where they are read."""
    inferred: str = ""
    """How many attempts did not state which rows their steps used, so that this is inferred; empty if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Checkpoints of one attempt that are not in the history: their work was rolled back."""

    attempt: int
    parent: int | None
    """The slot of the checkpoint from which the branch left the history, or another branch."""
    slots: tuple[int, ...]
    last_step: int
    rows: int
    """Rows that the branch had consumed, over all readers. They do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit."""

    run: str
    step: int
    """Optimizer steps of the history."""
    slot: int | None
    """The newest checkpoint of the history; None if there is none."""
    checkpoints: int
    """How many checkpoints the history has."""
    attempts: int
    readers: tuple[ReaderAudit, ...]
    branches: tuple[Branch, ...]
    doubts: tuple[str, ...]
    """Reasons against a proof, beside those of the readers."""
    notes: tuple[str, ...]
    """Observations that do not matter to the proof."""
    trusted: tuple[str, ...]
    """The assumptions of the proof."""
    from_step: int = 0
    """The first so many optimizer steps did not record which rows they used."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all readers."""
        return tuple(finding for reader in self.readers for finding in reader.findings)

    @property
    def every_doubt(self) -> tuple[str, ...]:
        """The reasons against a proof, of the run and of all readers."""
        return (*self.doubts, *(f"reader {one.name!r}: {text}" for one in self.readers for text in one.doubts))

    @property
    def verdict(self) -> Verdict:
        """See the module."""
        if self.findings or self.every_doubt:
            return "not proved"
        if self.from_step:
            return "from step"
        if any(one.inferred for one in self.readers):
            return "delivered"
        return "except" if self.excluded else "proved"

    @property
    def headline(self) -> str:
        """The verdict for people, such as ``PROVED EXCEPT 8 rows``."""
        if self.verdict == "not proved":
            return "NOT PROVED"
        of = " OF WHAT WAS DELIVERED" if any(one.inferred for one in self.readers) else ""
        since = f" FROM STEP {self.from_step:,}" if self.from_step else ""
        excluded = f" EXCEPT {self._count(self.excluded)}" if self.excluded else ""
        return f"PROVED{of}{since}{excluded}"

    @property
    def exactly_once(self) -> bool:
        """True if every row that is not excluded is proved to have counted exactly once."""
        return self.exit_status == 0

    @property
    def exit_status(self) -> int:
        """See `EXIT_STATUS`."""
        return EXIT_STATUS[self.verdict]

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
    def excluded(self) -> int:
        """Excluded rows, over all readers and epochs: those that trained nothing, and those of excluded row groups."""
        never = sum(one.rows for reader in self.readers for one in reader.excluded if one.step is None)
        return self._sum("excluded") + never

    def _sum(self, name: str) -> int:
        return sum(getattr(epoch, name) for reader in self.readers for epoch in reader.epochs)

    @property
    def words(self) -> str:
        """The verdict in one line."""
        done = f"{self.checkpoints:,} checkpoint{'' if self.checkpoints == 1 else 's'} up to step {self.step:,}"
        if self.verdict != "not proved":
            dropped = f", {self._sum('dropped'):,} dropped on purpose" if self._sum("dropped") else ""
            reasons = sorted({one.reason for reader in self.readers for one in reader.excluded})
            excluded = f", {self.excluded:,} excluded ({', '.join(reasons)})" if self.excluded else ""
            counted = "were delivered" if any(one.inferred for one in self.readers) else "counted"
            since = f"; the rows of the first {self.from_step:,} steps were not recorded" if self.from_step else ""
            once = f"{self._count(self._sum('once'))} {counted} exactly once"
            return f"{done}: {once}, 0 lost, 0 repeated{dropped}{excluded}{since}{self._unread()}"
        if self.findings:
            again = f", {self.again:,} more to be read again" if self.again else ""
            return f"{done}: {self._count(self.lost)} lost, {self.repeated:,} repeated{again}"
        return f"{done}: no row is known to be lost or repeated, but {self.every_doubt[0]}"

    def _count(self, number: int) -> str:
        """Return ``number`` with the name of what all readers count; rows, if they count several things."""
        names = {one.counted for one in self.readers}
        name = names.pop() if len(names) == 1 else "row"
        return f"{number:,} {name}{'' if number == 1 else 's'}"

    def _unread(self) -> str:
        """Name the readers of which no row was read, as a small source of a mixture may be, with their rows."""
        unread = [one for one in self.readers if one.epochs and all(epoch.left == epoch.rows for epoch in one.epochs)]
        return "".join(f"; {one.epochs[0].left:,} rows of {one.name!r} are to come, none was read" for one in unread)

    def to_plain(self) -> dict[str, object]:
        """JSON-able values: all fields, and the sums over readers."""
        sums = ("verdict", "headline", "exactly_once", "words", "lost", "repeated", "surplus", "again", "excluded")
        return {
            **{one.name: plain_of(getattr(self, one.name)) for one in fields(self)},
            **{name: getattr(self, name) for name in sums},
            "dropped": self._sum("dropped"),
            "doubts": list(self.every_doubt),
        }

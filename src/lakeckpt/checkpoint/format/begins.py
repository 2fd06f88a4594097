"""This module defines the entries by which an attempt takes a run over, before its first commit.

A `Begin` claims the run: its slot is the attempt's number and fencing token. A `Restored` says which checkpoint the
history goes on from: an attempt writes it when it has restored that checkpoint, and ``lakeckpt rollback`` writes it as
an order. An attempt that died between the two entries has changed nothing of the history.

Imports without torch. Never touches storage: `lakeckpt.checkpoint.persist.log` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from lakeckpt.wire.documents import Count, Positive, as_row

__all__ = ["Begin", "CutId", "Facts", "Restored", "said_of"]

Facts = Mapping[str, Mapping[str, str]]
"""Reader → what a script gave to it → a text, for people."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class CutId:
    """A cut: the state after optimizer step ``step``, as ``attempt`` had it. An attempt that goes on from a cut of a
    step may have another cut of that step."""

    attempt: Count
    step: Count

    @property
    def age(self) -> tuple[int, int]:
        """What orders cuts from old to new."""
        return self.step, self.attempt

    def to_text(self) -> str:
        """For messages between ranks.

        >>> CutId(attempt=3, step=70).to_text()
        '3:70'
        """
        return f"{self.attempt}:{self.step}"

    @classmethod
    def from_text(cls, text: str) -> CutId:
        """Return the cut from a text of `to_text`."""
        attempt, _, step = text.partition(":")
        return cls(attempt=int(attempt), step=int(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An attempt claims the run."""

    run: str
    slot: Count
    world_size: Positive
    library: str
    created_s: float
    """When, in seconds since 1970, by the clock of rank 0's machine."""
    write_id: str
    """Unique to this put, so that an entry can be recognised as our own after the answer of a store was lost."""
    host: str = ""
    """The machine of rank 0."""
    pid: Count = 0
    """The process of rank 0 there."""
    facts: Facts = field(default_factory=dict)
    """What its script gave to readers, by which the next attempt says what it has otherwise."""

    @property
    def attempt(self) -> int:
        """The attempt's number: its slot."""
        return self.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The history goes on from a checkpoint. The first attempt of a run restores nothing and writes no such entry."""

    run: str
    slot: Count
    attempt: Count | None
    """The attempt that restored it; None: ``lakeckpt rollback`` ordered it, and nobody has restored it yet."""
    restored: Count | None
    """The slot of the checkpoint; None: there was none."""
    library: str
    created_s: float
    write_id: str
    host: str = ""
    pid: Count = 0
    skipped: Mapping[str, Count] = field(default_factory=dict)
    """reader → the epoch whose rest it skips, because the table version is gone."""
    captured: CutId | None = None
    """The cut in host memory that it went on from, if that was not older than ``restored``."""
    rolled_back_to: Count | None = None
    """The step of the roll-back that this entry obeys (``restore(step=…)``) or orders (``lakeckpt rollback``)."""

    @classmethod
    def by_first(cls, begin: Begin) -> Restored:
        """Return the entry that the first attempt of a run would write, which restores nothing."""
        return cls(
            run=begin.run,
            slot=begin.slot,
            attempt=begin.attempt,
            restored=None,
            library=begin.library,
            created_s=begin.created_s,
            write_id=begin.write_id,
        )


def said_of(entry: Begin | Restored) -> str:
    """Return the process that wrote the entry, and when, for messages.

    >>> said_of(Begin(run="r", slot=4, world_size=1, library="", created_s=0.0, write_id="", host="node-3", pid=71))
    'attempt 4 (process 71 on node-3, 1970-01-01 00:00:00 UTC)'
    """
    when = datetime.fromtimestamp(entry.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    who = f"a roll-back to step {entry.rolled_back_to}" if isinstance(entry, Restored) else f"attempt {entry.attempt}"
    where = f"process {entry.pid} on {entry.host}, " if entry.host else ""
    return f"{who} ({where}{when})"

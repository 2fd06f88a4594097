"""This module defines the entries by which an attempt takes a run over, before its first commit.

A `Begin` claims the run: its slot is the attempt's number and fencing token. A `Restored` says which checkpoint the
history goes on from: an attempt writes it when it has restored that checkpoint, and ``lakeckpt rollback`` writes it as
an order. An attempt that died between the two entries has changed nothing of the history.

Imports without torch. Never touches storage: `lakeckpt.checkpoint.log` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from lakeckpt.checkpoint.fields import fields_of, number, taken
from lakeckpt.errors import WireDamaged

__all__ = ["Begin", "Captured", "Restored", "begin_from_plain", "restored_from_plain", "said_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A cut in host memory: the generation of ``step`` that ``attempt`` captured."""

    attempt: int
    step: int

    def to_text(self) -> str:
        """For messages between ranks.

        >>> Captured(attempt=3, step=70).to_text()
        '3:70'
        """
        return f"{self.attempt}:{self.step}"

    @classmethod
    def from_text(cls, text: str) -> Captured:
        """What `to_text` has said."""
        attempt, _, step = text.partition(":")
        return cls(attempt=int(attempt), step=int(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An attempt claims the run."""

    run: str
    slot: int
    world_size: int
    library: str
    created_s: float
    """When, in seconds since 1970, by the clock of rank 0's machine."""
    write_id: str
    """Unique to this put: tells our entry from another's where the answer of a store was lost."""
    host: str = ""
    """The machine of rank 0."""
    pid: int = 0
    """The process of rank 0 there."""

    @property
    def attempt(self) -> int:
        """The attempt's number: its slot."""
        return self.slot

    def to_plain(self) -> dict[str, object]:
        """The fields of its document."""
        return {
            "entry": "begin",
            "run": self.run,
            "slot": self.slot,
            "world_size": self.world_size,
            "library": self.library,
            "created_s": self.created_s,
            "write_id": self.write_id,
            "host": self.host,
            "pid": self.pid,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The history goes on from a checkpoint. The first attempt of a run restores nothing and writes no such entry."""

    run: str
    slot: int
    attempt: int | None
    """The attempt that restored it; None: ``lakeckpt rollback`` ordered it, and nobody has restored it yet."""
    restored: int | None
    """The slot of the checkpoint, or None where there was none."""
    library: str
    created_s: float
    write_id: str
    host: str = ""
    pid: int = 0
    given_up: Mapping[str, int] = field(default_factory=dict)
    """reader → the epoch of which it gives the rest up, as its table version is gone."""
    captured: Captured | None = None
    """The cut in host memory that it went on from, where that was newer than ``restored``, or the same."""
    rolled_back_to: int | None = None
    """The step of the roll-back that this entry obeys (``restore(step=…)``) or orders (``lakeckpt rollback``)."""

    @classmethod
    def by_first(cls, begin: Begin) -> Restored:
        """What the first attempt of a run would have written: it restored nothing."""
        return cls(
            run=begin.run,
            slot=begin.slot,
            attempt=begin.attempt,
            restored=None,
            library=begin.library,
            created_s=begin.created_s,
            write_id=begin.write_id,
        )

    def to_plain(self) -> dict[str, object]:
        """The fields of its document."""
        return {
            "entry": "restored",
            "run": self.run,
            "slot": self.slot,
            "attempt": self.attempt,
            "restored": self.restored,
            "library": self.library,
            "created_s": self.created_s,
            "write_id": self.write_id,
            "host": self.host,
            "pid": self.pid,
            **({"given_up": dict(self.given_up)} if self.given_up else {}),
            **({"captured": [self.captured.attempt, self.captured.step]} if self.captured is not None else {}),
            **({"rolled_back_to": self.rolled_back_to} if self.rolled_back_to is not None else {}),
        }


def begin_from_plain(plain: Mapping[str, object]) -> Begin:
    """What `Begin.to_plain` made ``plain`` of; `WireDamaged` where it is none."""
    return Begin(
        run=taken(plain, "run", str),
        slot=number(plain, "slot"),
        world_size=number(plain, "world_size", least=1),
        library=taken(plain, "library", str),
        created_s=taken(plain, "created_s", float),
        write_id=taken(plain, "write_id", str),
        host=taken(plain, "host", str) if "host" in plain else "",
        pid=number(plain, "pid") if "pid" in plain else 0,
    )


def restored_from_plain(plain: Mapping[str, object]) -> Restored:
    """What `Restored.to_plain` made ``plain`` of; `WireDamaged` where it is none."""
    given_up = fields_of(plain.get("given_up", {}), "the epochs that are given up")
    found = Restored(
        run=taken(plain, "run", str),
        slot=number(plain, "slot"),
        attempt=_number_or_none(plain, "attempt"),
        restored=_number_or_none(plain, "restored"),
        library=taken(plain, "library", str),
        created_s=taken(plain, "created_s", float),
        write_id=taken(plain, "write_id", str),
        host=taken(plain, "host", str),
        pid=number(plain, "pid"),
        given_up={str(name): number(given_up, name) for name in given_up},
        captured=None if plain.get("captured") is None else _captured(plain["captured"]),
        rolled_back_to=_number_or_none(plain, "rolled_back_to"),
    )
    if any(one is not None and one >= found.slot for one in (found.attempt, found.restored)):
        raise WireDamaged(
            f"slot {found.slot} names attempt {found.attempt} and the checkpoint in slot {found.restored}, not before "
            "it"
        )
    return found


def _number_or_none(plain: Mapping[str, object], name: str) -> int | None:
    return None if plain.get(name) is None else number(plain, name)


def _captured(row: object) -> Captured:
    if not isinstance(row, list) or [type(value) for value in row] != [int, int] or min(row) < 0:
        raise WireDamaged(f"a cut in memory is [attempt, step], got {row!r:.80}")
    return Captured(attempt=row[0], step=row[1])


def said_of(entry: Begin | Restored) -> str:
    """Who wrote the entry, and when, for messages.

    >>> said_of(Begin(run="r", slot=4, world_size=1, library="", created_s=0.0, write_id="", host="node-3", pid=71))
    'attempt 4 (process 71 on node-3, 1970-01-01 00:00:00 UTC)'
    """
    when = datetime.fromtimestamp(entry.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    who = f"a roll-back to step {entry.rolled_back_to}" if isinstance(entry, Restored) else f"attempt {entry.attempt}"
    where = f"process {entry.pid} on {entry.host}, " if entry.host else ""
    return f"{who} ({where}{when})"

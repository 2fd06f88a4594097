"""This module reads what a record of the log says of one reader, or of one source of a mixture, as values.

A mixture has one record. The consumption of each of its sources follows from the states in it
(`lakeckpt.core.state.State.of`), so the ledger accounts for each source as for a reader of its own. States are read
when they are first asked for; `StateError` comes then, if one cannot be used.

The module is pure. It never imports torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.cached import cached_property
from lakeckpt.checkpoint.format.manifest import Excluded, Manifest, ReaderRecord, Stretch
from lakeckpt.core.consumption import consumption
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import State
from lakeckpt.errors import StateMismatch

__all__ = ["Records", "SourceRecord", "SourceStretch", "by_source", "readers_in"]


@dataclass(frozen=True, kw_only=True)
class SourceStretch:
    """The consumption of one source between two states."""

    begin: State
    end: State
    recorded: Mapping[int, Intervals] | None
    """epoch → the positions that are recorded; None: of a mixture, none are."""
    record: Stretch

    @cached_property
    def consumed(self) -> Mapping[int, Intervals]:
        """epoch → positions: as they are recorded, or as they follow from the states."""
        if self.recorded is None:
            with contextlib.suppress(StateMismatch):
                return consumption(self.begin, self.end)
        return self.recorded or {}


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One record of a reader, or the part of it that is about ``source``, the name of a source of a mixture."""

    record: ReaderRecord
    source: str | None
    states: _States
    """The states of the record."""

    @cached_property
    def state(self) -> State:
        """The state at the cut."""
        return self._seen(self.states.state)

    @cached_property
    def stretches(self) -> tuple[SourceStretch, ...]:
        """The stretches consumed since the parent, in order."""
        pairs = zip(self.record.stretches, self.states.pairs, strict=True)
        return tuple(
            SourceStretch(
                begin=self._seen(begin),
                end=self._seen(end),
                recorded=one.consumed if self.source is None else None,
                record=one,
            )
            for one, (begin, end) in pairs
            if self.source is None or (begin.mixing is not None and self.source in begin.mixing.names)
        )

    @property
    def excluded(self) -> Sequence[Excluded]:
        """The rows that were consumed since the parent and trained nothing."""
        return [one for one in self.record.excluded if one.source == self.source]

    def _seen(self, state: State) -> State:
        if self.source is None or state.mixing is None:
            return state
        return state.of(state.mixing.names.index(self.source))


class _States:
    """The states of one record, for all sources of a mixture."""

    def __init__(self, record: ReaderRecord) -> None:
        self._record = record

    @cached_property
    def state(self) -> State:
        return State.from_plain(self._record.state)

    @cached_property
    def pairs(self) -> list[tuple[State, State]]:
        return [(State.from_plain(one.begin), State.from_plain(one.end)) for one in self._record.stretches]


Records = Sequence[tuple[Manifest, SourceRecord]]
"""The records of one reader, or of one source, each with its manifest, oldest first."""


def by_source(name: str, record: ReaderRecord) -> dict[str, SourceRecord]:
    """Return what ``record`` says of reader ``name``; of a mixture, of each source, as "name.source"."""
    states, mixing = _States(record), record.state.get("mixing")
    if mixing is None:
        return {name: SourceRecord(record=record, source=None, states=states)}
    return {f"{name}.{one}": SourceRecord(record=record, source=one, states=states) for one in mixing[0]}


def readers_in(manifest: Manifest) -> dict[str, SourceRecord]:
    """Return what ``manifest`` says of each reader, and of each source of a mixture, in the order of their names."""
    found: dict[str, SourceRecord] = {}
    for name, record in sorted(manifest.readers.items()):
        found |= by_source(name, record)
    return found

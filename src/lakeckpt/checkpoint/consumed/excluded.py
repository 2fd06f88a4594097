"""This module records excluded rows: they count as consumed, and train nothing.

`Opening` is what a reader excludes where it goes on from a checkpoint: row groups that cannot be read, or rows that a
person or a crash loop has excluded. Every rank excludes the same, and it enters the record of the first step.

What the training loop skips is known to one rank alone. Each rank has the rows of its own micro-batches in its pending
records. Its part of a save holds all of them since the newest commit that it knows. The committer takes those of the
steps that its commit records. Ranks that read the same rows report the same, which counts once.

The module is pure, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lakeckpt.checkpoint.consumed.exclusions import without_exclusions
from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.manifest import Excluded, ExcludedFor, Exclusion, ReaderRecord
from lakeckpt.core.consumption import consumption
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixture import excluding
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.values import pack, unpack

__all__ = ["Change", "Opening", "begun_at", "excluded_of", "going_on_with", "with_excluded"]

_Excluded = Mapping[str, tuple[Excluded, ...]]


Change = tuple[Identity, Mapping[int, Intervals]]
"""The order of the epochs that begin later, and epoch → the positions that are excluded of those that have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a reader excludes where it goes on from a state."""

    begin: State
    """The state as it was saved; of an epoch of which nothing was read, in the lanes that it gets."""
    end: State
    """The same state without the excluded positions."""
    state: State
    """That state with the orders of epochs that begin later: the reader goes on from it."""
    step: int
    """The optimizer step of the cut."""
    excluded: tuple[Excluded, ...]


def begun_at(plain: Mapping[str, Any], exclusions: Iterable[Exclusion], reader: str, *, step: int) -> Opening:
    """Return how ``reader`` goes on from the state ``plain`` of the whole job, at the cut of optimizer step ``step``,
    without ``exclusions``."""
    begin, end, excluded = without_exclusions(reader, State.from_plain(plain), exclusions, step=step)
    return Opening(begin=begin, end=end, state=end, step=step, excluded=excluded)


def going_on_with(opening: Opening, changes: Mapping[str, Change], *, reason: ExcludedFor) -> Opening:
    """Return how a reader goes on from an ``opening`` if its tables change, too.

    ``changes`` are by source of a mixture; "": of a reader of one table.
    """
    begin = opening.end
    names = [""] if begin.mixing is None else list(begin.mixing.names)
    each = [changes.get(name, (order, {})) for name, order in zip(names, begin.orders, strict=True)]
    positions = [found for _, found in each]
    end = excluding(begin, positions, begin.orders)
    found = [
        Excluded(
            rank=0,
            step=opening.step + 1,
            reason=reason,
            positions=consumption(*(one if name == "" else one.of(at) for one in (begin, end))),
            source=name or None,
        )
        for at, name in enumerate(names)
    ]
    return replace(
        opening,
        end=end,
        state=excluding(begin, positions, [order for order, _ in each]),
        excluded=(*opening.excluded, *(one for one in found if one.positions)),
    )


def excluded_of(readers: Mapping[str, Sequence[PendingRecord]]) -> bytes:
    """Return the report of all that the pending records of ``readers`` exclude; empty if they exclude nothing."""
    found = {name: tuple(each for one in pending for each in one.record.excluded) for name, pending in readers.items()}
    found = {name: each for name, each in found.items() if each}
    return bytes(pack(to_plain(found, _Excluded))) if found else b""


def with_excluded(
    readers: Mapping[str, ReaderRecord], reports: Iterable[bytes], *, after: int, upto: int
) -> dict[str, ReaderRecord]:
    """Return the records of ``readers`` with what all ranks excluded in the steps from ``after`` + 1 to ``upto``."""
    every: dict[str, list[Excluded]] = {name: [] for name in readers}
    for data in filter(None, reports):
        found: _Excluded = from_plain(_Excluded, unpack(data, what="a report"), "the excluded rows of a rank")
        for name, each in found.items():
            every[name] += [one for one in each if after < one.step <= upto and one not in every[name]]
    for of_reader in every.values():
        of_reader.sort(key=lambda one: (one.step, one.rank, one.source or ""))
    return {name: replace(record, excluded=tuple(every[name])) for name, record in readers.items()}

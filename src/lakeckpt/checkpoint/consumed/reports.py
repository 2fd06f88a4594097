"""This module reports what one rank consumed, if that depends on the data, and merges the reports of all ranks.

Then each rank knows the frontiers of its own lanes alone, and its pending records hold *parts* of states
(`lakeckpt.core.state.Held`). The report of a rank lies in its part of the save. It has the frontiers of each state in
these records, and a digest of everything else, which must be equal on all ranks. The committer joins the frontiers of
all ranks into states of the whole job, for the manifest.

Ranks that read the same data, as the stages of one pipeline do, report the same, and count once. The module is pure,
imports without torch and starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lakeckpt.checkpoint.consumed.pending import PendingRecord, positions
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.fields import Digest
from lakeckpt.checkpoint.format.manifest import ReaderRecord
from lakeckpt.core.merge import joined
from lakeckpt.core.state import Held, State, depends_on_data
from lakeckpt.errors import StateError, TrackingError
from lakeckpt.tracking.tally import name_ranks
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["of_all_ranks", "reports_of", "shared_fields"]

_KIND, _VERSION = "value", (1, 0)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The report of a rank on one pending record."""

    first: Count
    step: Count
    shared: Digest
    """The digest of all that the ranks have in common."""
    held: tuple[Held, ...]
    """The frontiers of each state."""


_Reports = tuple[_Report, ...]


def shared_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the plain state of a reader that are the same on all ranks: without frontiers."""
    return {name: value for name, value in state.items() if name != "held"} if depends_on_data(state) else dict(state)


def reports_of(readers: Mapping[str, Sequence[PendingRecord]]) -> dict[str, bytes]:
    """Return reader → the report of its pending records, for those of ``readers`` that depend on the data."""
    return {name: _report_of(pending) for name, pending in readers.items() if depends_on_data(pending[-1].record.state)}


def _report_of(pending: Sequence[PendingRecord]) -> bytes:
    reports = tuple(
        _Report(
            first=one.first,
            step=one.step,
            shared=_shared_digest(one.record),
            held=tuple(_held(state) for state in _states_of(one.record)),
        )
        for one in pending
    )
    return dumps(to_plain(reports, _Reports), kind=_KIND, version=_VERSION, compress=True)


def of_all_ranks(
    name: str, own: Sequence[PendingRecord], reports: Sequence[Mapping[str, bytes]]
) -> tuple[PendingRecord, ...]:
    """Return the ``own`` pending records of reader ``name`` with states of the whole job: as they are in
    lockstep. ``reports`` are those of all ranks (`reports_of`), in the order of ranks.

    Raises `TrackingError`, which names the ranks, if a rank did not report a record or consumed it in other steps,
    if the lanes of a rank are missing, and if two ranks report different frontiers of the same lanes.
    """
    if not depends_on_data(own[-1].record.state):
        return tuple(own)
    every = [
        {(one.first, one.step): one for one in _read(name, rank, one_rank.get(name))}
        for rank, one_rank in enumerate(reports)
    ]
    return tuple(replace(one, record=_merged_record(name, one, every)) for one in own)


def _merged_record(name: str, own: PendingRecord, every: Sequence[Mapping[tuple[int, int], _Report]]) -> ReaderRecord:
    shared, which = _shared_digest(own.record), f"of reader {name!r} between the steps {own.first} and {own.step}"
    chains: dict[tuple[Held, ...], None] = {}
    for rank, reports in enumerate(every):
        one = reports.get((own.first, own.step))
        if one is None or one.shared != shared:
            wrong = "did not report the places" if one is None else "reports places of another order, or of other steps"
            raise TrackingError(f"rank {rank} {wrong} {which}: the ranks are not at one cut")
        chains[one.held] = None
    states = [
        _whole(State.from_plain(state), [chain[at] for chain in chains], which)
        for at, state in enumerate(_states_of(own.record))
    ]
    pairs = zip(states[:-1:2], states[1:-1:2], own.record.stretches, strict=True)
    return replace(
        own.record,
        state=states[-1].to_plain(),
        stretches=tuple(
            replace(one, begin=begin.to_plain(), end=end.to_plain(), consumed=positions(begin, end))
            for begin, end, one in pairs
        ),
    )


def _whole(own: State, held: Sequence[Held], which: str) -> State:
    """Return the state of the whole job at the cut of ``own``; all ranks hold the lanes ``held``."""
    try:
        found = joined(own, dict.fromkeys(held))
    except StateError as error:
        raise TrackingError(f"the places {which}: {error}") from error
    if found.held is not None and not found.is_whole:
        missing = name_ranks(found.held.ranks.complement(found.segment.world_size))
        raise TrackingError(
            f"no rank reported the places {which} that {missing} of {found.segment.world_size} of the reader reads: "
            "let all ranks that read it save into one run"
        )
    return found


def _states_of(record: ReaderRecord) -> list[Mapping[str, Any]]:
    """Return the states in a record, in their order: both ends of each stretch, and the state at the cut."""
    return [state for one in record.stretches for state in (one.begin, one.end)] + [record.state]


def _held(state: Mapping[str, Any]) -> Held:
    held = State.from_plain(state).held
    assert held is not None
    return held


def _shared_digest(record: ReaderRecord) -> bytes:
    shared = [shared_fields(state) for state in _states_of(record)]
    return short_digest(dumps(shared, kind=_KIND, version=_VERSION))


def _read(name: str, rank: int, data: bytes | None) -> _Reports:
    if data is None:
        raise TrackingError(f"rank {rank} did not report its places of reader {name!r}: the ranks are not at one cut")
    found: _Reports = from_plain(
        _Reports, loads(data, kind=_KIND, supported=_VERSION), f"the report of rank {rank} on {name!r}"
    )
    return found

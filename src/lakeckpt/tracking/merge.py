"""How do the ranks' parts of a reader state become the state of the job?

In lockstep every rank's state is already the whole job's: `merge_states` then only proves that all say the same. Where
consumption depends on the data, a rank knows the frontiers of its own lanes alone, and marks its state as its part::

    {…, "part": {"rank": 1, "world_size": 2, "num_lanes": 4, "lanes": [[1, epoch, position, offset], [3, …]]}}

The parts join into one state with ``"lanes"`` of all, each lane exactly once. Never
guesses: a missing rank, a lane that two report or none, and any other field that differs are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plain import integer, integers, listing
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import FORMAT, ReaderState
from lakeckpt.errors import ConfigError, DisagreementError, GapError, OverlapError, StateInvalid
from lakeckpt.tracking.facts import facts_of
from lakeckpt.tracking.tally import Tally

__all__ = ["is_part", "merge_states"]


def is_part(state: object) -> bool:
    """Whether a state is one rank's part of the job's state."""
    return isinstance(state, Mapping) and "part" in state


def merge_states(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states that the ranks of one job gave at one cut, in any order, into the state of the job.

    Whole states (not marked as parts) must all be equal, and give themselves; rank ``i`` is then the ``i``-th of them.
    Those of a `LakeLoader` say of how many ranks they are, save at the end of an epoch.

    Raises `MissingRanksError`, `OverlapError` (a rank or a lane twice), `GapError` (a lane of nobody),
    `DisagreementError` (any other field differs), `StateInvalid` (a malformed state) and `ConfigError` (nothing, or
    parts and whole states mixed).
    """
    parts = _listed(parts)
    marked = [is_part(state) for state in parts]
    if not any(marked):
        _agree(list(enumerate(parts)), world_size=_ranks_of(parts))
        return dict(parts[0])
    if not all(marked):
        raise ConfigError(
            f"state {marked.index(False)} is of the whole job and state {marked.index(True)} is a rank's part: "
            "give the states that the ranks of one job gave at one cut"
        )
    owners = [_Part(state["part"]) for state in parts]
    sizes = {owner.world_size for owner in owners}
    if len(sizes) > 1:
        raise DisagreementError(f"these are parts of jobs of {sorted(sizes)} ranks: give the states of one job")
    common = [{name: value for name, value in state.items() if name != "part"} for state in parts]
    _agree(list(zip([owner.rank for owner in owners], common, strict=True)), world_size=owners[0].world_size)
    lanes = _all_lanes(owners)
    return {**common[0], "num_lanes": owners[0].num_lanes, "lanes": [list(lane) for lane in lanes]}


def _listed(parts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(parts, Mapping) or not isinstance(parts, Iterable):
        raise ConfigError(f"merge_states takes a list of the states of all ranks, got {type(parts).__name__}")
    found = list(parts)
    if not found:
        raise ConfigError("merge_states needs the states of all ranks, got none")
    for rank, state in enumerate(found):
        if not isinstance(state, Mapping):
            raise StateInvalid(f"the state of a rank is a mapping, got {type(state).__name__} as state {rank}")
    return found


def _ranks_of(states: list[Mapping[str, Any]]) -> int:
    """Of how many ranks whole states are. At the end of an epoch others than those that read it may give its state."""
    if states[0].get("format") != FORMAT:
        return len(states)
    state = ReaderState.from_plain(states[0])
    world_size = state.segment.world_size
    if Plan(state).at_end:
        return len(states)
    if len(states) > world_size:
        raise OverlapError(f"{len(states)} states were given, of a job of {world_size} ranks: give one of each rank")
    return world_size


class _Part:
    """The checked mark of a part."""

    __slots__ = ("lanes", "num_lanes", "rank", "world_size")

    def __init__(self, mark: object) -> None:
        if not isinstance(mark, Mapping):
            raise StateInvalid(f"'part' must be a mapping, got {type(mark).__name__}")
        self.rank = integer(mark, "rank")
        self.world_size = integer(mark, "world_size", least=1)
        self.num_lanes = integer(mark, "num_lanes", least=1)
        self.lanes = [integers(entry, "lanes", count=4) for entry in listing(mark, "lanes")]
        if self.rank >= self.world_size or any(lane[0] >= self.num_lanes for lane in self.lanes):
            raise StateInvalid(
                f"a part of rank {self.rank} of {self.world_size} and of {self.num_lanes} lanes holds lanes "
                f"{[lane[0] for lane in self.lanes]}"
            )


def _agree(states: list[tuple[int, Mapping[str, Any]]], *, world_size: int) -> None:
    """Raise unless all ranks are there, once each, with equal states."""
    tallies = []
    for rank, state in states:
        tallies.append(Tally.of_rank(rank, world_size=world_size, facts=facts_of(state)))
    job = tallies[0].merge(*tallies[1:])
    job.settle(agreed=sorted(job.facts))


def _all_lanes(owners: list[_Part]) -> list[tuple[int, ...]]:
    num_lanes = owners[0].num_lanes
    seen: dict[int, int] = {}
    for owner in owners:
        if owner.num_lanes != num_lanes:
            raise GapError(f"rank {owner.rank} has {owner.num_lanes} lanes and rank {owners[0].rank} {num_lanes}")
        for lane, *_ in owner.lanes:
            if lane in seen:
                raise OverlapError(f"lane {lane} is reported by ranks {seen[lane]} and {owner.rank}")
            seen[lane] = owner.rank
    gap = Intervals.of([(lane, lane + 1) for lane in seen]).complement(num_lanes)
    if gap:
        raise GapError(f"of {num_lanes} lanes, no rank reports {gap}")
    return sorted(lane for owner in owners for lane in owner.lanes)

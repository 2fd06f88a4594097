"""This module joins the parts that several ranks have of one state, if consumption depends on the data.

Ranks know the frontiers of their own lanes alone (`lakeckpt.core.state.Held`). Everything else of a state is the same
on all ranks. The module never communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import Held, State, lanes_of
from lakeckpt.errors import StateError, StateMismatch

__all__ = ["joined", "merge", "merge_states"]


def merge(parts: Sequence[State]) -> State:
    """Return the parts of one cut as one state; it is a part, too, if ranks are missing.

    Raises `StateMismatch` if parts are not of one order, segment and step, `StateError` if two hold one rank.
    """
    if not parts:
        raise StateError("there are no parts to merge")
    first = parts[0]
    for part in parts[1:]:
        if lines := _differences(first, part):
            raise StateMismatch(
                f"the part of the ranks {_ranks(part)} is not of one cut with that of the ranks {_ranks(first)}: "
                f"{'; '.join(lines)}. Merge parts that were taken after the same step of the same run"
            )
    return joined(first, [part.held for part in parts if part.held is not None])


def _ranks(state: State) -> Intervals:
    return Intervals.whole(state.segment.world_size) if state.held is None else state.held.ranks


def joined(cut: State, parts: Iterable[Held]) -> State:
    """Return the state at the cut of ``cut``, a part, that holds the lanes of all ``parts``.

    Raises `StateError` if a rank is held twice, or has another number of lanes.
    """
    segment, sources = cut.segment, len(cut.makers)
    done, offsets = (np.full((sources, segment.num_lanes), -1, np.int64) for _ in range(2))
    for held in parts:
        lanes = lanes_of(segment, held.ranks)
        if len(lanes) * sources != len(held.done):
            raise StateError(
                f"the ranks {held.ranks} have {len(lanes) * sources} lanes, and the frontiers of {len(held.done)} were "
                "given"
            )
        if len(twice := lanes[done[0, lanes] >= 0]):
            wrong = _ranks_of(cut, twice)
            raise StateError(f"two parts hold the lanes of the ranks {wrong}: give the part of each rank once")
        done[:, lanes], offsets[:, lanes] = (np.reshape(one, (sources, -1)) for one in (held.done, held.offsets))
    kept = np.flatnonzero(done[0] >= 0)
    found = (tuple(one[:, kept].reshape(-1).tolist()) for one in (done, offsets))
    return replace(cut, held=Held(ranks=_ranks_of(cut, kept), done=next(found), offsets=next(found)))


def _ranks_of(cut: State, lanes: Any) -> Intervals:
    """Return the ranks that read ``lanes``."""
    segment = cut.segment
    reads = np.unique((lanes - segment.micro_batch) % segment.world_size).tolist()
    return Intervals.of((rank, rank + 1) for rank in reads)


def _differences(one: State, other: State) -> list[str]:
    lines = []
    for mine, its in zip(one.orders, other.orders, strict=False):
        lines += mine.differences(its, words="{} and {}")
        if mine.maker != its.maker:
            lines.append(f"maker: {mine.maker} and {its.maker}")
    names = [each.name for each in fields(one) if each.name not in ("orders", "held")]
    for name in names:
        values = getattr(one, name), getattr(other, name)
        if values[0] != values[1]:
            lines.append(f"{name}: {values[0]!r:.200} and {values[1]!r:.200}")
    return lines


def merge_states(parts: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Return the state of the whole job from the ``state_dict()`` of each of its ranks.

    If a transform is declared ``rows="many"``, texts are tokenized where they are read, or whole documents are packed,
    each rank knows the place of its own lanes only, and its state is its part; also of a mixture with such a source, or
    that is packed. If
    all states are of the whole job (ranks in lockstep, or before the first batch of an epoch), they are equal, and one
    of them is returned.

    Raises `StateMismatch` if the states are not of one cut (it names what differs), `StateError` if one is not a state,
    and if the part of a rank is missing, or is there twice.
    """
    states = [State.from_plain(part) for part in parts]
    if states and all(one == states[0] and one.is_whole for one in states):
        return states[0].to_plain()
    dependent = [one for one in states if one.held is not None]
    if len(dependent) != len(states) or not states:
        raise StateMismatch(
            "states to merge are the parts of one reader, or equal, and these are not: "
            f"{len(dependent)} of {len(states)} are parts. Take all after the same step"
        )
    found = merge(states)
    if not found.is_whole:
        missing = _ranks(found).complement(found.segment.world_size)
        raise StateError(
            f"the parts of the ranks {missing} of {found.segment.world_size} are missing: merge the states of all ranks"
        )
    return found.to_plain()

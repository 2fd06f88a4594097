"""This module codes the frontiers of the lanes of one rank, or of several, as small messages.

Where consumption depends on the data, each rank knows the frontiers of its own lanes alone
(`lakeckpt.core.flows.state.FlowState`). A message states what has changed since earlier frontiers, which the receiver
has, too: a lane that did not move costs nothing, one that moved a few bytes. Everything else of a state is the same on
all ranks, and only its digest crosses.

The module is pure, imports without torch and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain

__all__ = ["HeldLanes", "chain_from_plain", "chain_to_plain", "from_message", "to_message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLanes:
    """The frontiers of all lanes of some ranks."""

    ranks: Intervals
    done: tuple[int, ...]
    """For each lane of the ranks, in ascending order: the positions that are consumed."""
    offsets: tuple[int, ...]
    """For each lane: the items that are consumed of the position that follows."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """Lanes, as what has changed since a base."""

    ranks: Intervals | None
    """None: the ranks of the base, with as many lanes."""
    count: Count
    """How many lanes ``ranks`` have."""
    moved: Intervals | None
    """The lanes with another frontier than in the base, by their numbers from 0 on; None: all."""
    done: tuple[int, ...]
    """For each lane that moved: its positions, less those in the base. Of other ranks than those of the base: all."""
    offsets: tuple[int, ...]


def to_message(lanes: HeldLanes, base: HeldLanes | None = None) -> object:
    """Return the plain values of ``lanes``, for a receiver that has ``base``."""
    count = len(lanes.done)
    before = base if _is_like(base, lanes.ranks, count) else None
    old = before or _at_the_start(lanes.ranks, count)
    pairs = zip(_frontiers(lanes), _frontiers(old), strict=True)
    moved = [at for at, (now, earlier) in enumerate(pairs) if now != earlier]
    return to_plain(
        _Message(
            ranks=lanes.ranks if before is None else None,
            count=count if before is None else 0,
            moved=None if len(moved) == count else Intervals.of((at, at + 1) for at in moved),
            done=tuple(lanes.done[at] - old.done[at] for at in moved),
            offsets=tuple(lanes.offsets[at] - old.offsets[at] for at in moved),
        )
    )


def from_message(plain: object, base: HeldLanes | None = None) -> HeldLanes:
    """Return the lanes of which `to_message` made ``plain``, with the same ``base``. Raises `WireDamaged`."""
    message: _Message = from_plain(_Message, plain, "the frontiers of lanes")
    if message.ranks is None and base is None:
        raise WireDamaged("the frontiers of lanes: they are those of a base, and there is none")
    old = base if message.ranks is None else _at_the_start(message.ranks, message.count)
    assert old is not None
    count = len(old.done)
    moved = range(count) if message.moved is None else [at for one in message.moved for at in range(*one)]
    if not len(moved) == len(message.done) == len(message.offsets) or (moved and moved[-1] >= count):
        raise WireDamaged(
            f"the frontiers of {count} lanes: {message.moved} have moved, and there are {len(message.done)} counts of "
            f"positions and {len(message.offsets)} offsets"
        )
    return HeldLanes(
        ranks=old.ranks,
        done=_shifted(old.done, moved, message.done),
        offsets=_shifted(old.offsets, moved, message.offsets),
    )


def chain_to_plain(states: Sequence[HeldLanes]) -> list[object]:
    """Return the plain values of ``states`` that follow one another: each as a change of the one before, None if there
    is none."""
    pairs = zip(states, (None, *states), strict=False)
    return [None if now == before else to_message(now, before) for now, before in pairs]


def chain_from_plain(plain: Iterable[object]) -> list[HeldLanes]:
    """Return the states of which `chain_to_plain` made ``plain``. Raises `WireDamaged`."""
    found: list[HeldLanes] = []
    for one in plain:
        if one is None and found:
            found.append(found[-1])
        else:
            found.append(from_message(one, found[-1] if found else None))
    return found


def _is_like(base: HeldLanes | None, ranks: Intervals, count: int) -> bool:
    return base is not None and (base.ranks, len(base.done)) == (ranks, count)


def _at_the_start(ranks: Intervals, count: int) -> HeldLanes:
    return HeldLanes(ranks=ranks, done=(0,) * count, offsets=(0,) * count)


def _frontiers(lanes: HeldLanes) -> Iterable[tuple[int, int]]:
    return zip(lanes.done, lanes.offsets, strict=True)


def _shifted(base: Sequence[int], moved: Iterable[int], by: Iterable[int]) -> tuple[int, ...]:
    found = list(base)
    for at, shift in zip(moved, by, strict=True):
        found[at] += shift
    return tuple(found)

"""This module says which source of a mixture gives the next position of a lane, if consumption depends on the data.

A source that is read alone gives one position after another. Sources of a packed mixture take turns by positions, which
are documents: document j of a lane is of the source that `lakeckpt.core.streams.mixing.Share` has at place j. So the
frontiers of all sources follow from one place of the lane, (documents done, items done of the next document), and that
place from the frontiers. The module reads nothing, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, repeat

from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import LaneMove, LaneRead
from lakeckpt.core.state import Frontier
from lakeckpt.core.streams.lane_batches import LaneBatch
from lakeckpt.core.streams.mixing import Share
from lakeckpt.errors import StateError

__all__ = ["FlowTurns"]

_AHEAD = 64
"""Turns that are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowTurns:
    """The sources that give the positions of each lane, one after another, from the frontiers of their plans on."""

    plans: Mapping[int, Plan]
    """Source → its plan, of the sources that have a weight."""
    shares: Mapping[int, Share] = field(default_factory=dict)
    """Source → its share of the positions of each lane; empty: there is one source."""

    def begin(self, lane: int) -> Frontier:
        """Return the place of ``lane`` in all sources together. `StateError` if no job comes to their frontiers."""
        found = {source: plan.state.frontiers[lane] for source, plan in self.plans.items()}
        place = sum(done for done, _ in found.values()), max(offset for _, offset in found.values())
        if any(self.frontier(source, lane, place) != its for source, its in found.items()):
            raise StateError(
                f"no job comes to this reader state: the sources of lane {lane} stand at {list(found.values())}, and "
                "they take turns in another way. It was damaged or made by hand: load a state as it was saved"
            )
        return place

    def frontier(self, source: int, lane: int, place: Frontier) -> Frontier:
        """Return the frontier of ``source`` when ``lane`` stands at ``place`` in all sources together."""
        if not self.shares:
            return place
        done, offset = place
        mine, following = (self.shares[source].before_one(lane, done + more, 1) for more in (0, 1))
        return mine, offset if following > mine else 0

    def sources(self, lane: int, done: int) -> Iterator[int]:
        """Yield the source of each position of ``lane``, from the ``done``-th on, without end."""
        if not self.shares:
            yield from repeat(next(iter(self.plans)))
        share = next(iter(self.shares.values()))
        for turn in count(done, _AHEAD):
            yield from share.sources(lane, turn, 1, _AHEAD).tolist()

    def reads(self, lane: int, made: LaneBatch) -> dict[int, LaneRead]:
        """Return source → what was read of it for the micro-batch ``made`` of ``lane``, of the sources that moved."""
        found = {}
        for source, plan in self.plans.items():
            before, after = (self.frontier(source, lane, one) for one in (made.before, made.after))
            touched, _ = self.frontier(source, lane, (made.touched, 0))
            if before != after:
                found[source] = LaneRead(
                    move=LaneMove(lane=lane, before=before, after=after, source=source),
                    spans=tuple(plan.lane_spans(lane, before[0], touched)),
                    items=made.count,
                    is_last=False,
                )
        return found

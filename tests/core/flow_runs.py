"""A job that reads a flow, simulated with the real plan and the real cutting of items into micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lakeckpt.core.changes import moved, part_of
from lakeckpt.core.merge import merge, merge_states
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Span
from lakeckpt.core.state import Frontier, State
from lakeckpt.core.streams.lane_batches import LaneBatches, PositionItems

Item = tuple[int, int, int]
"""(epoch, position, number of the item)."""
Counts = Callable[[int, int], int]
"""How many items a position of an epoch yields."""


def items_of(span: Span, counts: Counts) -> list[Item]:
    return [(span.epoch, span.start, number) for number in range(counts(span.epoch, span.start))]


def positions_of(plan: Plan, lane: int, done: int, counts: Counts) -> Iterator[PositionItems]:
    while plan.sizes is None or done < plan.sizes[lane]:
        (span,) = plan.lane_spans(lane, done, done + 1)
        yield PositionItems(items=items_of(span, counts), skip=plan.skips([span]).get(span, 0))
        done += 1


@dataclass
class Rank:
    """One rank: its part of the state, and its lanes."""

    state: State
    rank: int
    counts: Counts
    lanes: dict[int, LaneBatches] = field(init=False)

    def __post_init__(self) -> None:
        self.state = part_of(self.state, self.rank)
        self.plan = Plan(self.state)
        self.lanes = {
            lane: LaneBatches(
                positions_of(self.plan, lane, begin[0], self.counts),
                begin=begin,
                batch_size=self.state.segment.batch_size,
            )
            for lane, begin in self.plan.open_lanes(self.rank).items()
        }

    @property
    def is_through(self) -> bool:
        return not self.lanes

    def step(self) -> tuple[int, list[Item]]:
        """The lane and its items; a lane that has nothing more is no step."""
        frontiers: dict[int, Frontier] = {}
        lane, items = -1, list[Item]()
        while self.lanes and not items:
            lane = self.plan.lane(self.state.step, self.rank, self.lanes)
            batch = next(self.lanes[lane])
            items, frontiers[lane] = batch.items, batch.after
            if batch.is_last:
                del self.lanes[lane]
        self.state = moved(self.state, step=self.state.step + 1, frontiers=frontiers)
        return lane, items


class Job:
    """All ranks of a job, in lockstep, from a state of the whole job on."""

    def __init__(self, state: State, counts: Counts) -> None:
        self.ranks = [Rank(state, rank, counts) for rank in range(state.segment.world_size)]

    @property
    def is_through(self) -> bool:
        return all(rank.is_through for rank in self.ranks)

    def step(self) -> list[tuple[int, list[Item]]]:
        """The lane and the items of each rank."""
        return [rank.step() for rank in self.ranks]

    @property
    def state(self) -> State:
        """Joined in another order, and by way of JSON."""
        parts = [rank.state for rank in reversed(self.ranks)]
        found = State.from_plain(json.loads(json.dumps(merge_states([part.to_plain() for part in parts]))))
        half = len(parts) // 2
        assert not half or merge([merge(parts[half:]), merge(parts[:half])]) == found, "by way of a tree"
        return found

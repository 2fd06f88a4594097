"""A job that reads a flow, simulated with the real plan and the real cutting of items into micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lakeckpt.core.flows.batches import LaneBatches, PositionItems
from lakeckpt.core.flows.plan import FlowPlan, Frontier, frontiers_of, merge, merge_states, moved, part_of
from lakeckpt.core.flows.state import FlowState
from lakeckpt.core.receipts import Span

Item = tuple[int, int, int]
"""(epoch, position, number of the item)."""
Counts = Callable[[int, int], int]
"""How many items a position of an epoch yields."""


def items_of(span: Span, counts: Counts) -> list[Item]:
    return [(span.epoch, span.start, number) for number in range(counts(span.epoch, span.start))]


def positions_of(plan: FlowPlan, lane: int, done: int, counts: Counts) -> Iterator[PositionItems]:
    while plan.sizes is None or done < plan.sizes[lane]:
        (span,) = plan.spans(lane, done, done + 1)
        yield PositionItems(items=items_of(span, counts), skip=plan.skips([span]).get(span, 0))
        done += 1


@dataclass
class Rank:
    """One rank: its part of the state, and its lanes."""

    state: FlowState
    rank: int
    counts: Counts
    lanes: dict[int, LaneBatches] = field(init=False)
    over: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = part_of(self.state, self.rank)
        self.plan = FlowPlan(self.state)
        self.lanes = {
            lane: LaneBatches(
                positions_of(self.plan, lane, begin[0], self.counts),
                begin=begin,
                batch_size=self.state.segment.batch_size,
            )
            for lane, begin in frontiers_of(self.state).items()
        }

    @property
    def is_through(self) -> bool:
        return self.over == set(self.lanes)

    def step(self) -> tuple[int, list[Item]]:
        """The number of the micro-batch and its items."""
        step = self.state.step
        lane = self.plan.lane(step, self.rank)
        batch = next(self.lanes[lane], None)
        frontiers: dict[int, Frontier] = {}
        if batch is not None:
            frontiers[lane] = batch.after
            self.over |= {lane} if batch.is_last else set()
        self.state = moved(self.state, step=step + 1, frontiers=frontiers)
        return self.plan.micro_batch(step, self.rank), [] if batch is None else batch.items


class Job:
    """All ranks of a job, in lockstep, from a state of the whole job on."""

    def __init__(self, state: FlowState, counts: Counts) -> None:
        self.ranks = [Rank(state, rank, counts) for rank in range(state.segment.world_size)]

    @property
    def is_through(self) -> bool:
        return all(rank.is_through for rank in self.ranks)

    def step(self) -> dict[int, list[Item]]:
        return dict(rank.step() for rank in self.ranks)

    @property
    def state(self) -> FlowState:
        """Joined in another order, and by way of JSON."""
        parts = [rank.state for rank in reversed(self.ranks)]
        found = FlowState.from_plain(json.loads(json.dumps(merge_states([part.to_plain() for part in parts]))))
        half = len(parts) // 2
        assert not half or merge([merge(parts[half:]), merge(parts[:half])]) == found, "by way of a tree"
        return found

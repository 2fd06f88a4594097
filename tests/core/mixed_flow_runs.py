"""A job that reads a mixture some of whose sources yield any number of items, simulated with the real plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from lakeckpt.core.changes import moved, part_of
from lakeckpt.core.merge import merge, merge_states
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import LaneRead
from lakeckpt.core.state import State
from lakeckpt.core.streams.flow_turns import FlowTurns
from lakeckpt.core.streams.lane_batches import LaneBatches, PositionItems
from lakeckpt.core.streams.mixed_batches import MixedReceipt
from lakeckpt.core.streams.mixture import advanced, stretches
from tests.core.flow_runs import positions_of

Items = Counter[tuple[int, int, int, int]]
"""(source, epoch, position, number of the item) → how often it was delivered."""
Counts = Callable[[int, int], int]


class Rank:
    """One rank: its part of the state, and the lanes that it reads."""

    def __init__(self, state: State, rank: int, counts: Counts) -> None:
        self.state, self.rank, self.counts = part_of(state, rank), rank, counts
        self.lanes: dict[tuple[int, int], LaneBatches] = {}
        self.assignments = (
            plan.assignment(step, rank)
            for plan, first, stop in stretches(self.state)
            for step in (range(first, stop) if stop is not None else range(first, first + 10**6))
        )

    def step(self, found: Items) -> MixedReceipt:
        dealt = next(self.assignments)
        reads = dict[int, LaneRead]()
        for part in dealt.block.parts_of(dealt.number):
            assert part.rows == int((dealt.block.order[dealt.number] == part.source).sum())
            for span in part.spans:
                found.update((part.source, span.epoch, at, 0) for at in range(span.start, span.stop))
            if part.flow is not None:
                reads |= self._read(part.source, part.flow, dealt.receipt.lane, part.rows, found)
        receipt = dealt.receipt.with_reads(self.state.mixing.names, reads)
        frontiers = {move.key: move.after for move in receipt.moves}
        self.state = advanced(moved(self.state, step=self.state.step + 1, frontiers=frontiers))
        return receipt

    def _read(self, number: int, flow: FlowTurns, lane: int, rows: int, found: Items) -> dict[int, LaneRead]:
        if (number, lane) not in self.lanes:
            begin = flow.begin(lane)
            every = {source: self._positions(source, plan, flow, lane, begin[0]) for source, plan in flow.plans.items()}
            positions = (next(every[source]) for source in flow.sources(lane, begin[0]))
            self.lanes[number, lane] = LaneBatches(positions, begin=begin, batch_size=1)
        made = self.lanes[number, lane].take(rows)
        assert made.count == rows
        found.update(made.items)
        return flow.reads(lane, made)

    def _positions(self, source: int, plan: Plan, flow: FlowTurns, lane: int, done: int) -> Iterator[PositionItems]:
        mine, _ = flow.frontier(source, lane, (done, 0))
        for one in positions_of(plan, lane, mine, self.counts):
            yield replace(one, items=[(source, *item) for item in one.items])


class Job:
    """All ranks of a job, in lockstep, from a state of the whole job on."""

    def __init__(self, state: State, counts: Counts) -> None:
        self.ranks = [Rank(state, rank, counts) for rank in range(state.segment.world_size)]
        self.items: Items = Counter()

    def step(self) -> None:
        for rank in self.ranks:
            rank.step(self.items)

    @property
    def state(self) -> State:
        """Joined in another order, and by way of JSON."""
        parts = [rank.state for rank in reversed(self.ranks)]
        plain = json.loads(json.dumps(merge_states([part.to_plain() for part in parts])))
        found = State.from_plain(plain)
        half = len(parts) // 2
        assert not half or merge([merge(parts[half:]), merge(parts[:half])]) == found, "by way of a tree"
        return found

"""A tracked reader of a flow, which reads no row: position p yields none to six items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lakeckpt.core.changes import fit_lanes, moved, part_of, replan, start
from lakeckpt.core.identity import Identity, Maker
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.core.streams.lane_batches import LaneBatches, PositionItems
from lakeckpt.errors import StateUnavailable
from lakeckpt.lake.table.table import Table

Item = tuple[int, int, int]
"""(epoch, position, number of the item)."""
MAKER = Maker(name="items of tests")


def items_of(epoch: int, position: int) -> list[Item]:
    """None to six items."""
    return [(epoch, position, number) for number in range((position * 7 + epoch) % 11 % 7)]


class FlowReader:
    """One rank's side of a flow over the rows of a table, of which only their number counts."""

    def __init__(
        self, table: Table, *, rank: int = 0, world_size: int = 1, num_lanes: int | None = 4, batch_size: int = 3
    ) -> None:
        spec = OrderSpec(seed=3, shuffle=True, window=2)
        index = table.index
        identity = Identity(
            table=index.digest, selection="", rows=index.num_rows, spec=spec, tail="short", endless=False, maker=MAKER
        )
        self.table = table
        self.rank, self.world_size, self.num_lanes, self.batch_size = rank, world_size, num_lanes, batch_size
        lanes = fit_lanes(num_lanes, None, world_size, 0)
        self.last_receipt: Receipt | None = None
        self._runs: list[list[State]] = []
        self._after: dict[Receipt, State] = {}
        self._begin(start(identity, epoch=0, num_lanes=lanes, batch_size=batch_size, world_size=world_size))

    def __iter__(self) -> Iterator[list[Item]]:
        whole = self._whole
        plan, lanes = Plan(whole), whole.segment.num_lanes
        left = {lane: self._batches(plan, lane, frontier) for lane, frontier in whole.frontiers.items()}
        turns = max((sum(1 for _ in self._batches(plan, *one)) for one in whole.frontiers.items()), default=0)
        for step in range(whole.step, whole.step + turns * lanes // self.world_size):
            lane = plan.lane(step, self.rank)
            batch = next(left[lane], None)
            part = self._runs[-1][1]
            frontier = part.frontiers[lane] if batch is None else batch.after
            self._delivered(moved(part, step=step + 1, frontiers={lane: frontier}), lane)
            yield [] if batch is None else batch.items
        self._begin(
            start(
                whole.identity,
                epoch=whole.epoch + 1,
                num_lanes=lanes,
                batch_size=self.batch_size,
                world_size=self.world_size,
            )
        )

    @staticmethod
    def _batches(plan: Plan, lane: int, frontier: tuple[int, int]) -> LaneBatches:
        assert plan.sizes is not None
        spans = plan.lane_spans(lane, frontier[0], plan.sizes[lane])
        skips = {(one.epoch, one.start): skip for one, skip in plan.skips(spans).items()}
        positions = (
            PositionItems(items=items_of(one.epoch, at), skip=skips.get((one.epoch, at), 0))
            for one in spans
            for at in range(one.start, one.stop)
        )
        return LaneBatches(positions, begin=frontier, batch_size=plan.state.segment.batch_size)

    def _delivered(self, state: State, lane: int) -> None:
        number = state.segment.micro_batch + (state.step - 1 - state.segment.step) * self.world_size + self.rank
        self.last_receipt = Receipt(
            epoch=state.epoch,
            micro_batch=number,
            lane=lane,
            step=state.step - 1,
            rank=self.rank,
            world_size=self.world_size,
            spans=(),
            step_rows=0,
        )
        self.state = self._runs[-1][1] = state
        self._after[self.last_receipt] = state

    def _begin(self, whole: State) -> None:
        self._whole = self.state = whole
        part = part_of(whole, self.rank)
        self._runs.append([part, part])

    # --- as a manager sees it

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        return (self.state if at is None else self._state_after(at)).to_plain()

    def load_state_dict(self, state: Any) -> None:
        found = State.from_plain(state)
        if not found.is_whole:  # what a refused restore undoes
            self.state, self._runs = found, [[found, found]]
            return
        lanes = fit_lanes(self.num_lanes, found.segment.num_lanes, self.world_size, 0)
        self.last_receipt = None
        self._runs = []
        self._begin(replan(found, num_lanes=lanes, batch_size=self.batch_size, world_size=self.world_size))

    def mark(self, at: Receipt | None = None) -> None:
        state = self._runs[-1][1] if at is None else self._state_after(at)
        later = [run for run in self._runs if run[0].epoch >= state.epoch]
        later[0][0] = state
        self._runs = later

    def stretches(self, at: Receipt | None = None) -> list[tuple[State, State]]:
        runs = [list(run) for run in self._runs]
        if at is not None:
            end = self._state_after(at)
            runs = [run for run in runs if run[0].epoch <= end.epoch]
            runs[-1][1] = end
        return [(first, last) for first, last in runs if first.step != last.step]

    def _state_after(self, at: Receipt) -> State:
        if at not in self._after:
            raise StateUnavailable(f"{at} was not delivered")
        return self._after[at]

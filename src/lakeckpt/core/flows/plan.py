"""This module computes what follows from the state of a flow, and joins the parts of several ranks.

`FlowPlan` gives the lane that a rank reads in a step, and the positions of a lane. `merge` joins parts of one cut.
`replan_flow` goes on with another topology: while the number of lanes stays, the frontiers stay, so that micro-batches
are the same for every number of ranks that divides the lanes. Another number of lanes deals what is left anew:
positions are divided, never permuted again, and a begun position goes on at its offset in the lane it falls to.

The module never reads a row, and never communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.flows.receipts import FlowReceipt, LaneMove, LaneRead
from lakeckpt.core.flows.state import FLOW_FORMAT, Begun, FlowState, Maker, deal_of, inside, lanes_of
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import EpochDeal, Rest
from lakeckpt.core.plan import LayoutKey
from lakeckpt.core.receipts import Span
from lakeckpt.core.state import Identity, ReaderState, Segment
from lakeckpt.errors import StateError, StateMismatch

__all__ = [
    "Consumption",
    "FlowPlan",
    "Frontier",
    "begun_of",
    "flow_consumption",
    "flow_start",
    "frontiers_of",
    "joined",
    "merge",
    "merge_states",
    "moved",
    "part_of",
    "read_state",
    "replan_flow",
    "rest_of",
]

Int64Array = npt.NDArray[np.int64]
Frontier = tuple[int, int]
"""(positions of a lane that are consumed, items consumed of the position that follows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """What was consumed between two states of a flow."""

    finished: Mapping[int, Intervals]
    """Epoch → the positions whose last item was consumed, or that yielded none."""
    begun: tuple[Begun, ...]
    """The positions that have begun at the end, with all items consumed of them so far."""


def flow_start(
    identity: Identity, maker: Maker, *, epoch: int, num_lanes: int, batch_size: int, world_size: int
) -> FlowState:
    """Return the state of the whole job before the first step of ``epoch``."""
    segment = Segment(micro_batch=0, step=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)
    return _whole(identity, maker, epoch, segment, step=0)


def _whole(
    identity: Identity,
    maker: Maker,
    epoch: int,
    segment: Segment,
    *,
    step: int,
    base: Rest | None = None,
    begun: tuple[Begun, ...] = (),
) -> FlowState:
    return FlowState(
        identity=identity,
        maker=maker,
        epoch=epoch,
        segment=segment,
        step=step,
        ranks=Intervals.whole(segment.world_size),
        done=(0,) * segment.num_lanes,
        offsets=(0,) * segment.num_lanes,
        base=base,
        begun=begun,
    )


class FlowPlan:
    """The consequences of a state. Made once for a segment: they are the same for all its steps and parts."""

    def __init__(self, state: FlowState) -> None:
        self.state = state
        self.deal = deal_of(state)
        self._begun = {(one.epoch, one.position): one.offset for one in state.begun}

    def lane(self, step: int, rank: int, open_lanes: Collection[int] | None = None) -> int:
        """Return the lane that ``rank`` reads in ``step``: that of its micro-batch m, m mod L, while all its lanes have
        items. ``open_lanes``: those of its lanes that have more, at least one; it takes turns among them.
        """
        segment, number = self.state.segment, self.micro_batch(step, rank)
        if open_lanes is None or len(open_lanes) == segment.num_lanes // segment.world_size:
            return number % segment.num_lanes
        return sorted(open_lanes)[number // segment.world_size % len(open_lanes)]

    def micro_batch(self, step: int, rank: int) -> int:
        """Return the number of the micro-batch of ``rank`` in ``step``."""
        segment = self.state.segment
        return segment.micro_batch + (step - segment.step) * segment.world_size + rank

    @cached_property
    def _reader(self) -> str:
        return self.state.identity.digest

    @cached_property
    def sizes(self) -> list[int] | None:
        """The positions of each lane; None where a lane does not end."""
        found: list[int] | None = self.deal.limits.tolist() if isinstance(self.deal, EpochDeal) else None
        return found

    def spans(self, lane: int, start: int, stop: int) -> list[Span]:
        """Return the ``start``-th to ``stop``-th (exclusive) positions of ``lane``, in their order."""
        return self.deal.lane_spans(lane, start, stop)

    def skips(self, spans: Iterable[Span]) -> dict[Span, int]:
        """Return, for the positions of ``spans`` that had begun when the lanes were dealt, their consumed items."""
        if not self._begun:
            return {}
        single = [Span(epoch=one.epoch, start=at, stop=at + 1) for one in spans for at in range(one.start, one.stop)]
        return {one: self._begun[one.epoch, one.start] for one in single if (one.epoch, one.start) in self._begun}

    def open_lanes(self, rank: int, frontiers: Mapping[int, Frontier]) -> dict[int, Frontier]:
        """Return the lanes of ``rank`` of which a position is left at ``frontiers``, and their frontiers there."""
        lanes = lanes_of(self.state.segment, Intervals.of([(rank, rank + 1)])).tolist()
        sizes = self.sizes
        return {lane: frontiers[lane] for lane in lanes if sizes is None or frontiers[lane][0] < sizes[lane]}

    def receipt(self, step: int, rank: int, read: LaneRead | None, moves: tuple[LaneMove, ...] = ()) -> FlowReceipt:
        """Return the receipt of what ``rank`` gets in ``step``: ``read``, or no row. ``moves`` are of other lanes."""
        segment = self.state.segment
        return FlowReceipt(
            epoch=self.state.epoch,
            micro_batch=self.micro_batch(step, rank),
            lane=-1 if read is None else read.move.lane,
            step=step,
            rank=rank,
            world_size=segment.world_size,
            spans=() if read is None else read.spans,
            step_rows=segment.batch_size * segment.world_size,
            reader=self._reader,
            items=0 if read is None else read.items,
            moves=moves if read is None else (*moves, read.move),
        )

    def layout(self, epoch: int) -> LayoutKey:
        """Return the layout of ``epoch``."""
        num_lanes, rotation = self.deal.layout(epoch)
        return LayoutKey(epoch=epoch, num_lanes=num_lanes, rotation=rotation)

    def rest(self, frontiers: Mapping[int, Frontier]) -> tuple[Rest, tuple[Begun, ...]]:
        """Return the positions that are left at ``frontiers`` (lane → frontier), and those of them that have begun.

        Lanes without a frontier have consumed nothing.
        """
        done, held = np.zeros((2, self.state.segment.num_lanes), np.int64)
        begun = dict(self._begun)
        for lane, (count, offset) in frontiers.items():
            done[lane] = count
            if offset:
                held[lane] = 1
                (at,) = self.spans(lane, count, count + 1)
                begun[at.epoch, at.start] = max(offset, begun.get((at.epoch, at.start), 0))
        deal = self.deal
        rest = deal.rest_of(done) if isinstance(deal, EpochDeal) else deal.rest_of(done, held)
        named = tuple(Begun(epoch=epoch, position=at, offset=begun[epoch, at]) for epoch, at in sorted(begun))
        return rest, inside(rest, self.state.identity, named)

    @property
    def at_end(self) -> bool:
        """True if no position of the lanes that the state holds is left."""
        sizes = self.sizes
        return sizes is not None and all(count == sizes[lane] for lane, (count, _) in frontiers_of(self.state).items())


def frontiers_of(state: FlowState) -> dict[int, Frontier]:
    """Return lane → frontier, for each lane that ``state`` holds."""
    return dict(zip(state.lanes.tolist(), zip(state.done, state.offsets, strict=True), strict=True))


def rest_of(state: FlowState) -> Rest:
    """Return the positions that are left, those that have begun included; lanes not held have consumed nothing."""
    return FlowPlan(state).rest(frontiers_of(state))[0]


def begun_of(state: FlowState) -> tuple[Begun, ...]:
    """Return the positions that have begun, with the items consumed of them."""
    return FlowPlan(state).rest(frontiers_of(state))[1]


def moved(state: FlowState, *, step: int, frontiers: Mapping[int, Frontier]) -> FlowState:
    """Return ``state`` with ``step`` steps done, and its lanes at ``frontiers``; other lanes stay where they are."""
    found = frontiers_of(state)
    if not found.keys() >= frontiers.keys():
        raise ValueError(f"a part with lanes {sorted(found)[:8]} has none of {sorted(frontiers.keys() - found.keys())}")
    every = (found | dict(frontiers)).values()
    return replace(
        state, step=step, done=tuple(done for done, _ in every), offsets=tuple(offset for _, offset in every)
    )


def part_of(state: FlowState, rank: int) -> FlowState:
    """Return the part of ``rank``; ValueError where ``state`` does not hold the lanes of that rank."""
    ranks = Intervals.of([(rank, rank + 1)])
    if ranks.difference(state.ranks):
        raise ValueError(f"a state of the ranks {state.ranks} has no part of rank {rank}")
    found = frontiers_of(state)
    kept = [found[lane] for lane in lanes_of(state.segment, ranks).tolist()]
    return replace(
        state, ranks=ranks, done=tuple(done for done, _ in kept), offsets=tuple(offset for _, offset in kept)
    )


def merge(parts: Sequence[FlowState]) -> FlowState:
    """Return the parts of one cut as one state; it is a part, too, where ranks are missing.

    Raises `StateMismatch` where parts are not of one flow, segment and step, `StateError` where two hold one rank.
    """
    if not parts:
        raise StateError("there are no parts to merge")
    first = parts[0]
    for part in parts[1:]:
        if lines := _differences(first, part):
            raise StateMismatch(
                f"the part of the ranks {part.ranks} is not of one cut with that of the ranks {first.ranks}: "
                f"{'; '.join(lines)}. Merge parts that were taken after the same step of the same run"
            )
    return joined(first, ((part.ranks, part.done, part.offsets) for part in parts))


def joined(cut: FlowState, held: Iterable[tuple[Intervals, Sequence[int], Sequence[int]]]) -> FlowState:
    """Return the state at the cut of ``cut``, a part, that holds the lanes of all ``held``: (ranks, done, offsets).

    Raises `StateError` where a rank is held twice, or has another number of lanes.
    """
    segment = cut.segment
    done, offsets = np.full(segment.num_lanes, -1, np.int64), np.zeros(segment.num_lanes, np.int64)
    for ranks, its_done, its_offsets in held:
        lanes = lanes_of(segment, ranks)
        if not len(lanes) == len(its_done) == len(its_offsets):
            raise StateError(
                f"the ranks {ranks} have {len(lanes)} lanes, and the frontiers of {len(its_done)} were given"
            )
        if len(twice := lanes[done[lanes] >= 0]):
            wrong = Intervals.of(
                (rank, rank + 1) for rank in ((twice - segment.micro_batch) % segment.world_size).tolist()
            )
            raise StateError(f"two parts hold the lanes of the ranks {wrong}: give the part of each rank once")
        done[lanes], offsets[lanes] = its_done, its_offsets
    kept = np.flatnonzero(done >= 0)
    reads = np.unique((kept - segment.micro_batch) % segment.world_size).tolist()
    return replace(
        cut,
        ranks=Intervals.of((rank, rank + 1) for rank in reads),
        done=tuple(done[kept].tolist()),
        offsets=tuple(offsets[kept].tolist()),
    )


def _differences(one: FlowState, other: FlowState) -> list[str]:
    lines = one.identity.differences(other.identity, words="{} and {}")
    names = [each.name for each in fields(one) if each.name not in ("identity", "ranks", "done", "offsets")]
    for name in names:
        mine, its = getattr(one, name), getattr(other, name)
        if mine != its:
            lines.append(f"{name}: {mine!r:.200} and {its!r:.200}")
    return lines


def merge_states(parts: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Return the state of the whole job from the ``state_dict()`` of each of its ranks.

    Where a transform is declared ``rows="many"``, each rank knows the place of its own lanes only, and its state is
    its part. Where all states are of the whole job (ranks in lockstep, or before the first batch of an epoch), they
    are equal, and one of them is returned.

    Raises `StateMismatch` where the states are not of one cut (it names what differs), `StateError` where one is none,
    the part of a rank is missing, or is there twice.
    """
    states = [read_state(part) for part in parts]
    flows = [one for one in states if isinstance(one, FlowState)]
    if states and all(one == states[0] for one in states) and all(one.is_whole for one in flows):
        return states[0].to_plain()
    if len(flows) != len(states) or not states:
        raise StateMismatch(
            "states to merge are the parts of one reader, or equal, and these are not: "
            f"{len(flows)} of {len(states)} are parts. Take all after the same step"
        )
    found = merge(flows)
    if not found.is_whole:
        missing = found.ranks.complement(found.segment.world_size)
        raise StateError(
            f"the parts of the ranks {missing} of {found.segment.world_size} are missing: merge the states of all ranks"
        )
    return found.to_plain()


def read_state(plain: object) -> ReaderState | FlowState:
    """Return the state of a reader, of either kind, that ``plain`` was made of; StateError where it is none."""
    is_flow = isinstance(plain, Mapping) and plain.get("format") == FLOW_FORMAT
    return FlowState.from_plain(plain) if is_flow else ReaderState.from_plain(plain)


def replan_flow(state: FlowState, *, num_lanes: int, batch_size: int, world_size: int) -> FlowState:
    """Return ``state`` going on with another topology: unchanged if it is the same.

    Every item that is left is dealt exactly once. An epoch that has not begun is planned anew; one of which no position
    is left stays as it is. `StateError` where the topology changes and ``state`` is a part.
    """
    if state.segment.topology == (num_lanes, batch_size, world_size):
        return state
    if not state.is_whole:
        raise StateError(
            f"this is the part of the ranks {state.ranks} of {state.segment.world_size}, and another topology needs "
            "the state of the whole job: lakeckpt.merge_states joins the parts of all ranks"
        )
    topology: dict[str, Any] = {"num_lanes": num_lanes, "batch_size": batch_size, "world_size": world_size}
    if state.is_start:
        return flow_start(state.identity, state.maker, epoch=state.epoch, **topology)
    plan = FlowPlan(state)
    if plan.at_end:
        return state
    segment = Segment(micro_batch=plan.micro_batch(state.step, 0), step=state.step, **topology)
    if num_lanes == state.segment.num_lanes:
        return replace(state, segment=segment, ranks=Intervals.whole(world_size))
    rest, begun = plan.rest(frontiers_of(state))
    return _whole(state.identity, state.maker, state.epoch, segment, step=state.step, base=rest, begun=begun)


def flow_consumption(before: FlowState, after: FlowState) -> Consumption:
    """Return what was consumed going from ``before`` to ``after``: both of the whole job, or the same part of it.

    StateMismatch where they are not of one flow and epoch (or stream), or where what ``before`` had consumed is left in
    ``after``.
    """
    _check_comparable(before, after)
    was, had = FlowPlan(before).rest(frontiers_of(before))
    still, begun = FlowPlan(after).rest(frontiers_of(after))
    identity, finished = before.identity, {}
    first = was.begun[0].epoch if was.begun else was.next_epoch
    for epoch in range(min(first, *(left.epoch for left in still.begun), still.next_epoch), still.next_epoch):
        earlier, later = (rest.of(epoch, identity.rows_of(epoch)) for rest in (was, still))
        if again := later.difference(earlier):
            raise StateMismatch(f"epoch {epoch}: positions {again} had been consumed and are left again")
        if used := earlier.difference(later):
            finished[epoch] = used
    known = {(one.epoch, one.position): one.offset for one in begun}
    for one in inside(still, identity, had):
        if known.get((one.epoch, one.position), 0) < one.offset:
            raise StateMismatch(f"items of a position had been consumed and are left again: {one}")
    return Consumption(finished=finished, begun=begun)


def _check_comparable(before: FlowState, after: FlowState) -> None:
    lines = before.identity.differences(after.identity)
    if (before.epoch, before.maker) != (after.epoch, after.maker):
        lines.append(f"epoch {before.epoch} of {before.maker} became epoch {after.epoch} of {after.maker}")
    is_same_deal = (before.segment, before.base, before.ranks) == (after.segment, after.base, after.ranks)
    if not (before.is_whole and after.is_whole) and not is_same_deal:
        lines.append(
            f"the part of the ranks {before.ranks} became the part of the ranks {after.ranks}, or another deal"
        )
    if lines:
        raise StateMismatch(f"two states that are not of one flow: {'; '.join(lines)}")

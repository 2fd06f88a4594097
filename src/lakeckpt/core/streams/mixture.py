"""This module plans a mixture: a state with several orders, one for each source, and weights in its segments.

Micro-batch m of a mixture comes from one lane, as any other, and lane l of the mixture reads lane l of each source.
`State.of` shows the state as one source sees it, and `lakeckpt.core.plan.Plan` plans that source as a stream of which
each micro-batch has a share. So the ledger derives from one record what each source consumed. Of a source that has a
maker, the plan says how many rows a micro-batch has; which positions these take, only reading tells. Of a packed
mixture, whose sources take turns by documents (`lakeckpt.core.streams.flow_turns`), only reading tells both.

Weights change when a segment begins: by `reweighed`, at the steps of a schedule, or when a source is used up. The
last two are pure functions of the state, so that every rank and every worker finds the same step (`stretches`).

The module reads nothing, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lakeckpt.cached import cached_property
from lakeckpt.core.changes import check_whole, dealt_anew, opening, replan, unread, without
from lakeckpt.core.identity import Identity, Mixing
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Rest, turns
from lakeckpt.core.plan import Plan, dealt_in, share_of
from lakeckpt.core.state import Segment, State
from lakeckpt.core.streams.flow_turns import FlowTurns
from lakeckpt.core.streams.mixed_batches import MixedAssignment, MixedBlock, Part, planned_receipt
from lakeckpt.core.streams.mixing import Share, fractions
from lakeckpt.core.streams.stream import StreamDeal

__all__ = [
    "MixedPlan",
    "advanced",
    "excluding",
    "going_on",
    "joined",
    "plan_of",
    "replanned",
    "reweighed",
    "started",
    "stretches",
]

_BLOCK = 16
"""Micro-batches that are planned together."""


class MixedPlan:
    """The consequences of the state of a mixture, in the current segment."""

    def __init__(self, state: State) -> None:
        assert state.mixing is not None and state.segment.weights is not None
        self.state, self.segment = state, state.segment
        self.mixing, self.weights = state.mixing, state.segment.weights
        self._plans: dict[int, Plan] = {}
        self._shares: dict[int, Share] = {}
        self._blocks: dict[int, MixedBlock] = {}
        """Lane → the block that was planned last."""

    def source(self, number: int) -> Plan:
        """Return the plan of a source."""
        if number not in self._plans:
            self._plans[number] = Plan(self.state.of(number))
        return self._plans[number]

    def _deal(self, number: int) -> StreamDeal:
        deal = self.source(number).deal
        assert isinstance(deal, StreamDeal)
        return deal

    def share(self, number: int) -> Share:
        """Return the share of a source in the micro-batches of the current segment."""
        if number not in self._shares:
            self._shares[number] = share_of(self.state.of(number), self.segment)
        return self._shares[number]

    @cached_property
    def flows(self) -> dict[int, FlowTurns]:
        """The turns of each source that has a maker and a weight; of a packed mixture, those of all sources, as 0."""
        plans = {number: self.source(number) for number in self.state.makers if self.weights[number]}
        if self.mixing.packs:
            return {0: FlowTurns(plans=plans, shares={number: self.share(number) for number in plans})}
        return {number: FlowTurns(plans={number: plan}) for number, plan in plans.items()}

    @cached_property
    def _reader(self) -> str:
        return self.state.digest

    @cached_property
    def first(self) -> int:
        """The first micro-batch of the deal of the current segment."""
        return self.state.segments[dealt_in(self.state.segments)].micro_batch

    @cached_property
    def change(self) -> tuple[int, tuple[int, ...] | None] | None:
        """(step, weights from this step on; None: the mixture ends), if the current segment ends there; else None."""
        # Equal weights open no segment, so they are no change.
        planned = [one for one in self.mixing.schedule if one[0] > self.segment.step and one[1] != self.weights]
        scheduled = min(planned, default=None)
        used_up = self._used_up()
        if used_up is None or (scheduled is not None and scheduled[0] <= used_up[0]):
            return scheduled
        return used_up

    @property
    def steps(self) -> int | None:
        """The step before which the current segment ends; None: it does not end."""
        return None if self.change is None else self.change[0]

    @property
    def is_last(self) -> bool:
        """True if the mixture ends where the segment does."""
        return self.change is not None and self.change[1] is None

    def _used_up(self) -> tuple[int, tuple[int, ...] | None] | None:
        """Return the `change` at the first step for which a source has too few rows left in its first epoch."""
        if self.mixing.exhausted == "next_epoch":
            return None
        steps = self._last_steps()
        at = max(min(steps.values()), self.segment.step)
        left = {str(one): float(self.weights[one]) for one, step in steps.items() if step > at}
        if self.mixing.exhausted == "stop" or not left:
            return at, None
        shares = fractions(left)
        return at, tuple(shares.get(str(one), 0) for one in range(len(self.weights)))

    def _last_steps(self) -> dict[int, int]:
        """Return source → the first step for which it has too few rows left in its first epoch."""
        steps = {}
        for number in np.flatnonzero(self.weights).tolist():
            end = self._deal(number).end_of(0)
            if end is not None:
                steps[number] = self.segment.step + (end - self.segment.micro_batch) // self.segment.world_size
        return steps

    @property
    def too_small(self) -> list[int]:
        """The sources that have too few rows for the first step of the mixture, if it ends before that step."""
        if not self.is_last or self.steps != 0:
            return []
        return [one for one, step in self._last_steps().items() if step <= 0]

    def micro_batch(self, step: int) -> int:
        """Return the first micro-batch of ``step``."""
        return self.segment.micro_batch + (step - self.segment.step) * self.segment.world_size

    def owner(self, step: int, rank: int) -> int:
        """Return which of its lanes ``rank`` reads in ``step``."""
        return (self.micro_batch(step) + rank) % self.segment.num_lanes // self.segment.world_size

    def assignment(self, step: int, rank: int, *, row_wise: bool = False) -> MixedAssignment:
        """Return what ``rank`` gets in ``step``: never a micro-batch without a row."""
        segment = self.segment
        number = self.micro_batch(step) + rank
        turn, lane = divmod(number - self.first, segment.num_lanes)
        block = self._blocks.get(lane)
        if block is None or not block.turn <= turn < block.turn + len(block.order):
            block = self._blocks[lane] = self._block(lane, turn)
        inside = turn - block.turn
        receipt = planned_receipt(
            partial(block.spans_of, inside, self.mixing.names),
            micro_batch=number,
            lane=number % segment.num_lanes,
            step=step,
            rank=rank,
            world_size=segment.world_size,
            rows=segment.batch_size,
            reader=self._reader,
            last=self.is_last and self.steps == step + 1,
        )
        return MixedAssignment(
            receipt=receipt,
            block=block,
            number=inside,
            owner=receipt.lane // segment.world_size,
            lanes=segment.num_lanes // segment.world_size,
        )

    def _last_turn(self, lane: int) -> int | None:
        """Return how many micro-batches ``lane`` gives before the segment ends; None: it does not end."""
        if self.steps is None:
            return None
        return max(0, -(-(self.micro_batch(self.steps) - self.first - lane) // self.segment.num_lanes))

    def _block(self, lane: int, turn: int) -> MixedBlock:
        """Plan the next micro-batches of ``lane``, as far as the segment goes."""
        size, last = self.segment.batch_size, self._last_turn(lane)
        count = _BLOCK if last is None else max(1, min(_BLOCK, last - turn))
        if self.mixing.packs:
            order = np.zeros((count, size), np.uint16)
        else:
            order = self.share(0).sources(lane, turn, size, count).reshape(count, size)
        sources = len(self.mixing.names)
        places = order + np.arange(count)[:, None] * sources
        rows = np.bincount(places.reshape(-1), minlength=count * sources).reshape(count, sources)
        before = np.concatenate([np.zeros((1, sources), np.int64), np.cumsum(rows, axis=0)]).tolist()
        parts = []
        for source, given in enumerate(before[-1]):
            if given and source in self.flows:
                parts.append(Part(source, (), (), given, self.flows[source]))
            elif given:
                plan, start = self.source(source), self.share(source).before_one(lane, turn, size)
                spans = self._deal(source).lane_spans(lane, start, start + given)
                parts.append(Part(source, tuple(spans), plan.layouts_of(spans), given))
        return MixedBlock(turn=turn, whole=self.mixing.whole, order=order, parts=tuple(parts), before=before)


def plan_of(state: State) -> Plan | MixedPlan:
    """Return the plan of ``state``: of one order, or of a mixture."""
    return Plan(state) if state.mixing is None else MixedPlan(state)


def started(mixing: Mixing, orders: tuple[Identity, ...], topology: Mapping[str, Any]) -> State:
    """Return the state of a mixture before its first step. ``topology``: num_lanes, batch_size, world_size."""
    first = Segment(micro_batch=0, step=0, weights=mixing.weights, **topology)
    return State(orders=orders, mixing=mixing, epoch=0, segments=(first,), step=0, held=unread(orders, first))


def joined(state: State, mixing: Mixing, orders: tuple[Identity, ...]) -> State:
    """Return ``state`` going on as ``mixing``, which has its sources and others. Those begin at their first rows, and
    all go on with the first weights of ``mixing``."""
    assert state.mixing is not None
    check_whole(state)
    opened = replace(
        state.segment,
        micro_batch=MixedPlan(state).micro_batch(state.step),
        step=state.step,
        carried=None,
    )
    dealt, numbers = dealt_anew(state, opened), [mixing.names.index(name) for name in state.mixing.names]
    rests = dict(zip(numbers, dealt.bases, strict=True))
    begun = [replace(one, source=numbers[one.source or 0]) for one in dealt.begun]
    return replace(
        dealt,
        orders=orders,
        mixing=mixing,
        segments=(opened := replace(opened, weights=mixing.weights),),
        bases=tuple(rests.get(number, Rest(begun=(), next_epoch=0)) for number in range(len(orders))),
        begun=tuple(sorted(begun, key=lambda one: (one.source or 0, one.epoch, one.position))),
        held=unread(orders, opened),
    )


def replanned(state: State, topology: Mapping[str, Any]) -> State:
    """Return ``state`` going on with another topology; the same if it has it already."""
    before = _topology(state)
    if before == topology:
        return state
    check_whole(state)
    segment = state.segment
    # The deal goes on: micro-batches stay as they are. In a packed mixture, documents do.
    its = {"batch_size": topology["batch_size"]} if state.mixing is not None and state.mixing.packs else {}
    if before | {"world_size": topology["world_size"], **its} == topology:
        return _opened(state, topology, segment.weights, segment.carried)
    return _opened(state, topology, segment.weights, _carried(state, topology["num_lanes"]))


def going_on(state: State, topology: Mapping[str, int]) -> State:
    """Return ``state``, of one order or of a mixture, going on with another topology, in the segment that begins where
    it is."""
    if state.mixing is None:
        return replan(state, **topology)
    return advanced(replanned(advanced(state), topology))


def reweighed(state: State, weights: tuple[int, ...]) -> State:
    """Return ``state`` going on with other weights; the same if it has them already."""
    if state.segment.weights == weights:
        return state
    return _opened(state, _topology(state), weights, _carried(state, state.segment.num_lanes))


def _opened(
    state: State, topology: Mapping[str, Any], weights: tuple[int, ...] | None, carried: tuple[int, ...] | None
) -> State:
    if state.step == 0 and not state.bases:
        first = Segment(micro_batch=0, step=0, weights=weights, **topology)
        return replace(state, segments=(first,), held=unread(state.orders, first))
    number = MixedPlan(state).micro_batch(state.step)
    segment = Segment(micro_batch=number, step=state.step, weights=weights, carried=carried, **topology)
    return opening(state, segment)


def excluding(state: State, excluded: Sequence[Mapping[int, Intervals]], orders: Sequence[Identity]) -> State:
    """Return ``state``, of one order or of a mixture, without ``excluded``: see `lakeckpt.core.changes.without`.

    A state of which nothing was read, and nothing is excluded, begins in ``orders``.
    """
    if state.is_start and not any(positions for one in excluded for positions in one.values()):
        return replace(state, orders=tuple(orders))
    opened = replace(state.segment, micro_batch=plan_of(state).micro_batch(state.step), step=state.step)
    if state.mixing is not None:
        opened = replace(opened, carried=_carried(state, opened.num_lanes))
    return without(state, opened, excluded, orders)


def _carried(state: State, num_lanes: int) -> tuple[int, ...] | None:
    """Return what each of ``num_lanes`` new lanes carries over of the rows that sources had too many."""
    if state.step == 0 and not state.bases:
        return None
    plan, segment = MixedPlan(state), state.segment
    done, size = turns(plan.micro_batch(state.step) - plan.first, segment.num_lanes), segment.batch_size
    if plan.mixing.packs and state.held is not None:  # documents that have begun count in the new lanes
        done, size = np.reshape(state.held.done, (len(state.orders), -1)).sum(axis=0), 1
    every = (plan.share(number).excess(done, size) for number in range(len(state.orders)))
    return tuple(round(one / num_lanes) for one in every)


def advanced(state: State) -> State:
    """Return ``state`` in the segment that begins where it is, if the current segment ends there."""
    plan = MixedPlan(state)
    while plan.change is not None and plan.change[0] <= state.step and plan.change[1] is not None:
        state = reweighed(state, plan.change[1])
        plan = MixedPlan(state)
    return state


def _topology(state: State) -> dict[str, int]:
    return dict(zip(("num_lanes", "batch_size", "world_size"), state.segment.topology, strict=True))


def stretches(state: State) -> Iterator[tuple[Any, int, int | None]]:
    """Yield (plan, first step, one past its last step or None) of all that is to come after ``state``."""
    if state.mixing is None:
        single = Plan(state)
        yield single, state.step, single.steps
        return
    while True:
        state = advanced(state)
        plan = MixedPlan(state)
        yield plan, state.step, plan.steps
        if plan.steps is None or plan.is_last:
            return
        state = state.moved(step=plan.steps)

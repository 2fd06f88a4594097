"""This module plans a mixture: its sources are endless streams, whose states move in lockstep.

Micro-batch m of a mixture comes from one lane, as any other, and lane l of the mixture reads lane l of each source. A
source's state differs from that of a stream read alone in one thing: its segments hold its `Share`. So each source is
planned, recorded and audited by itself.

Weights change where a segment begins: by `reweighed`, at the steps of a schedule, or where a source is used up. The
last two are pure functions of the state, so that every rank and every worker finds the same step (`stretches`).

The module reads nothing, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from lakeckpt.core.changes import replan, start
from lakeckpt.core.hashing import derive_key
from lakeckpt.core.identity import Identity
from lakeckpt.core.lanes import Rest, turns
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import Segment, State
from lakeckpt.core.streams.mixed_batches import MixedAssignment, MixedReceipt, Part
from lakeckpt.core.streams.mixing import Share, fractions
from lakeckpt.core.streams.stream import StreamDeal
from lakeckpt.errors import StateError

__all__ = [
    "FORMAT",
    "MixedPlan",
    "MixedState",
    "Mixing",
    "advanced",
    "is_unread",
    "joined",
    "replanned",
    "reweighed",
    "started",
    "stretches",
]

FORMAT = "lakeckpt.mixture/1"
"""The name and major version of a plain state of a mixture."""

Exhausted = Literal["next_epoch", "stop", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """The user's choices about a mixture."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    """At the start, as `lakeckpt.core.streams.mixing.fractions` returns them."""
    seed: int
    whole: bool
    """Whether a micro-batch is of one source."""
    exhausted: Exhausted
    schedule: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(step, weights from this step on), in ascending order."""

    def share(self, source: int, weights: tuple[int, ...], carried: tuple[int, ...] = ()) -> Share:
        """Return the share of ``source`` in a segment with ``weights``."""
        return Share(source=source, weights=weights, seed=self.seed, whole=self.whole, carried=carried)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedState:
    """The state of a whole job that reads a mixture: the states of its sources, which are at the same step."""

    mixing: Mixing
    sources: tuple[State, ...]

    def __post_init__(self) -> None:
        topologies = {replace(one.segment, share=None) for one in self.sources}
        weights = {None if one.segment.share is None else one.segment.share.weights for one in self.sources}
        if len({one.step for one in self.sources}) > 1 or len(topologies) > 1 or len(weights) > 1 or None in weights:
            steps = [one.step for one in self.sources]
            raise StateError(
                f"the states of the sources of a mixture are not of one place (they are at the steps {steps} of their "
                "loader): load states that were saved together"
            )

    epoch = 0

    @property
    def step(self) -> int:
        """Steps done; every rank has done as many."""
        return self.sources[0].step

    @property
    def segment(self) -> Segment:
        """The segment at hand, as the first source has it."""
        return self.sources[0].segment

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights at hand."""
        assert self.segment.share is not None
        return self.segment.share.weights

    @property
    def has_begun(self) -> bool:
        """Whether anything was read."""
        return any(one.step > 0 or one.base is not None for one in self.sources)

    def moved(self, *, step: int) -> MixedState:
        """Return the state with ``step`` steps done, in the segment at hand."""
        return replace(self, sources=tuple(one.moved(step=step) for one in self.sources))

    def to_plain(self) -> dict[str, object]:
        """Return the state as JSON-able values."""
        sources = {name: one.to_plain() for name, one in zip(self.mixing.names, self.sources, strict=True)}
        return {"format": FORMAT, "sources": sources}


class MixedPlan:
    """The consequences of the state of a mixture, in the segment at hand."""

    def __init__(self, state: MixedState) -> None:
        self.state = state
        self.segment = state.segment
        self._plans: dict[int, Plan] = {}
        self._counts: dict[int, tuple[int, list[int]]] = {}
        """Lane → (the turn that comes next, the rows of each source before it)."""

    def source(self, number: int) -> Plan:
        """Return the plan of a source."""
        if number not in self._plans:
            self._plans[number] = Plan(self.state.sources[number])
        return self._plans[number]

    @cached_property
    def _reader(self) -> str:
        return f"{derive_key(' '.join(one.identity.digest for one in self.state.sources))[0]:016x}"

    @cached_property
    def _first(self) -> int:
        return self.source(0).deal.first

    @cached_property
    def change(self) -> tuple[int, tuple[int, ...] | None] | None:
        """(step, weights from this step on; None: the mixture ends), where the segment at hand ends; else None."""
        at, weights = self.segment.step, self.state.weights
        # Equal weights open no segment, so they are no change.
        planned = [one for one in self.state.mixing.schedule if one[0] > at and one[1] != weights]
        scheduled = min(planned, default=None)
        used_up = self._used_up()
        if used_up is None or (scheduled is not None and scheduled[0] <= used_up[0]):
            return scheduled
        return used_up

    @property
    def steps(self) -> int | None:
        """The step before which the segment at hand ends; None: it does not end."""
        return None if self.change is None else self.change[0]

    @property
    def is_last(self) -> bool:
        """Whether the mixture ends where the segment does."""
        return self.change is not None and self.change[1] is None

    def _used_up(self) -> tuple[int, tuple[int, ...] | None] | None:
        """Return the `change` at the first step for which a source has too few rows left in its first epoch."""
        mixing, weights = self.state.mixing, self.state.weights
        if mixing.exhausted == "next_epoch":
            return None
        steps = self._last_steps()
        at = max(min(steps.values()), self.segment.step)
        left = {str(one): float(weights[one]) for one, step in steps.items() if step > at}
        if mixing.exhausted == "stop" or not left:
            return at, None
        shares = fractions(left)
        return at, tuple(shares.get(str(one), 0) for one in range(len(weights)))

    def _last_steps(self) -> dict[int, int]:
        """Return source → the first step for which it has too few rows left in its first epoch."""
        steps = {}
        for number in np.flatnonzero(self.state.weights).tolist():
            deal = self.source(number).deal
            assert isinstance(deal, StreamDeal)
            end = deal.end_of(0)
            if end is not None:
                steps[number] = self.segment.step + (end - self.segment.micro_batch) // self.segment.world_size
        return steps

    @property
    def too_small(self) -> list[str]:
        """The sources that have too few rows for the first step of the mixture, if it ends before that step."""
        if not self.is_last or self.steps != 0:
            return []
        return [self.state.mixing.names[one] for one, step in self._last_steps().items() if step <= 0]

    def micro_batch(self, step: int) -> int:
        """Return the first micro-batch of ``step``."""
        return self.segment.micro_batch + (step - self.segment.step) * self.segment.world_size

    def owner(self, step: int, rank: int) -> int:
        """Return which of its lanes ``rank`` reads in ``step``."""
        return (self.micro_batch(step) + rank) % self.segment.num_lanes // self.segment.world_size

    def assignment(self, step: int, rank: int) -> MixedAssignment:
        """Return what ``rank`` gets in ``step``."""
        segment, names = self.segment, self.state.mixing.names
        number = self.micro_batch(step) + rank
        turn, lane = divmod(number - self._first, segment.num_lanes)
        assert segment.share is not None
        order = segment.share.sources(lane, turn, segment.batch_size)
        parts = self._parts(lane, turn, np.bincount(order, minlength=len(names)).tolist())
        receipt = MixedReceipt(
            micro_batch=number,
            lane=number % segment.num_lanes,
            step=step,
            rank=rank,
            world_size=segment.world_size,
            rows=segment.batch_size,
            spans=tuple((names[part.source], part.spans) for part in parts),
            reader=self._reader,
            last=self.is_last and self.steps == step + 1,
        )
        return MixedAssignment(
            receipt=receipt,
            parts=parts,
            order=order,
            owner=receipt.lane // segment.world_size,
            lanes=segment.num_lanes // segment.world_size,
        )

    def _parts(self, lane: int, turn: int, rows: list[int]) -> tuple[Part, ...]:
        """Return what each source gives to the micro-batch ``turn`` of ``lane``: ``rows[i]`` rows of source i."""
        at, before = self._counts.get(lane, (-1, []))
        if at != turn:
            shares, size = [one.segment.share for one in self.state.sources], self.segment.batch_size
            before = [one.before_one(lane, turn, size) for one in shares if one is not None]
        parts = []
        for source, count in enumerate(rows):
            if count:
                plan = self.source(source)
                assert isinstance(plan.deal, StreamDeal)
                spans = plan.deal.lane_spans(lane, before[source], before[source] + count)
                parts.append(Part(source, tuple(spans), plan.layouts_of(spans)))
        self._counts[lane] = turn + 1, [one + count for one, count in zip(before, rows, strict=True)]
        return tuple(parts)


def started(mixing: Mixing, identities: tuple[Identity, ...], topology: Mapping[str, int]) -> MixedState:
    """Return the state of a mixture before its first step. ``topology``: num_lanes, batch_size, world_size."""
    return MixedState(
        mixing=mixing,
        sources=tuple(
            start(one, epoch=0, share=mixing.share(number, mixing.weights), **topology)
            for number, one in enumerate(identities)
        ),
    )


def joined(mixing: Mixing, known: Mapping[int, State], identities: tuple[Identity, ...]) -> MixedState:
    """Return the state of a mixture to which sources were added: ``known`` are the states of those it had, by their
    numbers. All go on with the first weights of ``mixing``.

    `StateError` where the known states are not of one place.
    """
    MixedState(mixing=mixing, sources=tuple(known.values()))  # checks that they are of one place
    found = []
    for number, identity in enumerate(identities):
        share = mixing.share(number, mixing.weights)
        one = known.get(number)
        like = one or next(iter(known.values()))
        opened = replace(like.segment, micro_batch=Plan(like).micro_batch(like.step), step=like.step, share=share)
        if one is None:
            rest = Rest(begun=(), next_epoch=0)
            found.append(State(identity=identity, epoch=0, segments=(opened,), step=like.step, base=rest))
        else:
            found.append(replan(one, share=share, **_topology(one)))
    return MixedState(mixing=mixing, sources=tuple(found))


def is_unread(state: State) -> bool:
    """Return whether nothing of a source was read in ``state``: it is of the first step, or of one where it joined."""
    is_whole = state.base is None or state.base == Rest(begun=(), next_epoch=0)
    return is_whole and len(state.segments) == 1 and state.step == state.segment.step


def replanned(state: MixedState, topology: Mapping[str, int]) -> MixedState:
    """Return ``state`` going on with another topology; the same if it has it already."""
    before = _topology(state)
    if before == topology:
        return state
    if before | {"world_size": topology["world_size"]} == topology:  # the deal goes on: micro-batches stay as they are
        sources = tuple(replan(one, share=one.segment.share, **topology) for one in state.sources)
        return replace(state, sources=sources)
    return _resegmented(state, topology, state.weights)


def reweighed(state: MixedState, weights: tuple[int, ...]) -> MixedState:
    """Return ``state`` going on with other weights; the same if it has them already."""
    if state.weights == weights:
        return state
    return _resegmented(state, _topology(state), weights)


def _resegmented(state: MixedState, topology: Mapping[str, int], weights: tuple[int, ...]) -> MixedState:
    carried = _carried(state, topology["num_lanes"]) if state.has_begun else ()
    return replace(
        state,
        sources=tuple(
            replan(one, share=state.mixing.share(number, weights, carried), **topology)
            for number, one in enumerate(state.sources)
        ),
    )


def _carried(state: MixedState, num_lanes: int) -> tuple[int, ...]:
    """Return what each of ``num_lanes`` new lanes carries over of the rows that sources had too many."""
    found = []
    for one in state.sources:
        plan, segment = Plan(one), one.segment
        assert segment.share is not None
        done = turns(plan.micro_batch(one.step) - plan.deal.first, segment.num_lanes)
        found.append(round(segment.share.excess(done, segment.batch_size) / num_lanes))
    return tuple(found)


def advanced(state: MixedState) -> MixedState:
    """Return ``state`` in the segment that begins where it is, if the segment at hand ends there."""
    plan = MixedPlan(state)
    while plan.change is not None and plan.change[0] <= state.step and plan.change[1] is not None:
        state = _resegmented(state, _topology(state), plan.change[1])
        plan = MixedPlan(state)
    return state


def _topology(state: MixedState | State) -> dict[str, int]:
    return dict(zip(("num_lanes", "batch_size", "world_size"), state.segment.topology, strict=True))


def stretches(state: State | MixedState) -> Iterator[tuple[Plan | MixedPlan, int, int | None]]:
    """Yield (plan, first step, one past its last step or None) of all that is to come after ``state``."""
    if isinstance(state, State):
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

"""This module computes from a reader state which rows each rank gets in each step, without asking anyone.

Within a segment that began at micro-batch m0 and step s0, rank r of W takes micro-batch ``m0 + (s - s0) * W + r`` in
step s. Where the micro-batches left do not fill a step, the rows of that last step are dealt out equally, so that every
rank has the same number of steps (with ``drop_last=True`` they are dropped).

`replan` opens a segment where the topology or the batch size changes; while the lanes and the batch size stay, the deal
goes on, so that micro-batches are the same for every number of ranks that divides the lanes; else what is left is
re-cut. It never reads a table or changes a state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Deal, EpochDeal, Left, Rest
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.core.state import MAX_EPOCH, Identity, ReaderState, Segment
from lakeckpt.core.stream import StreamDeal
from lakeckpt.core.streams.mixing import Share
from lakeckpt.errors import StateError, StateMismatch

__all__ = [
    "MAX_SEGMENTS",
    "Assignment",
    "LayoutKey",
    "Plan",
    "between",
    "check_place",
    "consumed",
    "consumption",
    "deals",
    "fit_lanes",
    "is_start",
    "rebase",
    "replan",
    "start",
]

MAX_SEGMENTS = 32
"""A state with more segments is written with the rest that was left at its last re-cut instead of what came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKey:
    """The arguments of `lakeckpt.core.order.EpochLayout.build` that differ between the epochs of a table."""

    epoch: int
    num_lanes: int
    rotation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A micro-batch dealt to a rank, with the layouts of the epochs that its positions are of."""

    receipt: Receipt
    layouts: tuple[LayoutKey, ...]
    owner: int
    """Which of this rank's lanes it comes from, counted from 0: the worker that owns the lane reads it."""
    lanes: int
    """How many lanes this rank has."""


def fit_lanes(wanted: int | None, stored: int | None, world_size: int, workers: int) -> int:
    """Return the number of lanes for a topology: a multiple of ``world_size``.

    ``wanted`` (the user's) is rounded up to a multiple; without it, the ``stored`` number is kept if it is one; else it
    is ``world_size * max(1, workers)``.

    >>> fit_lanes(8, None, 3, 0), fit_lanes(None, 8, 4, 2), fit_lanes(None, 8, 3, 2)
    (9, 8, 6)
    """
    if wanted is not None:
        return -(-wanted // world_size) * world_size
    if stored is not None and stored % world_size == 0:
        return stored
    return world_size * max(1, workers)


def start(
    identity: Identity, *, epoch: int, num_lanes: int, batch_size: int, world_size: int, share: Share | None = None
) -> ReaderState:
    """Return the state before the first step of ``epoch``."""
    first = Segment(
        micro_batch=0, step=0, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size, share=share
    )
    return ReaderState(identity=identity, epoch=epoch, segments=(first,), step=0)


def is_start(state: ReaderState) -> bool:
    """Return whether nothing of the epoch of ``state`` was read."""
    return state.step == 0 and state.base is None and len(state.segments) == 1


class Plan:
    """The consequences of a reader state. Made once for a segment; `assignment` takes any step of the segment."""

    def __init__(self, state: ReaderState) -> None:
        self.state = state
        self.segment = state.segment
        self.deal, self._recut = deque(deals(state), maxlen=1).pop()
        self._recent: tuple[LayoutKey, ...] = ()

    @cached_property
    def _reader(self) -> str:
        return self.state.identity.digest

    @cached_property
    def steps(self) -> int | None:
        """The number of steps of the epoch, those of earlier segments included; None where it is endless."""
        if self.deal.end is None:
            return None
        left, world_size = self.deal.end - self.segment.micro_batch, self.segment.world_size
        whole = -(-left // world_size) if self.state.identity.tail == "short" else left // world_size
        return self.segment.step + whole

    def micro_batch(self, step: int) -> int:
        """Return the first micro-batch of ``step``: what lies below it has been consumed when the step begins."""
        segment, end = self.segment, self.deal.end
        first = segment.micro_batch + (step - segment.step) * segment.world_size
        return first if end is None or first < end else end

    def owner(self, step: int, rank: int) -> int:
        """Return which of its lanes ``rank`` reads in ``step``: the ``owner`` of that assignment."""
        world_size, first = self.segment.world_size, self.micro_batch(step)
        is_whole = self.micro_batch(step + 1) - first == world_size
        return (first + rank) % self.segment.num_lanes // world_size if is_whole else 0

    def assignment(self, step: int, rank: int, *, row_wise: bool = False) -> Assignment:
        """Return what ``rank`` gets in ``step``; ``row_wise``: the rank never gets a micro-batch without a row."""
        world_size, num_lanes = self.segment.world_size, self.segment.num_lanes
        first = self.micro_batch(step)
        stop = self.micro_batch(step + 1)
        number = first + rank
        if stop - first == world_size:
            spans, lane = self.deal.spans(number), number % num_lanes
        else:
            spans, lane = self._equal_part(first, stop, rank), -1
        receipt = Receipt(
            epoch=self.state.epoch,
            micro_batch=number,
            lane=lane,
            step=step,
            rank=rank,
            world_size=world_size,
            spans=tuple(spans),
            step_rows=self.deal.rows_of(first, stop),
            reader=self._reader,
            last=self._is_last(step, rank, row_wise=row_wise),
        )
        return Assignment(
            receipt=receipt,
            layouts=self.layouts_of(spans),
            owner=max(lane, 0) // world_size,
            lanes=num_lanes // world_size,
        )

    def _is_last(self, step: int, rank: int, *, row_wise: bool) -> bool | None:
        if self.state.identity.tail == "carry":
            return None  # what is left goes over to the next tranche, if there is one
        is_before_last = row_wise and self.steps == step + 2
        return self.steps == step + 1 or (is_before_last and not self.has_rows(rank, from_step=step + 1))

    def layouts_of(self, spans: list[Span]) -> tuple[LayoutKey, ...]:
        """Return the layouts of the epochs that ``spans`` are of."""
        if len(spans) == 1 and self._recent and self._recent[0].epoch == spans[0].epoch:
            return self._recent
        keys = []
        for epoch in dict.fromkeys(span.epoch for span in spans):
            num_lanes, rotation = self.deal.layout(epoch)
            keys.append(LayoutKey(epoch=epoch, num_lanes=num_lanes, rotation=rotation))
        self._recent = tuple(keys[-1:])
        return tuple(keys)

    def step_rows(self, step: int) -> int:
        """Return how many rows all ranks get in ``step``."""
        return self.deal.rows_of(self.micro_batch(step), self.micro_batch(step + 1))

    def has_rows(self, rank: int, *, from_step: int) -> bool:
        """Return whether a step from ``from_step`` on has rows for ``rank``."""
        return self.steps is None or any(
            self.assignment(step, rank).receipt.rows for step in range(from_step, self.steps)
        )

    def _equal_part(self, first: int, stop: int, rank: int) -> list[Span]:
        spans = [span for number in range(first, stop) for span in self.deal.spans(number)]
        share, extra = divmod(sum(span.rows for span in spans), self.segment.world_size)
        low = rank * share + min(rank, extra)
        return _cut_spans(spans, low, low + share + (rank < extra))

    def rest(self, step: int) -> Rest:
        """Return what is left when ``step`` steps are done."""
        return self.deal.rest(self.micro_batch(step))

    @property
    def at_end(self) -> bool:
        """True if nothing of the epoch is left to be dealt."""
        return self.steps is not None and self.state.step >= self.steps


def deals(state: ReaderState) -> Iterator[tuple[Deal, tuple[int, Rest | None]]]:
    """Yield for each segment the deal it is of, and which segment that began with and with what rest (None: all)."""
    deal, began = _deal(state, state.segments[0], state.base), (0, state.base)
    yield deal, began
    for index in range(1, len(state.segments)):
        before, segment = state.segments[index - 1], state.segments[index]
        if _deal_key(segment) != _deal_key(before):
            rest = deal.rest(segment.micro_batch)
            deal, began = _deal(state, segment, rest), (index, rest)
        yield deal, began


def _deal_key(segment: Segment) -> tuple[object, ...]:
    """Return all of a segment that a deal depends on."""
    return segment.num_lanes, segment.batch_size, segment.share


def _deal(state: ReaderState, segment: Segment, rest: Rest | None) -> Deal:
    identity, num_lanes = state.identity, segment.num_lanes
    first, batch_size = segment.micro_batch, segment.batch_size
    if identity.endless:
        rest = rest or Rest(begun=(), next_epoch=0)
        return StreamDeal(
            first=first,
            num_lanes=num_lanes,
            batch_size=batch_size,
            rows=identity.tokens or identity.rows,
            start=rest,
            unit=identity.unit,
            share=segment.share,
        )
    whole = Left(epoch=state.epoch, positions=Intervals.whole(identity.rows), num_lanes=num_lanes, rotation=0)
    left = rest.begun[0] if rest else whole
    return EpochDeal(first=first, num_lanes=num_lanes, batch_size=batch_size, tail=identity.tail, left=left)


def _cut_spans(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """Return the ``start``-th to ``stop``-th (exclusive) rows of ``spans``."""
    cut, before = [], 0
    for span in spans:
        low, high = max(start - before, 0), min(stop - before, span.rows)
        if low < high:
            cut.append(Span(epoch=span.epoch, start=span.start + low, stop=span.start + high))
        before += span.rows
    return cut


def check_place(state: ReaderState, *, ahead: int = 0) -> None:
    """Raise StateError where ``state`` is more than ``ahead`` steps behind the end of its epoch.

    Such a state was damaged or made by hand. Loading it would skip rows without an error.
    """
    steps = Plan(state).steps if state.epoch <= MAX_EPOCH else 0
    if steps is not None and state.step > steps + ahead:
        raise StateError(
            f"no job comes to this reader state: step {state.step} of epoch {state.epoch} is at hand, which has "
            f"{steps}. It was damaged or made by hand: load a state as it was saved"
        )


def replan(
    state: ReaderState, *, num_lanes: int, batch_size: int, world_size: int, share: Share | None = None
) -> ReaderState:
    """Return ``state`` going on with another topology, or share: unchanged if they are the same, else with one more
    segment.

    Every row that is left is dealt again exactly once. An epoch that has not begun is planned anew; one that is over
    stays as it is.
    """
    topology = {"num_lanes": num_lanes, "batch_size": batch_size, "world_size": world_size}
    if state.segment.topology == (num_lanes, batch_size, world_size) and state.segment.share == share:
        return state
    if state.step == 0 and state.base is None:
        return start(state.identity, epoch=state.epoch, share=share, **topology)
    plan = Plan(state)
    if plan.at_end:
        return state
    number = plan.micro_batch(state.step)
    opened = Segment(micro_batch=number, step=state.step, share=share, **topology)
    segments = (*state.segments, opened)
    if len(segments) <= MAX_SEGMENTS:
        return replace(state, segments=segments)
    return _shortened(replace(state, segments=segments))


def rebase(state: ReaderState, identity: Identity) -> ReaderState:
    """Return ``state`` with what is left of it dealt anew, with the ends of ``identity``.

    ``identity`` has as many rows in the same order. An epoch that has not begun is only renamed.
    """
    if state.step == 0 and state.base is None:
        return replace(state, identity=identity)
    plan = Plan(state)
    opened = replace(state.segment, micro_batch=plan.micro_batch(state.step), step=state.step)
    return replace(state, identity=identity, base=plan.rest(state.step), segments=(opened,))


def _shortened(state: ReaderState) -> ReaderState:
    """Return the state without the segments that what is to come does not depend on."""
    index, rest = Plan(state)._recut
    kept = (state.segments[index],) if index == len(state.segments) - 1 else (state.segments[index], state.segments[-1])
    if rest is None:
        return replace(state, segments=kept)
    return replace(state, base=rest, segments=kept)


def consumption(before: ReaderState, after: ReaderState) -> dict[int, Intervals]:
    """Return which positions of which epochs were consumed going from ``before`` to ``after``.

    Both are of one order and one epoch (or stream); StateMismatch where they are not, or where rows that ``before`` had
    consumed are left in ``after``.
    """
    if before.identity != after.identity or before.epoch != after.epoch:
        changed = before.identity.differences(after.identity) or [f"epoch: {before.epoch} became {after.epoch}"]
        raise StateMismatch(f"two states that are not of one order of rows: {'; '.join(changed)}")
    earlier, later = Plan(before).rest(before.step), Plan(after).rest(after.step)
    first = earlier.begun[0].epoch if earlier.begun else earlier.next_epoch
    found = {}
    for epoch in range(min(first, *(left.epoch for left in later.begun), later.next_epoch), later.next_epoch):
        rows = before.identity.rows_of(epoch)
        was, still = earlier.of(epoch, rows), later.of(epoch, rows)
        if still.difference(was):
            raise StateMismatch(
                f"epoch {epoch}: positions {still.difference(was)} had been consumed and are left again: "
                "the later state does not follow from the earlier one"
            )
        used = was.difference(still)
        if used:
            found[epoch] = used
    return found


def consumed(state: ReaderState) -> dict[int, Intervals]:
    """Return which positions of the epoch at hand (of an endless stream: of every epoch so far) have been consumed."""
    rest = Plan(state).rest(state.step)
    epochs = range(state.epoch, rest.next_epoch)  # the state of a stream is of epoch 0
    rows = {epoch: state.identity.rows_of(epoch) for epoch in epochs}
    every = {epoch: Intervals.whole(rows[epoch]).difference(rest.of(epoch, rows[epoch])) for epoch in epochs}
    return {epoch: positions for epoch, positions in every.items() if positions}


def between(before: ReaderState, after: ReaderState) -> list[tuple[ReaderState, ReaderState]]:
    """Return the stretches by which a job came from ``before`` to ``after``: pairs of states, each of one epoch.

    The segments of an epoch that ended between the two are not known, and its rows do not depend on them: all of them
    were consumed. So ``tail`` must be "short". Raises StateMismatch where ``after`` does not follow from ``before``;
    also where their positions may not mean the same rows, as in an endless stream whose lanes have changed.
    """
    assert before.identity.tail == "short", before.identity
    found = []
    while before.epoch < after.epoch:
        steps = Plan(before).steps
        assert steps is not None
        found.append((before, before.moved(step=steps)))
        before = _start_like(after, before.identity, before.epoch + 1)
    if is_start(before):
        before = _start_like(after, before.identity, before.epoch)
    if _layouts(before) != _layouts(after):
        raise StateMismatch(
            f"two states whose epochs were laid out in other lanes: {_layouts(before)} became {_layouts(after)}"
        )
    consumption(before, after)
    return [*found, (before, after)]


def _start_like(state: ReaderState, identity: Identity, epoch: int) -> ReaderState:
    """Return the start of ``epoch`` in the layout that the epoch of ``state`` began with."""
    num_lanes, batch_size, world_size = state.segments[0].topology
    if state.base is not None and state.base.begun:
        num_lanes, world_size = state.base.begun[0].num_lanes, 1
    return start(identity, epoch=epoch, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)


def _layouts(state: ReaderState) -> tuple[object, ...]:
    """Return what the layout of each epoch of ``state`` depends on."""
    if state.identity.endless:
        return state.base, {_deal_key(segment) for segment in state.segments}
    return (state.segments[0].num_lanes if state.base is None else state.base.begun[0].num_lanes,)

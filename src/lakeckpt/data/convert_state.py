"""How does a state of torchdata's StatefulDataLoader go on with other workers, or in a LakeLoader?

StatefulDataLoader keeps one part per worker inside of its own state, and refuses another number of workers. All ranks
of a job in lockstep have equal parts, so one rank's state says what the whole job consumed: that is what is worked out
here.

It never imports torchdata, and never guesses: a state whose parts do not fit together is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lakeckpt.core.plan import Plan, start
from lakeckpt.core.receipts import Span
from lakeckpt.core.state import FORMAT, ReaderState
from lakeckpt.data.worker_place import WORKER_FORMAT, WorkerPlace
from lakeckpt.errors import StateInvalid

__all__ = ["convert_state"]

_DEPTH = 8


def convert_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reader state of the whole job held in ``state``, for ``load_state_dict`` of a dataset or LakeLoader.

    ``state`` is what ``state_dict()`` of a torchdata ``StatefulDataLoader`` over a `lakeckpt.LakeDataset` returned on
    any rank of a job in lockstep, with any number of workers (or, already converted, a reader state). The result may be
    loaded on any topology. Steps that the loader had delivered since its last snapshot (``snapshot_every_n_steps``
    above 1) cannot be known and are refused.

    Raises StateInvalid where there is no such state, or its parts do not fit together.
    """
    if not isinstance(state, Mapping):
        raise StateInvalid(f"a loader's state is a mapping, got {type(state).__name__}")
    if state.get("_steps_since_snapshot", 0):
        raise StateInvalid(
            f"the loader delivered {state['_steps_since_snapshot']} batches since its last snapshot, and what they "
            "were is not in its state: make the StatefulDataLoader with snapshot_every_n_steps=1"
        )
    parts = list(_parts(state, 0))
    whole = [part for part in parts if part.get("format") == FORMAT]
    workers = [WorkerPlace.from_plain(part) for part in parts if part.get("format") == WORKER_FORMAT]
    if len(whole) == 1 and not workers:
        found = ReaderState.from_plain(whole[0])
        return (_before_the_end(found) if _awaits_its_end(state) else found).to_plain()
    if whole or not workers:
        raise StateInvalid(
            f"expected the state of a StatefulDataLoader over a LakeDataset, found {len(whole)} reader states and "
            f"{len(workers)} workers' parts in it"
        )
    joined = _joined(workers)
    if state.get("_iterator_finished") is True and Plan(joined).at_end:
        joined = _start_of(joined, joined.epoch + 1)
    return joined.to_plain()


def _awaits_its_end(state: Mapping[str, Any]) -> bool:
    """Whether the dataset has ended and the loop, having got the last batch, has yet to see that."""
    fetcher = state.get("fetcher_state")
    return isinstance(fetcher, Mapping) and fetcher.get("fetcher_ended") is True and not state.get("_iterator_finished")


def _before_the_end(state: ReaderState) -> ReaderState:
    """Return the end of the epoch before the one that ``state`` is at the start of."""
    if state.epoch == 0 or (state.step, state.row, state.base) != (0, 0, None):
        return state
    ended = _start_of(state, state.epoch - 1)
    return replace(ended, step=Plan(ended).steps or 0)


def _start_of(state: ReaderState, epoch: int) -> ReaderState:
    num_lanes, batch_size, world_size = state.segment.topology
    return start(state.identity, epoch=epoch, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)


def _parts(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if not isinstance(value, Mapping) or depth > _DEPTH:
        return
    if value.get("format") in (FORMAT, WORKER_FORMAT):
        yield value
        return
    for child in value.values():
        yield from _parts(child, depth + 1)


def _joined(places: list[WorkerPlace]) -> ReaderState:
    places = sorted(places, key=lambda place: place.worker)
    first = places[0]
    if [place.worker for place in places] != list(range(first.workers)):
        raise StateInvalid(
            f"expected the parts of {first.workers} workers, found those of {[p.worker for p in places]}"
        )
    shared = replace(first.state, step=first.origin, row=0)
    for place in places:
        same = replace(place.state, step=first.origin, row=0) == shared
        if not same or (place.workers, place.origin) != (first.workers, first.origin):
            raise StateInvalid(f"the parts of workers 0 and {place.worker} are of different iterations")
    plan = Plan(shared)
    last = max(place.next_step for place in places)
    done = min(place.next_step for place in places)
    if plan.steps is not None:
        last, done = min(last, plan.steps), min(done, plan.steps)
    ahead = [step for step in range(done, last) if step < places[(step - first.origin) % first.workers].next_step]
    if not ahead and not any(place.skip for place in places):
        return replace(shared, step=done)
    return _with_gaps(shared, plan, places, done)


def _with_gaps(shared: ReaderState, plan: Plan, places: list[WorkerPlace], done: int) -> ReaderState:
    """Return the state where of the steps from ``done`` on some are consumed, some in part, and some not."""
    stop = max(place.next_step for place in places) + 1
    stop = stop if plan.steps is None else min(stop, plan.steps)
    back: list[Span] = []
    layouts: dict[int, tuple[int, int]] = {}
    for step in range(done, stop):
        owner = places[(step - places[0].origin) % places[0].workers]
        if step < owner.next_step:
            continue
        skip = owner.skip if step == owner.next_step else 0
        for rank in range(plan.segment.world_size):
            assignment = plan.assignment(step, rank)
            back += _without_first(assignment.receipt.spans, skip)
            layouts.update({key.epoch: (key.num_lanes, key.rotation) for key in assignment.layouts})
    opened = replace(plan.segment, micro_batch=plan.micro_batch(done), step=done)
    return replace(shared, base=plan.rest(stop).plus(back, layouts), segments=(opened,), step=done)


def _without_first(spans: tuple[Span, ...], rows: int) -> list[Span]:
    left = []
    for span in spans:
        gone = min(rows, span.rows)
        rows -= gone
        if gone < span.rows:
            left.append(Span(epoch=span.epoch, start=span.start + gone, stop=span.stop))
    return left

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
    above 1) cannot be known and are refused; so is, where several workers of several ranks read single rows
    (``batch_size=None``), a state near the end of an epoch of which some ranks have a row more than others.

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
    shared, places = _in_turn(workers)
    if state.get("_iterator_finished") is True:  # of last steps that had no rows for this rank, no worker has a place
        return _start_of(shared, shared.epoch + 1).to_plain()
    if len(places) == 1 and _all_fetchers_ended(state):
        return replace(shared, step=Plan(shared).steps or 0).to_plain()
    return _joined(shared, places).to_plain()


def _awaits_its_end(state: Mapping[str, Any]) -> bool:
    """Whether the dataset has ended and the loop, having got the last batch, has yet to see that."""
    fetcher = state.get("fetcher_state")
    return isinstance(fetcher, Mapping) and fetcher.get("fetcher_ended") is True and not state.get("_iterator_finished")


def _all_fetchers_ended(state: Mapping[str, Any]) -> bool:
    """Whether the last batch of each worker was less than a full one. Of one, nothing is left on any rank then."""
    snapshot = state.get("_snapshot")
    found = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
    fetchers = [one.get("fetcher_state") for one in found.values()] if isinstance(found, Mapping) else []
    return bool(fetchers) and all(isinstance(one, Mapping) and one.get("fetcher_ended") is True for one in fetchers)


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


def _in_turn(places: list[WorkerPlace]) -> tuple[ReaderState, list[WorkerPlace]]:
    """Where the turns of all workers began, and their places in the order of their turns."""
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
    return shared, places


def _joined(shared: ReaderState, places: list[WorkerPlace]) -> ReaderState:
    first, plan = places[0], Plan(shared)
    last = max(place.next_step for place in places)
    done = min(place.next_step for place in places)
    if plan.steps is not None:
        last, done = min(last, plan.steps), min(done, plan.steps)
    if plan.steps is not None and done < plan.steps and first.workers > 1:
        _check_alike_on_all_ranks(plan, plan.steps, places)
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


def _check_alike_on_all_ranks(plan: Plan, steps: int, places: list[WorkerPlace]) -> None:
    """Refuse places at a step that has a row more for some ranks: from there on workers' turns differ between ranks.

    Single rows only, in the last turn of all lanes: where a rank has none, its other workers take the turn.
    """
    if plan.state.identity.tail != "rows":
        return
    world_size, first = plan.segment.world_size, places[0]
    for step in range(max(first.origin, steps - plan.segment.num_lanes // world_size), steps):
        rows = [plan.assignment(step, rank).receipt.rows for rank in range(world_size)]
        owner = places[(step - first.origin) % first.workers]
        is_there = step < owner.next_step or (step == owner.next_step and owner.skip >= min(rows))
        if is_there and min(rows) < max(rows):
            raise StateInvalid(
                f"step {step} of epoch {plan.state.epoch} has a row more for some ranks than for others, and worker "
                f"{owner.worker} has come to it: this rank's state does not tell where the workers of the other ranks "
                "are. Load it with the same ranks and workers, or convert a state from before the last rows of the "
                "epoch, or from its end; states of lakeckpt.LakeLoader, and of one worker or "
                'LakeDataset(tail="drop"), can go on anywhere'
            )


def _without_first(spans: tuple[Span, ...], rows: int) -> list[Span]:
    left = []
    for span in spans:
        gone = min(rows, span.rows)
        rows -= gone
        if gone < span.rows:
            left.append(Span(epoch=span.epoch, start=span.start + gone, stop=span.stop))
    return left

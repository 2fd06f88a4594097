"""This module takes positions out of the deal: those that a person or a crash loop has excluded (`Exclusion`).

An exclusion is kept in the log, from restore to restore, until a roll-back. It acts where positions of it are still
left: these count as consumed at once, and the rest of the epoch is cut anew without them, so that micro-batches stay
full (`lakeckpt.core.streams.mixture.excluding`). A state that has gone on without them has none of them left, so an
exclusion acts once on each history. Positions of packed sequences are sequences: of a document that goes on in the next
sequence, only the tokens in the excluded one are left out. If consumption depends on the data, a position is a row, or
a window of whole documents, and leaves the deal with all that it yields.

`of_micro_batch` names the positions of one micro-batch, and `withdrawn` takes them back, in words. The module is pure,
and starts no threads.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lakeckpt.checkpoint.format.manifest import Excluded, Exclusion
from lakeckpt.core.changes import start
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixture import excluding, stretches
from lakeckpt.errors import ConfigError, StateMismatch
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "check_kind",
    "crashed",
    "exclusion_of",
    "exclusions_from_text",
    "exclusions_to_text",
    "laid_out",
    "left_of",
    "of_micro_batch",
    "said_of_every",
    "said_of_exclusion",
    "withdrawn",
    "without_exclusions",
]

_KIND, _VERSION = "exclusions", (1, 0)
_Every = tuple[Exclusion, ...]


def of_micro_batch(
    reader: str, state: State, *, epoch: int, loader_step: int, rank: int, attempt: int, step: int
) -> _Every:
    """Return what excludes the micro-batch that ``rank`` got in step ``loader_step`` of ``reader``: the job died of it,
    again and again, in optimizer step ``step`` of ``attempt``.

    ``state`` is the reader's state of the whole job at the cut from which that attempt went on, in the topology of that
    attempt (`lakeckpt.core.streams.mixture.going_on`). Of a mixture, each of its sources with rows in the micro-batch
    has an exclusion. `ConfigError` if the state does not tell which rows these are.
    """
    if state.held is not None:
        raise ConfigError(
            f"which rows of {reader!r} a micro-batch had depends on what its transform yielded, and no record has "
            "that, so they cannot be excluded: leave them out in the transform, or by filters= of a new run"
        )
    check_kind(state, reader)
    if epoch != state.epoch:
        raise ConfigError(
            f"the micro-batch is of epoch {epoch} of {reader!r}, and the cut lies in epoch {state.epoch}: its rows can "
            "be excluded only from a cut in their own epoch"
        )
    plan = next(
        (one for one, low, high in stretches(state) if low <= loader_step and _is_below(loader_step, high)), None
    )
    if plan is None:
        raise ConfigError(f"{reader!r} has no step {loader_step} in epoch {epoch} after its step {state.step}")
    receipt = plan.assignment(loader_step, rank).receipt
    sources = [(None, receipt.spans)] if state.mixing is None else list(receipt.spans)
    found = []
    for source, spans in sources:
        seen = state if source is None else state.of(_number_of(state, source))
        pairs: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            pairs.setdefault(span.epoch, []).append((span.start, span.stop))
        found += [
            exclusion_of(seen, reader, source, each, Intervals.of(positions), attempt=attempt, steps=(step, step + 1))
            for each, positions in sorted(pairs.items())
        ]
    return tuple(replace(one, reason="crash", micro_batch=receipt.micro_batch) for one in found)


def check_kind(state: State, reader: str) -> None:
    """Raise `ConfigError` if nothing of the stream of ``state`` can be excluded."""
    if any(one.tail == "carry" for one in state.orders):
        raise ConfigError(
            f"nothing of {reader!r} can be excluded: it follows a growing table, whose tranches are joined from the "
            "rows that are left. Begin a new run, with filters= that leave the rows out"
        )


def withdrawn(exclusions: Iterable[Exclusion], why: str) -> _Every:
    """Return ``exclusions`` with those that crashes have caused taken back, for the reason ``why``: their positions are
    dealt again by what is restored from now on."""
    return tuple(
        replace(one, withdrawn=why) if one.reason == "crash" and not one.withdrawn else one for one in exclusions
    )


def crashed(exclusions: Iterable[Exclusion]) -> int:
    """Return how many micro-batches are excluded because the job died of them, for ``max_excluded=``."""
    found = {(one.reader, one.attempt, one.micro_batch) for one in exclusions if one.reason == "crash"}
    gone = {(one.reader, one.attempt, one.micro_batch) for one in exclusions if one.withdrawn}
    return len(found - gone)


def exclusion_of(
    seen: State,
    reader: str,
    source: str | None,
    epoch: int,
    positions: Intervals,
    *,
    attempt: int,
    steps: tuple[int, int],
) -> Exclusion:
    """Return what excludes ``positions`` of ``epoch``, in the layout that this epoch has in the state ``seen`` (of a
    mixture, as one of its sources sees it)."""
    key = Plan(seen).layout(epoch)
    return Exclusion(
        reader=reader,
        source=source,
        reason="order",
        order=seen.order_of(epoch).digest,
        epoch=epoch,
        num_lanes=key.num_lanes,
        rotation=key.rotation,
        positions=positions,
        attempt=attempt,
        steps=steps,
    )


def left_of(seen: State, one: Exclusion) -> Intervals:
    """Return the positions of an exclusion that are left at a state, as its source of a mixture sees it: none if the
    state is of another epoch. `StateMismatch` if the epoch has another order, or other lanes, in which positions are
    other rows."""
    if one.epoch != seen.epoch and not seen.is_endless:
        return Intervals.empty()
    plan = Plan(seen)
    left = plan.left.of(one.epoch, seen.rows_of(one.epoch)).intersection(one.positions)
    if not left:
        return left
    order, key = seen.order_of(one.epoch), plan.layout(one.epoch)
    is_same = not order.spec.shuffle or (key.num_lanes, key.rotation) == (one.num_lanes, one.rotation)
    if order.digest != one.order or not is_same:
        raise StateMismatch(
            f"{said_of_exclusion(one)} cannot be excluded: epoch {one.epoch} has another order, or other lanes, here "
            "than there, so that its positions are other rows"
        )
    return left


def laid_out(state: State, one: Exclusion) -> State:
    """Return ``state`` with the lanes of the layout of an exclusion, if nothing of its epoch was read: then the number
    of lanes is free. Of a mixture it is not, because its sources share their lanes."""
    is_free = state.is_start and state.mixing is None and state.epoch == one.epoch
    lanes, batch_size, world_size = state.segment.topology
    if not is_free or lanes == one.num_lanes:
        return state
    world_size = world_size if one.num_lanes % world_size == 0 else 1
    return start(
        state.identity, epoch=state.epoch, num_lanes=one.num_lanes, batch_size=batch_size, world_size=world_size
    )


def without_exclusions(
    reader: str, state: State, exclusions: Iterable[Exclusion], *, step: int
) -> tuple[State, State, tuple[Excluded, ...]]:
    """Return ``state``, of the whole job, as the epoch is laid out; the same without what is left of the ``exclusions``
    of ``reader``; and what is excluded, as the record of optimizer step ``step`` + 1 has it. `StateMismatch` as
    `left_of`, if that was ordered."""
    exclusions = [one for one in exclusions if one.reader == reader and not one.withdrawn]
    first = next((one for one in exclusions if one.epoch == state.epoch), None)
    if first is not None:
        state = laid_out(state, first)
    names: list[str | None] = [None] if state.mixing is None else [*state.mixing.names]
    positions: list[dict[int, Intervals]] = [{} for _ in names]
    found = []
    for one in exclusions:
        if one.source not in names:
            continue
        number = names.index(one.source)
        try:
            left = left_of(state if state.mixing is None else state.of(number), one)
        except StateMismatch:
            if one.reason == "order":
                raise
            continue  # if the job dies of these rows once more, they are named anew
        before = positions[number].get(one.epoch, Intervals.empty())
        left = left.difference(before)
        if left:
            positions[number][one.epoch] = before.union(left)
            found.append(
                Excluded(
                    rank=0,
                    step=step + 1,
                    reason=one.reason,
                    positions={one.epoch: left},
                    source=one.source,
                    steps=one.steps,
                )
            )
    return state, (excluding(state, positions, state.orders) if found else state), tuple(found)


def _is_below(step: int, stop: int | None) -> bool:
    return stop is None or step < stop


def _number_of(state: State, source: str) -> int:
    assert state.mixing is not None
    return state.mixing.names.index(source)


def said_of_exclusion(one: Exclusion) -> str:
    """Return what is excluded, for people."""
    first, stop = one.steps
    steps = f"step {first:,}" if stop == first + 1 else f"the steps {first:,} to {stop - 1:,}"
    name = one.reader if one.source is None else f"{one.reader}.{one.source}"
    what = "of" if one.micro_batch is None else f"of micro-batch {one.micro_batch:,} in"
    return f"{one.positions.size:,} rows of {name!r}, {what} {steps} of attempt {one.attempt}"


def said_of_every(exclusions: Iterable[Exclusion]) -> tuple[str, ...]:
    """Return what is excluded and why, or why it is not any more, for people."""
    return tuple(
        f"{said_of_exclusion(one)}: {one.reason}{f', withdrawn: {one.withdrawn}' if one.withdrawn else ''}"
        for one in exclusions
    )


def exclusions_to_text(exclusions: Sequence[Exclusion]) -> str:
    """Return a text for the other ranks; empty if there are none."""
    if not exclusions:
        return ""
    return b64encode(dumps(to_plain(tuple(exclusions), _Every), kind=_KIND, version=_VERSION, compress=True)).decode()


def exclusions_from_text(text: str) -> _Every:
    """Return what `exclusions_to_text` was given. `WireError`."""
    if not text:
        return ()
    found: _Every = from_plain(_Every, loads(b64decode(text), kind=_KIND, supported=_VERSION), "exclusions")
    return found

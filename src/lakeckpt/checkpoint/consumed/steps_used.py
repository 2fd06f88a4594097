"""This module finds which positions of a reader optimizer steps have used, from the records of a history.

A manifest holds the states between which a reader moved since its parent, and its place after each optimizer step. So a
step lies between two places, and the plan of the state says which positions lie between them (`StepsUsed`), whether or
not a checkpoint was saved there. If consumption depends on the data, only the states at checkpoints are recorded: then
the positions of steps are known if the steps begin and end at checkpoints.

`exclusions_of_steps` returns what excludes the positions of steps from an earlier checkpoint on. The module is pure,
and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lakeckpt.checkpoint.consumed.exclusions import check_kind, exclusion_of, laid_out, left_of, said_of_exclusion
from lakeckpt.checkpoint.consumed.source_records import SourceRecord, by_source
from lakeckpt.checkpoint.format.manifest import Exclusion, Manifest
from lakeckpt.core.consumption import consumption
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError, StateMismatch
from lakeckpt.tracking.steps import Frontier

__all__ = ["StepsUsed", "check_steps", "exclusions_of_steps"]


class StepsUsed:
    """The places between which the optimizer steps in ``record`` moved reader ``name``. ``where`` names the record in
    errors."""

    def __init__(self, name: str, record: SourceRecord, where: str) -> None:
        self._name, self._where = name, where
        self._runs = record.record.steps.runs
        self._pairs = [(one.begin, one.end) for one in record.stretches]

    def between(self, first: int, last: int) -> Iterator[tuple[State, int, int]]:
        """Yield what the steps ``first`` to ``last`` consumed: (state, from, to) in steps of the loader, each within
        the segment of the state. `CheckpointDamaged` if the record contradicts itself."""
        at, begin = 0, self._pairs[0][0].step if self._pairs else 0
        for frontier, is_it in self._frontiers(first, last):
            upto = self._find(frontier, at, begin)
            if upto is None:
                continue  # nothing was consumed yet since the parent
            if is_it:
                for index in range(at, upto + 1):
                    start, end = self._pairs[index]
                    low = begin if index == at else start.step
                    high = frontier.step if index == upto else end.step
                    if low < high:
                        yield end, low, high
            at, begin = upto, frontier.step

    def _frontiers(self, first: int, last: int) -> Iterator[tuple[Frontier, bool]]:
        """Yield the frontiers that lead to the steps, each with whether it is the frontier of one of them. Between two
        of a run, the reader moved on by equal strides."""
        for run in self._runs:
            if run.first > last:
                return
            before, end = (min(max(one - run.first, 0), run.count - 1) for one in (first - 1, last))
            for one in sorted({0, before, end}):
                yield run.at(one), first <= run.first + one <= last

    def _find(self, frontier: Frontier, at: int, begin: int) -> int | None:
        """Return the first stretch from ``at`` on in which ``frontier`` lies; None if it lies before all stretches.

        If the frontier did not move, the step read nothing. It is not assumed that the step began the epoch again and
        read up to the same place.
        """
        for index in range(at, len(self._pairs)):
            first, last = self._pairs[index]
            low = begin if index == at else first.step
            if first.epoch == frontier.epoch and low <= frontier.step <= last.step:
                return index
        start = self._pairs[0][0] if self._pairs else None
        if start is None or (at == 0 and begin == start.step and frontier.epoch < start.epoch):
            return None
        raise CheckpointDamaged(
            f"{self._where}: the record of optimizer steps of {self._name!r} names epoch {frontier.epoch}, step "
            f"{frontier.step}, and no recorded stretch goes there"
        )


def check_steps(step: int, exclude_steps: object) -> tuple[int, int]:
    """Return the ``exclude_steps`` (A, B) of a roll-back to ``step``. `ConfigError` if they are no optimizer steps that
    come after it."""
    found = tuple(exclude_steps) if isinstance(exclude_steps, (tuple, list)) else ()
    if len(found) != 2 or any(type(one) is not int for one in found) or not step < found[0] < found[1]:
        raise ConfigError(
            f"the steps to exclude are (A, B), half-open, with {step} < A < B for a roll-back to step {step}: the "
            f"batches that the steps A to B - 1 have used are left out. Got {exclude_steps!r}"
        )
    return found[0], found[1]


def exclusions_of_steps(
    chain: Sequence[Manifest], goes_back_to: Manifest, steps: tuple[int, int]
) -> tuple[Exclusion, ...]:
    """Return what excludes the batches of the optimizer ``steps`` (A, B), half-open, of all readers, from a checkpoint
    before them on. ``chain`` are the manifests of the history that has the steps, oldest first.

    Raises `CheckpointNotFound` if the history has not all steps, `CheckpointDamaged` if it cannot be read that far
    back, and `CheckpointMismatch` if a reader cannot go on from the checkpoint without them, with the reason.
    """
    first, stop = steps
    newest = chain[-1].step if chain else 0
    if stop - 1 > newest:
        raise CheckpointNotFound(
            f"the steps {first:,} to {stop - 1:,} are to be excluded, and the history ends at step {newest:,}: which "
            "rows later steps have used was not committed. Name steps up to there"
        )
    if chain[0].step > goes_back_to.step:
        raise CheckpointDamaged(
            f"the record of the history before step {chain[0].step:,} cannot be read, and with it which rows the steps "
            f"{first:,} to {stop - 1:,} have used: run `lakeckpt verify`"
        )
    found: list[Exclusion] = []
    for before, manifest in zip([None, *chain], chain, strict=False):
        if manifest.step < first or (before is not None and before.step >= stop - 1):
            continue
        for name, record in manifest.readers.items():
            for at, seen in by_source(name, record).items():
                for one in _of_record(name, at, seen, manifest, 0 if before is None else before.step, steps):
                    _add(found, one)
    if not found:
        raise CheckpointMismatch(
            f"the log has no rows of the steps {first:,} to {stop - 1:,}: no reader of them is in the manager's state. "
            "Put the LakeLoader into it"
        )
    for one in found:
        _check(one, goes_back_to)
    return tuple(found)


def _of_record(
    reader: str, name: str, record: SourceRecord, manifest: Manifest, parent: int, steps: tuple[int, int]
) -> Iterator[Exclusion]:
    """Yield what excludes the part of ``steps`` in one record, whose parent is of step ``parent``."""
    first, last = max(steps[0], parent + 1), min(steps[1] - 1, manifest.step)
    if not all(record.record.steps.is_known(step) for step in (first, last)):
        raise CheckpointMismatch(
            f"other processes did the steps {parent + 1:,} to {manifest.step:,}, and this run got their state: which "
            f"rows of {name!r} the steps {first:,} to {last:,} used is not recorded"
        )
    if record.state.held is None:
        every = StepsUsed(name, record, f"the checkpoint of step {manifest.step:,}").between(first, last)
        pairs = [(state.moved(step=low), state.moved(step=high)) for state, low, high in every]
    elif (first, last) == (parent + 1, manifest.step):
        pairs = [(one.begin, one.end) for one in record.stretches]
    else:
        raise CheckpointMismatch(
            f"which rows of {name!r} a step used depends on what its transform yielded, and the log has that from "
            f"checkpoint to checkpoint only: the steps {parent + 1:,} to {manifest.step:,} can be excluded together, "
            f"but not {first:,} to {last:,} alone"
        )
    for begin, end in pairs:
        for epoch, positions in _touched(begin, end).items():
            yield exclusion_of(begin, reader, record.source, epoch, positions, attempt=manifest.attempt, steps=steps)


def _touched(begin: State, end: State) -> dict[int, Intervals]:
    """Return epoch → the positions that were used between two states, in part or whole."""
    found = dict(consumption(begin, end))
    before = {(one.epoch, one.position): one.offset for one in Plan(begin).begun}
    for one in Plan(end).begun:
        if before.get((one.epoch, one.position), 0) < one.offset:
            known = found.get(one.epoch, Intervals.empty())
            found[one.epoch] = known.union(Intervals.of([(one.position, one.position + 1)]))
    return found


def _add(found: list[Exclusion], one: Exclusion) -> None:
    """Add ``one``, joined with another one of the same order and epoch."""
    for at, other in enumerate(found):
        if replace(one, positions=other.positions, attempt=other.attempt) == other:
            found[at] = replace(other, positions=other.positions.union(one.positions))
            return
    found.append(one)


def _check(one: Exclusion, goes_back_to: Manifest) -> None:
    """Raise `CheckpointMismatch` if the positions of an exclusion are not all left at the checkpoint."""
    record = goes_back_to.readers.get(one.reader)
    seen = None if record is None else State.from_plain(record.state)
    if seen is not None and seen.mixing is not None and one.source in seen.mixing.names:
        seen = seen.of(seen.mixing.names.index(one.source or ""))
    if seen is None or (seen.mixing is not None and seen.source is None):
        raise CheckpointMismatch(
            f"{said_of_exclusion(one)} cannot be excluded: the checkpoint of step {goes_back_to.step:,} has no such "
            "reader"
        )
    check_kind(seen, one.reader)
    seen = laid_out(seen, one)
    try:
        left = left_of(seen, one)
    except StateMismatch as error:
        raise CheckpointMismatch(str(error)) from None
    if left != one.positions:
        raise CheckpointMismatch(
            f"{said_of_exclusion(one)} cannot be excluded: they are rows of epoch {one.epoch}, and the checkpoint of "
            f"step {goes_back_to.step:,} lies in epoch {seen.epoch}. Go back to a checkpoint in epoch {one.epoch}"
        )

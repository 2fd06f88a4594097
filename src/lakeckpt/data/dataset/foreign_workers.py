"""This module reads a dataset in the worker processes of another DataLoader.

Worker w of n yields every n-th micro-batch of its rank (steps w, w + n, …), so that torch's round robin over workers
restores the order of micro-batches. Each iteration is one whole epoch: the one that `SharedEpoch` holds, which the main
process sets and workers that live on read. torch does not tell the dataset that an iteration begins, so the epoch stays
the same until ``set_epoch``. torchdata's StatefulDataLoader keeps each worker's `WorkerPlace`, and gives it back to the
same worker of a loader with as many ranks and workers. It starts no threads. `lakeckpt.LakeLoader` plans in the main
process and needs none of this.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.data.base.ahead import Ahead
from lakeckpt.data.base.source import BatchSource, gives
from lakeckpt.data.base.transform import CarriedRows
from lakeckpt.data.position.progress import Progress
from lakeckpt.errors import StateError, StateUnavailable
from lakeckpt.wire.documents import Count, Positive, from_plain, to_plain

__all__ = ["WORKER_FORMAT", "SharedEpoch", "WorkerPlace", "WorkerTurns"]

WORKER_FORMAT = "lakeckpt.worker/1"
"""The name and major version of a plain worker place."""

_EPOCH, _LANES, _ITERATION, _INSIDE = range(4)


class SharedEpoch:
    """The epoch that workers read, in four numbers of memory that a process shares with the workers that it starts.

    A deep copy has memory of its own, and nobody has begun to read it.
    """

    def __init__(self) -> None:
        self._numbers = _shared(torch.tensor([-1, 0, 0, 0]))

    def __deepcopy__(self, memo: object) -> SharedEpoch:
        copied = SharedEpoch()
        copied._numbers.copy_(self._numbers)
        copied._numbers[_ITERATION] = 0
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._numbers = _shared(state["_numbers"])  # nothing changes if it is shared already

    @property
    def epoch(self) -> int | None:
        """The epoch that was set; None if none was."""
        epoch = int(self._numbers[_EPOCH])
        return None if epoch < 0 else epoch

    @property
    def has_begun(self) -> bool:
        """True if a worker has begun to read since the last `go_to`."""
        return bool(self._numbers[_ITERATION])

    @property
    def is_inside(self) -> bool:
        """True if the main process went to a place in the middle of the epoch."""
        return bool(self._numbers[_INSIDE])

    @property
    def has_lanes(self) -> bool:
        """True if the number of lanes is agreed on."""
        return bool(self._numbers[_LANES])

    def go_to(self, epoch: int, *, inside: bool = False) -> None:
        """Let the next iteration be of ``epoch``; ``inside``: the main process is in its middle."""
        self._numbers[_EPOCH], self._numbers[_ITERATION], self._numbers[_INSIDE] = epoch, 0, int(inside)

    def begin(self, iteration: int) -> bool:
        """Note that a worker begins an iteration, a positive number; return whether it is not the first one."""
        if not self.has_begun:
            self._numbers[_ITERATION] = iteration
        return int(self._numbers[_ITERATION]) != iteration

    def agree_lanes(self, proposed: int) -> int:
        """Return the number of lanes: ``proposed``, unless a worker or the main process's ``len`` agreed on one."""
        if not self.has_lanes:
            self._numbers[_LANES] = proposed
        return int(self._numbers[_LANES])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place of worker ``worker`` of ``workers``: its part of the state of a StatefulDataLoader."""

    state: State
    """Its ``step`` is the next one of this worker, or 0."""
    worker: Count
    workers: Positive

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers:
            raise ValueError(f"no such worker: {self.worker} of {self.workers}")

    @property
    def next_step(self) -> int:
        """The next step of this worker."""
        return self.state.step + (self.worker - self.state.step) % self.workers

    @property
    def is_over(self) -> bool:
        """True if nothing of the epoch is left for this worker."""
        steps = Plan(self.state).steps
        return steps is not None and self.next_step >= steps

    def check(self, worker: int, workers: int, world_size: int) -> None:
        """Refuse to be the place of another worker, or of a job of another size."""
        was = (self.worker, self.workers, self.state.segment.world_size)
        if was == (worker, workers, world_size) or (was[:2] == (worker, workers) and Plan(self.state).at_end):
            return
        raise StateError(
            f"this is the state of worker {self.worker} of {self.workers}, of {was[2]} ranks, given to worker {worker} "
            f"of {workers}, of {world_size} ranks: a StatefulDataLoader goes on with as many ranks and workers as it "
            "had. lakeckpt.LakeLoader goes on with any number of both"
        )

    def to_plain(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"format": WORKER_FORMAT, **to_plain(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WorkerPlace:
        """Return what `to_plain` made ``plain`` of; StateError if ``plain`` is no place."""
        values = {name: value for name, value in plain.items() if name != "format"}
        found: WorkerPlace = from_plain(cls, values, "the state of a worker", error=StateError)
        return found


class WorkerTurns:
    """The iterations of one worker process; picklable with the dataset whose ``source`` and ``progress`` it has."""

    def __init__(self, source: BatchSource, progress: Progress, carried: CarriedRows, *, row_wise: bool) -> None:
        self._source, self._progress, self._carried, self._row_wise = source, progress, carried, row_wise
        self._loaded: Mapping[str, Any] | None = None
        self._place: WorkerPlace | None = None
        self._begun = 0

    def load(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at a worker's ``state``."""
        self._loaded = state

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's place, in plain types."""
        if self._row_wise:
            raise StateUnavailable(
                "a worker that reads single rows has no state: give LakeDataset a batch_size, or use num_workers=0, or "
                "lakeckpt.LakeLoader"
            )
        if self._place is None:
            raise StateUnavailable("this worker has not begun to iterate")
        return self._place.to_plain()

    def iterate(
        self, shared: SharedEpoch, base_seed: int, *, worker: int, workers: int, rank: int, world_size: int
    ) -> Generator[Any]:
        """Yield what worker ``worker`` of ``workers`` reads of an iteration; torch gives each a ``base_seed``."""
        loaded, self._loaded = self._loaded, None
        iteration = (base_seed + self._begun) % 2**62 + 1
        self._begun += 1
        if loaded is not None:
            place = self._restored(loaded, shared, worker=worker, workers=workers, world_size=world_size)
            if not place.is_over:  # a StatefulDataLoader begins again at once if its state is of an end
                shared.begin(iteration)
        else:
            follows = shared.begin(iteration)
            if refusal := self._refusal(shared, follows=follows):
                return _raise(refusal)
            self._warn_of_repeating(worker, follows=follows)
            place = self._first(shared, worker=worker, workers=workers, world_size=world_size)
        self._place = place
        return self._steps(place, rank)

    def _restored(
        self, loaded: Mapping[str, Any], shared: SharedEpoch, *, worker: int, workers: int, world_size: int
    ) -> WorkerPlace:
        place = WorkerPlace.from_plain(loaded)
        place.check(worker, workers, world_size)
        self._progress.load(place.state, ahead=workers)
        if place.state.segment.world_size == world_size:
            shared.agree_lanes(place.state.segment.num_lanes)
        return place

    def _refusal(self, shared: SharedEpoch, *, follows: bool) -> str:
        """Return why this iteration cannot be; empty if it can."""
        if shared.is_inside:
            return (
                "a state from the middle of an epoch was loaded into the dataset, and workers of a torch DataLoader "
                "read whole epochs: use lakeckpt.LakeLoader, or num_workers=0"
            )
        if follows and self._progress.identity.endless:
            return (
                "an endless stream is one iteration, and the workers of a torch DataLoader cannot go on with one that "
                "was broken off: use lakeckpt.LakeLoader"
            )
        return ""

    def _warn_of_repeating(self, worker: int, *, follows: bool) -> None:
        identity = self._progress.identity
        if follows and identity.spec.shuffle and not identity.endless and worker == 0:
            warnings.warn(
                "the workers of a torch DataLoader read the same shuffled order again, since nobody called "
                "dataset.set_epoch(epoch) before this iteration: call it before each, or use lakeckpt.LakeLoader",
                UserWarning,
                stacklevel=4,
            )

    def _first(self, shared: SharedEpoch, *, worker: int, workers: int, world_size: int) -> WorkerPlace:
        progress = self._progress
        if not progress.identity.endless:
            progress.begin_epoch(progress.epoch if shared.epoch is None else shared.epoch)
        lanes = shared.agree_lanes(progress.settled(world_size, workers).segment.num_lanes)
        progress.settle(world_size, workers, num_lanes=lanes)
        return WorkerPlace(state=progress.state, worker=worker, workers=workers)

    def _steps(self, place: WorkerPlace, rank: int) -> Generator[Any]:
        plan, workers, step = Plan(place.state), place.workers, place.next_step
        begin, stretches = step, [(plan, step, plan.steps)]
        ahead = Ahead(self._source, stretches, rank, owns=lambda _, one: (one - begin) % workers == 0)
        for dealt, found in ahead:
            self._carried.check(found, dealt)
            self._place = replace(place, state=replace(place.state, step=step + workers))
            if gives(dealt, self._row_wise):
                yield found
            step += workers
        if plan.steps is None or step < plan.steps:
            raise StateUnavailable(
                f"the iterator of worker {place.worker} of {workers} over epoch {place.state.epoch} ended before step "
                f"{step} of {plan.steps}: go on with a new iterator, iter(loader)"
            )


def _raise(refusal: str) -> Generator[Any]:
    """Raise when the first item is asked for: what ``iter`` raises in a worker that lives on ends it without a word."""
    raise StateUnavailable(refusal)
    yield


def _shared(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.share_memory_()  # type: ignore[no-untyped-call, no-any-return]

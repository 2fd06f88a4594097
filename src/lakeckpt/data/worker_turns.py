"""How does one worker of somebody else's DataLoader read its part?  `WorkerTurns`: the dataset's side inside of it.

Worker w of n yields every n-th micro-batch of its rank (steps w, w + n, …), so that torch's round robin over workers
restores the order of micro-batches whatever n is. Which epoch an iteration is of, the workers agree on through the
dataset's `EpochFile`. `lakeckpt.LakeLoader` needs none of this: it plans in the main process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from lakeckpt.core.plan import Plan
from lakeckpt.core.state import ReaderState
from lakeckpt.data.ahead import Ahead
from lakeckpt.data.carried_rows import CarriedRows
from lakeckpt.data.epoch_file import EpochFile, Turn
from lakeckpt.data.progress import Progress
from lakeckpt.data.source import BatchSource, items_of
from lakeckpt.data.worker_place import WorkerPlace
from lakeckpt.errors import StateUnavailable

__all__ = ["WorkerTurns"]


class WorkerTurns:
    """The iterations of one worker process; picklable with the dataset whose ``source`` and ``progress`` it has."""

    def __init__(self, source: BatchSource, progress: Progress, carried: CarriedRows, *, row_wise: bool) -> None:
        self._source, self._progress, self._carried, self._row_wise = source, progress, carried, row_wise
        self._loaded: Mapping[str, Any] | None = None
        self._place: WorkerPlace | None = None
        self._begun = 0

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Begin the next iteration at a worker's ``state``; None: where the workers agree to."""
        self._loaded = state

    def state_dict(self) -> dict[str, Any]:
        """This worker's place, in plain types."""
        if self._place is None:
            raise StateUnavailable("this worker has not begun to iterate")
        return self._place.to_plain()

    def iterate(
        self, epochs: EpochFile, base_seed: int, *, worker: int, workers: int, rank: int, world_size: int
    ) -> Iterator[Any]:
        """Yield what worker ``worker`` of ``workers`` reads of the iteration that torch tells by ``base_seed``, and
        ``epochs`` of which epoch it is."""
        progress = self._progress
        loaded, self._loaded = self._loaded, None
        mine = None if loaded is None else WorkerPlace.from_plain(loaded)
        if mine is not None:
            mine.check(worker, workers, world_size)
            progress.load(mine.state, ahead=workers)
        turn = epochs.join(
            rank,
            worker,
            base_seed=base_seed,
            begun=self._begun,
            first=progress.epoch,
            loaded=None if mine is None else mine.state,
            world_size=world_size,
        )
        self._begun += 1
        if mine is None:
            self._go_to(turn)
            settled = progress.settled(world_size, workers).segment
            # Nothing is dealt of an epoch that other ranks came to the end of: the lanes are agreed on at the next.
            is_over = settled.world_size != world_size
            lanes = None if is_over else epochs.agree_lanes(rank, settled.num_lanes)
            progress.settle(world_size, workers, num_lanes=lanes)
            mine = WorkerPlace(state=progress.state, worker=worker, workers=workers, origin=progress.state.step)
        self._place = mine
        return self._steps(mine, rank)

    def _go_to(self, turn: Turn) -> None:
        progress = self._progress
        if not turn.is_first and progress.identity.endless:
            raise StateUnavailable(
                "an endless stream is one iteration, and the workers of a torch DataLoader cannot go on with one that "
                "was broken off: use lakeckpt.LakeLoader"
            )
        if not turn.is_first:
            progress.begin_epoch(turn.epoch)
        elif turn.start is not None and turn.start["state"] is not None:
            progress.load(ReaderState.from_plain(turn.start["state"]))
        elif progress.epoch != turn.epoch:
            progress.begin_epoch(turn.epoch)

    def _steps(self, place: WorkerPlace, rank: int) -> Iterator[Any]:
        plan, workers = Plan(place.state), place.workers
        step, skip = place.next_step, place.skip
        steps = itertools.count(step, workers) if plan.steps is None else range(step, plan.steps, workers)
        for dealt, found in Ahead(self._source, (plan.assignment(step, rank) for step in steps)):
            self._carried.check(found, dealt)
            for item, receipt in items_of(found, dealt, self._row_wise, skip):
                ended = receipt.row is None or receipt.row + 1 == receipt.rows
                self._place = place.at(step + workers, 0) if ended else place.at(step, (receipt.row or 0) + 1)
                yield item
            skip = 0
            step += workers
        if plan.steps is None or step < plan.steps:
            raise StateUnavailable(
                f"what worker {place.worker} of {workers} reads of epoch {place.state.epoch} ended before step {step} "
                f"of {plan.steps}: go on with a new iterator, iter(loader)"
            )

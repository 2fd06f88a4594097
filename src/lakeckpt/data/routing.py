"""How do assignments reach the worker that owns their lane?  A torch DataLoader that routes instead of dealing in turn.

torch's multi-process iterator hands tasks to workers in turn. A lane must be read by one worker (its window is decoded
once), lanes may be owned unequally, and a lane may end earlier than another, so each task goes to the owner of its
lane. Results come back in the order of tasks, as torch guarantees. Everything else (start methods, pinning, time-outs,
error reports, persistent workers, shutdown) is torch's own.

The one method that is replaced, ``_try_put_index``, is private to torch: the tests of `LakeLoader` hold it for the
versions that are supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.progress import Progress
from lakeckpt.data.source import BatchSource
from lakeckpt.errors import LakeckptError

__all__ = ["Dealer", "Failure", "Reads", "RoutedLoader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What stands for a micro-batch that could not be read."""

    error: LakeckptError


class Reads(Dataset[tuple[Receipt, Any]]):
    """A map from assignments to what the loop gets for them."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __getitem__(self, assignment: Assignment) -> tuple[Receipt, Any]:
        try:
            return self._source.take(assignment)
        except LakeckptError as error:
            # As a value: torch would raise another error with this one's text, without the file and row group it names.
            return assignment.receipt, Failure(error=error)


class Dealer(Sampler[Assignment]):
    """What is left of the epoch for ``rank``, asked anew for each iteration.

    It knows the place and not the loader, so that a loader that is let go of takes its workers with it at once.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.rank = 0

    def __iter__(self) -> Iterator[Assignment]:
        return self._progress.assignments(self.rank)


def _as_it_is(item: Any) -> Any:
    return item


class _RoutedIterator(_MultiProcessingDataLoaderIter):
    def _try_put_index(self) -> None:
        try:
            assignment: Assignment = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        worker = assignment.owner % self._num_workers
        self._index_queues[worker].put((self._send_idx, assignment))
        self._task_info[self._send_idx] = (worker,)
        self._workers_num_tasks[worker] += 1
        self._tasks_outstanding += 1
        self._send_idx += 1


class RoutedLoader(DataLoader[tuple[Receipt, Any]]):
    """Yields (receipt, what the loop gets) for each assignment, in their order."""

    def __init__(self, reads: Reads, dealer: Dealer, **options: Any) -> None:
        super().__init__(
            reads,
            batch_size=None,
            sampler=dealer,
            collate_fn=_as_it_is,
            **options,
        )
        self._generation = 0

    def renew(self, generation: int) -> None:
        """Let go of workers that live on from one iteration to the next if they read another version of the table."""
        if generation != self._generation and self._iterator is not None:
            shut_down = getattr(self._iterator, "_shutdown_workers", None)
            if shut_down is not None:
                shut_down()
            self._iterator = None
        self._generation = generation

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        return _RoutedIterator(self)

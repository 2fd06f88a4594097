"""This module gets micro-batches for a `LakeLoader` from worker processes, each of a torch DataLoader of its own.

Processes, queues, pinning threads, timeouts and seeds are those of the DataLoaders inside, which have one worker each.
A task asks a worker for a group of its own micro-batches (`lakeckpt.data.workers.reader`), and the loop asks the worker
that owns the lane of the next micro-batch. So a worker that is ahead of the others waits, and no lane is read by two.

In flight are two groups of each worker (with a ``prefetch_factor`` of 1, one), and a group that the loop is at. They
and the spare slots share the memory limit.

torch starts, watches, stops and joins the processes and the threads. `Workers.close` ends them.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.counters import add_stores
from lakeckpt.data.base.torch_private import ExceptionWrapper, leave_signals, queued, stop_workers, worker_process
from lakeckpt.data.workers.groups import Arrived, Group
from lakeckpt.data.workers.pickling import unpack
from lakeckpt.data.workers.reader import Beginning, Limits, Task, WorkerInit, WorkerReader
from lakeckpt.data.workers.signals import blocked_signals, ignored_signals
from lakeckpt.data.workers.slots import SlotMemory
from lakeckpt.data.workers.start_method import GUARD, check_picklable, worker_context
from lakeckpt.errors import ConfigError, StateUnavailable, WorkerDied, WorkerTimeout
from lakeckpt.lake.storage.base import Storage

__all__ = ["GROUP_BYTES", "Workers"]

GROUP_BYTES = 16 << 20
_GROUP_MOST = 512
_JOIN_S = 5.0

_ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()
_KEPT: list[Any] = []
"""In a forked process: torch's iterators of the parent, which would stop the parent's workers when they are deleted."""


class Workers:
    """Worker processes that read one dataset, for one thread.

    Args:
        dataset: the dataset, at the version that is read. Only the user's functions see it.
        source: the source of its batches.
        storage: the storage of its table, or of one of its tables.
        num_workers: how many processes.
        prefetch_factor: micro-batches that each worker may have ahead of the loop; None: two groups.
        memory_limit_bytes: bounds the groups in flight; None: 16 MiB for each.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: the user's choice, or None.
        options: what else the DataLoaders inside get.

    Raises `ConfigError` if the dataset's transform cannot reach the workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        source: Any,
        *,
        storage: Storage,
        num_workers: int,
        prefetch_factor: int | None,
        memory_limit_bytes: int | None,
        worker_init_fn: Callable[[int], None] | None,
        multiprocessing_context: Any,
        **options: Any,
    ) -> None:
        context = worker_context(multiprocessing_context, storage)
        check_picklable(context, {"transform": source.transform, "worker_init_fn": worker_init_fn})
        tasks = min(prefetch_factor or 2, 2)
        limits = _limits(prefetch_factor, memory_limit_bytes, groups=(tasks + 1) * num_workers, tasks=tasks)
        options |= {"prefetch_factor": tasks, "multiprocessing_context": context}
        self.closed = False
        self._iteration = 0
        self._process = os.getpid()
        reads = partial(WorkerReader, dataset, source)
        self._workers = [
            _Worker(reads, WorkerInit(number, num_workers, worker_init_fn, ignored_signals()), limits, options)
            for number in range(num_workers)
        ]

    def read(self, assignments: Iterator[Assignment], beginning: Beginning) -> Iterator[tuple[Receipt, Any]]:
        """Return (receipt, what the loop gets) for each of ``assignments``, which are those after ``beginning``.

        The workers begin to read at once. An earlier iteration ends. Raises what reading raised, `WorkerDied`,
        `WorkerTimeout`; `ConfigError` if the script that starts workers would run again in each of them.
        """
        self._iteration += 1
        try:
            for worker in self._workers:
                worker.begin(beginning)
        except BaseException:
            self.close()
            raise
        return self._results(assignments, self._iteration)

    @property
    def alive(self) -> bool:
        """True if the workers may read on: they were not closed, and none has ended."""
        return not self.closed and all(worker.is_alive for worker in self._workers)

    @property
    def ready(self) -> int:
        """About how many micro-batches have come from the workers, and wait for the loop. Any thread may ask."""
        return sum(worker.ready for worker in self._workers)

    def close(self) -> None:
        """Stop the processes and join them. Delivered batches stay valid as long as somebody holds it."""
        self.closed = True
        if os.getpid() == self._process:
            for worker in self._workers:
                worker.close()

    def _results(self, assignments: Iterator[Assignment], iteration: int) -> Iterator[tuple[Receipt, Any]]:
        for assignment in assignments:
            if iteration != self._iteration or self.closed or os.getpid() != self._process:
                raise StateUnavailable(
                    "the worker processes of this iterator were ended, read for a newer iterator, or answer to the "
                    "process that this one was forked from: iterate again to go on, iter(loader)"
                )
            try:
                found = self._workers[assignment.owner % len(self._workers)].next(assignment)
                received = assignment.receipt, unpack(found.slab, found.pickle_at, assignment.receipt)
            except BaseException:
                self.close()  # a message may be lost, and nobody waits for the tasks that are under way
                raise
            yield received


class _Worker:
    """One worker process, and what has come from it."""

    def __init__(self, reads: Callable[..., Any], init: WorkerInit, limits: Limits, options: dict[str, Any]) -> None:
        self._number, self._memory = init.worker, SlotMemory.make()
        self._tasks = _Tasks(self._memory)
        self._loader: DataLoader[Group] | None = DataLoader(
            reads(self._memory, init.worker, init.workers, limits),
            batch_size=None,
            sampler=self._tasks,
            collate_fn=_same,
            num_workers=1,
            worker_init_fn=init,
            **options,
        )
        self._groups: Any = None
        """torch's iterator."""
        self._last = Group(self._memory.number)
        """The group that the loop is at."""
        self._size = 1
        """How many micro-batches the group had that came last."""

    def begin(self, beginning: Beginning) -> None:
        """Start the worker at ``beginning``, and drop its earlier results."""
        assert self._loader is not None
        self._tasks.beginning, self._last = beginning, Group(self._memory.number)
        try:
            with blocked_signals():
                groups = iter(self._loader)
        except (RuntimeError, EOFError, ConnectionError) as error:
            if isinstance(error, RuntimeError) and "bootstrapping" not in str(error):
                raise
            raise ConfigError(f"worker processes cannot be started here: {error}. {GUARD}") from error
        if groups is not self._groups:
            self._groups = groups
            _ITERATORS.add(groups)
            weakref.finalize(groups, self._memory.close).atexit = False
            leave_signals(groups)

    def next(self, assignment: Assignment) -> Arrived:
        """Return the worker's next micro-batch, which is that of ``assignment``."""
        while not self._last.arrived:
            if (error := self._last.error) is not None:
                if isinstance(error, ExceptionWrapper):
                    error.reraise()  # type: ignore[no-untyped-call]
                raise error
            if self._last.over:
                raise _out_of_step("gave no more", assignment)
            self._last = self._next_group(assignment)
        found = self._last.arrived.popleft()
        if found.step != assignment.receipt.step:
            raise _out_of_step(f"gave step {found.step}", assignment)
        return found

    @property
    def ready(self) -> int:
        """The micro-batches of the current group, and of groups that wait in torch's queue. The size of a waiting group
        is not known: it counts as the last group did."""
        return len(self._last.arrived) + queued(self._groups) * self._size

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        return self._groups is None or self._process.is_alive()

    def close(self) -> None:
        """Stop the process and join it."""
        groups, self._groups, self._loader = self._groups, None, None
        if groups is not None:
            stop_workers(groups)  # now: the traceback of an error may refer to it for long
            self._memory.close()

    @property
    def _process(self) -> Any:
        return worker_process(self._groups)

    def _next_group(self, assignment: Assignment) -> Group:
        try:
            group: Group = next(self._groups)
            add_stores(group.stores)
            self._size = len(group.arrived)
            return group
        except RuntimeError as error:
            typed = self._typed(str(error), assignment.receipt)
            if typed is None:
                raise
        raise typed  # not within the handler: the frames of torch's error refer to the process

    def _typed(self, text: str, due: Receipt) -> Exception | None:
        """Return our error for torch's, if that is of a worker that has ended or does not answer."""
        what = (
            f"while micro-batch {due.micro_batch} was due (epoch {due.epoch}, step {due.step} of rank {due.rank}, "
            f"lane {due.lane})"
        )
        process = self._process
        if text.startswith("DataLoader timed out"):
            return WorkerTimeout(f"{text} {what}: give a longer timeout=, or look at what the workers wait for")
        if not text.startswith("DataLoader worker (pid") or process.is_alive():
            return None
        process.join(_JOIN_S)
        return WorkerDied(
            f"worker {self._number} (process {process.pid}) ended, {_ending(process.exitcode)}, {what}. What the loop "
            "received before is counted, and iterating again starts new workers",
            worker=self._number,
            exit_code=process.exitcode,
        )


class _Tasks(Sampler[Task]):
    """The tasks of one worker in the iteration that begins."""

    beginning: Beginning

    def __init__(self, memory: SlotMemory) -> None:
        self._memory = memory

    def __iter__(self) -> Iterator[Task]:
        yield Task(beginning=self.beginning, free=self._memory.ended())
        while True:
            yield Task(beginning=None, free=self._memory.ended())


def _limits(prefetch_factor: int | None, memory_limit_bytes: int | None, *, groups: int, tasks: int) -> Limits:
    """Return the limits of a group if ``groups`` of all workers are in flight, ``tasks`` of each not received."""
    most = _GROUP_MOST if prefetch_factor is None else prefetch_factor // tasks
    if memory_limit_bytes is None:
        return Limits(size_bytes=GROUP_BYTES, micro_batches=most, spare_bytes=4 * GROUP_BYTES)
    share = max(1, min(GROUP_BYTES, memory_limit_bytes // (groups + groups // (tasks + 1))))
    return Limits(size_bytes=share, micro_batches=most, spare_bytes=share)


def _same(group: Any) -> Any:
    return group


def _out_of_step(found: str, assignment: Assignment) -> StateUnavailable:
    return StateUnavailable(
        f"the worker of lane {assignment.receipt.lane} {found} where step {assignment.receipt.step} of epoch "
        f"{assignment.receipt.epoch} was due: it planned otherwise than the main process. This is a "
        "defect of lakeckpt: report it, please. The state is that of what the loop received"
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code} (its own output says why. {GUARD})" if code else "with exit code 0"
    named = {one.value for one in signal.Signals}
    how = f"killed by {signal.Signals(-code).name if -code in named else f'signal {-code}'}"
    return how + (" (out of memory? the kernel's log says so)" if code == -signal.SIGKILL else "")


os.register_at_fork(after_in_child=lambda: _KEPT.extend(_ITERATORS))

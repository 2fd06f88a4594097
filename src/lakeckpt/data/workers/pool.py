"""This module gets micro-batches for a `LakeLoader` from the worker processes of a torch DataLoader.

Processes, queues, the pinning thread, timeouts and seeds are those of a DataLoader inside. torch deals its tasks to the
workers in turn, and each task asks a worker for a group of its own micro-batches (`lakeckpt.data.workers.reader`).
`Workers.read` merges the groups into the order of assignments. A worker without a lane answers with empty groups.

In flight are two groups of each worker (with a ``prefetch_factor`` of 1, one), and a group that the loop is at. They
and the spare slots share the memory limit. A worker that is ahead of the others is asked for nothing until the loop has
used half of a group of its micro-batches.

torch starts, watches, stops and joins the processes and the thread. `Workers.close` ends them.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils import signal_handling

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.dataset import LakeDataset
from lakeckpt.data.workers.groups import Arrived, Group
from lakeckpt.data.workers.packing import Form, Layout
from lakeckpt.data.workers.reader import Beginning, Limits, Task, WorkerInit, WorkerReader
from lakeckpt.data.workers.slots import SlotMemory, forking_a_worker
from lakeckpt.data.workers.start_method import GUARD, check_picklable, worker_context
from lakeckpt.errors import ConfigError, StateUnavailable, WorkerDied, WorkerTimeout

__all__ = ["GROUP_BYTES", "Workers"]

GROUP_BYTES = 16 << 20
_GROUP_MOST = 512
_LAYOUTS = 64
_JOIN_S = 5.0

_ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()
_KEPT: list[Any] = []
"""In a forked process: torch's iterators of the parent, which would stop the parent's workers when they are deleted."""


class Workers:
    """Worker processes that read one dataset, for one thread.

    Args:
        dataset: the dataset, at the version that is read.
        num_workers: how many processes.
        prefetch_factor: micro-batches that each worker may have ahead of the loop; None: two groups.
        memory_limit_bytes: bounds the groups in flight; None: 16 MiB for each.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: the user's choice, or None.
        options: what else the DataLoader inside gets.

    Raises `ConfigError` where the dataset's transform cannot reach the workers.
    """

    def __init__(
        self,
        dataset: LakeDataset,
        *,
        num_workers: int,
        prefetch_factor: int | None,
        memory_limit_bytes: int | None,
        worker_init_fn: Callable[[int], None] | None,
        multiprocessing_context: Any,
        **options: Any,
    ) -> None:
        context = worker_context(multiprocessing_context, dataset.table.storage)
        check_picklable(context, {"transform": dataset._source.transform, "worker_init_fn": worker_init_fn})
        tasks = min(prefetch_factor or 2, 2)
        limits = _limits(prefetch_factor, memory_limit_bytes, groups=(tasks + 1) * num_workers, tasks=tasks)
        self.closed = False
        self.iteration = 0
        self._process = os.getpid()
        self._memories = [SlotMemory.make() for _ in range(num_workers)]
        self._asking = _Asking(self._memories, limits)
        self._layouts: dict[Form, Layout] = {}
        self._groups: Any = None
        """torch's iterator."""
        self._loader: DataLoader[Group] | None = _Inner(
            WorkerReader(dataset, self._memories, limits),
            batch_size=None,
            sampler=self._asking,
            collate_fn=_same,
            num_workers=num_workers,
            prefetch_factor=tasks,
            worker_init_fn=WorkerInit(worker_init_fn),
            multiprocessing_context=context,
            **options,
        )

    def read(self, assignments: Iterator[Assignment], beginning: Beginning) -> Iterator[tuple[Receipt, Any]]:
        """Return (receipt, what the loop gets) for each of ``assignments``, which are those after ``beginning``.

        The workers begin to read at once. An earlier iteration ends. Raises what reading raised, `WorkerDied`,
        `WorkerTimeout`; `ConfigError` where the script that starts workers would run again in each of them.
        """
        self.iteration += 1
        self._asking.begin(beginning)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return _Results(self, assignments)

    @property
    def alive(self) -> bool:
        """Whether they may read on: they were not closed, and none has ended."""
        return not self.closed and all(process.is_alive() for process in self.processes)

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return [] if self._groups is None else self._groups._workers

    def close(self) -> None:
        """Stop the processes and join them. What was delivered stays valid as long as somebody holds it."""
        groups, self.closed, self._groups, self._loader = self._groups, True, None, None
        if groups is not None and os.getpid() == self._process:
            groups._shutdown_workers()  # now: the traceback of an error may refer to them for long
            _close_all(self._memories)

    def receive(self, assignment: Assignment) -> tuple[Receipt, Any]:
        """Return the receipt of ``assignment``, and what the loop gets for it."""
        found = self._arrived(assignment.owner % len(self._memories), assignment)
        receipt = assignment.receipt
        if found.step != receipt.step:
            raise _out_of_step(f"gave step {found.step}", assignment)
        layout = self._layout(found.form)
        if isinstance(found.slab, torch.Tensor):
            return receipt, layout.build_pinned(found.slab, found.sizes, receipt)
        return receipt, layout.build(found.slab, found.sizes, receipt)

    # --- inside

    def _begin(self) -> None:
        assert self._loader is not None
        try:
            with forking_a_worker():
                groups = iter(self._loader)
        except (RuntimeError, EOFError, ConnectionError) as error:
            if isinstance(error, RuntimeError) and "bootstrapping" not in str(error):
                raise
            raise ConfigError(f"worker processes cannot be started here: {error}. {GUARD}") from error
        if groups is not self._groups:
            self._groups = groups
            _ITERATORS.add(groups)
            weakref.finalize(groups, _close_all, self._memories).atexit = False
            _leave_signals(groups)

    def _arrived(self, worker: int, assignment: Assignment) -> Arrived:
        """The next micro-batch of ``worker``."""
        asking = self._asking
        while not asking.arrived[worker]:
            if (error := asking.errors[worker]) is not None:
                if isinstance(error, ExceptionWrapper):
                    error.reraise()  # type: ignore[no-untyped-call]
                raise error
            if asking.over[worker]:
                raise _out_of_step("gave no more", assignment)
            asking.add(self._next_group(assignment))
        return asking.take(worker)

    def _next_group(self, assignment: Assignment) -> Group:
        try:
            return next(self._groups)  # type: ignore[no-any-return]
        except RuntimeError as error:
            typed = _typed(error, self.processes, assignment)
            if typed is None:
                raise
        raise typed  # not within the handler: the frames of torch's error refer to the processes

    def _layout(self, form: Form) -> Layout:
        layout = self._layouts.get(form)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            layout = self._layouts[form] = Layout(form)
        return layout


def _limits(prefetch_factor: int | None, memory_limit_bytes: int | None, *, groups: int, tasks: int) -> Limits:
    """Return the limits of a group where ``groups`` of all workers are in flight, ``tasks`` of each not received."""
    most = _GROUP_MOST if prefetch_factor is None else prefetch_factor // tasks
    if memory_limit_bytes is None:
        return Limits(size_bytes=GROUP_BYTES, micro_batches=most, spare_bytes=4 * GROUP_BYTES)
    share = max(1, min(GROUP_BYTES, memory_limit_bytes // (groups + groups // (tasks + 1))))
    return Limits(size_bytes=share, micro_batches=most, spare_bytes=share)


class _Inner(DataLoader[Group]):
    def check_worker_number_rationality(self) -> None:
        """Warn of nothing: the `LakeLoader` has warned."""


class _Asking(Sampler[Task]):
    """The tasks of the iteration at hand, which torch deals to the workers in turn; and what has come from each."""

    def __init__(self, memories: list[SlotMemory], limits: Limits) -> None:
        self._memories, self._limits = memories, limits

    def begin(self, beginning: Beginning) -> None:
        """Forget what has come, and ask for what follows ``beginning``."""
        workers = len(self._memories)
        self._beginning = beginning
        self.arrived: list[deque[Arrived]] = [deque() for _ in range(workers)]
        self.over = [False] * workers
        self.errors: list[Any] = [None] * workers
        self._bytes = [0] * workers

    def __iter__(self) -> Iterator[Task]:
        for memory in self._memories:
            yield Task(beginning=self._beginning, free=memory.ended(), wanted=True)
        while True:
            for worker, memory in enumerate(self._memories):
                yield Task(beginning=None, free=memory.ended(), wanted=self._is_wanted(worker))

    def add(self, group: Group) -> None:
        """Take in what has come."""
        worker = group.worker
        self.arrived[worker].extend(group.arrived)
        self._bytes[worker] += group.size_bytes
        self.over[worker] = group.over
        self.errors[worker] = self.errors[worker] or group.error

    def take(self, worker: int) -> Arrived:
        """Return the next micro-batch of ``worker``, which is there."""
        found = self.arrived[worker].popleft()
        self._bytes[worker] -= len(found.slab)
        return found

    def _is_wanted(self, worker: int) -> bool:
        limits, number = self._limits, len(self.arrived[worker])
        return not number or (2 * self._bytes[worker] < limits.size_bytes and 2 * number < limits.micro_batches)


class _Results(Iterator[tuple[Receipt, Any]]):
    """One iteration over the workers' micro-batches."""

    def __init__(self, workers: Workers, assignments: Iterator[Assignment]) -> None:
        self._workers, self._assignments, self._iteration = workers, assignments, workers.iteration

    def __next__(self) -> tuple[Receipt, Any]:
        workers = self._workers
        if self._iteration != workers.iteration or workers.closed:
            raise StateUnavailable(
                "the worker processes of this iterator were ended, or are at what loader.start() began since: iterate "
                "again to go on, iter(loader)"
            )
        assignment = next(self._assignments)
        try:
            return workers.receive(assignment)
        except BaseException:
            workers.close()  # a message may be lost, and nobody waits for the tasks that are under way
            raise


def _same(group: Any) -> Any:
    return group


def _close_all(memories: list[SlotMemory]) -> None:
    for memory in memories:
        memory.close()


def _leave_signals(groups: Any) -> None:
    """Have torch notice a worker's death where it waits for the worker, and not in its handler of SIGCHLD.

    The handler raises at any line of the main thread, also after a batch was counted and before the loop has it. A
    torch that waits looks at its workers every 5 s.
    """
    if groups._worker_pids_set:
        signal_handling._remove_worker_pids(id(groups))  # type: ignore[attr-defined]
        groups._worker_pids_set = False


def _out_of_step(found: str, assignment: Assignment) -> StateUnavailable:
    return StateUnavailable(
        f"the worker of lane {assignment.receipt.lane} {found} where step {assignment.receipt.step} of epoch "
        f"{assignment.receipt.epoch} was due: it planned otherwise than the main process. This is a "
        "defect of lakeckpt: report it, please. The state is that of what the loop received"
    )


def _typed(error: RuntimeError, processes: list[Any], assignment: Assignment) -> Exception | None:
    """Return our error for torch's, if that is of a worker that has ended or does not answer."""
    receipt = assignment.receipt
    due = (
        f"while micro-batch {receipt.micro_batch} was due (epoch {receipt.epoch}, step {receipt.step} of rank "
        f"{receipt.rank}, lane {receipt.lane})"
    )
    if str(error).startswith("DataLoader timed out"):
        return WorkerTimeout(f"{error} {due}: give a longer timeout=, or look at what the workers wait for")
    if not str(error).startswith("DataLoader worker (pid"):
        return None
    ended = next(((number, one) for number, one in enumerate(processes) if not one.is_alive()), None)
    return None if ended is None else _died(*ended, due)


def _died(number: int, process: Any, due: str) -> WorkerDied:
    process.join(_JOIN_S)
    return WorkerDied(
        f"worker {number} (process {process.pid}) ended, {_ending(process.exitcode)}, {due}. What the loop received "
        "before is counted, and iterating again starts new workers",
        worker=number,
        exit_code=process.exitcode,
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code} (its own output says why. {GUARD})" if code else "with exit code 0"
    named = {one.value for one in signal.Signals}
    how = f"killed by {signal.Signals(-code).name if -code in named else f'signal {-code}'}"
    return how + (" (out of memory? the kernel's log says so)" if code == -signal.SIGKILL else "")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _KEPT.extend(_ITERATORS))

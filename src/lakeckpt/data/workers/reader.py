"""This module reads groups of micro-batches in a worker process of torch's DataLoader.

A `WorkerReader` is the data set of the DataLoader inside a `LakeLoader`. Each index that torch sends is a `Task`, which
asks a worker for its next group. A worker plans the epoch itself, from the reader state in the first task of an
iteration, and reads the lanes that it owns: lane l belongs to worker l modulo the number of workers, so each window is
decoded by one process. No assignment crosses a queue, and the threads of the source decode ahead while the worker waits
for a task.

A group ends at 16 MiB, after 50 ms, at 512 micro-batches, and where the next window is not decoded yet. The first
groups of an iteration hold 1, 2, 4, … micro-batches, so the loop gets the first one soon.

A worker never decides an order, and its place counts for no state. An exception of the reading is part of a group,
because torch would go on with the next task after an exception that it carries itself.

In a worker that was not forked, `WorkerInit` starts a daemon thread that ends the process when the main process has
gone. Nobody joins the thread.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lakeckpt.core.plan import Assignment, Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import ReaderState
from lakeckpt.data.ahead import Ahead
from lakeckpt.data.dataset import LakeDataset
from lakeckpt.data.source import BatchSource
from lakeckpt.data.workers.groups import Group
from lakeckpt.data.workers.packing import Packed, PlainPacking, pack
from lakeckpt.data.workers.slots import ALIGNMENT, SlotMemory, Slots
from lakeckpt.errors import LakeckptError
from lakeckpt.reading.columns.plain import PlainRows

__all__ = ["Beginning", "Limits", "Task", "WorkerInit", "WorkerReader"]

_GROUP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where an iteration begins: what a worker plans from."""

    state: ReaderState
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a group may be. One micro-batch is always allowed."""

    size_bytes: int
    micro_batches: int
    spare_bytes: int
    """Free slots of so many bytes keep their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request for a worker's next group."""

    beginning: Beginning | None
    """Given in the first task of an iteration for each worker."""
    free: list[int]
    """Slots that may be written again."""
    wanted: bool
    """False: the loop has enough from this worker for now. The worker answers with an empty group."""


class WorkerReader(Dataset[Group]):
    """Returns a `Group` for each `Task`. Worker number n writes to ``memories[n]``."""

    def __init__(self, dataset: LakeDataset, memories: list[SlotMemory], limits: Limits) -> None:
        self.dataset = dataset
        self._memories, self._limits = memories, limits
        self._writer: _GroupWriter | None = None

    def __getitem__(self, task: Task) -> Group:
        if self._writer is None:
            info = get_worker_info()
            assert info is not None, "it is read in worker processes only"
            memory = self._memories[info.id]
            self._writer = _GroupWriter(self.dataset._source, info.id, info.num_workers, memory, self._limits)
        return self._writer.group(task)


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """The ``worker_init_fn`` of the DataLoader inside, which calls the user's.

    `torch.utils.data.get_worker_info` knows the user's dataset afterwards.
    """

    worker_init_fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Prepare this process. A StopIteration becomes a RuntimeError, which does not end the loop in silence."""
        gc.freeze()  # a collection need not look at what is there now
        _end_with_main()
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, WorkerReader)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset.dataset
        )
        if self.worker_init_fn is not None:
            try:
                self.worker_init_fn(worker)
            except StopIteration as error:
                raise RuntimeError(f"worker_init_fn raised StopIteration in worker {worker}") from error


def _end_with_main() -> None:
    """Start the thread that ends this worker when its main process has gone, unless the worker was forked.

    torch's watchdog compares `os.getppid`, which is the fork server's for a worker that the fork server started, and
    the fork server lives as long as its children. A forked worker has torch's watchdog alone: workers that were forked
    later hold the write end of its sentinel, too.
    """
    process, main = multiprocessing.current_process(), multiprocessing.parent_process()
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    if method != "fork" and main is not None:
        threading.Thread(target=_exit_after, args=(main,), name="lakeckpt-watch", daemon=True).start()


def _exit_after(main: Any) -> None:
    main.join()  # it waits for the sentinel
    os._exit(1)


class _GroupWriter:
    """One worker's side of all iterations."""

    def __init__(self, source: BatchSource, worker: int, workers: int, memory: SlotMemory, limits: Limits) -> None:
        self._source, self._worker, self._workers = source, worker, workers
        self._memory, self._slots = memory, Slots(memory, spare_bytes=limits.spare_bytes)
        self._limits = limits
        self._ahead: _PackedAhead | None = None
        """What is left of the iteration; None: nothing."""
        self._groups = 0

    def group(self, task: Task) -> Group:
        """Return the group that ``task`` asks for."""
        self._slots.free(task.free)
        if task.beginning is not None:
            mine = _assignments(task.beginning, self._worker, self._workers)
            self._ahead, self._groups = _PackedAhead(self._source, mine), 0
        group = Group(worker=self._worker, memory=self._memory.number)
        if task.wanted and self._ahead is not None:
            try:
                self._fill(group, self._ahead)
            except Exception as error:
                group.error, self._ahead = _crossing(error, self._worker), None
        group.over = self._ahead is None
        return group

    def _fill(self, group: Group, ahead: _PackedAhead) -> None:
        most, until = min(self._limits.micro_batches, 1 << min(self._groups, 20)), 0.0
        self._groups += 1
        while len(group.written) < most and group.size_bytes < self._limits.size_bytes:
            if group.written and (time.monotonic() >= until or not self._source.is_ready):
                return
            receipt, packed = next(ahead, (None, None))
            if receipt is None or packed is None:
                self._ahead = None
                return
            until = until or time.monotonic() + _GROUP_S
            group.add(receipt, packed.form, self._written(packed), packed.size_bytes, packed.sizes)

    def _written(self, packed: Packed) -> int:
        """Copy a micro-batch into a slot, and return its offset."""
        if not packed.size_bytes:
            return 0
        offset = self._slots.take(packed.size_bytes)
        at = self._memory.address + offset
        for address, size in packed.leaves:
            if size:
                ctypes.memmove(at, address, size)
                at += (size + ALIGNMENT - 1) & -ALIGNMENT
        return offset


class _PackedAhead(Ahead):
    """Yields packed micro-batches. It makes no batch where `PlainPacking` copies the rows from their window."""

    def __init__(self, source: BatchSource, assignments: Iterator[Assignment]) -> None:
        self._plain: weakref.WeakKeyDictionary[PlainRows, PlainPacking] = weakref.WeakKeyDictionary()
        super().__init__(source, assignments)

    def _take(self, assignment: Assignment) -> tuple[Receipt, Packed]:
        if (found := self._source.take_plain(assignment)) is None:
            receipt, value = self._source.take(assignment)
            return receipt, pack(value, receipt)
        rows, start, stop = found
        packing = self._plain.get(rows)
        if packing is None:
            packing = self._plain[rows] = PlainPacking(rows, arrays=self._source.gives_arrays)
        return assignment.receipt, packing.pack(rows, start, stop)


def _assignments(beginning: Beginning, worker: int, workers: int) -> Iterator[Assignment]:
    """Yield what ``worker`` of ``workers`` reads of the rest of the epoch."""
    plan, rank = Plan(beginning.state), beginning.rank
    step = beginning.state.step
    while plan.steps is None or step < plan.steps:
        if plan.owner(step, rank) % workers == worker:
            yield plan.assignment(step, rank)
        step += 1


def _crossing(error: Exception, worker: int) -> Any:
    """Return what crosses for ``error``: ours as it is, with its file and row group; others with their traceback."""
    if isinstance(error, LakeckptError) and _crosses(error):
        return error
    # As a StopIteration it would end the loop as the end of the rows does.
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    where = f"in DataLoader worker process {worker}"
    wrapped: Any = ExceptionWrapper((kind, error, error.__traceback__), where=where)  # type: ignore[no-untyped-call]
    if not _crosses(wrapped):
        wrapped.exc_type = RuntimeError  # the main process cannot find its own class, or cannot make one
    return wrapped


def _crosses(error: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(error, 5))
    except Exception:
        return False
    return True

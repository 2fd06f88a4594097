"""This module reads groups of micro-batches in a worker process of torch's DataLoader.

A `WorkerReader` is the data set of the DataLoader inside a `LakeLoader`. Each index that torch sends is a `Task`, which
asks a worker for its next group. A worker plans the epoch itself, from the reader state in the first task of an
iteration, and reads the lanes that it owns: lane l belongs to worker l modulo the number of workers, so each window is
decoded by one process. No assignment crosses a queue, and the threads of the source decode ahead while the worker waits
for a task.

A group ends at 16 MiB, after 50 ms, at 512 micro-batches, and when the next window is not decoded yet. The first
groups of an iteration hold 1, 2, 4, … micro-batches, so the loop gets the first one soon.

A worker never decides an order, and its place counts for no state. An exception of the reading is part of a group,
because torch would go on with the next task after an exception that it carries itself.

In a worker that was not forked, `WorkerInit` starts a daemon thread that ends the process when the main process has
gone, and another one if the main process handles signals (`lakeckpt.data.workers.signals`). Nobody joins them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lakeckpt.core.state import State
from lakeckpt.core.streams.mixture import stretches
from lakeckpt.counters import take_stores
from lakeckpt.data.base.ahead import Ahead
from lakeckpt.data.base.torch_private import ExceptionWrapper, set_worker_info
from lakeckpt.data.flows.reading import FlowReading
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.workers.groups import Group
from lakeckpt.data.workers.pickling import pack
from lakeckpt.data.workers.signals import end_by_main
from lakeckpt.data.workers.slots import SlotMemory, Slots
from lakeckpt.errors import LakeckptError

__all__ = ["Beginning", "Limits", "Task", "WorkerInit", "WorkerReader"]

_GROUP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The place where an iteration begins, from which a worker plans."""

    state: State
    """The state of the job, or if consumption depends on the data, the part of the rank."""
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a group. One micro-batch is always allowed."""

    size_bytes: int
    micro_batches: int
    spare_bytes: int
    """Free slots of so many bytes keep their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request for a worker's next group."""

    beginning: Beginning | None
    """Given in the first task of an iteration."""
    free: list[int]
    """Slots that may be written again."""


class WorkerReader(Dataset[Group]):
    """Returns a `Group` for each `Task`, in worker ``worker`` of ``workers``: ``source`` reads, and ``memory`` is
    written to. The user's functions find ``dataset`` in torch's worker info."""

    def __init__(
        self, dataset: Dataset[Any], source: Any, memory: SlotMemory, worker: int, workers: int, limits: Limits
    ) -> None:
        self.dataset, self._source = dataset, source
        self._memory, self._worker, self._workers, self._limits = memory, worker, workers, limits
        self._slots = Slots(memory, spare_bytes=limits.spare_bytes)
        self._ahead: Ahead | FlowReading | None = None
        """The rest of the iteration; None: nothing is left."""
        self._groups = 0

    def __getitem__(self, task: Task) -> Group:
        self._slots.free(task.free)
        if task.beginning is not None:
            self._ahead, self._groups = self._begun(task.beginning), 0
        group = Group(self._memory.number)
        if self._ahead is not None:
            try:
                self._fill(group, self._ahead)
            except Exception as error:
                group.error, self._ahead = _crossing(error, self._worker), None
        group.over, group.stores = self._ahead is None, take_stores()
        return group

    def _begun(self, beginning: Beginning) -> Ahead | FlowReading:
        source, worker, workers = self._source, self._worker, self._workers
        state, rank, ranks = beginning.state, beginning.rank, beginning.state.segment.world_size
        if isinstance(source, FlowSource):
            return FlowReading(source, state, rank, owns=lambda lane: lane // ranks % workers == worker)
        return Ahead(source, stretches(state), rank, owns=lambda plan, step: plan.owner(step, rank) % workers == worker)

    def _fill(self, group: Group, ahead: Ahead | FlowReading) -> None:
        most, until = min(self._limits.micro_batches, 1 << min(self._groups, 20)), 0.0
        self._groups += 1
        while len(group.written) < most and group.size_bytes < self._limits.size_bytes:
            if group.written and (time.monotonic() >= until or not ahead.is_ready):
                return
            receipt, value = next(ahead, (None, None))
            if receipt is None:
                self._ahead = None
                return
            until = until or time.monotonic() + _GROUP_S
            packed = pack(value, None if isinstance(ahead, FlowReading) else receipt)
            offset = self._slots.take(packed.size_bytes)
            packed.copy_to(self._memory.address + offset)
            group.add(receipt.step, offset, packed.size_bytes, packed.pickle_at)


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """The ``worker_init_fn`` of the DataLoader of worker ``worker`` of ``workers``, which calls the user's.

    `torch.utils.data.get_worker_info` knows the user's dataset and all workers afterwards.
    """

    worker: int
    workers: int
    worker_init_fn: Callable[[int], None] | None
    ignored: frozenset[int]
    """The signals that the worker ignores."""

    def __call__(self, _: int) -> None:
        """Prepare this process, and call the user's function in it."""
        gc.freeze()  # a collection need not look at what is there now
        end_by_main(self.ignored)  # before other threads begin, which inherit what is blocked
        _end_with_main()
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, WorkerReader)
        set_worker_info(worker=self.worker, workers=self.workers, seed=info.seed, dataset=info.dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(self.worker)


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


def _crossing(error: Exception, worker: int) -> Any:
    """Return what crosses for ``error``: ours as it is, with its file and row group; others with their traceback."""
    if isinstance(error, LakeckptError) and _crosses(error):
        return error
    where = f"in DataLoader worker process {worker}"
    wrapped: Any = ExceptionWrapper((type(error), error, error.__traceback__), where=where)  # type: ignore[no-untyped-call]
    if not _crosses(wrapped):
        wrapped.exc_type = RuntimeError  # the main process cannot find its own class, or cannot make one
    return wrapped


def _crosses(error: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(error, 5))
    except Exception:
        return False
    return True

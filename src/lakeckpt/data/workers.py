"""How do assignments become micro-batches in worker processes, in order?  By `Workers`, who start and stop them.

Each assignment goes to the worker that owns its lane (a window is decoded once, by one process), and results are given
out in the order of assignments: each worker keeps its own order, so the next result is the next one of a known worker.
Tasks go out as far ahead as workers have room for what they decode, a few for each micro-batch that the loop takes and
more while it would wait: so neither the first micro-batch nor any other waits for the dealing of thousands. What a
worker may have delivered ahead of the loop is bounded.

The processes are daemons. They end when told to (`Workers.close`, or nobody refers to the workers any more, or the
interpreter ends), and are joined; one that does not end within seconds is killed. A worker that dies is named by
`WorkerDied` once its next result is due; where none is due yet, the loader starts others (`Workers.alive`). Without
pinning there is no thread here.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import ExceptionWrapper

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.beside import Beside
from lakeckpt.data.channel import PeerGone
from lakeckpt.data.dataset import LakeDataset
from lakeckpt.data.packing import Layout
from lakeckpt.data.slots import SlotMemory
from lakeckpt.data.tasks import to_task
from lakeckpt.data.worker_handle import WorkerHandle, died, doing, let_go, start_worker, stop_workers
from lakeckpt.data.worker_process import Entry, Orders, WorkerSetup
from lakeckpt.errors import LakeckptError, StateUnavailable, WorkerTimeout

__all__ = ["Workers", "pinned_copy"]

AHEAD_S = 0.1
"""What is delivered ahead, unless told otherwise, is to last for so long: processors are busy elsewhere at times."""
MOST_AHEAD = 512
AHEAD_BYTES = 32 << 20
MOST_TOLD = 4096
"""Tasks of each worker that the loop has not got."""
_EACH_TIME = 4
"""Tasks dealt for each micro-batch that the loop takes: more than one, so that more and more are ahead of it."""
_WHILE_WAITING = 32
"""Tasks dealt at a time while there is nothing to take: about a millisecond's."""
_TOLD_TOGETHER = 64
"""Tasks worth a message."""
_LOOK_UP_S = 0.2
_NOTHING = np.empty(0, np.uint8)


Order = deque[tuple[WorkerHandle, Assignment]]
"""What is dealt and not received: whose it is, and what."""


class Workers:
    """Worker processes that read one dataset. For one thread.

    ``ahead``: micro-batches that a worker may have delivered ahead of the loop; None: two, and more where they are
    so small or so quick to read that two would not last for a message; 32 MiB of them, and one, at most.
    ``timeout_s``: how long to wait for a worker; 0: for ever. ``memory_limit_bytes`` bounds what is delivered
    ahead, and what the loop keeps counts against it: one micro-batch of each worker is always allowed. With
    ``pins``, micro-batches are copied into pinned memory, by a thread (`lakeckpt.data.beside`), and slots are free
    as soon as that is done.
    """

    def __init__(
        self,
        dataset: LakeDataset,
        *,
        num_workers: int,
        base_seed: int,
        context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        ahead: int | None = None,
        timeout_s: float = 0,
        memory_limit_bytes: int | None = None,
        pins: bool = False,
    ) -> None:
        self.closed = False
        self._pins = pins
        self._beside: weakref.ref[Beside[tuple[Receipt, Any]]] | None = None
        self._pinning: threading.Thread | None = None
        self._ahead, self._timeout_s, self._memory_limit_bytes = ahead, timeout_s, memory_limit_bytes
        self._iteration = -1
        self._spare = 0
        """Free slots that may keep their memory, as many as were of use so far."""
        self._seconds = self._bytes = 0.0
        """What a micro-batch takes, of late."""
        self._all: list[WorkerHandle] = []
        self._finalizer = weakref.finalize(self, stop_workers, self._all, os.getpid())
        context = context or multiprocessing.get_context()
        try:
            for number in range(num_workers):
                memory, descriptor = SlotMemory.make()
                try:
                    setup = WorkerSetup(
                        worker=number,
                        workers=num_workers,
                        base_seed=base_seed,
                        dataset=dataset,
                        worker_init_fn=worker_init_fn,
                        memory_bytes=memory.size_bytes,
                        parent=os.getpid(),
                    )
                    self._all.append(start_worker(context, setup, memory, descriptor))
                finally:
                    os.close(descriptor)
        except BaseException:
            self.close()
            raise

    def read(self, assignments: Iterator[Assignment]) -> Iterator[tuple[Receipt, Any]]:
        """Return (receipt, what the loop gets) for each assignment, in their order; the first are being read already.

        It ends an earlier iteration. Raises what reading raised, `WorkerDied`, `WorkerTimeout`.
        """
        self._end_thread()
        self._iteration += 1
        for worker in self._all:
            for _, entry in worker.delivered:
                let_go(worker, entry)
            worker.delivered.clear()
            worker.unsent.clear()
            worker.told = worker.received = worker.may_deliver = 0
            worker.received_bytes = worker.may_deliver_bytes = 0
            worker.has_room = True
        if not self._pins:
            return _Results(self, assignments, self._iteration)
        device = torch.accelerator.current_device_index()

        def in_thread(is_wanted: Callable[[], bool]) -> Iterator[tuple[Receipt, Any]]:
            return _Results(self, assignments, self._iteration, is_wanted)

        beside = Beside(in_thread, prepare=lambda: _prepare_to_pin(device))
        self._beside, self._pinning = weakref.ref(beside), beside.thread
        return beside

    @property
    def alive(self) -> bool:
        """Whether they may read on: they were not closed, and none has ended."""
        return not self.closed and all(worker.process.is_alive() for worker in self._all)

    def close(self) -> None:
        """Stop the processes and join them. What was delivered stays valid as long as somebody holds it."""
        self.closed = True
        self._end_thread()
        self._finalizer()

    def _end_thread(self) -> None:
        if self._beside is not None and (beside := self._beside()) is not None:
            beside.close()
        # One that nobody refers to any more was told to end, and may be at work on these processes still.
        if self._pinning is not None and self._pinning is not threading.current_thread():
            self._pinning.join()
            self._pinning = None

    # --- what results ask

    def deal(self, order: Order, assignments: Iterator[Assignment], most: int) -> bool:
        """Deal up to ``most`` tasks more, as far as that is of use; tell whether there may be still more to deal."""
        enough = 2 * self._may_be_ahead() * len(self._all)
        # One that nothing was dealt to has no lane: its room is of no use, however much is dealt to the others.
        useful = MOST_TOLD * len(self._all) if any(worker.has_room and worker.told for worker in self._all) else 0
        for _ in range(most):
            if len(order) >= max(enough, useful):
                return False
            assignment = next(assignments, None)
            if assignment is None:
                return False
            worker = self._all[assignment.owner % len(self._all)]
            if assignment.skips is not worker.skips and assignment.skips != worker.skips:
                worker.skips = assignment.skips
                worker.unsent.append(assignment.skips)
            worker.unsent.append(to_task(assignment))
            worker.told += 1
            order.append((worker, assignment))
        return True

    def permit(self, *, at_once: bool) -> None:
        """Tell each worker what it may do by now, where that is worth a message; ``at_once``: where it is news."""
        ahead, ahead_bytes = self._may_be_ahead(), self._bytes_ahead()
        for worker in self._all:
            due = 2 * (worker.may_deliver - worker.received) <= ahead
            due = due or 2 * (worker.may_deliver_bytes - worker.received_bytes) <= ahead_bytes
            if worker.unsent and not due:
                known = worker.told - worker.received - len(worker.unsent)
                due = at_once or known <= ahead or len(worker.unsent) >= _TOLD_TOGETHER
            if due:
                self._order(worker, ahead, ahead_bytes)

    def receive(
        self,
        worker: WorkerHandle,
        assignment: Assignment,
        deal_more: Callable[[], bool],
        is_wanted: Callable[[], bool] | None,
    ) -> tuple[Receipt, Any]:
        """Return the next result of ``worker``, which is of ``assignment``; ``deal_more`` while it is not there."""
        deadline = time.monotonic() + self._timeout_s if self._timeout_s else None
        while not worker.delivered:
            if deal_more():
                self._hear_others(worker)
                left: float | None = 0.0
            else:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if is_wanted is not None:
                    left = _LOOK_UP_S if left is None else min(left, _LOOK_UP_S)
            try:
                message = worker.channel.receive(left)
            except PeerGone:
                raise died(worker, assignment) from None
            if message is not None:
                self._hear(worker, message)
                continue
            if is_wanted is not None and not is_wanted():
                raise _GivenUp
            if deadline is not None and time.monotonic() >= deadline:
                raise WorkerTimeout(
                    f"worker {worker.number} (process {worker.process.pid}) gave no answer within {self._timeout_s} s "
                    f"while {doing(assignment)}: give a longer timeout=, or look at what it waits for"
                )
        layout, entry = worker.delivered.popleft()
        worker.received += 1
        worker.received_bytes += entry[3] if len(entry) > 1 else 0
        return self._result(worker, layout, entry, assignment.receipt)

    # --- inside

    def _order(self, worker: WorkerHandle, ahead: int, ahead_bytes: int) -> None:
        worker.may_deliver = worker.received + ahead
        worker.may_deliver_bytes = worker.received_bytes + ahead_bytes
        # Memory that is given back and taken again costs as much as making a micro-batch.
        self._spare = ahead + 2 if self._memory_limit_bytes is not None else max(self._spare, ahead + 2)
        spare = max(ahead + 2, min(self._spare, int(AHEAD_BYTES / max(1, self._bytes))))  # many, if they are small
        permitted = worker.may_deliver, worker.may_deliver_bytes
        orders: Orders = (self._iteration, worker.unsent, *permitted, worker.memory.ended(), spare)
        try:
            worker.channel.send(pickle.dumps(orders, 5))
        except PeerGone:
            pass  # said when its next result is due
        worker.unsent = []

    def _hear(self, worker: WorkerHandle, message: bytes) -> None:
        iteration, entries, has_room, seconds = pickle.loads(message)
        for entry in entries:
            if len(entry) > 1 and entry[1] is not None:
                worker.layouts[entry[0]] = Layout(entry[1])
            if iteration == self._iteration:
                # By the time it is due, another form may have its number.
                worker.delivered.append((worker.layouts[entry[0]] if len(entry) > 1 else None, entry))
            else:
                let_go(worker, entry)
        if iteration == self._iteration:
            worker.has_room = has_room
        if entries:
            each = seconds / len(entries)
            self._seconds += (each - self._seconds) * (0.25 if self._seconds else 1.0)
        for entry in entries:
            if len(entry) > 1:
                self._bytes = max(0.9 * self._bytes, entry[3])

    def _hear_others(self, awaited: WorkerHandle) -> None:
        """Whether the others have room has to be known while one is waited for."""
        for worker in self._all:
            try:
                while worker is not awaited and (message := worker.channel.receive(0)) is not None:
                    self._hear(worker, message)
            except PeerGone:
                worker.has_room = False  # said when its next result is due

    def _result(
        self, worker: WorkerHandle, layout: Layout | None, entry: Entry, receipt: Receipt
    ) -> tuple[Receipt, Any]:
        if layout is None:
            error = entry[0]
            if isinstance(error, ExceptionWrapper):
                error.reraise()  # type: ignore[no-untyped-call]
            assert isinstance(error, LakeckptError)
            raise error
        _, _, offset, size, sizes, skips = entry
        if skips:
            receipt = replace(receipt, skips=skips)
        slab = worker.memory.lease(offset, size) if size else _NOTHING
        if self._pins and size:
            return receipt, layout.build_pinned(pinned_copy(slab), sizes, receipt)
        return receipt, layout.build(slab, sizes, receipt)

    def _may_be_ahead(self) -> int:
        """How many micro-batches each worker may have delivered ahead of the loop."""
        if self._ahead is not None:
            ahead = max(1, self._ahead)
        else:
            ahead = 2
            if self._seconds and self._bytes:
                ahead = int(max(2, min(MOST_AHEAD, AHEAD_S / self._seconds, AHEAD_BYTES / self._bytes)))
        if self._memory_limit_bytes is not None and self._bytes:
            kept = sum(worker.memory.leased_bytes for worker in self._all)
            ahead = min(ahead, int((self._memory_limit_bytes - kept) / (len(self._all) * self._bytes)))
        return max(1, ahead)

    def _bytes_ahead(self) -> int:
        """How many bytes each worker may have delivered ahead of the loop: what micro-batches took says nothing sure of
        those to come."""
        most = AHEAD_BYTES if self._ahead is None else 1 << 62
        if self._memory_limit_bytes is not None:
            kept = sum(worker.memory.leased_bytes for worker in self._all)
            most = min(most, (self._memory_limit_bytes - kept) // len(self._all))
        return max(1, most)


class _Results(Iterator[tuple[Receipt, Any]]):
    """One iteration over the workers' results; in a thread, as long as they are wanted."""

    def __init__(
        self,
        workers: Workers,
        assignments: Iterator[Assignment],
        iteration: int,
        is_wanted: Callable[[], bool] | None = None,
    ) -> None:
        self._workers, self._assignments, self._iteration = workers, assignments, iteration
        self._is_wanted = is_wanted
        self._order: Order = deque()
        try:
            workers.deal(self._order, assignments, _EACH_TIME)
            workers.permit(at_once=True)
        except BaseException:
            workers.close()
            raise

    def __next__(self) -> tuple[Receipt, Any]:
        workers = self._workers
        if self._iteration != workers._iteration:
            raise StateUnavailable(
                "the worker processes are at what loader.start() began since: iterate again to go on with that"
            )
        if not self._order:
            raise StopIteration
        try:
            found = workers.receive(*self._order.popleft(), self._deal_while_waiting, self._is_wanted)
            workers.deal(self._order, self._assignments, _EACH_TIME)
            workers.permit(at_once=False)
        except _GivenUp:
            raise StopIteration from None
        except BaseException:
            workers.close()  # a message may be lost, and tasks are under way that nobody waits for
            raise
        return found

    def _deal_while_waiting(self) -> bool:
        more = self._workers.deal(self._order, self._assignments, _WHILE_WAITING)
        self._workers.permit(at_once=True)
        return more


class _GivenUp(Exception):
    """Nobody wants what is waited for."""


def pinned_copy(slab: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return the bytes of ``slab`` in pinned memory."""
    return torch.empty(len(slab), dtype=torch.uint8, pin_memory=True).copy_(torch.from_numpy(slab))


def _prepare_to_pin(device: int) -> None:
    torch.set_num_threads(1)  # of this thread
    torch.accelerator.set_device_index(device)

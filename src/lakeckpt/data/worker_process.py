"""What does a loader's worker process do?  It reads the assignments that it is told, in order, into its memory.

It is told tasks well ahead of what it may deliver, so that decoding (which runs ahead in threads of the source) has
begun when a micro-batch is due; while it waits for a window to be decoded, it hears of those to come. Micro-batches
cross in runs: small ones several to a message, a slow one by itself at once. How many it may have delivered that the
loop has not received is the main process's to say, message by message.

It is started, told to stop and joined by `lakeckpt.data.workers`, ignores Ctrl-C (the main process decides what that
means), and ends by itself when the main process is gone. It never decides an order, and knows no place in the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import pickle
import random
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.skips import SkipList
from lakeckpt.data.channel import Channel, PeerGone
from lakeckpt.data.dataset import LakeDataset
from lakeckpt.data.packing import Form, Packed, PlainPacking, pack
from lakeckpt.data.slots import ALIGNMENT, SlotMemory, Slots
from lakeckpt.data.tasks import from_task
from lakeckpt.errors import LakeckptError
from lakeckpt.reading.plain import PlainRows

__all__ = ["FORMS", "Delivered", "Entry", "Orders", "WorkerSetup", "work"]

FORMS = 64
"""Forms that both sides remember, by numbers below this one: a new form takes the place of the oldest."""

_RUN = 64
_RUN_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker is started with."""

    worker: int
    workers: int
    base_seed: int
    dataset: LakeDataset
    worker_init_fn: Callable[[int], None] | None
    memory_bytes: int
    parent: int


Orders = tuple[int, list[Any], int, int, list[int], int]
"""To a worker: (iteration, tasks and what is to be skipped from there on, how many it may have delivered of this
iteration, how many bytes it must have delivered to wait, slots that are free, free slots to keep the memory of)."""

Entry = tuple[Any, ...]
"""A micro-batch: (number of its form, the form if it is new, offset in memory, bytes, sizes, skips); or (error,)."""

Delivered = tuple[int, list[Entry], bool, float]
"""From a worker: (iteration, micro-batches in the order of their tasks, whether tasks further ahead are of use, seconds
that these took). Without micro-batches where there is room no more, or again."""


def work(end: socket.socket, setup: WorkerSetup) -> None:
    """Run in the worker process until told to stop, or until the main process is gone."""
    with contextlib.suppress(ValueError):  # only the main thread may, and only there is it needed
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
    assert descriptors, "it was sent before this process was started"
    parent = parent_process()
    channel = Channel(end)
    channel.attend(setup.parent, lambda: parent is None or parent.is_alive())
    try:
        _Worker(channel, descriptors[0], setup).run()
    except PeerGone:
        pass
    finally:
        setup.dataset._source.clear()
        channel.close()


class _Worker:
    def __init__(self, channel: Channel, descriptor: int, setup: WorkerSetup) -> None:
        self._channel, self._setup = channel, setup
        self._wake = channel.waker()
        self._memory = SlotMemory(descriptor, setup.memory_bytes)
        self._slots = Slots(self._memory, descriptor)
        self._source = setup.dataset._source
        self._forms: dict[Form, int] = {}
        self._forms_met = 0
        self._plain: weakref.WeakKeyDictionary[PlainRows, PlainPacking] = weakref.WeakKeyDictionary()
        self._iteration = -1
        self._tasks: deque[Assignment] = deque()
        self._skips = SkipList()
        self._may_deliver = self._delivered = 0
        self._may_deliver_bytes = self._delivered_bytes = 0
        self._stopped = False
        self._unsent: list[Entry] = []
        self._began: float | None = None
        self._told_room = True
        """What the main process believes of our room."""

    def run(self) -> None:
        failed = self._prepare()
        while not self._stopped:
            ready = bool(self._tasks) and self._delivered < self._may_deliver
            ready = ready and self._delivered_bytes < self._may_deliver_bytes
            if ready and failed is None and self._source.waits(self._wake):
                ready = False  # until then there is time to hear of what comes later
            if not ready or self._is_run():
                self._send()
            message = self._channel.receive(0 if ready else None)
            if message is not None:
                self._hear(pickle.loads(message))
            elif ready:
                if self._began is None:
                    self._began = time.monotonic()
                assignment = self._tasks.popleft()
                self._unsent.append(failed if failed is not None else self._entry(assignment))
                failed = None
                self._delivered += 1

    def _prepare(self) -> Entry | None:
        """Make this process what torch's workers are; what the user's function raises is what the loop gets first."""
        setup = self._setup
        torch.set_num_threads(1)
        gc.freeze()  # what is there now stays, and need not be looked at by each collection
        seed = setup.base_seed + setup.worker
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(np.random.SeedSequence((setup.base_seed, setup.worker)).generate_state(4))
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=setup.worker, num_workers=setup.workers, seed=seed, dataset=setup.dataset
        )
        try:
            if setup.worker_init_fn is not None:
                setup.worker_init_fn(setup.worker)
        except Exception as error:
            return self._failed(error)
        return None

    def _is_run(self) -> bool:
        """Whether what is unsent is worth a message: the first ones of an iteration are, each by itself."""
        if not self._unsent:
            return False
        few = len(self._unsent) < min(_RUN, self._delivered)
        return not few or (self._began is not None and time.monotonic() - self._began >= _RUN_S)

    def _send(self) -> None:
        has_room = self._source.has_room
        if self._unsent or has_room != self._told_room:
            now = time.monotonic()
            delivered: Delivered = (self._iteration, self._unsent, has_room, now - (self._began or now))
            self._channel.send(pickle.dumps(delivered, 5))
            self._unsent, self._began, self._told_room = [], None, has_room

    def _hear(self, orders: Orders | None) -> None:
        if orders is None:
            self._stopped = True
            return
        iteration, tasks, self._may_deliver, self._may_deliver_bytes, free, self._slots.spare = orders
        self._slots.free(free)
        if iteration != self._iteration:
            if self._iteration >= 0:
                self._send()
            self._source.clear()  # at first of what a main process that forked was reading ahead itself
            self._iteration, self._delivered, self._delivered_bytes, self._told_room = iteration, 0, 0, True
            self._tasks.clear()
        for task in tasks:
            if isinstance(task, SkipList):
                self._skips = task
            else:
                assignment = from_task(task, self._skips)
                self._source.announce(assignment)
                self._tasks.append(assignment)

    def _entry(self, assignment: Assignment) -> Entry:
        try:
            receipt, packed = self._packed(assignment)
            offset = self._written(packed)
            number, form = self._form(packed)  # last: what is known here has to arrive there
            self._delivered_bytes += packed.size_bytes
            return number, form, offset, packed.size_bytes, packed.sizes, receipt.skips
        except Exception as error:
            return self._failed(error)

    def _packed(self, assignment: Assignment) -> tuple[Receipt, Packed]:
        if (found := self._source.take_plain(assignment)) is None:
            receipt, value = self._source.take(assignment)
            return receipt, pack(value, receipt)
        rows, start, stop = found
        packing = self._plain.get(rows)
        if packing is None:
            packing = self._plain[rows] = PlainPacking(rows, arrays=self._source.gives_arrays)
        return assignment.receipt, packing.pack(rows, start, stop)

    def _written(self, packed: Packed) -> int:
        if not packed.size_bytes:
            return 0
        offset = self._slots.take(packed.size_bytes)
        at = self._memory.address + offset
        for address, size in packed.leaves:
            if size:
                ctypes.memmove(at, address, size)
                at += (size + ALIGNMENT - 1) & -ALIGNMENT
        return offset

    def _form(self, packed: Packed) -> tuple[int, Form | None]:
        number = self._forms.get(packed.form)
        if number is not None:
            return number, None
        pickle.dumps(packed.form, 5)  # before it counts as known
        number = self._forms_met % FORMS
        if self._forms_met >= FORMS:
            del self._forms[next(iter(self._forms))]
        self._forms[packed.form] = number
        self._forms_met += 1
        return number, packed.form

    def _failed(self, error: Exception) -> Entry:
        """An error as an entry: ours as itself, with the file and row group that it names; others with a traceback."""
        if isinstance(error, LakeckptError) and _crosses(error):
            return (error,)
        where = f"in DataLoader worker process {self._setup.worker}"
        # By its own name, that would end the loop as the end of the rows does.
        kind = RuntimeError if isinstance(error, StopIteration) else type(error)
        wrapped: Any = ExceptionWrapper(  # type: ignore[no-untyped-call]
            (kind, error, error.__traceback__), where=where
        )
        if not _crosses(wrapped):
            wrapped.exc_type = RuntimeError  # its own class cannot be found, or made, by the main process
        return (wrapped,)


def _crosses(error: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(error, 5))
    except Exception:
        return False
    return True

"""What does the main process know of one of its loader's workers?  `WorkerHandle`; and how one is started and stopped.

A worker is a daemon. It is told to stop and joined; one that does not end within seconds is killed. One that ends by
itself is named by `WorkerDied`, with how it ended. What it reads, and when, is decided in `lakeckpt.data.workers`.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.core.plan import Assignment
from lakeckpt.core.skips import SkipList
from lakeckpt.data.channel import Channel
from lakeckpt.data.packing import Layout
from lakeckpt.data.slots import SlotMemory, forking_a_worker
from lakeckpt.data.worker_process import Entry, WorkerSetup, work
from lakeckpt.errors import WorkerDied

__all__ = ["WorkerHandle", "died", "doing", "let_go", "start_worker", "stop_workers"]

STOP_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerHandle:
    """The main process's side of one worker."""

    number: int
    process: Any
    channel: Channel
    memory: SlotMemory
    layouts: dict[int, Layout] = field(default_factory=dict)
    delivered: deque[tuple[Layout | None, Entry]] = field(default_factory=deque)
    """What has come and is not due yet: the layout that its number stood for then, and None with errors."""
    unsent: list[Any] = field(default_factory=list)
    """Tasks that the next message carries."""
    skips: SkipList = field(default_factory=SkipList)
    """What the worker has been told to skip."""
    told: int = 0
    """Tasks of the iteration, with those that are unsent."""
    has_room: bool = True
    """Whether more tasks are of use to it, as it said last."""
    received: int = 0
    """Micro-batches of the iteration that the loop got."""
    may_deliver: int = 0
    """Micro-batches of the iteration that it was told it may deliver."""
    received_bytes: int = 0
    may_deliver_bytes: int = 0
    """The same of bytes: one micro-batch may go beyond it, as its size shows when it is made."""


def start_worker(context: Any, setup: WorkerSetup, memory: SlotMemory, descriptor: int) -> WorkerHandle:
    """Start a worker process, and hand it ``descriptor``, which is that of ``memory``."""
    mine, theirs = socket.socketpair()
    channel = Channel(mine)  # by now, so that a forked worker has no end of it that would keep it open
    try:
        process = context.Process(
            target=work, args=(theirs, setup), daemon=True, name=f"lakeckpt-worker-{setup.worker}"
        )
        # Before it starts: it must not wait for what a main process that is killed meanwhile would never send.
        socket.send_fds(mine, [b"a"], [descriptor])
        with forking_a_worker():
            process.start()
    except BaseException as error:
        channel.close()
        if isinstance(error, (AttributeError, TypeError, pickle.PicklingError)):
            error.add_note(
                f"while worker {setup.worker} was started: what is not forked gets the dataset, its transform and "
                "worker_init_fn pickled, so functions must stand at the top of a module"
            )
        raise
    finally:
        theirs.close()
    channel.attend(process.pid, process.is_alive)
    return WorkerHandle(number=setup.worker, process=process, channel=channel, memory=memory)


def stop_workers(workers: list[WorkerHandle], owner: int) -> None:
    """Tell all to stop, and join them; those that do not listen are killed."""
    if os.getpid() != owner:
        return  # a copy of the loader in a process that was forked
    for worker in workers:
        worker.channel.close(pickle.dumps(None))
    deadline = time.monotonic() + STOP_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        worker.memory.close()
    workers.clear()


def let_go(worker: WorkerHandle, entry: Entry) -> None:
    """Give the slot of a micro-batch back that nobody wants any more."""
    if len(entry) > 1 and entry[3]:
        worker.memory.lease(entry[2], entry[3])


def doing(assignment: Assignment) -> str:
    """What a worker is at, for messages."""
    receipt = assignment.receipt
    return (
        f"reading micro-batch {receipt.micro_batch} (epoch {receipt.epoch}, step {receipt.step} of rank "
        f"{receipt.rank}, lane {receipt.lane})"
    )


def died(worker: WorkerHandle, assignment: Assignment) -> WorkerDied:
    """The error for a worker that has ended before its result of ``assignment`` came."""
    process = worker.process
    process.join(STOP_S)
    code = process.exitcode
    how = f"with exit code {code}"
    if code is None:
        how = "without closing its books"
    elif code < 0:
        named = {one.value for one in signal.Signals}
        how = f"killed by {signal.Signals(-code).name if -code in named else f'signal {-code}'}"
    hint = " (out of memory? the kernel's log says so)" if code == -signal.SIGKILL else ""
    return WorkerDied(
        f"worker {worker.number} (process {process.pid}) ended, {how}{hint}, while {doing(assignment)}. What "
        "the loop received before is counted, and iterating again starts new workers",
        worker=worker.number,
        exit_code=code,
    )

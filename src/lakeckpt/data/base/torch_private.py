"""This module names the private parts of torch that lakeckpt uses, so that a new torch breaks in one file.

torch has no public way to do what each function does. tests/data/test_torch_private.py has a test for each. The module
starts no threads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as _worker
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = [
    "ExceptionWrapper",
    "collate",
    "default_collate_fn_map",
    "job_store",
    "leave_signals",
    "pin_memory",
    "queued",
    "set_worker_info",
    "stop_workers",
    "worker_process",
]


def job_store(ranks: int) -> Any:
    """Return the key-value store of the job; None if torch.distributed has none, or has fewer than ``ranks`` ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < ranks:
        return None
    with contextlib.suppress(RuntimeError, ValueError):
        return dist.distributed_c10d._get_default_store()
    return None


def set_worker_info(*, worker: int, workers: int, seed: int, dataset: Any) -> None:
    """Have `torch.utils.data.get_worker_info` return these in this worker process."""
    _worker._worker_info = _worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


def worker_process(iterator: Any) -> Any:
    """Return the process of the first worker of a DataLoader's iterator."""
    return iterator._workers[0]


def queued(iterator: Any) -> int:
    """Return about how many results have come from the workers of a DataLoader's iterator and wait for `next`."""
    queue = getattr(iterator, "_data_queue", None)
    return 0 if queue is None else queue.qsize()


def stop_workers(iterator: Any) -> None:
    """Stop the workers of a DataLoader's iterator and join them."""
    iterator._shutdown_workers()


def leave_signals(iterator: Any) -> None:
    """Have torch notice the death of a worker when `next` waits for the worker, and not in its handler of SIGCHLD.

    The handler raises at any line of the main thread, also after a batch was counted and before the loop has it. When
    torch waits, it looks at its workers every 5 s.
    """
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False

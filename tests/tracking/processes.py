"""Ranks as real processes, quickly: a fork server that has torch loaded, and never ran anything, forks them.

A process has one such server, which loads what was named last before its start: all tests name it here.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE_S

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "torch.distributed",
        "torch._dynamo",  # two seconds, for which the first optimizer of a process asks
        "lakeckpt.checkpoint.manager",
        "lakeckpt.data.loader.loader",
        "lakeckpt.lake.table.table",
        "tests.jobs.s3_job",
    ]
)


def run_processes(
    world_size: int,
    body: Callable[..., None],
    *args: Any,
    ends: list[int] | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Run ``body(rank, *args)`` in a process per rank; AssertionError unless their exit codes are ``ends`` (all 0)."""
    processes = [FORKS.Process(target=body, args=(rank, *args)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patience_s)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    codes = [process.exitcode for process in processes]
    assert not hanging, f"ranks {hanging} hang"
    assert codes == (ends or [0] * world_size), f"the ranks ended with {codes}"

"""This module joins the ranks of a job for a check of its nodes: it gathers reports, and times collectives.

The process group is made from the environment that torchrun gives, and destroyed at the end. The module starts no
threads of its own; the group has those of torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lakeckpt.cli.node.report import NodeCheck, NodeHistory, NodeReport
from lakeckpt.cli.output import format_bytes

__all__ = ["gathered", "job", "sweep"]

_SIZES = (2**12, 2**16, 2**20, 2**24, 2**26)
_TIMES = 5


@contextmanager
def job(timeout_s: float) -> Iterator[int]:
    """Join the ranks that the environment names, and yield this rank. ``timeout_s``: of each collective."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank()
        dist.barrier(device_ids=[torch.cuda.current_device()] if torch.cuda.is_available() else None)
    finally:
        dist.destroy_process_group()


def gathered(report: NodeReport) -> list[NodeReport]:
    """Return the reports of all ranks, in their order."""
    data = torch.frombuffer(bytearray(NodeHistory(reports=(report,)).to_bytes()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = int(max(sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.cat([data, torch.zeros(longest - len(data), dtype=torch.uint8)]))
    found = (text[: int(size)].numpy().tobytes() for text, size in zip(texts, sizes, strict=True))
    return [NodeHistory.from_bytes(one).reports[0] for one in found]


def sweep() -> list[NodeCheck]:
    """Time ``all_reduce`` of several sizes: the bus bandwidth of the best of five.

    The slowest rank sets the time of all, so the figures name no node: they are text.
    """
    world = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checks = []
    for size in _SIZES:
        data = torch.zeros(size // 4, device=device)
        dist.all_reduce(data)
        best = min(_seconds(data) for _ in range(_TIMES))
        rate = 2 * (world - 1) / world * size / best / 1e9
        checks.append(NodeCheck(name=f"all_reduce {format_bytes(size)}", text=f"{rate:.3g} GB/s, {1e6 * best:.0f} us"))
    return checks


def _seconds(data: torch.Tensor) -> float:
    begin = time.perf_counter()
    dist.all_reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin

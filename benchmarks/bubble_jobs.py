"""What do the two ranks of ``benchmarks.bubbles`` train?  Jobs of one rank each, whose waits a gate is told of."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lakeckpt.checkpoint.bubbles.collectives import watch_ddp
from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.bubbles.pipeline import watch_schedule
from lakeckpt.checkpoint.bubbles.watch import watch_data

__all__ = ["CASES", "WORLD", "Job"]

WORLD = 2
STAGES = 4


class Block(nn.Module):
    """A residual block of two large layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        return value + self.down(torch.relu(self.up(self.norm(value))))


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's training: ``step`` goes forward and backward, the optimizer follows."""

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def pipeline(rank: int, switch: Any, asked: argparse.Namespace) -> Job:
    """Stages ``rank`` and ``rank + 2`` of four. Gradients are clipped by their norm over all stages: before its update
    each rank waits for the other's part of it."""
    job = pipeline_unclipped(rank, switch, asked)

    def step() -> None:
        job.step()
        gradients = [one.grad for one in job.model.parameters() if one.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        with switch.idle("norm"):
            dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(job.model.parameters(), 1.0, square.sqrt())

    return Job(step, job.model, job.optimizer)


def pipeline_unclipped(rank: int, switch: Any, asked: argparse.Namespace) -> Job:
    """The same, and the rank that is done first goes on."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    numbers = (rank, rank + WORLD)
    modules = [Block(asked.width) for _ in numbers]
    stages = [
        PipelineStage(module, number, STAGES, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    microbatches = asked.microbatches or 2
    schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=nn.functional.mse_loss)
    watch_schedule(switch, schedule)
    rows = torch.randn((asked.rows or 96) * microbatches, asked.width)
    first, last = ([rows], {}) if rank == 0 else ([], {"target": rows, "losses": []})
    model = nn.ModuleList(modules)
    return Job(lambda: schedule.step(*first, **last), model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def data_parallel(rank: int, switch: Any, asked: argparse.Namespace) -> Job:
    """Two blocks each, gradients of several micro-batches; rank 1 waits ``--slow-s`` for its data in each iteration.

    The first micro-batch is there when it is asked for (it was fetched while the update was made), the others come
    late: so what is copied at once, after the cut, is in the way of the rank that the other one waits for.
    """
    return _data_parallel(switch, asked, rows=asked.rows or 64, wait_s=asked.slow_s if rank == 1 else 0)


def data_parallel_computing(rank: int, switch: Any, asked: argparse.Namespace) -> Job:
    """Two blocks each; rank 1 has ``--more`` times the rows, and never waits."""
    return _data_parallel(switch, asked, rows=int((asked.rows or 64) * (asked.more if rank == 1 else 1)), wait_s=0)


def _data_parallel(switch: Any, asked: argparse.Namespace, *, rows: int, wait_s: float) -> Job:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(Block(asked.width), Block(asked.width)))
    watch_ddp(switch, model)
    batch, number = torch.randn(rows, asked.width), asked.microbatches or 4

    def late() -> Iterator[torch.Tensor]:
        while True:
            yield batch
            for _ in range(number - 1):
                time.sleep(wait_s / (number - 1))
                yield batch

    source = watch_data(cast(BubbleGate, switch), late())

    def step() -> None:
        for left in range(number - 1, -1, -1):
            batch = next(source)
            with model.no_sync() if left else contextlib.nullcontext():
                (nn.functional.mse_loss(model(batch), batch) / number).backward()

    return Job(step, model, torch.optim.AdamW(model.parameters(), lr=1e-4))


CASES: dict[str, Callable[[int, Any, argparse.Namespace], Job]] = {
    "pipeline": pipeline,
    "pipeline-unclipped": pipeline_unclipped,
    "ddp": data_parallel,
    "ddp-computing": data_parallel_computing,
}

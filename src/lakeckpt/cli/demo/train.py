"""The demo's training script: an ordinary PyTorch loop under torchrun, with lakeckpt for the data and the checkpoints.

How: DDP over gloo, one thread per rank. One optimizer step takes `Phase.accumulate` micro-batches per rank; the loss is
summed over rows and divided by the rows of the global batch, which is exact whatever the ranks got. What is not
ordinary is marked so: `Writer` records the ids that the loop used, `Trip` lets the fault script kill at a chosen point.

Never: it is started by hand only to look; ``lakeckpt demo`` starts it as
``torchrun … -m lakeckpt.cli.demo.train CONFIG LAUNCH``, where CONFIG is a `DemoConfig` as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lakeckpt
from lakeckpt.cli.demo.lake import sample_rows
from lakeckpt.cli.demo.model import GPT, Crop, ModelShape, build, crop, digest, loss_sum
from lakeckpt.cli.demo.records import Writer, record_path
from lakeckpt.cli.demo.scenario import DemoConfig, Phase
from lakeckpt.cli.demo.trip import Trip

__all__ = ["main"]

_SHAPE = ModelShape()
_JUDGED_ROWS = 128


class _ForgetfulLoader(lakeckpt.LakeLoader):
    """A loader with a bug: a restore gives it its state, and it drops it. For proving that the verdict can be red."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


def _learning_rate(config: DemoConfig) -> Any:
    """A factor for `LambdaLR`: a short warm-up, then a straight line down to a tenth."""
    total = config.epochs * config.steps_per_epoch
    warm_up = max(1, min(30, total // 10))

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * max(0.1, 1.0 - 0.9 * step / total)

    return factor


def _groups(loader: Any, size: int) -> Iterator[list[Any]]:
    """The epoch's micro-batches of this rank, ``size`` to an optimizer step; the last step may have fewer."""
    batches = iter(loader)
    while group := list(itertools.islice(batches, size)):
        yield group


class _Training:
    """The live objects of one rank, and what one optimizer step does with them."""

    def __init__(self, config: DemoConfig, phase: Phase, trip: Trip, writer: Writer) -> None:
        self.config, self.phase, self.trip, self.writer = config, phase, trip, writer
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model: GPT = build(_SHAPE, config.seed)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _learning_rate(config))
        dataset = lakeckpt.LakeDataset(
            config.lake,
            batch_size=config.batch_size,
            columns=["id", "tokens"],
            shuffle=True,
            seed=config.seed,
            num_lanes=config.num_lanes,
            transform=Crop(length=_SHAPE.context),
        )
        kind = _ForgetfulLoader if config.drop_reader_state else lakeckpt.LakeLoader
        self.loader: Any = kind(dataset, num_workers=phase.workers)

    def gradients(self, group: list[Any]) -> tuple[float, list[int]]:
        """Backward over the micro-batches of one optimizer step; returns the loss summed over rows, and their ids."""
        total = sum(batch.receipt.step_rows for batch in group)
        lost = 0.0
        ids: list[int] = []
        for number, batch in enumerate(group):
            last = number == len(group) - 1
            with contextlib.nullcontext() if last else self.parallel.no_sync():
                loss = loss_sum(self.parallel, batch["stretch"])
                (loss * self.world_size / total).backward()
            lost += float(loss.detach())
            ids.extend(batch["id"].tolist())
        return lost, ids

    def step(self, step: int, group: list[Any], epoch: int) -> None:
        """Optimizer step ``step``, up to the cut; the record is written once the weights have changed."""
        began = time.monotonic()
        self.writer.write("enter", step=step)
        loss, ids = self.gradients(group)
        self.trip.reach("before-update", step)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        ended = time.monotonic()
        weights = digest(self.model.state_dict()) if self.rank == 0 else ""
        self.writer.write(
            "step", step=step, epoch=epoch, ids=ids, loss_sum=loss, began=began, ended=ended, digest=weights
        )
        self.trip.reach("before-cut", step)

    def run(self) -> None:
        """Restore, train to the end of the last epoch, and record what came of it."""
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "reader": self.loader,
        }
        with lakeckpt.CheckpointManager(
            self.config.checkpoints, state, persist_every=self.config.save_every
        ) as manager:
            step = manager.restore()
            self.writer.write(
                "start",
                restored=step,
                world_size=self.world_size,
                workers=self.phase.workers,
                pid=os.getpid(),
                time=time.monotonic(),
            )
            for epoch in range(self.loader.epoch, self.config.epochs):
                for group in _groups(self.loader, self.phase.accumulate):
                    step += 1
                    self.step(step, group, epoch)
                    self.cut(manager, step, group[-1])
        if self.rank == 0:
            self.judge(step)

    def cut(self, manager: Any, step: int, batch: Any) -> None:
        began = time.monotonic()
        self.trip.enter_cut(step)
        manager.step(batch)
        self.trip.leave_cut()
        self.writer.write("cut", step=step, seconds=time.monotonic() - began)

    def judge(self, step: int) -> None:
        """The closing record: digests of weights and optimizer, and the loss on rows spread over the whole lake."""
        with torch.no_grad():
            rows = torch.from_numpy(sample_rows(Path(self.config.lake), _JUDGED_ROWS))
            places = np.arange(_JUDGED_ROWS, dtype=np.uint64) * np.uint64(37)
            loss = float(loss_sum(self.model, crop(rows, places, _SHAPE.context))) / len(rows)
        self.writer.write(
            "final",
            step=step,
            time=time.monotonic(),
            weights=digest(self.model.state_dict()),
            optimizer=digest(self.optimizer.state_dict()),
            loss=loss,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
        )


def main(argv: list[str]) -> None:
    """``CONFIG LAUNCH``: a path to a `DemoConfig` as JSON, and which of its phases this is (counted from 0)."""
    config, launch = DemoConfig.from_json(Path(argv[0]).read_text()), int(argv[1])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank, records = dist.get_rank(), Path(config.records)
    phase = config.phases[launch]
    trip = Trip(phase.fault, rank=rank, folder=records, launch=launch, checkpoints=Path(config.checkpoints))
    writer = Writer(record_path(records, launch, rank))
    try:
        _Training(config, phase, trip, writer).run()
    finally:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

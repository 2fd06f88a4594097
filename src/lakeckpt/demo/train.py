"""This module is the demo's training script: an ordinary PyTorch loop under torchrun, with lakeckpt.

DDP over gloo, one thread per rank. An optimizer step takes `Phase.accumulate` micro-batches per rank; the loss is
summed over rows and divided by the rows of the global batch, which is exact for any number of rows on each rank. Two
things are not ordinary: `Writer` records the ids that the loop used, and `Trip` lets the fault script kill at a chosen
point.

``lakeckpt demo`` starts it as ``torchrun … -m lakeckpt.demo.train CONFIG LAUNCH``, where CONFIG is a file with a
`DemoConfig` as JSON, and LAUNCH the number of its phase (from 0).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lakeckpt
from lakeckpt.demo.model import CONTEXT, GPT, Crop, build, digest, loss_sum
from lakeckpt.demo.records import Writer, record_path
from lakeckpt.demo.scenario import BATCH_SIZE, EPOCHS, NUM_LANES, DemoConfig
from lakeckpt.demo.trip import Trip

__all__ = ["main"]

_SEED = 7


class _ForgetfulLoader(lakeckpt.LakeLoader):
    """A loader with a planted fault: it drops the state that a restore gives it. The verdict must be red."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


class _Training:
    """The live objects of one rank."""

    def __init__(self, config: DemoConfig, launch: int) -> None:
        self.config, self.phase, self.rank = config, config.phases[launch], dist.get_rank()
        self.trip = Trip(config, launch, self.rank)
        self.writer = Writer(record_path(config.records, launch, self.rank))
        self.model: GPT = build(_SEED)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-3, betas=(0.9, 0.95))
        steps = EPOCHS * config.steps_per_epoch
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.1, 1 - 0.9 * step / steps))
        dataset = lakeckpt.LakeDataset(
            config.lake,
            batch_size=BATCH_SIZE,
            columns=["id", "tokens"],
            shuffle=True,
            seed=_SEED,
            options=lakeckpt.ReadOptions(num_lanes=NUM_LANES),
            transform=Crop(length=CONTEXT),
        )
        kind = _ForgetfulLoader if config.drop_reader_state else lakeckpt.LakeLoader
        self.loader: Any = kind(dataset, num_workers=self.phase.workers)

    def run(self) -> None:
        """Restore, and train to the end of the last epoch."""
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "reader": self.loader,
        }
        with lakeckpt.CheckpointManager(
            str(self.config.checkpoints), state, persist_every=self.config.save_every
        ) as manager:
            step = manager.restore()
            self.writer.write("start", restored=step, world_size=dist.get_world_size())
            for epoch in range(self.loader.epoch, EPOCHS):
                batches = iter(self.loader)
                while group := list(itertools.islice(batches, self.phase.accumulate)):
                    step += 1
                    self.step(step, group, epoch)
                    self.trip.save_begins(step)
                    manager.step(group[-1])
                    self.trip.save_ends()
        self.writer.write("end")

    def step(self, step: int, group: list[Any], epoch: int) -> None:
        """Make optimizer step ``step``, and record it once the weights have changed."""
        loss, ids = self.gradients(group)
        self.trip.reach("before-update", step)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        weights = digest(self.model) if self.rank == 0 else ""
        self.writer.write("step", step=step, epoch=epoch, ids=ids, loss_sum=loss, digest=weights)
        self.trip.reach("before-cut", step)

    def gradients(self, group: list[Any]) -> tuple[float, list[int]]:
        """Compute the gradients of the micro-batches, and return the loss summed over rows, and the rows' ids."""
        total = sum(batch.receipt.step_rows for batch in group)
        loss_of_all = 0.0
        ids: list[int] = []
        for batch in group:
            with contextlib.nullcontext() if batch is group[-1] else self.parallel.no_sync():
                loss = loss_sum(self.parallel, batch["stretch"])
                (loss * dist.get_world_size() / total).backward()
            loss_of_all += float(loss.detach())
            ids.extend(batch["id"].tolist())
        return loss_of_all, ids


def main(argv: list[str]) -> None:
    """Run one rank; ``argv`` is the path of the config and the number of the launch."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    _Training(DemoConfig.from_json(Path(argv[0]).read_text()), int(argv[1])).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

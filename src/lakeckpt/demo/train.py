"""This module is the demo's training script: an ordinary PyTorch loop under torchrun, with lakeckpt.

DDP over gloo, one thread per rank. Documents are packed into sequences, and the sequences of two tables are mixed. A
table that is through begins its next epoch. An optimizer step takes `Phase.accumulate` micro-batches per rank; the loss
is summed over tokens and divided by the tokens of the global batch. Every step is captured in memory. Two things are
not ordinary: `Writer` records the tokens that the loop used, and `Trip` lets the fault script kill at a chosen point.

``lakeckpt demo`` starts it as ``lakeckpt run … -m lakeckpt.demo.train CONFIG PHASE``, where CONFIG is a file with a
`DemoConfig` as JSON, and PHASE the number of the launcher's first phase (from 0). Each restart begins the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lakeckpt
from lakeckpt.demo.model import GPT, build, digest, loss_sum
from lakeckpt.demo.records import Packed, Writer, record_path
from lakeckpt.demo.scenario import BATCH_SIZE, LENGTH, NUM_LANES, WEIGHTS, DemoConfig
from lakeckpt.demo.trip import Trip

__all__ = ["main", "training_data"]

_SEED = 7


class _Training:
    """The live objects of one rank."""

    def __init__(self, config: DemoConfig, number: int) -> None:
        self.config, self.phase, self.rank = config, config.phases[number], dist.get_rank()
        self.trip = Trip(config, number, self.rank)
        self.writer = Writer(record_path(config.records, number, self.rank))
        self.model: GPT = build(_SEED)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-3, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - 0.9 * step / config.steps)
        self.loader = lakeckpt.LakeLoader(training_data(config.lake), num_workers=self.phase.workers)

    def run(self) -> None:
        """Restore, and train to the last step."""
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "reader": self.loader,
        }
        with lakeckpt.CheckpointManager(
            str(self.config.checkpoints),
            state,
            persist_every=self.config.save_every,
            capture_every=1,
            arenas=self.config.arenas,
        ) as manager:
            fresh = self.loader.state_dict() if self.config.drop_reader_state else None
            done = manager.restore()
            if fresh is not None:  # a planted fault: the verdict must be red
                self.loader.load_state_dict(fresh)
            self.writer.write("start", restored=done, world_size=dist.get_world_size())
            batches = iter(self.loader)
            for step in range(done + 1, self.config.steps + 1):
                group = list(itertools.islice(batches, self.phase.accumulate))
                self.step(step, group)
                manager.step(group[-1])
                self.trip.reach("after-order", step)
        self.writer.write("end")

    def step(self, step: int, group: list[lakeckpt.Batch]) -> None:
        """Make optimizer step ``step``, and record it: what it used as soon as all ranks have its gradients. From then
        on it counts, even if this rank dies, because another one may have captured the weights that it makes."""
        loss = self.gradients(group)
        used = [one for batch in group for one in _sequences(batch)]
        self.writer.write("step", step=step, used=used, loss_sum=loss, at_s=time.time())
        self.trip.reach("before-update", step)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.writer.write("weights", step=step, digest=digest(self.model))
        self.trip.reach("before-cut", step)

    def gradients(self, group: list[lakeckpt.Batch]) -> float:
        """Compute the gradients of the micro-batches, and return the loss summed over tokens."""
        total = LENGTH * sum(batch.receipt.step_rows for batch in group)
        loss_of_all = 0.0
        for batch in group:
            with contextlib.nullcontext() if batch is group[-1] else self.parallel.no_sync():
                loss = loss_sum(self.parallel, batch)
                (loss * dist.get_world_size() / total).backward()  # type: ignore[no-untyped-call]
            loss_of_all += float(loss.detach())
        return loss_of_all


def training_data(lake: str) -> Any:
    """Return a mixture of the tables of ``lake``, the documents of each packed into sequences."""
    packed = {}
    for source in WEIGHTS:
        documents = lakeckpt.LakeDataset(f"{lake}/{source}", batch_size=BATCH_SIZE, shuffle=True, seed=_SEED)
        packed[source] = lakeckpt.pack(documents, length=LENGTH, labels=True)
    weighted = {source: (packed[source], weight) for source, weight in WEIGHTS.items()}
    return lakeckpt.mix(weighted, seed=_SEED, num_lanes=NUM_LANES, source_column="source")


def _sequences(batch: lakeckpt.Batch) -> list[Packed]:
    """Return the sequences of a batch, each with its source, the source's epoch, and the numbers of its tokens."""
    receipt: Any = batch.receipt
    epochs = {name: iter([one.epoch for one in spans for _ in range(one.rows)]) for name, spans in receipt.spans}
    sources = [list(WEIGHTS)[number] for number in batch["source"].tolist()]
    tokens = (batch["tokens"] >> 8).tolist()
    return [(source, next(epochs[source]), numbers) for source, numbers in zip(sources, tokens, strict=True)]


def main(argv: list[str]) -> None:
    """Run one rank; ``argv`` is the path of the config and the number of the launcher's first phase."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    number = int(argv[1]) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _Training(DemoConfig.from_json(Path(argv[0]).read_text()), number).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

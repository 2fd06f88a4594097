"""Trains as the ranks of a job, in processes that a fork server starts, and stops at a moment of a step.

A rank that comes to the moment releases ``at``, and goes on when ``go`` is set. The test sends signals in between.
Each rank notes what each of its steps used before it ends the step, so that rows are counted without lakeckpt's books.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.tracking import obstacles
from tests.patience import PATIENCE_S
from tests.tracking.processes import FORKS

STEP = 4
"""The step in which a rank stops."""
BATCH_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The ranks ``where`` stop in step `STEP`, at ``name``."""

    name: str
    where: Sequence[int] = (0,)
    at: Any = field(default_factory=lambda: FORKS.Semaphore(0))
    go: Any = field(default_factory=FORKS.Event)


class Loop:
    """The loop of one rank, which stops at ``moment``."""

    def __init__(self, rank: int, moment: Moment) -> None:
        self.rank, self.moment = rank, moment
        self.step = 1
        self.is_over = False

    def reach(self, name: str) -> None:
        """Stop here if this is the moment."""
        if name == self.moment.name and self.rank in self.moment.where and self.step == STEP:
            self.moment.at.release()
            assert self.moment.go.wait(PATIENCE_S)

    def state_dict(self) -> dict[str, Any]:
        self.reach("save")
        if self.is_over and self.moment.name == "last" and self.rank in self.moment.where:
            self.moment.at.release()
            assert self.moment.go.wait(PATIENCE_S)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(folder: Path, loop: Loop, world_size: int, attempt: int, **options: Any) -> None:
    """Train on what is left of the first epoch."""
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    if world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: loop.reach("optimizer"))
    dataset = lakeckpt.LakeDataset(folder / "table", batch_size=BATCH_ROWS, shuffle=True, seed=3)
    loader = lakeckpt.LakeLoader(dataset)
    state = {"model": model, "optimizer": optimizer, "reader": loader, "loop": loop}
    options = {"persist_every": 10**6, "arenas": folder / "arenas", **options}
    notes = folder / f"notes-{attempt}-{loop.rank}.jsonl"
    with notes.open("a") as file, lakeckpt.CheckpointManager(folder / "run", state, **options) as manager:
        done = manager.restore()
        print(json.dumps({"restored": done}), file=file, flush=True)
        loop.step = done + 1
        batches = iter(loader) if loader.epoch == 0 else iter(())
        while True:
            loop.reach("data")
            batch = next(batches, None)
            if batch is None:
                loop.is_over = True
                break
            loop.reach("collective")  # other ranks wait for this one in their backward pass
            loss = (model(batch["x"][:, None]) * batch.receipt.weight).sum()
            loop.reach("forward")
            loss.register_hook(lambda grad: loop.reach("backward"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps({"step": loop.step, "ids": batch["id"].tolist()}), file=file, flush=True)
            manager.step(batch)
            if options.get("capture_every"):  # the next moment finds this step captured, however slow the machine is
                manager._saves._engine.wait()  # type: ignore[union-attr]
            loop.step += 1


def be_rank(rank: int, world_size: int, folder: Path, attempt: int, moment: Moment, options: dict[str, Any]) -> None:
    """Be a rank, in a process of its own."""
    descriptor = os.open(folder / f"log-{attempt}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.environ.update(options.pop("environment", {}))
    nodes = options.pop("nodes", None)
    if nodes is not None:  # as if the ranks were on several machines
        obstacles._node = lambda: nodes[rank]  # type: ignore[assignment]
    torch.set_num_threads(1)
    if world_size > 1:
        store = f"file://{folder}/rendezvous-{attempt}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    train(folder, Loop(rank, moment), world_size, attempt, **options)
    if world_size > 1:
        dist.destroy_process_group()


def start(folder: Path, world_size: int, moment: Moment, **options: Any) -> list[ForkServerProcess]:
    """Start the ranks of the first attempt."""
    ranks = [
        FORKS.Process(target=be_rank, args=(rank, world_size, folder, 0, moment, options)) for rank in range(world_size)
    ]
    for one in ranks:
        one.start()
    return ranks


def reach(moment: Moment, ranks: Sequence[ForkServerProcess], folder: Path) -> None:
    """Wait until the ranks that stop are at their moment."""
    missing = len(moment.where)
    for _ in range(int(PATIENCE_S / 0.2)):
        missing -= moment.at.acquire(timeout=0.2)
        if not missing:
            return
        assert all(one.is_alive() for one in ranks), log(folder)
    raise AssertionError("not all ranks come to the moment")


def ends(ranks: Sequence[ForkServerProcess]) -> list[int | None]:
    """Wait for the ranks, and return their exit codes."""
    for one in ranks:
        one.join(PATIENCE_S)
    hanging = [one for one in ranks if one.is_alive()]
    for one in hanging:
        one.kill()
    assert not hanging, "ranks hang"
    return [one.exitcode for one in ranks]


def go_on(folder: Path, **options: Any) -> int:
    """Go on with one rank, in this process, to the end of the epoch; the step that was restored."""
    train(folder, Loop(0, Moment(name="none")), 1, 1, **options)
    return restored(folder)


def restored(folder: Path) -> int:
    """The step from which the second attempt went on."""
    return int(lines(folder, 1)[0]["restored"])


def lines(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """What all ranks of an attempt have noted."""
    texts = [path.read_text().splitlines() for path in sorted(folder.glob(f"notes-{attempt}-*.jsonl"))]
    return [json.loads(line) for text in texts for line in text]


def steps(folder: Path) -> set[int]:
    """The steps that the first attempt made."""
    return {line["step"] for line in lines(folder, 0) if "step" in line}


def wrong_rows(folder: Path, rows: int) -> dict[int, int]:
    """id → how often it counted, of the rows that did not count once in the surviving history."""
    before = [one for one in lines(folder, 0) if one.get("step", 10**9) <= restored(folder)]
    after = [one for one in lines(folder, 1) if "step" in one]
    counts = Counter(row for one in (*before, *after) for row in one["ids"])
    return {row: counts[row] for row in range(rows) if counts[row] != 1}


def is_proved(folder: Path) -> bool:
    """Whether the audit says PROVED."""
    return audit(LocalStorage(folder / "run")).exactly_once


def log(folder: Path) -> str:
    """What the ranks of the first attempt have written to their standard error."""
    return "".join(path.read_text() for path in sorted(folder.glob("log-0-*.txt")))

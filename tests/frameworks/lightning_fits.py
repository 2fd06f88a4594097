"""This module runs Lightning's `fit` in this process, interrupts it, and notes which rows each step used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import lakeckpt
from lakeckpt.integrations.lightning import LakeCheckpoint

ROWS, BATCH = 72, 8
"""Of the table; an epoch has 9 steps."""


class Module(pl.LightningModule):
    """A line through x and y: with noise that is drawn for each batch, and an average of weights after each batch.

    It notes (step, epoch) of each validation that ended, the sanity check apart.
    """

    def __init__(self, scheduler: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.scheduler = torch.nn.Linear(1, 1), scheduler
        self.register_buffer("average", torch.zeros(1, 1))
        self.validations: list[tuple[int, int]] = []
        self.validated = 0

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        batch["x"] = batch["x"] + torch.rand_like(batch["x"]) / 100
        return batch

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.lerp_(self.line.weight.detach(), 0.1)  # type: ignore[operator]

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.line(batch["x"][:, None])[:, 0], batch["y"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated += 0 if self.trainer.sanity_checking else len(batch["id"])
        self.log("loss", self.loss(batch))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class Interrupted(Exception):
    """Stands for a crash: nothing is saved where it is raised."""


@dataclass
class Fit(pl.Callback):
    """One `fit`: what its batches were, as (epoch, steps done then, rows)."""

    hook: str = ""
    at: int = -1
    batches: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    module: Any = None
    trainer: Any = None
    checkpoint: Any = None

    def __hash__(self) -> int:
        return id(self)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.batches.append((trainer.current_epoch, trainer.global_step, tuple(batch["id"].tolist())))
        self._interrupt("batch start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._interrupt("batch end")

    def on_validation_start(self, *_: Any) -> None:
        self._interrupt("validation")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._interrupt("epoch end")

    def _interrupt(self, hook: str) -> None:
        if (hook, self.trainer.global_step) == (self.hook, self.at):
            raise Interrupted

    @property
    def weights(self) -> list[float]:
        return [float(one) for one in self.module.state_dict().values()]


def loader_of(table: Path, *, num_workers: int = 0, restart: bool = False, **options: Any) -> lakeckpt.LakeLoader:
    dataset = lakeckpt.LakeDataset(str(table), **{"batch_size": BATCH, "shuffle": True, "seed": 7, **options})
    return lakeckpt.LakeLoader(dataset, num_workers=num_workers, restart=restart)


def fit(
    run: Path,
    loader: Any,
    *,
    interrupt: tuple[str, int] = ("", -1),
    module: Any = None,
    validation: Any = None,
    checkpoint: LakeCheckpoint | None = None,
    before: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Fit:
    """Run `fit` with a checkpoint at each step, until it ends or is interrupted at ``interrupt``, (hook, steps). The
    callbacks ``before`` stand before the `LakeCheckpoint`."""
    one = Fit(*interrupt)
    one.checkpoint = checkpoint or LakeCheckpoint(run, persist_every=1)
    one.module = Module() if module is None else module
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    one.trainer = pl.Trainer(
        callbacks=[*before, one.checkpoint, *callbacks, one],
        default_root_dir=run.parent,
        **{"max_epochs": 2, **quiet, **options},
    )
    try:
        one.trainer.fit(one.module, loader, validation)
    except Interrupted:
        pass
    else:
        assert one.hook == "", f"it was not interrupted: {one.hook} of step {one.at}"
    return one


def used(*fits: Fit) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the batches of the history that survives: each `fit` undid what the one before did after its cut."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for one in fits:
        if one.batches:
            found = [batch for batch in found if batch[1] < one.batches[0][1]]
            found += one.batches
    return found


def times(*fits: Fit, epochs: int = 2) -> list[Counter[int]]:
    """Return epoch → how often each row was used → the number of such rows; all of them once is {1: ROWS}."""
    counts: list[Counter[int]] = [Counter() for _ in range(epochs)]
    for epoch, _, rows in used(*fits):
        counts[epoch].update(rows)
    return [Counter(one.values()) for one in counts]

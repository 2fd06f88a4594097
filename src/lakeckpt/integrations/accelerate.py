"""This module defines `LakeCheckpoint`, which saves and restores what an accelerate script has prepared, as one cut.

The script gives it the objects that ``accelerator.prepare`` returned, unnamed, as to ``register_for_checkpointing``.
`LakeCheckpoint` unwraps them for a `CheckpointManager`, which does the work, and adds the accelerator's gradient
scaler. ``accelerator.sync_gradients`` says at which batches the optimizer has stepped. The module starts no threads.
"""

from __future__ import annotations

from collections import Counter
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch

from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.common import Framework
from lakeckpt.lake.storage.base import Storage

_ACCELERATE = Framework(distribution="accelerate", oldest="1.9.0", newest="1.15.0")
with _ACCELERATE.imports():
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

__all__ = ["LakeCheckpoint", "check_whole"]

_SEAMS = (
    "sync_gradients",
    "scaler",
    "distributed_type",
    "unwrap_model()",
    "register_load_state_pre_hook()",
)

_DIVIDED = {DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA}


class LakeCheckpoint:
    """The run of an accelerate script: ``with LakeCheckpoint(accelerator, "run", model, optimizer, loader) as run:``.

    Entering restores the newest checkpoint, if there is one. Leaving well saves the last step; leaving by an
    exception saves nothing new.

    Args:
        accelerator: the script's.
        run: where the run lies, as for `CheckpointManager`.
        objects: what ``accelerator.prepare`` returned (models, optimizers, schedulers and a `LakeLoader`), and any
            other objects with ``state_dict`` and ``load_state_dict``. Objects of one kind are numbered: give them in
            the same order in each attempt.
        options: other arguments of `CheckpointManager`, such as ``persist_every=100``.

    ``accelerator.save_state`` writes its folders beside the run, which never reads them. ``accelerator.load_state`` is
    refused inside of the ``with`` (ConfigError), as it would put weights of another history into the run.

    Raises ConfigError for a loader that is no prepared `LakeLoader`, and as `check_whole` does. Entering, `step` and
    leaving raise what the `CheckpointManager` raises.
    """

    def __init__(
        self, accelerator: Accelerator, run: str | PathLike[str] | Storage, *objects: Any, **options: Any
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ConfigError(f"LakeCheckpoint takes the accelerator first, got {type(accelerator).__name__}")
        _ACCELERATE.check(accelerator, *_SEAMS)
        self._accelerator, self._run = accelerator, run
        self._manager = CheckpointManager(run, _state_of(accelerator, objects), **options)

    @property
    def manager(self) -> CheckpointManager:
        """The manager, for all else: ``manager.save()``, ``manager.latest()``, ``manager.fence()``."""
        return self._manager

    @property
    def steps_done(self) -> int:
        """Optimizer steps done so far, over all attempts in this history."""
        return self._manager.steps_done

    def step(self, batch: Any) -> None:
        """Count an optimizer step, if ``accelerator.sync_gradients``, and save if the policy says so. Call it on every
        rank after each batch, when optimizer and scheduler have stepped. ``batch`` is the batch, or its receipt."""
        if batch is None:
            raise ConfigError("LakeCheckpoint.step takes the batch that was used last, or its receipt, and got None")
        if self._accelerator.sync_gradients:
            self._manager.step(batch)

    def __enter__(self) -> Self:
        self._manager.__enter__()
        try:
            self._manager.restore()
        except BaseException as error:
            self._manager.__exit__(type(error), error, error.__traceback__)
            raise
        self._hook = self._accelerator.register_load_state_pre_hook(self._refuse)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._manager.__exit__(kind, error, trace)

    def _refuse(self, models: Any, folder: str) -> None:
        raise ConfigError(
            f"accelerator.load_state({folder!r}) would put other weights into the run at {self._run}, which is at "
            f"step {self.steps_done}: for a run that begins with them, load them before the LakeCheckpoint is entered"
        )


def check_whole(accelerator: Accelerator, loader: LakeLoader) -> None:
    """ConfigError if ranks do not hold the whole model, or train apart although the loader deals rows to each."""
    kind, ranks = accelerator.distributed_type, loader.topology[1]
    if kind in _DIVIDED:
        raise ConfigError(
            f"the model is divided over ranks ({kind.value}), and this integration restores models that are whole on "
            "each rank (one process, or DDP): use a loop of your own with lakeckpt.CheckpointManager"
        )
    if ranks > 1 and kind == DistributedType.NO:
        raise ConfigError(
            f"the dataset deals its rows to {ranks} ranks, and accelerate would train on each of them apart. On CPUs "
            "set Accelerator(cpu=True), or for transformers TrainingArguments(use_cpu=True); elsewhere give the "
            "LakeDataset no rank="
        )


def _state_of(accelerator: Accelerator, objects: tuple[Any, ...]) -> dict[str, Any]:
    """Return name → object for a manager."""
    named, seen = {}, Counter[str]()
    for one in objects:
        kind, found = _named(accelerator, one)
        named[f"{kind}_{seen[kind]}" if seen[kind] else kind] = found
        seen[kind] += 1
    if "reader" not in named:
        raise ConfigError("LakeCheckpoint needs the LakeLoader, as accelerator.prepare(loader) returned it")
    return named if accelerator.scaler is None else {**named, "scaler": accelerator.scaler}


def _named(accelerator: Accelerator, one: Any) -> tuple[str, Any]:
    """Return the kind of an object, and the object as a manager takes it."""
    if isinstance(one, torch.nn.Module):
        return "model", accelerator.unwrap_model(one)
    if isinstance(one, torch.optim.Optimizer):
        return "optimizer", _inside(one, "optimizer") if isinstance(one, AcceleratedOptimizer) else one
    if isinstance(one, (AcceleratedScheduler, torch.optim.lr_scheduler.LRScheduler)):
        return "scheduler", _inside(one, "scheduler") if isinstance(one, AcceleratedScheduler) else one
    if isinstance(one, LakeLoader):
        if not one._is_prepared:
            raise ConfigError("this LakeLoader was not prepared: loader = accelerator.prepare(loader) comes first")
        check_whole(accelerator, one)
        return "reader", one
    if isinstance(one, torch.utils.data.DataLoader):
        raise ConfigError(
            f"the place of a {type(one).__name__} cannot be restored exactly: give accelerator.prepare a LakeLoader"
        )
    return "object", one


def _inside(wrapper: Any, name: str) -> Any:
    """Return what accelerate has wrapped."""
    _ACCELERATE.check(wrapper, name)
    return getattr(wrapper, name)

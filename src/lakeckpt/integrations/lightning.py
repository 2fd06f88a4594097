"""This module defines `LakeCheckpoint`, a Lightning callback that saves and restores a run by a `CheckpointManager`.

A step is over when Lightning asks the loader for another batch, begins another epoch, or ends: validation, schedulers
and all hooks of the step are done then. At this moment the callback makes the cut, of the batch that the step used.
Lightning's counters are saved in the form in which Lightning saves them itself: inside of an epoch as at the end of the
batch, else as after the epoch. Lightning counts the steps of an epoch when `fit` begins. The callback has them counted
after the restore, and again if an epoch has another number of steps.

The callback runs on the training thread. It relies on names that Lightning does not document, such as
``fit_loop.setup_data``; tests/frameworks/test_lightning_fit.py holds them against the real Lightning.
"""

from __future__ import annotations

import inspect
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from typing import Any

from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.common import Framework
from lakeckpt.lake.storage.base import Storage

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    _LIGHTNING = Framework(distribution="pytorch-lightning", oldest="2.5.6", newest="2.6.6")
    with _LIGHTNING.imports():
        from pytorch_lightning import callbacks
        from pytorch_lightning.callbacks import Callback, Checkpoint, StochasticWeightAveraging
        from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
        from pytorch_lightning.utilities import CombinedLoader
        from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    _LIGHTNING = Framework(distribution="lightning", oldest="2.5.6", newest="2.6.6")
    with _LIGHTNING.imports():
        from lightning.pytorch import callbacks
        from lightning.pytorch.callbacks import Callback, Checkpoint, StochasticWeightAveraging
        from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
        from lightning.pytorch.utilities import CombinedLoader
        from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["LakeCheckpoint"]

_SEAMS = (
    "fit_loop.setup_data()",
    "fit_loop._data_source.instance",
    "fit_loop._data_source.dataloader()",
    "fit_loop._combined_loader",
    "fit_loop.epoch_progress.state_dict()",
    "fit_loop.load_state_dict()",
    "fit_loop.on_iteration_done()",
    "fit_loop.epoch_loop.state_dict(prefix)",
    "fit_loop.epoch_loop.on_iteration_done()",
    "fit_loop.epoch_loop.automatic_optimization.on_iteration_done()",
    "fit_loop.epoch_loop.manual_optimization.on_iteration_done()",
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "strategy.restore_checkpoint_after_setup",
    "precision_plugin.state_dict()",
    "lr_scheduler_configs",
    "reload_dataloaders_every_n_epochs",
    "num_training_batches",
    "callback_metrics",
    "ckpt_path",
)
_EPOCH = "epoch_loop."


class LakeCheckpoint(Checkpoint):
    """Checkpoints of ``trainer.fit`` in the run at ``uri``: ``Trainer(callbacks=[LakeCheckpoint("run")])``.

    The training loader is one `lakeckpt.LakeLoader`. `fit` goes on from the newest checkpoint in the run, in the middle
    of an epoch and on any number of ranks. Saved are the module, optimizers, schedulers, the precision plugin, what
    callbacks and the data module return from ``state_dict()``, Lightning's counters, the loader, and random states.

    Args:
        uri: where the run lies, as for `lakeckpt.CheckpointManager`.
        state: name → further objects with ``state_dict`` and ``load_state_dict``. It is needed, and may be empty, if
            the module or a callback has ``on_save_checkpoint``, which is not called.
        monitor: the name of a logged metric, for ``keep=lakeckpt.Keep(best=…)``. A step has the newest value, which is
            that of the last validation for a metric that is logged there.
        options: all other arguments of `lakeckpt.CheckpointManager`, such as ``persist_every`` and ``keep``.

    Lightning makes no `ModelCheckpoint` of its own beside this callback; one that you add works as always, and its
    files are for other programs: a `fit` with ``ckpt_path`` is refused. With ``fast_dev_run`` nothing is restored or
    saved. Raises TypeError for an argument that a `CheckpointManager` does not have; `fit` raises ConfigError for what
    cannot be exact, and what `CheckpointManager` raises.
    """

    best_model_path = ""
    """Lightning asks the first checkpoint callback for it if ``ckpt_path="best"``. A `LakeCheckpoint` has no file."""

    def __init__(
        self,
        uri: str | PathLike[str] | Storage,
        *,
        state: Mapping[str, Any] | None = None,
        monitor: str | None = None,
        **options: Any,
    ) -> None:
        inspect.signature(CheckpointManager).bind(uri, {}, **options)
        self.manager: CheckpointManager | None = None
        """The manager of the newest `fit`; None before."""
        self._uri, self._more, self._monitor, self._options = uri, state, monitor, options
        self._open = ExitStack()
        self._used: Any = None
        """The batch that the current step used; None: the step is over."""

    # --- what Lightning calls

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Come after all other callbacks: Lightning asks the first checkpoint callback for its files."""
        others = [one for one in trainer.callbacks if one is not self and not isinstance(one, _AtEnd)]
        trainer.callbacks = [_AtEnd(self), *others, self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the run, if there is one, before anything is read."""
        if trainer.fast_dev_run:
            return
        _LIGHTNING.check(trainer, *_SEAMS)
        _refuse_trainer(trainer)
        _refuse_hooks(trainer, has_state=self._more is not None)
        self._trainer, self._loader, self._loops = trainer, _loader_of(trainer), _Loops(trainer.fit_loop)
        averages = _averages_of(trainer)
        state = {**_state_of(trainer), **averages, "loops": self._loops, "reader": self._loader, **(self._more or {})}
        self.manager = CheckpointManager(self._uri, state, **self._options)
        self._open.push(self.manager)
        before = self._handlers()
        # A run of `lakeckpt convert` has none of these.
        self.manager.restore(allow_missing={"callbacks", "loops", "reader", *averages})
        self._signals = self._handlers()
        _handle(before)  # Lightning sets its own handlers now, and brings these back at the end
        if not self._loops.loaded:
            _check_at_start(self._loader)
        self._counted = _count(trainer, self._loader)
        self._stepped, self._used = trainer.global_step, None
        self._loader._before_more = self._step_is_over
        self._open.callback(setattr, self._loader, "_before_more", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals of ``save_on`` back from Lightning."""
        if self._is_open:
            _handle(self._signals)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the steps of the epoch counted, if there are others than in the epoch before."""
        if self._is_open and self._counted is not None:
            self._loader._turn()  # to the newest version of the table, if this is its epoch
            if len(self._loader) != self._counted:
                self._counted = _count(trainer, self._loader)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what the step used, if there was one: batches whose gradients are accumulated are no steps."""
        if self._is_open and trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            # Lightning reads a batch ahead of what it cannot count, and of nothing else.
            self._used = self._loader.last_receipt if trainer.num_training_batches != float("inf") else batch
            self._loops.keep()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a loader that would go on where the last validation stopped."""
        if not self._is_open:
            return
        for one in CombinedLoader(trainer.val_dataloaders, "sequential").flattened:
            if isinstance(one, LakeLoader) and one._restarts is None:
                raise ConfigError(
                    "the validation loader is a LakeLoader that goes on where it stopped, so the sanity check and "
                    "limit_val_batches would leave rows out: make it LakeLoader(…, restart=True)"
                )

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn if nothing is logged under the name of ``monitor``."""
        if self._is_open and not trainer.sanity_checking and self._monitor not in (None, *trainer.callback_metrics):
            warnings.warn(
                f"monitor={self._monitor!r} is none of the metrics that were logged up to the end of a validation, so "
                f"steps have no metric: {sorted(trainer.callback_metrics)}",
                stacklevel=2,
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the run if there was nothing to train."""
        self._open.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run without saving; a step whose validation did not end is done again."""
        self._open.__exit__(type(exception), exception, exception.__traceback__)

    # --- inside

    def _end(self) -> None:
        """Save the last step, and close the run, while the state is on its devices."""
        self._step_is_over()
        self._open.close()

    @property
    def _is_open(self) -> bool:
        return getattr(self, "_loader", None) is not None and self._loader._before_more is not None

    def _handlers(self) -> dict[int, Any]:
        """Return signal → its handler now, for the signals of ``save_on``."""
        numbers = [getattr(signal, name) for name in self._options.get("save_on", ())]
        return {number: signal.getsignal(number) for number in numbers}

    def _step_is_over(self) -> None:
        """Make the cut of the step that ended, if there is one."""
        if self._is_open and self._used is not None:
            used, self._used = self._used, None
            self._loops.end_step()
            assert self.manager is not None
            self.manager.step(used, metric=self._metric())

    def _metric(self) -> float | None:
        found = self._trainer.callback_metrics.get(self._monitor)
        return None if found is None else float(found)


class _AtEnd(Callback):
    """Ends the run when training ends, before another callback changes the module: `WeightAveraging` puts its average
    there."""

    def __init__(self, checkpoint: LakeCheckpoint) -> None:
        self._checkpoint = checkpoint

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._checkpoint._end()


class _Loops:
    """Lightning's counters, at the last cut."""

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._kept = self._now()
        self.loaded = False
        """True if a checkpoint was loaded."""

    def keep(self) -> None:
        """Note the counters at the end of a batch."""
        self._kept = self._now()

    def end_step(self) -> None:
        """Note the counters at the end of an epoch, if the batch was its last one. If `fit` ends inside of an epoch
        Lightning counts the epoch, too; then the counters at the end of the batch stay."""
        if self._fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._kept = {**self._now(), "inside": False}

    def _now(self) -> dict[str, Any]:
        loop = self._fit_loop
        counters = {"epoch_progress": loop.epoch_progress.state_dict(), **loop.epoch_loop.state_dict(prefix=_EPOCH)}
        return {"inside": True, "counters": counters}

    def state_dict(self) -> dict[str, Any]:
        return self._kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counters. Lightning goes on in the middle of an epoch as with a checkpoint of its own, and at the
        start of one as a second `fit` does."""
        self._fit_loop.load_state_dict(state["counters"])
        epochs = self._fit_loop.epoch_loop
        if not state["inside"]:
            for loop in (self._fit_loop, epochs, epochs.automatic_optimization, epochs.manual_optimization):
                loop.on_iteration_done()
        self._kept, self.loaded = dict(state), True


class _Callbacks:
    """The states that callbacks return from ``state_dict()``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        found = {one.state_key: one.state_dict() for one in self._trainer.callbacks}
        return {name: state for name, state in found.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for one in self._trainer.callbacks:
            if one.state_key in state:
                one.load_state_dict(state[one.state_key])


def _handle(handlers: Mapping[int, Any]) -> None:
    """Let these handlers have their signals."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _state_of(trainer: Any) -> dict[str, Any]:
    """Return what Lightning saves, by the names that `lakeckpt convert` gives the parts of Lightning's checkpoints."""
    found = {"model": trainer.lightning_module, "callbacks": _Callbacks(trainer)}
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for name, every in (("optimizer", trainer.optimizers), ("scheduler", schedulers)):
        found |= {name if len(every) == 1 else f"{name}_{number}": one for number, one in enumerate(every)}
    if trainer.precision_plugin.state_dict():
        found["scaler"] = trainer.precision_plugin
    if trainer.datamodule is not None and is_overridden("state_dict", trainer.datamodule):
        found["datamodule"] = trainer.datamodule
    return found


def _averages_of(trainer: Any) -> dict[str, Any]:
    """Return the averaged models of `WeightAveraging` callbacks, which make them in ``setup``."""
    found = [one for one in trainer.callbacks if _averages(one)]
    for one in found:
        _LIGHTNING.check(one, "_average_model")
    return {f"weight_average{number or ''}": one._average_model for number, one in enumerate(found)}


def _averages(callback: Any) -> bool:
    """Return whether the average of ``callback`` is all that its ``on_save_checkpoint`` would save."""
    kind = getattr(callbacks, "WeightAveraging", None)  # lightning 2.5 has none
    return (
        kind is not None and isinstance(callback, kind) and type(callback).on_save_checkpoint is kind.on_save_checkpoint
    )


def _loader_of(trainer: Any) -> LakeLoader:
    """Return the training loader, which is made if it is not yet."""
    loader = trainer.train_dataloader
    if loader is None:
        loader = trainer.fit_loop._data_source.dataloader()
    if not isinstance(loader, LakeLoader) or loader._row_wise:
        raise ConfigError(
            f"LakeCheckpoint counts the rows of one lakeckpt.LakeLoader, and the training loader is {loader!r:.80}: "
            "give fit a LakeLoader whose dataset has a batch_size. Several tables are one loader by lakeckpt.mix"
        )
    return loader


def _count(trainer: Any, loader: LakeLoader) -> int | None:
    """Have Lightning count the steps of the current epoch; return the steps of the whole epoch, None if unknown."""
    loop = trainer.fit_loop
    loop._data_source.instance = loader  # a hook of the module would make another loader
    loop._combined_loader = None
    loop.setup_data()
    try:
        return len(loader)
    except TypeError:
        return None


def _check_at_start(loader: LakeLoader) -> None:
    """Raise ConfigError if Lightning would begin to count in the middle of the rows."""
    if loader.epoch != 0 or not loader._progress.at_start:
        raise ConfigError(
            f"the loader is in epoch {loader.epoch}, and no checkpoint of LakeCheckpoint says at which of Lightning's "
            "steps: it was read before fit (to look at a batch, loader.peek() takes none), or another loop began this "
            "run, and has to end it"
        )


def _refuse_trainer(trainer: Any) -> None:
    """Raise ConfigError for a trainer that would not go on exactly."""
    strategy = trainer.strategy
    if strategy.restore_checkpoint_after_setup or not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ConfigError(
            "LakeCheckpoint works on one device and with strategy='ddp', of the package that was imported before it "
            f"(lightning or pytorch_lightning), and this is {type(strategy).__module__}.{type(strategy).__name__}"
        )
    if trainer.ckpt_path is not None:
        raise ConfigError(
            f"fit has ckpt_path={str(trainer.ckpt_path)!r}, and LakeCheckpoint goes on from its own run: leave "
            "ckpt_path out (under Slurm: SLURMEnvironment(auto_requeue=False)). `lakeckpt convert FILE RUN --to run` "
            "makes a run of the file"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "reload_dataloaders_every_n_epochs makes another loader, which knows nothing of the rows that were read: "
            "leave it out; a LakeLoader begins the next epoch by itself"
        )


def _refuse_hooks(trainer: Any, *, has_state: bool) -> None:
    """Raise ConfigError for what reads ahead by itself, and for state that only Lightning's checkpoints would have."""
    module = trainer.lightning_module
    if sum(isinstance(one, LakeCheckpoint) for one in trainer.callbacks) > 1:
        raise ConfigError("the trainer has two LakeCheckpoints, and a fit is saved into one run: leave one of them out")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError("training_step(dataloader_iter) reads ahead of its steps: write training_step(batch)")
    for one in (module, *trainer.callbacks):
        if isinstance(one, StochasticWeightAveraging):
            raise ConfigError("StochasticWeightAveraging changes schedulers in mid-run, and cannot go on exactly")
        if is_overridden("on_save_checkpoint", one) and not has_state and not _averages(one):
            raise ConfigError(
                f"{type(one).__name__}.on_save_checkpoint adds to Lightning's checkpoints, and LakeCheckpoint makes "
                'none: give what is to be saved beside the module, LakeCheckpoint(…, state={"average": average}), or '
                "state={} if nothing is"
            )

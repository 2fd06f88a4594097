"""This module defines `LakeTrainer`: transformers' Trainer with the reader, the atomic cut, the ledger and the audit.

The Trainer iterates the `LakeLoader` itself, and accelerate reads no batch of it ahead. The Trainer takes the batches
of an optimizer step at once and makes each anew, so `LakeTrainer` reads the receipt of a batch where the Trainer gives
the batch to ``training_step``. The cut of a step comes after its logs, its evaluation and the Trainer's own save, when
nothing of the step is left to do. The run is restored when model, optimizer and scheduler exist and no batch has been
read. Epochs begin and end where the reader's do. The module starts no threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import ExitStack
from math import ceil
from os import PathLike
from typing import Any

from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.core.plan import Plan
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.data.streams.mix import MixedDataset
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.accelerate import check_whole
from lakeckpt.integrations.common import Framework
from lakeckpt.lake.storage.base import Storage

_TRANSFORMERS = Framework(distribution="transformers", oldest="5.19.0", newest="5.24.0")
with _TRANSFORMERS.imports():
    from transformers import EarlyStoppingCallback, Trainer
    from transformers.trainer_callback import ExportableState

__all__ = ["LakeTrainer"]

_METHODS = (
    "set_initial_training_values()",
    "create_scheduler(num_training_steps, optimizer)",
    "training_step()",
    "log()",
    "_run_epoch(epoch, steps_in_epoch, num_update_steps_per_epoch)",
    "_maybe_log_save_evaluate()",
    "_finalize_training()",
)
"""The methods of the Trainer that `LakeTrainer` overrides: without one of them, it would never be called."""

_FIELDS = (
    "accelerator.scaler",
    "is_distributed_loading_by_transformers",
    "args.parallelism_config",
    "args.auto_find_batch_size",
    "control.should_training_stop",
    "callback_handler.callbacks",
    "_created_lr_scheduler",
    "_train_batch_size",
)
_NOTES = (
    "log_history",
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The fields of a TrainerState that are saved: the reader and the manager have the rest, or the Trainer's arguments."""


class LakeTrainer(Trainer):
    """A Trainer whose run lies at ``run``: `train` goes on from its newest checkpoint, and saves there.

    Args:
        model, args: as for the Trainer, and so are all arguments that are not named here.
        train_dataset: a `LakeLoader`, or a `LakeDataset`, of which a loader with the ``dataloader_…`` settings of
            ``args`` is made. The columns are the arguments of ``model.forward``. The dataset makes the batches, so
            ``per_device_train_batch_size`` and ``data_collator`` are not used for training.
        run: where the run lies, as for `CheckpointManager`.
        run_options: other arguments of the `CheckpointManager`, such as ``{"persist_every": 100}``.

    Other trainers get the same by ``class Mine(LakeTrainer, MyTrainer): pass``, if they give the Trainer their
    ``train_dataset`` unread. ``eval_dataset`` may be a `LakeDataset` of its own, or a `LakeLoader` (``restart=True``).

    Model, optimizer, scheduler, scaler, random states, the Trainer's logs and best metric, the attributes in the
    ``state()`` of callbacks (`EarlyStoppingCallback` has one), and the reader are saved, all of one optimizer step.
    ``state.global_step`` counts the steps of the run, and ``state.epoch`` is the place of the reader. The Trainer's own
    checkpoints (``save_strategy``) are written beside the run and never read.

    A run goes on with any number of ranks, also in the middle of an epoch. With ``num_train_epochs``, the steps that
    are left are counted for the current ranks, and so is the length of the schedule.

    Raises ConfigError for a dataset of another kind, if the model is not whole on each rank (DeepSpeed, FSDP, tensor
    parallelism), and if ranks would train apart.
    """

    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        train_dataset: LakeDataset | LakeLoader,
        run: str | PathLike[str] | Storage,
        run_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._lake_run, self._lake_options = run, dict(run_options or {})
        self._lake_manager: CheckpointManager | None = None
        self._lake_open: ExitStack | None = None
        """Closes the manager when training ends; None outside of `train`."""
        self._lake_used: Any = None
        """The receipt of the batch that was trained on last."""
        self._lake_rows = 0
        """The rows that `train` has trained on, on all ranks."""
        self._lake_ended = False
        """True if the restored run has stopped early, and trains no more."""
        self._lake_length: int | None = None
        """The batches of the current epoch, if they are known."""
        self._lake_waits = False
        """True if the cut of the last step of an epoch waits for the end of the epoch."""
        super().__init__(model, args, *others, train_dataset=_loader_of(train_dataset, args), **options)
        _TRANSFORMERS.check(Trainer, *_METHODS)
        _TRANSFORMERS.check(self, *_FIELDS)
        _TRANSFORMERS.check(self.state, "global_step", "max_steps", *_NOTES)
        self._train_batch_size = self.train_dataset.dataset.batch_size  # for the Trainer's reports
        self._check_supported()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *others: Any, **options: Any) -> Any:
        """Train to the end, from the newest checkpoint of the run on. Arguments, result and errors: as for the Trainer,
        and as for `CheckpointManager`. ``resume_from_checkpoint`` and ``trial`` are refused (ConfigError)."""
        if resume_from_checkpoint:
            raise ConfigError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}) would load other weights than those of the "
                f"run at {self._lake_run}: leave it out, train() goes on from the newest checkpoint of the run"
            )
        if trial is not None:
            raise ConfigError(
                "each trial of a hyperparameter search needs a run of its own: make a LakeTrainer for each"
            )
        self._lake_rows = 0
        with ExitStack() as self._lake_open:
            self._lake_open.callback(setattr, self, "_lake_open", None)
            return super().train(None, None, *others, **options)

    # --- what the Trainer asks for

    def get_train_dataloader(self) -> LakeLoader:
        """Return the loader, prepared by accelerate: its batches come on the Trainer's device."""
        found: LakeLoader = self.accelerator.prepare(self.train_dataset)
        return found

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of lakeckpt, prepared, which begins anew in each evaluation; others as the Trainer does."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        found = self.eval_dataset[found] if isinstance(found, str) else found
        if not isinstance(found, (LakeDataset, MixedDataset, LakeLoader)):
            return super().get_eval_dataloader(eval_dataset)
        found = LakeLoader(found, restart=True) if isinstance(found, (LakeDataset, MixedDataset)) else found
        if found._restarts is None:
            raise ConfigError(
                "eval_dataset is a LakeLoader that goes on where it stopped, so evaluations would read other rows each "
                "time: give a LakeDataset of its own, or LakeLoader(…, restart=True) of one"
            )
        return self.accelerator.prepare(found)

    def set_initial_training_values(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Return the Trainer's plan. With ``max_steps``, epochs do not end it: other ranks need another number."""
        epochs, *rest = super().set_initial_training_values(*args, **options)
        return max(epochs, self.args.max_steps), *rest

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler; in `train`, also restore the run, as all that is saved exists now."""
        super().create_scheduler(num_training_steps, optimizer)
        if self._lake_open is not None and self._lake_manager is None:
            self._restore(self._lake_open)
            self._fit_schedule(num_training_steps)
        return self.lr_scheduler

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Train on one batch, as the Trainer does, and note the batch as used by the current step."""
        self._lake_used = getattr(inputs, "receipt", None)
        if self._lake_used is None:
            raise ConfigError(
                f"training_step was given a {type(inputs).__name__} without a receipt, which names its rows: pass on "
                "the batches of the LakeLoader as they are, and change them by the transform= of the LakeDataset"
            )
        loader = self.train_dataset
        is_flow = loader.dataset.yields_many  # its receipts count what was read
        self._lake_rows += loader.dataset.batch_size * loader.topology[1] if is_flow else self._lake_used.step_rows
        return super().training_step(model, inputs, *args, **options)

    def log(self, logs: dict[str, Any], *args: Any, **options: Any) -> None:
        """Log as the Trainer does. The samples of ``train_samples_per_second`` are rows that were trained on."""
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(self._lake_rows / max(logs["train_runtime"], 1e-4), 3)
        super().log(logs, *args, **options)

    # --- inside

    def _check_supported(self) -> None:
        check_whole(self.accelerator, self.train_dataset)
        if self.is_distributed_loading_by_transformers or self.args.parallelism_config is not None:
            raise ConfigError(
                "LakeTrainer restores models that are whole on each rank, and this one is divided over ranks"
            )
        if self.args.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size=True changes the batch size, and the LakeDataset makes the batches")

    def _restore(self, opened: ExitStack) -> None:
        state = {
            "model": self.model,
            "optimizer": self.optimizer.optimizer,
            "scheduler": _Schedule(self),
            "trainer": _Notes(self),
            "reader": self.train_dataset,
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        self._lake_manager = opened.enter_context(CheckpointManager(self._lake_run, state, **self._lake_options))
        opened.callback(setattr, self, "_lake_manager", None)
        self.state.global_step = self._lake_manager.restore(allow_missing={"trainer", "reader"})  # `lakeckpt convert`
        self._lake_ended = any(
            isinstance(one, EarlyStoppingCallback)
            and one.early_stopping_patience_counter >= one.early_stopping_patience
            for one in self.callback_handler.callbacks
        )

    def _fit_schedule(self, planned: int) -> None:
        """Make a schedule of ``planned`` steps anew if the run will have another number of steps."""
        self.state.max_steps = self._steps_of_run()
        if self.state.max_steps != planned and self._created_lr_scheduler:
            saved, rates = self.lr_scheduler.state_dict(), [group["lr"] for group in self.optimizer.param_groups]
            self.lr_scheduler = None
            super().create_scheduler(self.state.max_steps)
            self.lr_scheduler.load_state_dict(saved)
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):  # until the scheduler steps
                group["lr"] = rate

    def _steps_of_run(self) -> int:
        """Return the optimizer steps of the whole run, those that are done included, on the current ranks."""
        place, loader = _place_of(self.train_dataset), self.train_dataset
        if self.args.max_steps > 0 or place is None:
            return int(self.args.max_steps)
        read, length = place
        epochs = self.args.num_train_epochs - loader.epoch - 1  # after the current epoch
        if epochs < 0:
            wanted = ceil((1 + epochs) * self._updates(length)) - self._updates(read)
        else:
            following = Plan(loader._progress.following(loader._progress.state)).steps or 0
            wanted = self._updates(length - read) + ceil(epochs * self._updates(following))
        total: int = self.state.global_step + max(0, wanted)
        return total

    def _updates(self, batches: int) -> int:
        each: int = self.args.gradient_accumulation_steps
        return -(-batches // each)

    def _run_epoch(self, **call: Any) -> None:
        """Train on what is left of the reader's current epoch."""
        loader = self.train_dataset
        loader._turn()  # the Trainer counts batches, so the loader has not seen the end of the epoch before
        place = _place_of(loader)
        if (place is not None and place[0] == place[1]) or (loader.dataset.yields_many and loader.peek() is None):
            deque(loader, maxlen=0)  # the run was restored at the end of an epoch: go over it
            place = _place_of(loader)
        self.state.max_steps = self._steps_of_run()
        ended, self._lake_ended = self._lake_ended, False
        if ended or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if place is not None:
            left = place[1] - place[0]
            call.update(steps_in_epoch=left, num_update_steps_per_epoch=self._updates(left))
        self._lake_length = None if place is None else place[1]
        super()._run_epoch(**{**call, "epoch": loader.epoch})

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Log, evaluate and save as the Trainer does, and make the cut after that, once for each optimizer step. The
        Trainer calls this once more at the end of an epoch: the cut of its last step comes then."""
        assert self._lake_manager is not None
        is_new = self.state.global_step > self._lake_manager.steps_done
        if is_new and self._lake_length is not None:
            self.state.epoch = self._lake_used.epoch + (self._lake_used.step + 1) / self._lake_length
        elif is_new and self.train_dataset._progress.is_endless:
            self.state.epoch = self.state.global_step / self.state.max_steps
        super()._maybe_log_save_evaluate(*args, **options)
        is_last = is_new and self._lake_used.step + 1 == self._lake_length
        self._lake_waits = is_last and not self._lake_waits
        if is_new and not self._lake_waits:
            self._lake_manager.step(self._lake_used)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Save the last step before the Trainer loads its best model, and finish as the Trainer does."""
        assert self._lake_open is not None
        self._lake_open.close()
        return super()._finalize_training(*args, **options)


class _Schedule:
    """The scheduler of a trainer, which may be made anew later."""

    def __init__(self, trainer: LakeTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> Any:
        """Return the state of the current scheduler."""
        return self._trainer.lr_scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` returned."""
        self._trainer.lr_scheduler.load_state_dict(state)


class _Notes:
    """The notes of a trainer, as an object of a manager."""

    def __init__(self, trainer: LakeTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the notes."""
        callbacks = {
            name: [one.state().get("attributes", {}) for one in every] for name, every in self._callbacks().items()
        }
        return {**{name: getattr(self._trainer.state, name) for name in _NOTES}, "callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name in _NOTES:
            setattr(self._trainer.state, name, state[name])
        for name, every in self._callbacks().items():
            for one, attributes in zip(every, state["callbacks"].get(name, ()), strict=False):
                for attribute, value in attributes.items():
                    setattr(one, attribute, value)

    def _callbacks(self) -> dict[str, list[Any]]:
        """Return the callbacks that have a state, by the names of their classes."""
        found = defaultdict(list)
        for one in self._trainer.callback_handler.callbacks:
            if isinstance(one, ExportableState):
                found[type(one).__name__].append(one)
        return found


def _loader_of(given: object, args: Any) -> LakeLoader:
    """Return the loader that was given, or one of the dataset that was given."""
    dataset = given.dataset if isinstance(given, LakeLoader) else given
    if not isinstance(dataset, (LakeDataset, MixedDataset)) or dataset.row_wise:
        found = (
            "a LakeDataset without a batch_size"
            if isinstance(dataset, (LakeDataset, MixedDataset))
            else type(given).__name__
        )
        raise ConfigError(
            f"train_dataset of a LakeTrainer is a lakeckpt.LakeDataset with a batch_size, or a LakeLoader of one; got "
            f"{found}: LakeDataset(…, batch_size=args.per_device_train_batch_size)"
        )
    if isinstance(given, LakeLoader) or args is None:
        return given if isinstance(given, LakeLoader) else LakeLoader(dataset)
    return LakeLoader(
        dataset,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        prefetch_factor=args.dataloader_prefetch_factor,
        persistent_workers=args.dataloader_persistent_workers,
    )


def _place_of(loader: LakeLoader) -> tuple[int, int] | None:
    """Return (batches of the current epoch that were read, batches that it has); None if this is not known."""
    try:
        length = len(loader)
    except TypeError:
        return None
    return loader._progress.state.step, length

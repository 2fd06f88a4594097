"""This module fits lakeckpt into torchtitan's Trainer: by the configs of `LakeDataLoader` and `LakeCheckpoint`.

`LakeDataLoader` is a ``BaseDataLoader``: it gives packed sequences of a table as torchtitan's models take them. Its
state is the same on every data-parallel rank, and goes on on any number of them, also in torchtitan's own checkpoints.
`LakeCheckpoint` is a ``BaseCheckpointManager`` around a `lakeckpt.CheckpointManager`: the Trainer calls it after each
optimizer step, which is a cut. The module starts no threads itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.base.options import ReadOptions
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.data.streams.pack import pack
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.common import Framework

_TORCHTITAN = Framework(distribution="torchtitan", oldest="0.3.0", newest="0.3.0")
with _TORCHTITAN.imports():
    import tyro  # type: ignore[import-not-found]
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.tools import filesystem

__all__ = ["LakeCheckpoint", "LakeDataLoader"]

_STATE = "lakeckpt"
"""The key of a loader's state in torchtitan's own checkpoints, which hold a text: DCP loads no key that is new."""
_METHODS = ("_load(step)", "_save(curr_step, last_step)", "_maybe_wait_for_staging()", "_wait_for_saving()", "_close()")
"""The methods that the base class of checkpointers leaves to `LakeCheckpoint`."""
_FIELDS = ("folder", "interval", "keep_latest_k", "load_only", "enable_first_step_checkpoint")
_REFUSED = (
    "initial_load_path",
    "exclude_from_loading",
    "last_save_in_hf",
    "create_seed_checkpoint",
    "initial_load_in_hf",
)


class LakeDataLoader(BaseDataLoader):
    """Packed sequences of the table at ``dataset_path``, as ``({"input", "positions"}, labels)``, int64 of shape
    (batch, sequence): see `lakeckpt.pack`. With ``endless`` (the default) they never end.

    A Trainer builds it from its `Config`. ``loader`` is the `lakeckpt.LakeLoader` inside. ConfigError if the config
    names no table.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The table and its columns. ``dataset_path`` is what `lakeckpt.open_table` takes; ``dataset`` does not
        count."""

        column: str = "text"
        """The column of documents: texts, or lists of tokens."""
        tokenized: bool = False
        """The column holds lists of tokens, and the tokenizer is not used."""
        end: int | None = None
        """With tokenized: the token that is put after each document. The tokenizer adds its own to texts."""
        shuffle: bool = True
        """Permute row groups, and documents in windows of row groups, anew in each epoch."""
        seed: int = 0
        """The seed of the order."""
        num_lanes: int | None = None
        """Equal parts of an epoch. Numbers of ranks that divide it get the same batches. None: the number of ranks."""
        endless: bool = True
        """Go on with the next epoch. Otherwise the Trainer stops at the end of the epoch."""
        num_workers: int = 0
        """Worker processes that read and tokenize."""
        make: Annotated[Callable[..., LakeDataset] | None, tyro.conf.Suppress] = None
        """Makes the dataset in place of all the above, of batches with ``tokens`` and ``labels``; called with rank=,
        world_size=, batch_size=, length= and tokenizer=."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **others: Any,
    ) -> None:
        make = config.make or (lambda **given: _packed(config, **given))
        dataset = make(
            rank=dp_rank, world_size=dp_world_size, batch_size=local_batch_size, length=seq_len, tokenizer=tokenizer
        )
        self.loader = LakeLoader(dataset, num_workers=config.num_workers)
        self.delivered = 0
        """Batches that the Trainer has got."""

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            self.delivered += 1
            yield self.inputs_of(batch)

    def inputs_of(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return a batch as the model takes it. A subclass may give the model more."""
        inputs = {"input": batch["tokens"].long()}
        if "position_ids" in batch:
            inputs["positions"] = batch["position_ids"].long()
        return inputs, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what the Trainer has got, for torchtitan's own checkpoints; the same on every rank."""
        return {_STATE: json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state. An empty one, of a Trainer that starts, changes nothing. StateError as of LakeLoader."""
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict[_STATE]))


def _packed(config: LakeDataLoader.Config, *, length: int, tokenizer: Any, **given: Any) -> LakeDataset:
    if not config.dataset_path:
        raise ConfigError("LakeDataLoader.Config needs dataset_path=, the path or URL of a table, or make=")
    documents = LakeDataset(
        config.dataset_path,
        shuffle=config.shuffle,
        seed=config.seed,
        endless=config.endless,
        options=ReadOptions(num_lanes=config.num_lanes),
        **given,
    )
    encode = None if config.tokenized else _Encoding(tokenizer)
    return pack(
        documents, length=length, column=config.column, after=config.end, labels=True, padding=0, tokenizer=encode
    )


class _Encoding:
    """Makes the tokens of a text with torchtitan's ``tokenizer``, between those of beginning and end that it has."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.__name__ = f"{type(tokenizer).__name__}.encode"

    def __call__(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_bos=True, add_eos=True)
        return found


class LakeCheckpoint(BaseCheckpointManager):
    """The checkpoints of a Trainer, as a run of lakeckpt in ``folder`` of the Trainer's dump folder.

    The run holds the model's parts, the optimizers, the schedulers, the Trainer's own state and the reader. The
    Trainer's loader must be a `LakeDataLoader`. It uses torchtitan's options ``interval``, ``keep_latest_k``,
    ``load_step`` and ``enable_first_step_checkpoint``. The last step is always saved whole. ConfigError for the options
    that load or write other formats.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, and those of a `lakeckpt.CheckpointManager`."""

        enable: bool = True
        """True: save and load."""
        initial_load_model_only: bool = False
        """Not used."""
        capture_every: int | None = None
        """See `lakeckpt.CheckpointManager`."""
        timeout_s: float = 600.0
        """How long a rank waits for another one in a save or restore, in seconds."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: BaseDataLoader | None,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        if not config.enable:
            return
        _TORCHTITAN.check(BaseCheckpointManager, *_METHODS)
        _TORCHTITAN.check(config, *_FIELDS, *_REFUSED)
        _check(config, dataloader)
        self._load_only, self._saves_first = config.load_only, config.enable_first_step_checkpoint
        self._trainer, self._taken = states.get("train_state"), 0
        assert isinstance(dataloader, LakeDataLoader)
        self._dataloader = dataloader
        state = {**_numbered("model", model_parts), **_numbered("optimizer", optimizers), "lr_scheduler": lr_schedulers}
        self._manager = CheckpointManager(
            filesystem.join(base_folder, config.folder),
            {**state, **states, "reader": dataloader.loader},
            persist_every=config.interval,
            keep=Keep(last=config.keep_latest_k) if config.keep_latest_k else Keep(every=1),
            capture_every=config.capture_every,
            timeout_s=config.timeout_s,
        )

    def _load(self, step: int = -1) -> bool:
        done = self._manager.restore(None if step == -1 else step)
        self._taken = self._dataloader.delivered
        return done > 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._load_only:
            return False
        if curr_step != self._manager.steps_done + 1:
            raise ConfigError(
                f"the Trainer has done step {curr_step}, and the run's last one is {self._manager.steps_done}: call "
                "load() before the first step, and save() after each one"
            )
        self._manager.step(self._used())
        if last_step or (curr_step == 1 and self._saves_first):
            self._manager.save()
        return True

    def _used(self) -> Receipt | None:
        """Return the receipt of the last batch that the step used. ConfigError if the Trainer took more batches."""
        taken, self._taken = self._dataloader.delivered - self._taken, self._dataloader.delivered
        used = _batches_of_a_step(self._trainer)
        if used is not None and taken != used:
            raise ConfigError(
                f"{taken} batches were taken for a step that uses {used}: something reads ahead of the Trainer, and "
                "what it holds would be lost in a crash. Let the Trainer iterate its LakeDataLoader itself"
            )
        return self._dataloader.loader.last_receipt

    def _maybe_wait_for_staging(self) -> None:
        self._manager.fence()

    def _wait_for_saving(self) -> None:
        self._manager.wait()

    def _close(self) -> None:
        if hasattr(self, "_manager"):
            self._manager.close()


def _batches_of_a_step(trainer: Any) -> int | None:
    """Return how many batches an optimizer step of ``trainer`` uses; None for something that is no Trainer."""
    accumulated = getattr(trainer, "gradient_accumulation_steps", None)
    return None if accumulated is None else accumulated * getattr(trainer, "num_pipeline_parallel_microbatches", 1)


def _numbered(name: str, objects: Any) -> dict[str, Any]:
    """Return the objects by name: ``model`` for the first one, ``model1`` for the next one, and so on."""
    return {f"{name}{at or ''}": one for at, one in enumerate(objects)}


def _check(config: LakeCheckpoint.Config, dataloader: object) -> None:
    if not isinstance(dataloader, LakeDataLoader):
        raise ConfigError(
            f"LakeCheckpoint saves a LakeDataLoader, and the Trainer's loader is a {type(dataloader).__name__}: set "
            "dataloader=LakeDataLoader.Config(dataset_path=…), too"
        )
    for name in _REFUSED:
        if getattr(config, name):
            raise ConfigError(
                f"LakeCheckpoint has no {name}: it saves and loads runs of lakeckpt. `lakeckpt convert` makes a run of "
                "other checkpoints, and other formats of a run"
            )

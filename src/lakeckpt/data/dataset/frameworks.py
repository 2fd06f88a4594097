"""This module fits datasets and loaders into Hugging Face accelerate and Lightning, and refuses what would lose rows.

A `LakeDataset` yields what belongs to its own rank. accelerate (and transformers' Trainer by it) takes a torch
DataLoader apart and deals the rows of its dataset to the ranks itself; of a dataset that deals for itself that leaves
one row of W, without an error. `check_dealers` sees on the stack what iterates the dataset, and refuses that.

A `LakeLoader` says that accelerate has prepared it (`Prepared`), so accelerate takes it as it is. The other work of
accelerate's own loaders is done here: they put batches on the device, say when one is the last (so that ``accumulate``
steps there), and enter ``save_state`` with their state.

Lightning counts the steps of an epoch itself, once, when it begins. If a part of the epoch was read on other ranks
that is wrong, and of a loader without a length it fetches a batch ahead. It saves and loads a loader's state from one
place, which `counts_steps` finds on the stack.

The module imports neither of them, and calls nothing that it finds on the stack. It starts no threads.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import Sampler

from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.errors import ConfigError, StateUnavailable

__all__ = [
    "EpochSetter",
    "Prepared",
    "check_counted",
    "check_dealers",
    "check_not_fetched_ahead",
    "check_not_sampled",
    "counts_steps",
    "without_others",
]

_MODULES = frozenset({"accelerate.data_loader", "transformers.trainer_pt_utils"})
_DEALERS = frozenset({"DataLoaderDispatcher", "IterableDatasetShard"})
_AHEAD = frozenset({"DataLoaderDispatcher", "DataLoaderShard"})
_INSTEAD = (
    "Give it a lakeckpt.LakeLoader, which accelerate takes as it is: accelerator.prepare(loader), or with "
    "transformers' Trainer a lakeckpt.integrations.transformers.LakeTrainer"
)


def _callers() -> dict[str, object]:
    """Class name to object of the loaders and datasets of those frameworks that are at work in this thread."""
    found: dict[str, object] = {}
    if not any(name in sys.modules for name in _MODULES):
        return found
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _MODULES:
            one = frame.f_locals.get("self")
            found.setdefault(type(one).__name__, one)
        frame = frame.f_back
    return found


def check_dealers(topology: tuple[int, int], *, at_start: bool = True) -> str:
    """Return which loader takes more from a dataset than its own loop has received; empty: none does.

    Raises ConfigError if what asks for rows of one rank of several would deal them to the ranks once more, and
    StateUnavailable if it skips batches that may be others than those that were trained on.
    """
    callers, (rank, world_size) = _callers(), topology
    for name in _DEALERS & callers.keys() if world_size > 1 else ():
        raise ConfigError(
            f"this dataset yields the rows of rank {rank} of {world_size}, and accelerate's {name} would deal them to "
            f"the {world_size} ranks once more: the others would be lost. {_INSTEAD}; or let accelerate alone deal, "
            "LakeDataset(…, rank=0, world_size=1), without exact resumption"
        )
    for name, one in callers.items():
        skipped = getattr(one, "skip_batches", 0)
        if skipped and (name == "SkipDataLoader" or not at_start):
            raise StateUnavailable(
                f"accelerate's {name} would read {skipped} batches from where the dataset is, whatever its epoch and "
                "however much of it was read before, and drop them: they may be others than those that were trained "
                "on. Load the reader's state (loader.load_state_dict(…)) and call no skip_first_batches; with "
                "transformers' Trainer set TrainingArguments(ignore_data_skip=True)"
            )
    return next((name for name in _AHEAD & callers.keys() if not _is_stateful(callers[name])), "")


def _is_stateful(loader: object) -> bool:
    """Return whether accelerate reads by torchdata's StatefulDataLoader, whose state is of what the loop received."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


_LIGHTNING = frozenset({"lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader"})


def counts_steps() -> bool:
    """Return whether Lightning called the caller of this function, to save or load a checkpoint."""
    return _asked_by(3)


def check_counted(state: State, world_size: int) -> None:
    """StateUnavailable if Lightning would go on within an epoch on other ranks, and miscount its steps. It does so also
    from the last step of an epoch. From a checkpoint at the end of an epoch, it loads no loader's state."""
    before = state.segment.world_size
    if before == world_size or state.step == 0:
        return
    raise StateUnavailable(
        f"Lightning goes on at step {state.step} of epoch {state.epoch} with {world_size} ranks, and was saved with "
        f"{before}: it counts the steps of epochs once, for all of them, so rows would be lost. Go on with {before} "
        "ranks, or from a checkpoint of the end of an epoch: ModelCheckpoint(save_on_train_epoch_end=True). A "
        "lakeckpt.integrations.lightning.LakeCheckpoint goes on with any number of ranks"
    )


def check_not_fetched_ahead() -> None:
    """StateUnavailable if Lightning asks for the state of a loader without a length."""
    if _asked_by(3):
        raise StateUnavailable(
            "Lightning fetches a batch ahead of a loader without a length: the state that it would save has a batch "
            "that no step has used. Leave endless=True out: Trainer(max_epochs=-1, max_steps=…) goes over many epochs. "
            "Or save by a lakeckpt.integrations.lightning.LakeCheckpoint, and not by ModelCheckpoint"
        )


_SAMPLERS = frozenset({"torch.utils.data.distributed", "torch.utils.data.sampler"})


def check_not_sampled() -> None:
    """ConfigError if a sampler of torch asks for the length of a dataset that has the order of rows itself.

    DeepSpeed makes such a sampler of its ``training_data``. torch refuses it later, and does not say what to do."""
    if sys._getframe(2).f_globals.get("__name__") in _SAMPLERS:
        raise ConfigError(
            "a LakeDataset takes no sampler: it has the order of rows, and each rank's share of it. Iterate a "
            "lakeckpt.LakeLoader(dataset), and leave training_data= out of deepspeed.initialize"
        )


def _asked_by(depth: int) -> bool:
    return sys._getframe(depth).f_globals.get("__name__") in _LIGHTNING


class Prepared:
    """The names by which accelerate knows a loader of its own."""

    use_stateful_dataloader = True
    """``save_state`` and ``load_state`` of an accelerator are to have the loader's state."""
    end_of_dataloader = False
    """True if the batch that the loop has is the last batch of the epoch."""
    remainder = -1
    """Rows that the last batch has too many: none is ever repeated to fill it."""

    _is_prepared = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked by ``accelerator.prepare``, which may also set it. Any other caller, such as a debugger, reads the
        value without changing it."""
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        self._is_prepared = self._is_prepared or asks.partition(".")[0] == "accelerate"
        return self._is_prepared

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._is_prepared = prepared

    @property
    def last_receipt(self) -> Receipt | None:
        """The receipt of what the loop received last."""
        raise NotImplementedError

    def _as_prepared(self, items: Iterator[Any], steps: int | None) -> Generator[Any]:
        """Deliver ``items`` as accelerate's loaders do; ``steps`` is how many the epoch has, None: it never ends."""
        state, operations = sys.modules["accelerate.state"], sys.modules["accelerate.utils.operations"]
        gradients, device = state.GradientState(), state.PartialState().device
        self.end_of_dataloader = False
        gradients._add_dataloader(self)
        try:
            for item in items:
                receipt = self.last_receipt
                assert receipt is not None
                self.end_of_dataloader = receipt.step + 1 == steps
                yield operations.send_to_device(item, device)
        finally:
            gradients._remove_dataloader(self)


class EpochSetter(Sampler[None]):
    """The ``sampler`` of a `LakeLoader`: frameworks tell a loader its epoch by ``loader.sampler.set_epoch(epoch)``."""

    def __init__(self, set_epoch: Callable[[int], None]) -> None:
        self._set_epoch = weakref.WeakMethod(set_epoch)

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (EpochSetter, (self._set_epoch(),))

    def set_epoch(self, epoch: int) -> None:
        """See `LakeLoader.set_epoch`. An iterator that has not given anything yet goes on there."""
        if (found := self._set_epoch()) is not None:
            found(epoch)


def without_others(init: Any) -> inspect.Signature:
    """Return the signature of ``init`` without ``**others``: frameworks that make a loader anew give it whatever its
    signature names."""
    found = inspect.signature(init)
    return found.replace(parameters=[one for one in found.parameters.values() if one.kind is not one.VAR_KEYWORD])

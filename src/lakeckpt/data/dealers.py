"""Does somebody else deal the rows that a dataset has dealt to its rank?  Then most of them would be lost.

A `LakeDataset` yields what belongs to its own rank. Hugging Face accelerate (and transformers' Trainer by it) takes a
torch DataLoader apart and deals its dataset's rows to the ranks itself: rank 0 reads for all, or each rank keeps its
share of what it reads. On W ranks, of a dataset that deals for itself that is one row of W, without an error. Whether
it does so can be seen in one place only: it is what iterates the dataset, or what has it pickled for a worker.

It looks at the stack, once per iteration, and calls nothing that it finds there.
"""

from __future__ import annotations

import sys
from types import FrameType

from lakeckpt.errors import ConfigError, StateUnavailable

__all__ = ["check_dealers"]

_MODULES = frozenset({"accelerate.data_loader", "transformers.trainer_pt_utils"})
_DEALERS = frozenset({"DataLoaderDispatcher", "IterableDatasetShard"})
_AHEAD = frozenset({"DataLoaderDispatcher", "DataLoaderShard"})
_INSTEAD = (
    "Give it a lakeckpt.LakeLoader, which accelerate takes as it is: accelerator.prepare(loader), or with "
    "transformers' Trainer a get_train_dataloader() that returns it"
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

    Raises ConfigError where what asks for rows of one rank of several would deal them to the ranks once more, and
    StateUnavailable where it skips batches that may be others than those that were trained on.
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
    """Whether accelerate reads by torchdata's StatefulDataLoader, and keeps its state as of what the loop received."""
    return bool(getattr(loader, "use_stateful_dataloader", False))

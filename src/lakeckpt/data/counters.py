"""Does Lightning ask for a loader's state, or give one?  It counts the steps of an epoch itself.

It asks ``len(loader)`` once, when it begins, and ends every epoch after as many batches: where a part of the epoch at
hand was read on other ranks, that is wrong for this epoch or for those after it, and rows would be lost without an
error. Of a loader without a length it fetches a batch ahead. It saves and loads what a loader says of itself from one
place, which is recognised by the stack, here; nothing of Lightning is imported or called.
"""

from __future__ import annotations

import sys

from lakeckpt.core.plan import Plan
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import StateUnavailable

__all__ = ["check_counted", "check_not_fetched_ahead", "counts_steps"]

_LIGHTNING = frozenset({"lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader"})


def counts_steps() -> bool:
    """Whether what called the caller of this is Lightning, saving or loading a checkpoint."""
    return _asked_by(3)


def check_counted(state: ReaderState, world_size: int) -> None:
    """StateUnavailable where Lightning would go on in the middle of an epoch on other ranks, and miscount its steps."""
    before = state.segment.world_size
    if before == world_size or (state.step, state.row) == (0, 0) or Plan(state).at_end:
        return
    raise StateUnavailable(
        f"Lightning goes on at step {state.step} of epoch {state.epoch} with {world_size} ranks, and was saved with "
        f"{before}: it counts the steps of epochs once, for all of them, so rows would be lost. Go on with {before} "
        "ranks, or from a checkpoint of the end of an epoch: ModelCheckpoint(save_on_train_epoch_end=True)"
    )


def check_not_fetched_ahead() -> None:
    """StateUnavailable where Lightning asks for the state of a loader without a length."""
    if _asked_by(3):
        raise StateUnavailable(
            "Lightning fetches a batch ahead of a loader without a length: the state that it would save has a batch "
            "that no step has used. Leave endless=True out: Trainer(max_epochs=-1, max_steps=…) goes over many epochs"
        )


def _asked_by(depth: int) -> bool:
    return sys._getframe(depth).f_globals.get("__name__") in _LIGHTNING

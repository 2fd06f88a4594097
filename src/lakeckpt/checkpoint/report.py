"""What did a restore find, and what do a checkpoint's users get told?  Small values, and the warning for damage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.log import Damage
from lakeckpt.checkpoint.manifest import Manifest

__all__ = [
    "CaptureWarning",
    "CheckpointInfo",
    "DamageWarning",
    "Remarks",
    "RestoreReport",
    "RetentionWarning",
    "SaveWarning",
]


class CaptureWarning(UserWarning):
    """Captures cannot run beside training as they should; what they hold is whole all the same."""


class DamageWarning(UserWarning):
    """Something of the run is not as it was written; an older checkpoint was taken, or it was not needed. Or a cut in
    memory is not what can be restored: then the message says that it is not damaged."""


class RetentionWarning(UserWarning):
    """Checkpoints that are not to be kept could not be removed, and take up room; the next save tries again."""


class SaveWarning(UserWarning):
    """A save failed and training goes on; nothing was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """What is to be said of a commit, beside that it was made."""

    lost: str = ""
    """What of the run was found to be gone; empty: nothing."""
    unpruned: str = ""
    """Why checkpoints that are not to be kept could not be removed behind it; empty: they were."""

    def warn(self) -> None:
        """Warn of each."""
        if self.lost:
            warnings.warn(f"damage in the run: {self.lost}", DamageWarning, stacklevel=5)
        if self.unpruned:
            text = "checkpoints that are not to be kept could not be removed, and take up room until a save can: "
            warnings.warn(text + self.unpruned, RetentionWarning, stacklevel=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint."""

    slot: int
    """Its slot in the log."""
    step: int
    """Optimizer steps done."""
    attempt: int
    world_size: int
    created_s: float
    """Seconds since 1970."""
    metric: float | None = None
    """How good its state is, where ``manager.step`` or ``save`` was told."""

    @classmethod
    def of(cls, manifest: Manifest) -> CheckpointInfo:
        """What a user is told of a manifest."""
        return cls(
            slot=manifest.slot,
            step=manifest.step,
            attempt=manifest.attempt,
            world_size=manifest.world_size,
            created_s=manifest.created_s,
            metric=manifest.metric,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What `CheckpointManager.restore` did."""

    restored: CheckpointInfo | None
    """The checkpoint taken; None on a fresh start. Where a newer cut in memory was: the one that it goes on from."""
    captured: int | None = None
    """The optimizer step of the cut in this job's memory that was restored; None where it was the checkpoint."""
    attempt: int
    """The attempt that began."""
    damaged: tuple[Damage, ...]
    """All that was found not to be as it was written, the newer checkpoints passed over included."""
    per_rank: tuple[str, ...]
    """Units (``tensor:…``, ``tree:…``) of which the ranks had different contents: on as many ranks as saved it, of
    those that this rank has, where replicas of parts of tensors that drifted apart need not be among them. After a
    change of the world size, rank r has those of the old rank r, and a new rank those of the old rank r mod W."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """reader → why the rest of its epoch was given up: its table version is gone (``on_version_gone="next_epoch"``)."""

"""This module defines what a checkpoint manager reports: small values, the handle of a save, and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.persist.log import Damage
from lakeckpt.errors import CheckpointError, LakeckptError

__all__ = [
    "CaptureWarning",
    "CheckpointInfo",
    "DamageWarning",
    "Remarks",
    "RestoreReport",
    "RetentionWarning",
    "SaveHandle",
    "SaveWarning",
]


class CaptureWarning(UserWarning):
    """Captures cannot run beside training as they should, or take longer. The captured states are complete and correct
    all the same."""


class DamageWarning(UserWarning):
    """An object of the run is not as it was written. Either the restore took an older checkpoint, or it did not need
    the object. The warning is also raised for a cut in memory that cannot be restored; its message then says
    that nothing is damaged."""


class RetentionWarning(UserWarning):
    """Checkpoints that are not to be kept could not be removed, and take up room; the next save tries again."""


class SaveWarning(UserWarning):
    """A save failed and training goes on; nothing was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """The problems that were found at a successful commit."""

    lost: str = ""
    """The objects of the run that are missing; empty if none is."""
    unpruned: str = ""
    """Why checkpoints that are not to be kept could not be removed after the commit; empty if they were removed."""

    def warn(self) -> None:
        """Warn of each problem."""
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
    """The metric that was given to ``manager.step`` or ``save``; None if none was given."""

    @classmethod
    def of(cls, manifest: Manifest) -> CheckpointInfo:
        """Return the values of a manifest that are shown to users."""
        return cls(
            slot=manifest.slot,
            step=manifest.step,
            attempt=manifest.attempt,
            world_size=manifest.world_size,
            created_s=manifest.created_s,
            metric=manifest.metric,
        )


class SaveHandle:
    """A save that has begun, as ``manager.save(sync=False)`` returns it. Only the training thread uses it."""

    def __init__(self, step: int, wait: Callable[[], object]) -> None:
        self.step = step
        """The optimizer step that is saved."""
        self._wait = wait
        self._result: CheckpointInfo | LakeckptError | None = None

    @property
    def done(self) -> bool:
        """Whether the result of the save is known. ``step`` and ``wait`` of the manager, and `wait`, update this."""
        return self._result is not None

    def wait(self) -> CheckpointInfo:
        """Wait for the commit and return the checkpoint. Raises the error of a save that failed, as
        `CheckpointManager.save` does."""
        if self._result is None:
            self._wait()
        if self._result is None:
            raise CheckpointError(f"the save of step {self.step} has no result: it was raised by an earlier call")
        if isinstance(self._result, LakeckptError):
            raise self._result
        return self._result

    def settle(self, result: CheckpointInfo | LakeckptError) -> None:
        """Record the result of the save. The manager calls it."""
        self._result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of `CheckpointManager.restore`."""

    restored: CheckpointInfo | None
    """The checkpoint that was restored; None on a fresh start. If a newer cut in memory was restored instead, this is
    the checkpoint that the cut follows."""
    captured: int | None = None
    """The optimizer step of the cut in this job's memory that was restored; None if the checkpoint was restored."""
    attempt: int
    """The attempt that began."""
    damaged: tuple[Damage, ...]
    """All damage that was found, also the damage of newer checkpoints that were skipped."""
    per_rank: tuple[str, ...]
    """Units (``tensor:…``, ``tree:…``) whose contents differed between ranks. On the same number of ranks these are
    units of this rank; replicas of a part of a tensor that have diverged may be missing. After a change of the world
    size, rank r takes the units of the old rank r, and a new rank takes those of the old rank r mod W."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """reader → why the rest of its epoch was skipped: its table version is gone (``on_version_gone="next_epoch"``)."""

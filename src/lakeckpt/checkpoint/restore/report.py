"""This module defines the report of a restore: what was restored, from where, and what was found on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.persist.log import Damage

__all__ = ["RestoreReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of `CheckpointManager.restore`."""

    restored: CheckpointInfo | None
    """The checkpoint that was restored; None on a fresh start. If a newer cut in memory was restored instead, this is
    the checkpoint that the cut follows."""
    captured: int | None = None
    """The optimizer step of the cut in this job's memory that was restored; None if the checkpoint was restored."""
    checked: bool = True
    """True if all that was read was compared with checksums. False: not checked. The process of some rank had died
    before its agent could take the checksums of the cut in memory."""
    attempt: int
    """The attempt that began."""
    damaged: tuple[Damage, ...]
    """All damage that was found, also the damage of newer checkpoints that were skipped."""
    per_rank: tuple[str, ...]
    """Units (``tensor:…``, ``tree:…``) whose contents differed between ranks. On the same number of ranks these are
    units of this rank; replicas of a part of a tensor that have diverged may be missing. After a change of the world
    size, rank r takes the units of the old rank r, and a new rank takes those of the old rank r mod W."""
    passed_over: tuple[str, ...] = ()
    """The cuts in memory that are newer than what was restored, and why each was passed over."""
    read: Mapping[str, int] = field(default_factory=dict)
    """How many bytes of tensors this rank has read, and from where: from its ``own`` capture in memory, from that of
    another rank on its ``own node``, from the memory of ``other nodes``, or from ``storage``."""
    derived_random: bool = False
    """True if this rank derived its random states, because those of a rank of its number were not there."""
    excluded: tuple[str, ...] = ()
    """The rows that have left the deal of what was restored, and why: by an order, or after crashes."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """reader → why the rest of its epoch was skipped: its table version is gone (``on_version_gone="next_epoch"``)."""

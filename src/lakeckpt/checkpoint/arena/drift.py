"""This module finds replicas of a node that have drifted apart, though they divide what they capture.

At each cut a replica samples every tensor that is divided, also those that others capture. The documents of a
generation hold these samples, and the digest of the cut covers them: captures of replicas that differ are not of one
cut. After each capture a replica compares the digests with those of the first replica of its node, and the first
replica compares them with those of all others. If they differ, the samples name the tensors.

From then on replicas capture all of their states, and their cuts can be restored again. A replica that drifts and the
first one see each other's generations at the latest one capture after the drift. So each of them captures a share once
more, before its arena is made anew. The others follow when they see that the first replica captures all of its state.

The thread that trains calls `Drift.is_over`, and the copier calls `Drift.look`. The module never communicates, and
starts no threads. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.dividing import Division
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, GenerationRecord
from lakeckpt.errors import ArenaError

__all__ = ["Drift"]

_BYTES = 8
_FROM_NOW_ON = (
    "Cuts in memory since then are not restored, an older one or a checkpoint is. From now on each rank captures all "
    "of its state, which takes more memory"
)


class Drift:
    """Compares the captures of the rank of ``identity`` in ``folder`` with those of other replicas in ``division``."""

    def __init__(self, folder: ArenaFolder, identity: ArenaIdentity, division: Division) -> None:
        first, *others = division.ranks
        self._folder, self._identity = folder, identity
        self._others = others if identity.rank == first else [first]
        self._found = False
        self._last: int | None = None  # the step of the last cut that is divided, if replicas have drifted apart

    def is_over(self, step: int) -> bool:
        """Return whether the cut of ``step``, which is to be captured now, and all later ones, are not divided."""
        if self._found and self._last is None:
            self._last = step
        return self._last is not None and step > self._last

    def look(self, own: Arena, keys: Sequence[str]) -> str:
        """Return a warning that names tensors and ranks, if replicas have drifted apart; once, and else an empty text.
        ``own``: the arena of this rank. ``keys``: of the tensors that are divided, in the order of samples."""
        if self._found:
            return ""
        mine = {one.cut: one for one in reversed(own.complete()) if one.divided}
        for rank in self._others:
            name = self._folder.name_of(replace(self._identity, rank=rank))
            with suppress(ArenaError, FileNotFoundError), self._folder.open(name) as other:
                for record in reversed(other.complete()):
                    known = mine.get(record.cut)
                    if known is None or known.digest == record.digest:
                        continue
                    if what := self._difference(own, other, record, rank, keys):
                        self._found = True
                        return f"{what} at step {record.cut.step}. {_FROM_NOW_ON}"
        return ""

    def _difference(self, own: Arena, other: Arena, record: GenerationRecord, rank: int, keys: Sequence[str]) -> str:
        """Return which tensors differ in what was sampled of a cut; an empty text if none does, or it is gone."""
        if not record.divided:
            return f"rank {rank} has found replicas that are not alike any more, and captures all of its state"
        with own.hold(record.cut) as held, other.hold(record.cut) as theirs:
            if held is None or theirs is None:
                return ""
            one, another = (contents_of(each).documents.samples for each in (held, theirs))
        if not len(one) == len(another) == _BYTES * len(keys):
            return ""
        starts = range(0, len(one), _BYTES)
        differ = [
            key for key, at in zip(keys, starts, strict=True) if one[at : at + _BYTES] != another[at : at + _BYTES]
        ]
        if not differ:
            return ""  # states of readers do
        more = f" and {len(differ) - 1} more tensors" if len(differ) > 1 else ""
        low, high = sorted((self._identity.rank, rank))
        return f"{differ[0]!r}{more} of the ranks {low} and {high}, which were replicas, are not alike any more"

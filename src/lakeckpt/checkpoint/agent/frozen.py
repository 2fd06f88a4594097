"""This module notices frozen tensors that have changed between two saves, though torch has counted no change.

Captures skip frozen tensors of which torch has counted no change (`lakeckpt.checkpoint.capture.kept`). Captures that
are saved copy all tensors. So the digest of a frozen tensor must be the same in two saves between which the count has
not changed. Nothing is read for that. Imports without torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from lakeckpt.checkpoint.state.staged import StagedTensor

__all__ = ["FrozenTensors"]


class FrozenTensors:
    """The digests of frozen tensors at the last commit of one rank. One thread calls it."""

    def __init__(self) -> None:
        self._known: Mapping[str, tuple[int, bytes]] = {}
        """key → (count of changes, digest)."""
        self._now: Mapping[str, tuple[int, bytes]] = {}

    def compare(self, counts: Mapping[str, int], tensors: Mapping[str, StagedTensor]) -> None:
        """Take the ``tensors`` of a save. ``counts``: how often each frozen one was changed; empty if nothing is known,
        because the capture has skipped some."""
        self._now = {key: (count, tensors[key].digest) for key, count in counts.items()}

    def adopt(self) -> tuple[str, ...]:
        """The save is committed. Return the keys of tensors that have changed since the one before, uncounted."""
        before = self._known
        found = [key for key, (count, _) in self._now.items() if before.get(key, (-1,))[0] == count]
        changed = tuple(sorted(key for key in found if before[key] != self._now[key]))
        self._known, self._now = self._now or before, {}
        return changed

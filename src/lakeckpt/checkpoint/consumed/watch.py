"""This module warns of training loops that use rows that the manager does not know, or counts too often.

It is asked at each optimizer step, on the training thread, and starts no threads. Each warning comes once, or names
another reader.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lakeckpt.checkpoint.consumed.tracks import ReaderTrack
from lakeckpt.data.position.deliveries import (
    ConsumptionWarning,
    Deliveries,
    ReadAheadWarning,
    unsaved,
    unsaved_in_training,
    watch_training,
)
from lakeckpt.tracking.readers import DeliveringReader

__all__ = ["Watch"]

_READS_AHEAD = (
    "something reads ahead between reader {!r} and the training loop ({}), and step() counts what it holds as used: "
    "after a crash those rows are lost. Call manager.step(batch) with the last batch that the step used, or its number "
    "(LakeLoader(receipt_column=…)); or read ahead by lakeckpt.prefetch(loader), which counts what the loop gets"
)
_UNSAVED = (
    "a LakeLoader or LakeDataset of this process delivers rows, and no reader is in this manager's state: where it is "
    "in the data is not saved, and a resumed run begins the epoch again. Put the loader into it: "
    'CheckpointManager(…, {"reader": loader, …}). If it is one for validation, ignore this'
)
_OUTSIDE = (
    "a LakeLoader or LakeDataset that is in no manager's state delivers rows while the models of this manager's state "
    "are trained: its place is not saved, and a resumed run begins its epoch again. lakeckpt audit notes it. Put the "
    'loader into the state: CheckpointManager(…, {"reader": loader, …, "other": other}). If it is one for validation, '
    "iterate it under torch.no_grad(), or give it restart=True"
)
_SILENT_STEPS = 3
_DELIVERED_NOTHING = (
    "{} in this manager's state delivered nothing in the first {} steps: the loop reads its rows elsewhere, and where "
    "it is in them is not saved. Iterate the loader that is in the state, in this process"
)


class Watch:
    """Watches what the readers in ``tracks`` deliver, and what other loaders do. ``objects`` are all other objects of
    the state."""

    def __init__(self, tracks: Mapping[str, ReaderTrack], objects: Mapping[str, Any]) -> None:
        self._counting = [
            (track, track.reader.deliveries) for track in tracks.values() if isinstance(track.reader, DeliveringReader)
        ]
        self._tracks = tracks
        self._steps = 0
        for one in objects.values():  # a dataset, or somebody else's loader of one, says where it is by its state alone
            counted = getattr(getattr(getattr(one, "dataset", one), "_progress", None), "deliveries", None)
            if isinstance(counted, Deliveries):
                counted.saved()
        self._unsaved = unsaved()
        self._outside: int | None = None
        """The batches of other loaders that came in training before the last step; None: no step was taken."""
        modules = [weakref.ref(one) for one in objects.values() if isinstance(one, torch.nn.Module)]
        if tracks:
            watch_training(lambda: _are_trained([module for one in modules if (module := one()) is not None]))

    def stepped(self, ahead: Mapping[str, str]) -> None:
        """Warn at an optimizer step. ``ahead``: reader → what shows that something reads ahead of the loop."""
        for name, reason in ahead.items():
            warnings.warn(_READS_AHEAD.format(name, reason), ReadAheadWarning, stacklevel=3)
        self._watch_others()
        if not self._tracks and unsaved() > self._unsaved:
            self._unsaved = sys.maxsize
            warnings.warn(_UNSAVED, ConsumptionWarning, stacklevel=3)
        self._steps += 1
        if self._counting and self._steps == _SILENT_STEPS and not any(one.delivered for one, _ in self._counting):
            text = _DELIVERED_NOTHING.format(", ".join(sorted(one.name for one, _ in self._counting)), _SILENT_STEPS)
            warnings.warn(text, ConsumptionWarning, stacklevel=3)

    def _watch_others(self) -> None:
        """Note in the tracks, and warn once, if a loader that is in no state delivers between two steps."""
        if any(one.has_others for one in self._tracks.values()):
            return
        before, self._outside = self._outside, unsaved_in_training()
        if self._tracks and before is not None and self._outside > before:
            for one in self._tracks.values():
                one.has_others = True
            warnings.warn(_OUTSIDE, ConsumptionWarning, stacklevel=4)

    def check_stepped(self) -> None:
        """Warn if readers have delivered batches, and no step was taken."""
        for _, deliveries in self._counting:
            deliveries.check_stepped()


def _are_trained(modules: Sequence[torch.nn.Module]) -> bool:
    """Return whether there are modules, and all are in train mode."""
    return bool(modules) and all(one.training for one in modules)

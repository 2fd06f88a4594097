"""Which data may go?  What no kept checkpoint refers to, and only behind a newer commit that was verified.

The checkpoints of the history that a `Keep` rule names keep their data. Everything else that this attempt or an earlier
one wrote is removed: older checkpoints, abandoned branches, saves that were never committed. The log and the index are
never touched, so that the record outlives the data. An attempt that has been superseded removes nothing.

Imports without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lakeckpt.checkpoint.keep import Keep, kept_of
from lakeckpt.checkpoint.log import read_entry, read_log, slot_path
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import OBJECTS, PARTS, SaveId
from lakeckpt.errors import ObjectMissing, WireError
from lakeckpt.lake.storage import ObjectInfo, Storage

__all__ = ["Retention"]

_FOLDER = re.compile(r"(?:parts|objects)/([0-9]{10})/([0-9]{12})-([0-9]{6})/[^/]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Committed:
    """What is remembered of a commit."""

    slot: int
    parent: int | None
    step: int
    metric: float | None
    save: SaveId

    @classmethod
    def of(cls, manifest: Manifest) -> _Committed:
        return cls(
            slot=manifest.slot,
            parent=manifest.parent,
            step=manifest.step,
            metric=manifest.metric,
            save=manifest.save,
        )


class Retention:
    """Removes data of one run. Remembers what it has read of the log, whose entries never change."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[int, _Committed] = {}
        self._has_read_all = False

    def prune(self, newest: Manifest, keep: Keep) -> int:
        """Remove what is not needed behind ``newest``, which this attempt has just committed; the number of objects
        removed. Safe to be killed at any moment, and to be repeated."""
        self._known[newest.slot] = _Committed.of(newest)
        if _slot_is_taken(self._storage, newest.slot + 1):
            return 0  # superseded: nothing is ours to remove
        listed = [info for folder in (OBJECTS, PARTS) for info in self._storage.list(folder)]
        kept = self._kept(newest, keep, there={save for info in listed if (save := _save_of(info)) is not None})
        if kept is None:
            return 0
        doomed = [info.path for info in listed if _may_go(info, newest=newest, kept=kept)]
        for path in doomed:
            self._storage.delete(path)
        return len(doomed)

    def _kept(self, newest: Manifest, keep: Keep, there: set[SaveId]) -> set[SaveId] | None:
        """The saves that must stay, or None where the chain cannot be read: then everything stays, this time."""
        if keep.looks_back and not self._has_read_all:
            self._known |= {one.slot: _Committed.of(one) for one in read_log(self._storage).manifests}
            self._has_read_all = True
        chain = [self._known[newest.slot]]
        while chain[-1].parent is not None and (keep.looks_back or len(chain) < keep.last):
            parent = self._read(chain[-1].parent)
            if parent is None:
                return None
            chain.append(parent)
        whole = [one for one in reversed(chain) if one.save in there or one.slot == newest.slot]
        slots = kept_of(whole, keep)
        return {one.save for one in whole if one.slot in slots}

    def _read(self, slot: int) -> _Committed | None:
        if slot not in self._known:
            try:
                entry = read_entry(self._storage, slot)
            except (WireError, ObjectMissing):
                return None
            if not isinstance(entry, Manifest):
                return None
            self._known[slot] = _Committed.of(entry)
        return self._known[slot]


def _slot_is_taken(storage: Storage, slot: int) -> bool:
    try:
        storage.read(slot_path(slot), 0, 1)
    except ObjectMissing:
        return False
    return True


def _save_of(info: ObjectInfo) -> SaveId | None:
    match = _FOLDER.fullmatch(info.path)
    if match is None:
        return None  # not ours
    return SaveId(attempt=int(match[1]), step=int(match[2]), number=int(match[3]))


def _may_go(info: ObjectInfo, *, newest: Manifest, kept: set[SaveId]) -> bool:
    save = _save_of(info)
    if save is None or save in kept or save.attempt > newest.attempt:
        return False
    return save.attempt < newest.attempt or save.number < newest.number

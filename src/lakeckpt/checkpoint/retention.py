"""Which data may go?  What no kept checkpoint refers to, and only behind a newer commit that was verified.

The newest ``keep`` checkpoints of the history keep their data. Everything else that this attempt or an earlier one
wrote is removed: older checkpoints, abandoned branches, saves that were never committed. The log and the index are
never touched, so that the record outlives the data. An attempt that has been superseded removes nothing.

Imports without torch.
"""

from __future__ import annotations

import re

from lakeckpt.checkpoint.log import read_entry, slot_path
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import OBJECTS, PARTS, SaveId
from lakeckpt.errors import ObjectMissing, WireError
from lakeckpt.lake.storage import ObjectInfo, Storage

__all__ = ["prune"]

_FOLDER = re.compile(r"(?:parts|objects)/([0-9]{10})/([0-9]{12})-([0-9]{6})/[^/]+", re.ASCII)


def prune(storage: Storage, newest: Manifest, *, keep: int) -> int:
    """Remove what is not needed behind ``newest``, which this attempt has just committed; the number of objects
    removed.

    ``keep`` is at least 1. Safe to be killed at any moment, and to be repeated.
    """
    assert keep >= 1
    if _slot_is_taken(storage, newest.slot + 1):
        return 0  # superseded: nothing is ours to remove
    kept = _kept(storage, newest, keep)
    if kept is None:
        return 0
    doomed = [
        info.path
        for folder in (OBJECTS, PARTS)
        for info in storage.list(folder)
        if _may_go(info, newest=newest, kept=kept)
    ]
    for path in doomed:
        storage.delete(path)
    return len(doomed)


def _slot_is_taken(storage: Storage, slot: int) -> bool:
    try:
        storage.read(slot_path(slot), 0, 1)
    except ObjectMissing:
        return False
    return True


def _kept(storage: Storage, newest: Manifest, keep: int) -> set[SaveId] | None:
    """The saves that must stay, or None where the chain cannot be read: then everything stays, this time."""
    kept, at = {newest.save}, newest.parent
    while at is not None and len(kept) < keep:
        try:
            entry = read_entry(storage, at)
        except (WireError, ObjectMissing):
            return None
        if not isinstance(entry, Manifest):
            return None
        kept.add(entry.save)
        at = entry.parent
    return kept


def _may_go(info: ObjectInfo, *, newest: Manifest, kept: set[SaveId]) -> bool:
    match = _FOLDER.fullmatch(info.path)
    if match is None:
        return False  # not ours
    save = SaveId(attempt=int(match[1]), step=int(match[2]), number=int(match[3]))
    if save in kept or save.attempt > newest.attempt:
        return False
    return save.attempt < newest.attempt or save.number < newest.number

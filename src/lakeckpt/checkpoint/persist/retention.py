"""This module removes the data that no kept checkpoint refers to, behind a newer commit that was verified.

The checkpoints of the history that a `Keep` rule names keep their data, and the files of earlier saves that they refer
to. The register of each commit names both, so that one object of the newest commit says all that the next one must know
(`Retention.register`). All other data of this attempt and of earlier attempts are removed: older checkpoints, abandoned
branches, and saves that were never committed. The log and the index are never touched, so that the record outlives the
data. An attempt that was superseded removes nothing. If the register of the commit before cannot be read, what it kept
stays until the rule does not need it any more.

The module imports without torch and starts no threads.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import OBJECTS, PARTS, SaveId
from lakeckpt.checkpoint.format.register import KeptCheckpoint, Register
from lakeckpt.checkpoint.format.verified_reads import fetch_register
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.commit import Collected
from lakeckpt.checkpoint.persist.log import is_taken, read_entry
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import CheckpointDamaged, ObjectMissing, WireError
from lakeckpt.lake.storage.base import ObjectInfo, Storage, delete_all

__all__ = ["Retention"]

_FOLDER = re.compile(r"(?:parts|objects)/([0-9]{10})/([0-9]{12})-([0-9]{6})/[^/]+", re.ASCII)
_EMPTY = Register(digests=b"", kept=(), needed={})


class Retention:
    """Removes data of one run, for one ``attempt``. It remembers the register of the attempt's newest commit."""

    def __init__(self, storage: Storage, attempt: Attempt) -> None:
        self._storage = storage
        self._attempt = attempt
        self._newest: tuple[int, Register] | None = None

    def register(self, one: KeptCheckpoint, collected: Collected, keep: Keep) -> Register:
        """Return the register of ``one``, which this attempt is about to commit. Raises `StorageError`."""
        parent, refers_to = self._attempt.parent, [path for head in collected.heads for path in head.earlier]
        if self._newest is not None and self._newest[0] == parent:
            return self._newest[1].followed_by(one, collected.digests, refers_to, keep)
        before, left = (_EMPTY, None) if parent is None else self._before(parent)
        return before.followed_by(one, collected.digests, refers_to, keep, left)

    def prune(self, newest: Manifest, register: Register) -> int:
        """Remove what is not needed behind ``newest``, which this attempt has just committed with its ``register``.
        Return the number of objects removed. It is safe to be killed at any moment, and to be repeated.

        Raises `CheckpointDamaged` if it is not known what is needed: then everything stays.
        """
        self._newest = newest.slot, register
        if register.unread:
            slots = ", ".join(f"{start} to {stop - 1}" for start, stop in register.unread.pairs())
            raise CheckpointDamaged(
                f"which files the checkpoints in slots {slots} need is not known, because the register of a commit "
                "cannot be read: everything stays until the rule (keep=) does not need these checkpoints any more. "
                "`lakeckpt verify` lists what is damaged"
            )
        saves = {one.save for one in register.kept}
        every = (*self._storage.list(OBJECTS), *self._storage.list(PARTS))
        doomed = [
            info.path for info in every if _may_go(info, newest=newest, kept=saves) and info.path not in register.needed
        ]
        if doomed and is_taken(self._storage, newest.slot + 1):  # asked last: a restore may have begun by now
            return 0  # superseded: nothing is ours to remove
        delete_all(self._storage, doomed)
        return len(doomed)

    def clear(self, save: SaveId) -> None:
        """Remove the files of tensors of a save that was not committed, and that no rank works at any more."""
        delete_all(self._storage, [info.path for info in self._storage.list(f"{OBJECTS}/{save.folder}")])

    def _before(self, parent: int) -> tuple[Register, Intervals | None]:
        """Return the register of the commit ``parent``, and which data the attempts before this one have left: what
        their newest commit kept, which may be of a branch that was abandoned."""
        manifest = self._manifest(parent)
        left = manifest
        if manifest is None or manifest.attempt != self._attempt.number:
            slots = range(self._attempt.number - 1, -1, -1)
            left = next((found for slot in slots if (found := self._manifest(slot)) is not None), None)
        return self._read(parent, manifest), None if left is None else left.kept

    def _read(self, slot: int, manifest: Manifest | None) -> Register:
        """Return the register of the commit in ``slot``. If it cannot be read, its checkpoints stay, unread."""
        with suppress(CheckpointDamaged):
            if manifest is not None:
                return fetch_register(self._storage, manifest)
        return replace(_EMPTY, unread=Intervals.whole(slot + 1) if manifest is None else manifest.kept)

    def _manifest(self, slot: int) -> Manifest | None:
        with suppress(WireError, ObjectMissing):
            entry = read_entry(self._storage, slot)
            return entry if isinstance(entry, Manifest) else None
        return None


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

"""This module removes the data that no kept checkpoint refers to, behind a newer commit that was verified.

The checkpoints of the history that a `Keep` rule names keep their data, and the files of earlier saves that they refer
to. All other data of this attempt and of earlier attempts are removed: older checkpoints, abandoned branches, and saves
that were never committed. The log and the index are never touched, so that the record outlives the data. An attempt
that was superseded removes nothing. If a record of what is needed cannot be read, everything stays.

The module imports without torch. `prune` starts and joins the threads that read parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Manifest, PartRef
from lakeckpt.checkpoint.format.parts import OBJECTS, PARTS, PartRecord, SaveId
from lakeckpt.checkpoint.persist.history import kept_of
from lakeckpt.checkpoint.persist.log import is_taken, read_entry, read_log, slot_path
from lakeckpt.errors import CheckpointDamaged, ObjectMissing, WireError
from lakeckpt.lake.storage.base import ObjectInfo, Storage, delete_all

__all__ = ["Retention"]

_READ_THREADS = 16
_FOLDER = re.compile(r"(?:parts|objects)/([0-9]{10})/([0-9]{12})-([0-9]{6})/[^/]+", re.ASCII)


class Retention:
    """Removes data of one run. Remembers what it has read of the log, whose entries never change."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[int, Manifest] = {}
        self._has_read_all = False
        self._files: dict[str, frozenset[str]] = {}  # part → the files that it names

    def remember(self, refs: Sequence[PartRef], parts: Sequence[PartRecord]) -> None:
        """Keep the names of the files of ``parts``, which are about to be committed, so that none is read again."""
        for ref, part in zip(refs, parts, strict=True):
            self._files[ref.path] = frozenset(file.path for file in part.files)

    def prune(self, newest: Manifest, keep: Keep) -> int:
        """Remove what is not needed behind ``newest``, which this attempt has just committed. Return the number of
        objects removed. It is safe to be killed at any moment, and to be repeated.

        Raises `CheckpointDamaged` if a record of what is needed cannot be read: then everything stays.
        """
        self._known[newest.slot] = newest
        objects, parts = self._storage.list(OBJECTS), self._storage.list(PARTS)
        kept = self._kept(newest, keep, there={save for info in parts if (save := _save_of(info)) is not None})
        needed = self._needed(kept)
        saves = {one.save for one in kept}
        gone = [info.path for info in (*objects, *parts) if _may_go(info, newest=newest, kept=saves)]
        doomed = [path for path in gone if path not in needed]
        if doomed and is_taken(self._storage, newest.slot + 1):  # asked last: a restore may have begun by now
            return 0  # superseded: nothing is ours to remove
        delete_all(self._storage, doomed)
        return len(doomed)

    def clear(self, save: SaveId) -> None:
        """Remove the files of tensors of a save that was not committed, and that no rank works at any more."""
        delete_all(self._storage, [info.path for info in self._storage.list(f"{OBJECTS}/{save.folder}")])

    def _kept(self, newest: Manifest, keep: Keep, there: set[SaveId]) -> list[Manifest]:
        """Return the checkpoints that must stay."""
        if keep.looks_back and not self._has_read_all:
            self._known |= {one.slot: one for one in read_log(self._storage).manifests}
            self._has_read_all = True
        chain = [self._known[newest.slot]]
        while chain[-1].parent is not None and (keep.looks_back or len(chain) < keep.last):
            chain.append(self._read(chain[-1].parent))
        whole = [one for one in reversed(chain) if one.save in there or one.slot == newest.slot]
        slots = kept_of(whole, keep)
        return [one for one in whole if one.slot in slots]

    def _needed(self, kept: Sequence[Manifest]) -> frozenset[str]:
        """Return the files that the parts of ``kept`` name."""
        refs = {ref.path: (one.save, ref) for one in kept for ref in one.parts}
        self._files = {path: files for path, files in self._files.items() if path in refs}
        unread = [path for path in refs if path not in self._files]
        if unread:
            with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-retention") as pool:
                found = list(pool.map(lambda path: self._files_of(path, *refs[path]), unread))
            self._files |= zip(unread, found, strict=True)
        return frozenset[str]().union(*self._files.values())

    def _files_of(self, path: str, save: SaveId, ref: PartRef) -> frozenset[str]:
        """Return the files that the part at ``path`` names."""
        try:
            part = PartRecord.from_bytes(self._storage.read(path))
        except (WireError, ObjectMissing) as error:
            raise _unreadable(path, f"of the checkpoint of step {save.step}", error) from error
        if (part.save, part.rank) != (save, ref.rank):
            raise _unreadable(path, f"of the checkpoint of step {save.step}", "it is another's")
        return frozenset(file.path for file in part.files)

    def _read(self, slot: int) -> Manifest:
        if slot not in self._known:
            try:
                entry = read_entry(self._storage, slot)
            except (WireError, ObjectMissing) as error:
                raise _unreadable(slot_path(slot), "of the log", error) from error
            if not isinstance(entry, Manifest):
                raise _unreadable(slot_path(slot), "of the log", "it is no commit")
            self._known[slot] = entry
        return self._known[slot]


def _unreadable(path: str, of: str, why: object) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{path} {of} cannot be read ({why}), and it names what must stay: so everything stays until it can be read, "
        "or the rule (keep=) does not need it any more. `lakeckpt verify` lists what else is damaged"
    )


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

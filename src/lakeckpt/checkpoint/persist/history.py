"""This module derives the history of a run from its log: which checkpoints the present state of the run was made of.

The history is the chain of manifests from the tip back through the parents. Every other manifest is of an abandoned
branch: work that was rolled back. The tip is the newest commit, or the checkpoint that the newest `Restored` entry
names. An attempt that only began changes nothing of the history. Entries that cannot be read are reported, never
guessed. The module reads only the log, because the record outlives the data of the checkpoints.

It imports without torch and starts no threads of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lakeckpt.checkpoint.format.manifest import Begin, Exclusion, Manifest, Restored
from lakeckpt.checkpoint.persist.log import Damage, LogView, read_log, slot_path
from lakeckpt.lake.storage.base import Storage
from lakeckpt.progress import Progress

__all__ = [
    "INDEX",
    "History",
    "at_work",
    "exclusions_in",
    "has_obeyed",
    "history_of",
    "index_path",
    "must_stay",
    "newest_slot",
    "not_rolled_back",
    "read_history",
    "selection_path",
]

INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The record of a run."""

    run: str | None
    chain: tuple[Manifest, ...]
    """The manifests of the history, oldest first; the last one is the tip."""
    broken_at: int | None
    """The slot of a parent that cannot be read: the chain begins after it. None: the chain is whole."""
    abandoned: tuple[Manifest, ...]
    """All other manifests, in order of slots."""
    begins: tuple[Begin, ...]
    """The attempts, in order."""
    restores: tuple[Restored, ...] = ()
    """The restores of attempts, and roll-backs, in order."""
    damaged: tuple[Damage, ...]

    @property
    def tip(self) -> Manifest | None:
        """The newest manifest of the history."""
        return self.chain[-1] if self.chain else None

    @property
    def whole(self) -> bool:
        """True if the chain reaches back to the first step of the run."""
        return self.broken_at is None


def index_path(digest: str) -> str:
    """Return the path of the footer index with this digest."""
    return f"{INDEX}/{digest}.lkc"


def selection_path(table: str, selection: str) -> str:
    """Return the path of the row selection with the digest ``selection``, of the table with the digest ``table``."""
    return f"{INDEX}/{table}/{selection}.lkc"


def read_history(storage: Storage, *, tip: int | None = None, progress: Progress | None = None) -> History:
    """Return the history of the run at ``storage``, from the slot ``tip`` (by default, the newest) to its beginning.

    ``progress`` counts the entries of the log. Raises `NewerFormat` for a log of a newer major version, `StorageError`
    if the store fails.
    """
    return history_of(read_log(storage, progress=progress), tip=tip)


def history_of(view: LogView, *, tip: int | None = None) -> History:
    """Return the history in a log; with ``tip``, as it was when that checkpoint was the newest."""
    view = view if tip is None else view.until(tip)
    at = newest_slot(view) if tip is None else tip
    chain: list[Manifest] = []
    broken_at = None
    while at is not None:
        entry = view.entries.get(at)
        if not isinstance(entry, Manifest):
            broken_at = at
            break
        chain.append(entry)
        at = entry.parent
    damaged = list(view.damaged)
    if broken_at is not None and not any(one.path == slot_path(broken_at) for one in damaged):
        damaged.append(Damage(path=slot_path(broken_at), reason="a manifest is named as a parent and is not there"))
    slots = {manifest.slot for manifest in chain}
    return History(
        run=view.run,
        chain=tuple(reversed(chain)),
        broken_at=broken_at,
        abandoned=tuple(one for one in reversed(view.manifests) if one.slot not in slots),
        begins=tuple(view.begins),
        restores=tuple(view.restores),
        damaged=tuple(damaged),
    )


def newest_slot(view: LogView) -> int | None:
    """Return the slot of the newest checkpoint of the history: the newest commit, or what an attempt or a roll-back has
    gone back to since."""
    entry = _newest_but_begins(view)
    if isinstance(entry, Manifest):
        return entry.slot
    return None if entry is None else entry.restored


def _newest_but_begins(view: LogView) -> Manifest | Restored | None:
    every = (entry for _, entry in sorted(view.entries.items(), reverse=True))
    return next((entry for entry in every if not isinstance(entry, Begin)), None)


def not_rolled_back(view: LogView) -> list[Manifest]:
    """Return the commits that can be read and that no roll-back and no later commit has abandoned, newest first.

    These are the history, the commits before the place where the history is broken, and newer commits that were found
    damaged, because these may be whole again.
    """
    found: list[Manifest] = []
    most = view.last  # the highest slot that can still be part of the history
    for slot, entry in sorted(view.entries.items(), reverse=True):
        if slot > most or isinstance(entry, Begin):
            continue
        if isinstance(entry, Restored):
            if entry.rolled_back_to is not None and entry.restored is not None:
                most = entry.restored
        else:
            found.append(entry)
            most = slot - 1 if entry.parent is None else entry.parent
    return found


def at_work(view: LogView) -> Restored | None:
    """Return what the newest attempt of the history restored. None if that cannot be read, or if the history ends with
    a roll-back by command, from which no attempt has gone on."""
    newest = _newest_but_begins(view)
    attempt = 0 if newest is None else newest.attempt
    return next((one for one in view.restores if attempt is not None and one.attempt == attempt), None)


def has_obeyed(view: LogView, step: int, exclude_steps: tuple[int, int] | None = None) -> bool:
    """Return whether the history descends from a roll-back to ``step`` already; with ``exclude_steps``, from one that
    left out their batches."""
    slots = {one.slot for one in not_rolled_back(view)}
    return any(
        one.rolled_back_to == step and one.restored in slots and exclude_steps in (None, one.exclude_steps)
        for one in view.restores
    )


def exclusions_in(view: LogView) -> tuple[Exclusion, ...]:
    """Return what leaves the deal of what is restored next: what the newest restore, or roll-back, lists. A log of
    which only the newest entries were read has that entry, if the run has one."""
    return view.restores[-1].exclusions if view.restores else ()


def must_stay(tip: Manifest, commits: Iterable[Manifest]) -> set[int]:
    """Return the slots of the history that ends with ``tip`` whose data no commit was allowed to remove.

    ``commits`` are those of a log. Behind the newest of them, only the data that it names in ``kept`` is left, whether
    or not it was rolled back later.
    """
    newest = max((tip, *commits), key=lambda one: one.slot)
    stay = tip.kept.intersection(newest.kept)
    return {slot for start, stop in stay.pairs() for slot in range(start, stop)} | {tip.slot}

"""This module derives the history of a run from its log: which checkpoints the present state of the run was made of.

The history is the chain of manifests from the tip back through the parents. Every other manifest is of an abandoned
branch: work that was rolled back. The tip is the newest commit, or the checkpoint that the newest `Restored` entry
names. An attempt that only began changes nothing of the history. Entries that cannot be read are reported, never
guessed. The module reads only the log, because the record outlives the data of the checkpoints. `kept_of` applies the
rule by which checkpoints keep their data.

It imports without torch and starts no threads of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal

from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Begin, Manifest, Restored
from lakeckpt.checkpoint.format.parts import PARTS
from lakeckpt.checkpoint.persist.log import Damage, LogView, read_log, slot_path
from lakeckpt.lake.storage.base import Storage
from lakeckpt.progress import Progress

__all__ = [
    "INDEX",
    "History",
    "at_work",
    "best_first",
    "folders_there",
    "has_obeyed",
    "history_of",
    "index_path",
    "kept_ever_since",
    "kept_of",
    "lost_entries",
    "must_stay",
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
    lost: str = ""
    """Why the newest entries of the log seem to be lost; empty if nothing shows that, or nobody has looked."""

    @property
    def tip(self) -> Manifest | None:
        """The newest manifest of the history."""
        return self.chain[-1] if self.chain else None

    @property
    def whole(self) -> bool:
        """Whether the chain reaches back to the first step of the run."""
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
    where the store fails.
    """
    return history_of(read_log(storage, progress=progress), tip=tip)


def history_of(view: LogView, *, tip: int | None = None) -> History:
    """Return the history in a log; with ``tip``, as it was when that checkpoint was the newest."""
    view = view if tip is None else view.until(tip)
    at = _newest(view) if tip is None else tip
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


def _newest(view: LogView) -> int | None:
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


def has_obeyed(view: LogView, step: int) -> bool:
    """Return whether the history descends from a roll-back to ``step`` already."""
    slots = {one.slot for one in not_rolled_back(view)}
    return any(one.rolled_back_to == step and one.restored in slots for one in view.restores)


def folders_there(storage: Storage) -> set[str]:
    """Return the folders (`lakeckpt.checkpoint.format.parts.SaveId.folder`) of saves that still have parts."""
    return {info.path.removeprefix(f"{PARTS}/").rpartition("/")[0] for info in storage.list(PARTS)}


def must_stay(history: History) -> set[int]:
    """Return the slots of the checkpoints whose data no commit in the log was allowed to remove, the tip among them."""
    if history.tip is None:
        return set()
    commits = sorted([*history.chain, *history.abandoned], key=lambda manifest: manifest.slot)
    kept = kept_ever_since(commits, history.tip.slot)
    # A commit whose entry cannot be read may have been allowed to remove anything before it.
    return {slot for slot in kept if all(one.path < slot_path(slot) for one in history.damaged)} | {history.tip.slot}


def lost_entries(history: History, there: Collection[str]) -> str:
    """Return why newer entries of the log seem to be lost; empty if nothing shows that.

    ``there`` are the `folders_there`, listed before the log was read. Retention removes the oldest data first, behind a
    newer commit. If one of the newest checkpoints has no data, and no commit in the log was allowed to remove them,
    then the commit that removed them is not in the log any more: provided that the tip has data, or that a newer save,
    which the log does not know, has parts. If all data are gone, as of a run that was trained to its end, nothing
    follows.
    """
    tip, stays = history.tip, must_stay(history)
    if tip is None or tip.keep is None:
        return ""
    if tip.save.folder not in there:
        known = {one.save.folder for one in (*history.chain, *history.abandoned)}
        newer = any(folder > tip.save.folder and folder not in known for folder in there)
        if not newer or any(one.path > slot_path(tip.slot) for one in history.damaged):
            return ""  # a commit that is there and damaged is reported by itself
        commits = sorted([*history.chain, *history.abandoned], key=lambda manifest: manifest.slot)
        if tip.slot not in kept_ever_since(commits, tip.slot):
            return ""
    gone = [one for one in history.chain[-tip.keep.last :] if one.slot in stays and one.save.folder not in there]
    if not gone:
        return ""
    steps = ", ".join(f"{one.step:,} (slot {one.slot})" for one in gone)
    return (
        f"the data of step {steps} are gone, and no commit in the log was allowed to remove them: entries newer than "
        f"{slot_path(tip.slot)} (step {tip.step:,}) seem to be lost, unless somebody removed these data by hand. "
        "Stop the job and put the entries back from a copy of the log, if there is one; else training goes on from "
        "the newest checkpoint that is whole"
    )


def kept_of(chain: Sequence[Manifest], keep: Keep) -> frozenset[int]:
    """Return the slots of the checkpoints in ``chain`` (the oldest first) that keep their data.

    The rule selects the same checkpoints after the others have been removed. So a removal that was interrupted can be
    continued later, and is not mistaken for damage.

    >>> from types import SimpleNamespace as One
    >>> chain = [One(slot=n, step=40 * n, metric=abs(n - 2.0)) for n in range(1, 8)]
    >>> sorted(kept_of(chain, Keep(last=1, every=100, best=1)))
    [2, 3, 5, 7]
    """
    kept = {one.slot for one in chain[-keep.last :]}
    if keep.every is not None:
        firsts: dict[int, int] = {}
        for one in chain:
            if one.step >= keep.every:
                firsts.setdefault(one.step // keep.every, one.slot)
        kept |= set(firsts.values())
    return frozenset(kept | {one.slot for one in best_first(chain, keep.best_is)[: keep.best]})


def best_first(checkpoints: Iterable[Manifest], best_is: Literal["lowest", "highest"]) -> list[Manifest]:
    """Return the ``checkpoints`` that have a metric other than NaN, the best first; of equal ones the newest first."""
    sign = 1.0 if best_is == "lowest" else -1.0
    rated = [
        (sign * one.metric, -one.slot, one) for one in checkpoints if one.metric is not None and not isnan(one.metric)
    ]
    return [one for _, _, one in sorted(rated, key=lambda row: row[:2])]


def kept_ever_since(commits: Sequence[Manifest], tip: int) -> frozenset[int]:
    """Return the slots of the history that ends with ``tip`` whose data no commit was allowed to remove.

    ``commits`` are all commits of a log, in its order. Each commit removed the data that its rule did not keep in its
    own history. This includes the commits of branches that were abandoned later.
    """
    by_slot = {one.slot: one for one in commits}
    kept: dict[int, frozenset[int]] = {}
    for one in commits:
        before = kept.get(one.parent, frozenset()) if one.parent is not None else frozenset()
        chain = [*(by_slot[slot] for slot in sorted(before)), one]
        kept[one.slot] = frozenset({one.slot}) if one.keep is None else kept_of(chain, one.keep)
    return frozenset(
        slot for slot in kept.get(tip, ()) if all(slot in some for other, some in kept.items() if other > slot)
    )

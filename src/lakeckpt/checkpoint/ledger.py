"""Which checkpoints is the present state of a run made of?  Its history, told from the log alone.

The history is the chain of manifests from the tip back through the parents; every other manifest is of an abandoned
branch: work that was rolled back. The tip is the newest commit, or what the newest attempt says that it went on from.
What cannot be read is reported, never guessed. Reads only the log: the record outlives the data of the checkpoints.

Imports without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakeckpt.checkpoint.log import Damage, LogView, read_log, slot_path
from lakeckpt.checkpoint.manifest import Begin, Manifest
from lakeckpt.lake.storage import Storage

__all__ = ["INDEX", "History", "history_of", "index_path", "read_history", "selection_path"]

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
    damaged: tuple[Damage, ...]

    @property
    def tip(self) -> Manifest | None:
        """The newest manifest of the history."""
        return self.chain[-1] if self.chain else None

    @property
    def whole(self) -> bool:
        """Whether the chain reaches back to the first step of the run."""
        return self.broken_at is None


def index_path(digest: str) -> str:
    """Where the footer index with this digest lies."""
    return f"{INDEX}/{digest}.lkc"


def selection_path(table: str, selection: str) -> str:
    """Where the row selection with this digest, of the table with that digest, lies."""
    return f"{INDEX}/{table}/{selection}.lkc"


def read_history(storage: Storage, *, tip: int | None = None) -> History:
    """The history of the run at ``storage``, from the slot ``tip`` (by default, the newest) back to its beginning.

    Raises `NewerFormat` for a log of a newer major version, `StorageError` where the store fails.
    """
    return history_of(read_log(storage), tip=tip)


def history_of(view: LogView, *, tip: int | None = None) -> History:
    """The history that a log tells; with ``tip``, as it was when that checkpoint was the newest."""
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
        damaged=tuple(damaged),
    )


def _newest(view: LogView) -> int | None:
    newest = max(view.entries, default=None)
    if newest is None:
        return None
    entry = view.entries[newest]
    if isinstance(entry, Manifest):
        return entry.slot
    return entry.restored  # None, too, where commits are there that could not be read when it began

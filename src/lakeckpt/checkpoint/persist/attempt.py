"""Where is this attempt in the log, and where does it commit next?

An attempt commits into the slot after the last one that it knows. Where the answer to a commit was lost and cannot be
looked up, it looks first, before it commits again. Where its own newest entry is not there any more (somebody removed
the run's folder, or another file system lies in its place), training is not to be lost, too: it goes on in the next
slot, and says what the log has lost; where another run lies there by now, the attempt is superseded.

Used by the thread that publishes. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.manifest import Entry, Manifest
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.persist.commit import superseded
from lakeckpt.checkpoint.persist.log import SlotTaken, list_slots, put_entry, read_entry, slot_path
from lakeckpt.errors import AttemptSuperseded, ObjectMissing, SaveFailed, StorageError, WireError
from lakeckpt.lake.storage.base import Storage, describe

__all__ = ["Attempt", "Tip"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The attempt that this process is part of, as far as it knows the log."""

    run: str
    number: int
    """Its number: the slot of its begin."""
    last: int
    """The last slot that this attempt knows to be taken: its own. At first, that of what it restored."""
    parent: int | None
    seed: int
    recorded: int = 0
    """Up to which optimizer step the log has recorded what was consumed: that of ``parent``."""
    pending: Mapping[str, tuple[PendingRecord, ...]] = field(default_factory=dict)
    """reader → what was consumed after ``recorded`` by an earlier attempt, where the history goes on from an arena."""
    saves: int = 0
    """How many saves have begun."""


class Tip:
    """The end of the log in ``storage``, for one ``attempt``."""

    __slots__ = ("_storage", "_unknown", "attempt", "failed")

    def __init__(self, storage: Storage, attempt: Attempt) -> None:
        self.attempt = attempt
        self.failed: set[SaveId] = set()
        """Saves of which nothing was heard but an error."""
        self._storage = storage
        self._unknown: dict[str, Manifest] = {}  # by write id: commits whose answer was lost

    @property
    def given_up(self) -> set[SaveId]:
        """The failed saves that cannot turn up as committed any more."""
        return self.failed - {one.save for one in self._unknown.values()}

    def next_slot(self) -> int:
        """The slot for the next commit; settles first whether one whose answer was lost has happened."""
        if self._unknown:
            try:
                found = read_entry(self._storage, self.attempt.last + 1)
            except ObjectMissing:
                return self.attempt.last + 1
            except (WireError, StorageError) as error:
                raise SaveFailed(
                    f"whether slot {self.attempt.last + 1} was committed cannot be looked up: {error}"
                ) from error
            self._settle(SlotTaken(found.slot, found))
        return self.attempt.last + 1

    def lost(self) -> str:
        """What the log has lost since this attempt wrote it; empty: nothing that can be told.

        Raises `AttemptSuperseded` where another run, or another attempt, lies in its place.
        """
        last = self.attempt.last
        try:
            self._refuse_others(read_entry(self._storage, last))
            return ""
        except ObjectMissing:
            pass
        except (WireError, StorageError):
            return ""  # it is damaged, or the store failed
        try:
            listed = list_slots(self._storage)
            if last in listed:
                return ""  # it is back, or the answer before was an old one
            if listed:
                self._refuse_others(read_entry(self._storage, listed[-1]), newest=True)
        except (WireError, StorageError):
            return ""
        return (
            f"{slot_path(last)} in {describe(self._storage)}, which this run had written, is not there any more: the "
            "folder was removed, or another file system lies in its place. Checkpoints from here on can be restored; "
            "the record of what was before is lost, and no audit can prove it"
        )

    def refuse_later(self) -> None:
        """Raise `AttemptSuperseded` where another attempt has begun, or another run lies here, behind what this one
        knows. Nothing is adopted; a store that fails says nothing."""
        try:
            found = read_entry(self._storage, self.attempt.last + 1)
        except (WireError, StorageError):
            return
        self._refuse_others(found)

    def _refuse_others(self, entry: Entry, *, newest: bool = False) -> None:
        is_ours = entry.attempt == self.attempt.number
        if newest and entry.attempt is not None:
            is_ours = entry.attempt <= self.attempt.number
        if entry.run != self.attempt.run or not is_ours:
            raise AttemptSuperseded(superseded(self.attempt.number, SlotTaken(entry.slot, entry)))

    def put(self, manifest: Manifest) -> None:
        """Put the manifest into its slot. Where the store fails, or this is interrupted, it may be there or not."""
        self._unknown[manifest.write_id] = manifest
        try:
            put_entry(self._storage, manifest)
        except SlotTaken as taken:
            del self._unknown[manifest.write_id]  # what is there is another one
            self._settle(taken)
            raise SaveFailed(
                f"slot {manifest.slot} holds an earlier commit of this attempt, whose answer was lost and which came "
                f"late: it counts, and step {manifest.step} was not saved"
            ) from None
        except StorageError as error:
            raise SaveFailed(f"the manifest of step {manifest.step} could not be put: {error}") from error

    def adopt(self, manifest: Manifest) -> None:
        """The manifest is committed: what follows builds on it."""
        self._unknown.clear()
        self.failed.discard(manifest.save)
        self.attempt.last = self.attempt.parent = manifest.slot
        self.attempt.recorded = manifest.step

    def catch_up(self) -> list[Manifest]:
        """Adopt what this attempt has committed without this one's knowledge: one before it died after a commit.

        Returns these commits. `AttemptSuperseded`, `StorageError`.
        """
        found: list[Manifest] = []
        while True:
            try:
                entry = read_entry(self._storage, self.attempt.last + 1)
            except ObjectMissing:
                return found
            except WireError as error:
                raise AttemptSuperseded(
                    superseded(self.attempt.number, SlotTaken(self.attempt.last + 1, None))
                ) from error
            ours = (self.attempt.run, self.attempt.number)  # another run's attempts have the same numbers
            if not isinstance(entry, Manifest) or (entry.run, entry.attempt) != ours:
                raise AttemptSuperseded(superseded(self.attempt.number, SlotTaken(entry.slot, entry)))
            self.adopt(entry)
            found.append(entry)

    def _settle(self, taken: SlotTaken) -> None:
        """Adopt the entry in the next slot if it is one of ours whose answer was lost; else we are superseded."""
        ours = self._unknown.get(taken.found.write_id) if taken.found is not None else None
        if ours is None:
            raise AttemptSuperseded(superseded(self.attempt.number, taken))
        self.adopt(ours)

"""This module finds where in the log an attempt commits next, and whether it may.

An attempt commits into the slot after the last slot that it knows. If the answer to a commit was lost and the slot
cannot be read, the attempt reads the slot before it commits again. If its own newest entry is missing (somebody removed
the folder of the run, or mounted another file system over it), training goes on: the attempt commits into the next slot
and reports what the log has lost. If another run lies there, the attempt is superseded.

The thread that publishes calls this module. It imports without torch and starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.consumed.excluded import Opening
from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.manifest import Entry, Manifest
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.persist.commit import superseded
from lakeckpt.checkpoint.persist.failures import save_failed
from lakeckpt.checkpoint.persist.log import SlotTaken, list_slots, put_entry, read_entry, slot_path
from lakeckpt.errors import AttemptSuperseded, ObjectMissing, SaveFailed, StorageError, WireError
from lakeckpt.lake.storage.base import Storage, describe

__all__ = ["Attempt", "Tip"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The attempt that this process is part of, and what it knows of the log."""

    run: str
    number: int
    """Its number, which is the slot of its begin."""
    last: int
    """The newest slot that this attempt has written. After a restore it is the slot of the `Restored` entry."""
    parent: int | None
    seed: int
    recorded: int = 0
    """The optimizer step of ``parent``: the log has recorded what was consumed up to it."""
    pending: Mapping[str, tuple[PendingRecord, ...]] = field(default_factory=dict)
    """reader → what an earlier attempt consumed after ``recorded``, if the history goes on from an arena."""
    openings: Mapping[str, Opening] = field(default_factory=dict)
    """reader → what it excluded when the attempt began."""
    saves: int = 0
    """How many saves have begun."""


class Tip:
    """The end of the log in ``storage``, for one ``attempt``."""

    __slots__ = ("_storage", "_unsure", "attempt", "failed")

    def __init__(self, storage: Storage, attempt: Attempt) -> None:
        self.attempt = attempt
        self.failed: set[SaveId] = set()
        """Saves that failed on this rank."""
        self._storage = storage
        self._unsure: set[SaveId] = set()  # commits whose answer was lost

    @property
    def abandoned(self) -> set[SaveId]:
        """The failed saves that cannot turn out to be committed any more."""
        return self.failed - self._unsure

    def next_slot(self) -> int:
        """Return the slot for the next commit. If the answer to a commit was lost, find out first whether it
        happened. Raises `SaveFailed` if the store fails then."""
        if self._unsure:
            try:
                self.catch_up()
            except StorageError as error:
                text = f"whether slot {self.attempt.last + 1} was committed cannot be looked up: {error}"
                raise save_failed(text, error) from error
        return self.attempt.last + 1

    def lost(self) -> str:
        """Return what the log has lost since this attempt wrote it, as a text; empty if nothing is known to be lost.

        Raises `AttemptSuperseded` if another run, or another attempt, lies in its place.
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

    def _refuse_others(self, entry: Entry, *, newest: bool = False) -> None:
        is_ours = entry.attempt == self.attempt.number
        if newest and entry.attempt is not None:
            is_ours = entry.attempt <= self.attempt.number
        if entry.run != self.attempt.run or not is_ours:
            raise AttemptSuperseded(superseded(self.attempt.number, SlotTaken(entry.slot, entry)))

    def put(self, manifest: Manifest) -> None:
        """Put the manifest into its slot. Raises `SaveFailed` if the store fails; the manifest may be there all the
        same."""
        self._unsure.add(manifest.save)
        try:
            put_entry(self._storage, manifest)
        except SlotTaken as taken:
            self._adopt_own(taken)
            raise SaveFailed(
                f"slot {manifest.slot} holds an earlier commit of this attempt, whose answer was lost and which came "
                f"late: it counts, and step {manifest.step} was not saved"
            ) from None
        except StorageError as error:
            raise save_failed(f"the manifest of step {manifest.step} could not be put: {error}", error) from error

    def adopt(self, manifest: Manifest) -> None:
        """Record that the manifest is committed, so that the next commit goes on from it."""
        self._unsure.clear()
        self.failed.discard(manifest.save)
        self.attempt.last = self.attempt.parent = manifest.slot
        self.attempt.recorded = manifest.step

    def catch_up(self) -> list[Manifest]:
        """Adopt the commits of this attempt that this process does not know, because their answers were lost or an
        agent before it has made them, and return them. Raises `AttemptSuperseded` and `StorageError`."""
        found: list[Manifest] = []
        while True:
            slot = self.attempt.last + 1
            try:
                taken = SlotTaken(slot, read_entry(self._storage, slot))
            except ObjectMissing:
                return found
            except WireError:
                taken = SlotTaken(slot, None)
            found.append(self._adopt_own(taken))

    def _adopt_own(self, taken: SlotTaken) -> Manifest:
        """Adopt the entry of the next slot if it is a commit of this attempt. Else raise `AttemptSuperseded`."""
        entry = taken.found
        ours = (self.attempt.run, self.attempt.number)  # another run's attempts have the same numbers
        if not isinstance(entry, Manifest) or (entry.run, entry.attempt) != ours:
            raise AttemptSuperseded(superseded(self.attempt.number, taken))
        self.adopt(entry)
        return entry

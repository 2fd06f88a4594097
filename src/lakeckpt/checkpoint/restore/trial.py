"""This module tries one state on the live objects of all ranks: it compares, loads what can be undone, then the rest.

`Trial` does the work of one rank, and votes about it with the other ranks. `Restorer` and `load` say in which order.
`Trial.go_back` takes back the versions of tables, readers and small objects. Modules and optimizers are loaded in
place, and cannot be taken back: `Trial.is_mixed` says that they hold parts of two states. The module starts no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.fields import CutId
from lakeckpt.checkpoint.format.manifest import CheckpointInfo, Manifest, ReaderRecord
from lakeckpt.checkpoint.persist.indexes import filtered, offer, save
from lakeckpt.checkpoint.persist.log import Damage, read_entry, slot_path
from lakeckpt.checkpoint.restore.compare import differences, refusal
from lakeckpt.checkpoint.restore.from_storage import load
from lakeckpt.checkpoint.restore.load_into import is_large, load_in_place, load_small
from lakeckpt.checkpoint.restore.table_versions import Pins, fit_readers, go_to
from lakeckpt.checkpoint.state.loaded import Loaded
from lakeckpt.errors import CheckpointDamaged, NewerFormat, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.notes import error_to_text
from lakeckpt.tracking.readers import selection_of
from lakeckpt.tracking.tally import Tally
from lakeckpt.tracking.votes import Together, verdict

__all__ = ["Candidate", "RestoreReport", "Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What may be restored: a checkpoint, or a cut in memory that goes on from it (or from the start of the run)."""

    manifest: Manifest | None
    captured: CutId | None = None
    is_checked: bool = True
    """True if what is read is compared with checksums: not so for a cut in memory that no agent has hashed."""
    step: int
    readers: Mapping[str, ReaderRecord]
    pending: Mapping[str, tuple[PendingRecord, ...]] = field(default_factory=dict)
    """What was consumed between the two, by reader."""
    loaded: Loaded
    pins: Pins

    @property
    def name(self) -> str:
        """For messages."""
        if self.captured is not None:
            return f"the cut of step {self.step} in memory"
        assert self.manifest is not None
        return f"slot {self.manifest.slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of `CheckpointManager.restore`."""

    restored: CheckpointInfo | None
    """The checkpoint that was restored; None on a fresh start. If a newer cut in memory was restored instead, this is
    the checkpoint that the cut follows."""
    captured: int | None = None
    """The optimizer step of the cut in this job's memory that was restored; None if the checkpoint was restored."""
    checked: bool = True
    """True if all that was read was compared with checksums. False: not checked. The process of some rank had died
    before its agent could take the checksums of the cut in memory."""
    attempt: int
    """The attempt that began."""
    damaged: tuple[Damage, ...]
    """All damage that was found, also the damage of newer checkpoints that were skipped."""
    per_rank: tuple[str, ...]
    """Units (``tensor:…``, ``tree:…``) whose contents differed between ranks. On the same number of ranks these are
    units of this rank; replicas of a part of a tensor that have diverged may be missing. After a change of the world
    size, rank r takes the units of the old rank r, and a new rank takes those of the old rank r mod W."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """reader → why the rest of its epoch was skipped: its table version is gone (``on_version_gone="next_epoch"``)."""


class Trial:
    """Tries states on ``objects`` (tracked readers included), on one rank.

    Objects named in ``allow_missing`` keep the state that they have, if what is loaded does not hold them. With
    ``all_items`` False, items of a checkpoint that are not among the objects are not read. ``advice`` and ``mixed`` end
    the errors for objects that do not fit, and for those that hold a mixture.
    """

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        objects: Mapping[str, Any],
        *,
        allow_missing: Collection[str] = (),
        all_items: bool = True,
        advice: str,
        mixed: str,
    ) -> None:
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._allow_missing = frozenset(allow_missing)
        self._items = None if all_items else frozenset(objects)
        self._advice = advice
        self._mixed = mixed
        self._undo: list[Callable[[], None]] = []
        self.together = Together(exchange)
        self.is_mixed = False

    # --- comparing: changes nothing

    def manifest(self, slot: int) -> Manifest:
        """Return the commit in ``slot``. `CheckpointDamaged` if there is none, `NewerFormat`."""
        try:
            manifest = read_entry(self._storage, slot)
        except NewerFormat:
            raise
        except WireError as error:
            raise CheckpointDamaged(f"{slot_path(slot)}: {error}") from error
        if not isinstance(manifest, Manifest):
            raise CheckpointDamaged(f"{slot_path(slot)}: expected a commit")
        return manifest

    def checkpoint(self, slot: int) -> Candidate:
        """Return what ``slot`` committed, which fits the objects; `CheckpointMismatch` if it does not."""
        manifest = self.manifest(slot)
        rank, world_size = self._exchange.rank, self._exchange.world_size
        loaded = load(self._storage, manifest, rank=rank, world_size=world_size, items=self._items)
        readers = dict(manifest.readers)
        if self._items is not None:
            readers = {name: one for name, one in readers.items() if name in self._items}
        pins = self.compare(loaded, readers, f"in slot {slot}")
        return Candidate(manifest=manifest, step=manifest.step, readers=readers, loaded=loaded, pins=pins)

    def compare(self, loaded: Loaded, readers: Mapping[str, ReaderRecord], where: str) -> Pins:
        """Return how readers go on; `CheckpointMismatch` if the state does not fit the objects."""
        lines = differences(self._held(loaded, readers), loaded, readers)
        if lines:
            raise refusal(lines, where=where, advice=self._advice)
        return fit_readers(self._storage, self._objects, readers, look=self._exchange.rank == 0)

    def _held(self, loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> Mapping[str, Any]:
        """Return the objects that are compared and loaded: all but those that are missing and may be."""
        missing = self._allow_missing - loaded.trees.keys() - readers.keys()
        return {name: one for name, one in self._objects.items() if name not in missing}

    # --- loading, on this rank

    def pin(self, indexes: Mapping[str, TableIndex]) -> None:
        """Let readers read these versions of their tables."""
        self._undo.append(go_to(self._objects, indexes))

    def settle_selections(self, *, keep: bool) -> None:
        """Take what the filters of readers select from the run, or count it; to ``keep`` it, rank 0 saves it."""
        for reader in filtered(self._objects.values()):
            offer(self._storage, reader)
            selection_of(reader)
            if keep and self._exchange.rank == 0:
                save(self._storage, reader)

    def load_readers(self, chosen: Candidate, records: Mapping[str, ReaderRecord]) -> None:
        """Load the states of ``records`` into readers."""
        readers = {name: self._objects[name] for name in records}
        self._undo.append(load_small(readers, chosen.loaded, records))

    def load_small(self, chosen: Candidate) -> None:
        """Verify the files that will be read, and load small objects."""
        chosen.loaded.check()
        held = self._held(chosen.loaded, chosen.readers)
        others = {name: one for name, one in held.items() if name not in chosen.readers}
        self._undo.append(load_small(others, chosen.loaded, {}))

    def load_large(self, chosen: Candidate) -> None:
        """Load modules, optimizers and other large objects in place."""
        held = self._held(chosen.loaded, chosen.readers)
        self.is_mixed = any(map(is_large, held.values()))
        load_in_place(held, chosen.loaded)

    # --- on all ranks

    def vote(self, work: Callable[[], dict[str, str] | None], what: str = "", *, of_memory: bool = False) -> Tally:
        """Do ``work`` on every rank, and return all votes: what ``work`` returned, ``damaged`` and ``unfit``.

        What else ``work`` raises on one rank is raised on all; ``what`` begins the error on the others. ``work`` never
        communicates.
        """
        failure: Exception | None = None
        try:
            votes = work() or {}
        except Exception as error:
            failure, votes = error, {verdict(error, of_memory=of_memory): error_to_text(error)}
        return self.together.settle(votes, failure, what)

    def done(self) -> None:
        """Keep what was loaded."""
        self._undo.clear()

    def go_back(self) -> None:
        """Let readers, small objects and the versions of tables be as they were before."""
        while self._undo:
            self._undo.pop()()

    @contextlib.contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Go back if the block raises; the error says if objects hold a mixture."""
        try:
            yield
        except BaseException as error:
            self.go_back()
            if self.is_mixed:
                error.add_note(self._mixed)
            raise

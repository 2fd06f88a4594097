"""This module restores a run on all ranks: it chooses what to restore, takes the run over, reads and applies.

1. *Choose and compare.* Rank 0 reads the log and chooses the newest checkpoint of the history. Every rank compares the
   names, shapes and dtypes in the records of parts with its live objects, and readers load their states, which can be
   undone. No tensor of the checkpoint is read. The ranks vote: a misfit anywhere raises on all, nothing was changed, no
   entry was written, and a job that is alive goes on.
2. *Claim.* Rank 0 begins the attempt: from now on no other job commits into the run or removes anything of it.
3. *Look again.* Where another job has committed in between, its commit is compared in the same way.
4. *Read and apply.* Small objects load their states, and all ranks vote: a refusal leaves them as they were. Last, the
   tensors of modules and optimizers are read in place, and verified as they come. Damage anywhere: the checkpoint
   before is tried, on all ranks; it replaces whatever a damaged one has left.
5. *Say so.* Rank 0 writes what was restored into the log. A job that dies before has changed nothing of the history.

Where all ranks still have a newer cut in their nodes' memory (``remembered``), that is restored instead, in the same
way; whatever is wrong with it, the checkpoint is. Before the claim, a checkpoint that vanishes while a newer one was
committed was removed by the job that is alive: that is no damage, and the newer one is chosen.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.manifest import Captured, Manifest, ReaderRecord
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.history import index_path
from lakeckpt.checkpoint.persist.indexes import documents_of, filtered, offer, save
from lakeckpt.checkpoint.persist.log import Damage, read_entry, slot_path
from lakeckpt.checkpoint.read.indexes import index_damage
from lakeckpt.checkpoint.read.load import load, load_own
from lakeckpt.checkpoint.read.loaded import Loaded
from lakeckpt.checkpoint.report import CheckpointInfo, DamageWarning, RestoreReport
from lakeckpt.checkpoint.restore.apply import apply, differences, is_large, refuse
from lakeckpt.checkpoint.restore.choosing import Chooser
from lakeckpt.checkpoint.restore.from_memory import Offer, Remembered
from lakeckpt.checkpoint.restore.in_place import load_in_place
from lakeckpt.checkpoint.restore.pinning import Pins, fit_readers, go_to, pins_of_rank_0, records_at, versions_of_ranks
from lakeckpt.checkpoint.restore.remap import records_remapped
from lakeckpt.checkpoint.restore.votes import Together, texts, verdict
from lakeckpt.checkpoint.state.random_states import derive_random, restore_random
from lakeckpt.errors import ArenaError, CheckpointDamaged, NewerFormat, StorageError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.notes import error_to_text
from lakeckpt.tracking.readers import selection_of
from lakeckpt.tracking.tally import Tally

__all__ = ["Restorer"]

_GIVEN_UP = "given up by "
_MOST_LOOKS = 10
"""So often a choice is compared before the claim. A live job that removes each one before its records are read is rare:
the run is claimed all the same, and what that job committed last is compared then."""
_MOST_ROUNDS = 100
_MIXED = "the modules and optimizers hold a mixture of states now: build them anew before they are used"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What is restored: a checkpoint, or a cut in memory that goes on from it (or from the start of the run)."""

    manifest: Manifest | None
    captured: Captured | None = None
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

    @property
    def epochs_given_up(self) -> dict[str, int]:
        """reader → the epoch of which the rest is given up."""
        return {name: int(self.readers[name].state["epoch"]) for name in self.pins.given_up}


_UNSEEN = (
    "rank {} cannot look at what its node's memory holds, so all ranks restore a checkpoint, perhaps an older one: {}"
)
_Which = tuple[int | None, Captured | None]
"""The slot of a checkpoint (None: none yet), and the cut in memory that goes on from it, if that is restored."""


class Restorer:
    """Restores ``objects`` (tracked readers included) and begins an attempt; from the memory in ``arenas``, where all
    ranks give it and have something newer there than what was committed. Objects named in ``allow_missing`` keep the
    state that they have, where what is restored does not hold them. ``step``: see `Chooser`."""

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        objects: Mapping[str, Any],
        *,
        step: int | None = None,
        arenas: ArenaFolder | None = None,
        allow_missing: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._allow_missing = frozenset(allow_missing)
        self._chooser = Chooser(
            storage, world_size=exchange.world_size, speaker=exchange.rank == 0, step=step, clock=clock
        )
        self._memory = (
            None if arenas is None else Remembered(arenas, storage, rank=exchange.rank, world_size=exchange.world_size)
        )
        self._forgotten: set[Captured] = set()
        self._all = Together(exchange)
        self._undo: list[Callable[[], None]] = []
        self._fits: tuple[_Which, _Chosen] | None = None  # what was compared, and whose reader states are loaded
        self._is_mixed = False

    def restore(self) -> tuple[int, Attempt, RestoreReport]:
        """Restore, collectively. Returns the optimizer steps done, the attempt that began and the report."""
        try:
            return self._restore()
        except BaseException as error:
            self._go_back()
            if self._is_mixed:
                error.add_note(_MIXED)
            raise
        finally:
            if self._memory is not None:
                self._memory.let_go()

    def _restore(self) -> tuple[int, Attempt, RestoreReport]:
        run = self._compare_first()
        begun = int(self._all.told_by_rank_0(lambda: self._chooser.claim(run))["begun"])
        for _ in range(_MOST_ROUNDS):
            told, which = self._choose()
            chosen: _Chosen | None = None
            if which == (None, None):
                self._go_back()
                self._all.do(self._refuse_mixture)
            else:
                chosen = self._compare(told["run"], which)
                if chosen is None or not self._apply(chosen):
                    continue
            lost = self._all.told_by_rank_0(self._chooser.find_lost)["lost"]
            self._chooser.report_lost(lost)
            given_up = {} if chosen is None else chosen.epochs_given_up
            work = partial(self._chooser.restored, told, begun, given_up, which[1])
            last = int(self._all.told_by_rank_0(work)["last"])
            self._undo.clear()
            return self._finish(told["run"], begun, last, chosen)
        raise CheckpointDamaged(f"{_MOST_ROUNDS} checkpoints of this run were tried, and none is whole")

    def _compare_first(self) -> str:
        """Before anything is written: refuse what does not fit, and let the job that is alive go on. The run's id."""
        for _ in range(_MOST_LOOKS):
            told, which = self._choose()
            if which == (None, None) or self._compare(told["run"], which) is not None:
                break
        return told["run"]

    def _choose(self) -> tuple[Mapping[str, str], _Which]:
        told = self._all.told_by_rank_0(self._chooser.choose)
        return told, (None if told["slot"] == "none" else int(told["slot"]), self._in_memory(told))

    def _compare(self, run: str, which: _Which) -> _Chosen | None:
        """What is to be restored, which fits the live objects on all ranks; None where it is damaged, or overtaken."""
        if self._fits is not None and self._fits[0] == which:
            return self._fits[1]
        self._go_back()
        chosen = self._load_and_vote(run, which)
        if chosen is None or not self._load_readers(chosen):
            return None
        self._fits = (which, chosen)
        return chosen

    def _in_memory(self, told: Mapping[str, str]) -> Captured | None:
        """The newest cut that goes on from the one that rank 0 has ``told`` of and that all ranks have in memory."""
        if not told["offer"]:
            return None
        mine: dict[Captured, bytes] = {}
        if self._memory is not None:
            try:
                mine = self._memory.found(told["run"], Offer.from_text(told["offer"]))
            except (ArenaError, OSError) as error:
                warnings.warn(_UNSEEN.format(self._exchange.rank, error), DamageWarning, stacklevel=6)
        text = " ".join(sorted(f"{one.to_text()}={cut.hex()}" for one, cut in mine.items()))
        said = self._exchange.everyone({"memory": text}).facts["memory"]
        common = set.intersection(*(set(text.split()) for text in said))
        cuts = {Captured.from_text(one.partition("=")[0]) for one in common} - self._forgotten
        return max(cuts, key=lambda one: (one.step, one.attempt), default=None)

    def _go_back(self) -> None:
        """Readers and small objects, and the versions of tables, are as they were before the last try."""
        self._fits = None
        while self._undo:
            self._undo.pop()()

    # --- what filters keep

    def _settle_selections(self, *, keep: bool) -> None:
        """Take from the run what the filters of readers keep, or count it, all ranks together; to ``keep`` it, rank 0
        saves it."""
        readers = filtered(self._objects.values())
        if not readers:
            return

        def settle() -> None:
            for reader in readers:
                offer(self._storage, reader)
                selection_of(reader)
                if keep and self._exchange.rank == 0:
                    save(self._storage, reader)

        self._all.do(settle)

    # --- comparing, on every rank

    def _load_and_vote(self, run: str, which: _Which) -> _Chosen | None:
        """What is to be restored as this rank has compared it, or None where it is damaged on any rank."""
        chosen, failure = None, None
        try:
            chosen = self._load(which[0]) if which[1] is None else self._recall(run, which[0], which[1])
        except Exception as error:
            failure = error
        votes = {}
        if failure is not None:
            votes = {verdict(failure, of_memory=which[1] is not None): error_to_text(failure)}
        if chosen is not None:
            votes = {f"{_GIVEN_UP}{name}": reason for name, reason in chosen.pins.given_up.items()}
        tally = self._all.settle(votes, failure)
        if not {"damaged", "unfit"}.isdisjoint(tally.facts):
            self._reject(which, tally)
            return None
        assert chosen is not None
        given_up = {
            fact.removeprefix(_GIVEN_UP): next(iter(said))
            for fact, said in tally.facts.items()
            if fact.startswith(_GIVEN_UP)
        }
        indexes = {name: index for name, index in chosen.pins.indexes.items() if name not in given_up}
        states = {name: state for name, state in chosen.pins.states.items() if name not in given_up}
        return replace(chosen, pins=Pins(indexes=indexes, states=states, given_up=given_up))

    def _reject(self, which: _Which, tally: Tally) -> None:
        """What is damaged is told and not chosen again; a checkpoint that a newer commit has overtaken is neither."""
        slot, captured = which
        if captured is None and self._all.told_by_rank_0(self._say_overtaken)["overtaken"]:
            return
        for text in texts(tally, "damaged"):
            if captured is not None:
                path, reason = f"memory/{captured.to_text()}", f"this cut is not restored from memory: {text}"
            else:
                assert slot is not None
                path, reason = slot_path(slot), f"this checkpoint is not whole: {text}"
            self._chooser.report(Damage(path=path, reason=reason))
        if captured is not None:
            self._chooser.pass_over(captured, texts(tally, "unfit"))
            self._forgotten.add(captured)
        elif slot is not None:
            self._chooser.reject(slot)

    def _say_overtaken(self) -> dict[str, str]:
        return {"overtaken": "yes" if self._chooser.is_overtaken() else ""}

    def _manifest(self, slot: int) -> Manifest:
        try:
            manifest = read_entry(self._storage, slot)
        except NewerFormat:
            raise
        except WireError as error:
            raise CheckpointDamaged(f"{slot_path(slot)}: {error}") from error
        if not isinstance(manifest, Manifest):
            raise CheckpointDamaged(f"{slot_path(slot)}: expected a commit")
        return manifest

    def _load(self, slot: int | None) -> _Chosen:
        assert slot is not None
        manifest = self._manifest(slot)
        rank, world_size = self._exchange.rank, self._exchange.world_size
        own = load_own(self._storage, manifest, rank=rank) if world_size == manifest.world_size else None
        loaded = load(self._storage, manifest, rank=rank, world_size=world_size) if own is None else own
        readers = records_remapped(self._storage, manifest)
        pins = self._compared(loaded, readers, f"in slot {slot}")
        return _Chosen(manifest=manifest, step=manifest.step, readers=readers, loaded=loaded, pins=pins)

    def _recall(self, run: str, slot: int | None, captured: Captured) -> _Chosen:
        assert self._memory is not None
        manifest = None if slot is None else self._manifest(slot)
        recalled = self._memory.recall(run, captured, recorded=None if manifest is None else manifest.step)
        pins = self._compared(recalled.loaded, recalled.last, f"of step {captured.step} in memory")
        return _Chosen(
            manifest=manifest,
            captured=captured,
            step=captured.step,
            readers=recalled.last,
            pending=recalled.pending,
            loaded=recalled.loaded,
            pins=pins,
        )

    def _compared(self, loaded: Loaded, readers: Mapping[str, ReaderRecord], where: str) -> Pins:
        lines = differences(self._held(loaded, readers), loaded, readers)
        if lines:
            raise refuse(lines, where=where)
        return fit_readers(self._storage, self._objects, readers, look=self._exchange.rank == 0)

    def _held(self, loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> Mapping[str, Any]:
        """The objects that are compared and loaded: all but those that are missing and may be."""
        missing = self._allow_missing - loaded.trees.keys() - readers.keys()
        return {name: one for name, one in self._objects.items() if name not in missing}

    # --- applying, on every rank

    def _finish(self, run: str, number: int, last: int, chosen: _Chosen | None) -> tuple[int, Attempt, RestoreReport]:
        attempt = Attempt(run=run, number=number, last=last, parent=None, seed=torch.initial_seed() % 2**63)
        step, restored = 0, None
        per_rank: tuple[str, ...] = ()
        given_up: Mapping[str, str] = {}
        if chosen is None:
            self._same_versions()
            self._settle_selections(keep=True)
        else:
            manifest, step = chosen.manifest, chosen.step
            attempt.pending = chosen.pending
            if manifest is not None:
                attempt.parent, attempt.seed, attempt.recorded = manifest.slot, manifest.seed, manifest.step
                restored = CheckpointInfo.of(manifest)
            if chosen.loaded.random is None:
                derive_random(attempt.seed, step, self._exchange.rank)
            else:
                restore_random(chosen.loaded.random)
            self._check_indexes(chosen.readers)
            per_rank, given_up = chosen.loaded.per_rank, chosen.pins.given_up
            self._warn_of(given_up)
        damaged = self._chooser.damaged
        report = RestoreReport(
            restored=restored,
            captured=None if chosen is None or chosen.captured is None else chosen.step,
            attempt=number,
            damaged=damaged,
            per_rank=per_rank,
            given_up=given_up,
        )
        return step, attempt, report

    def _warn_of(self, given_up: Mapping[str, str]) -> None:
        for name, reason in given_up.items():
            if self._exchange.rank == 0:
                text = f"{name!r} gives the rest of its epoch up, and goes on with the next one: {reason}"
                warnings.warn(text, DamageWarning, stacklevel=5)

    def _same_versions(self) -> None:
        """Where no state says which versions are read, all ranks read those of their tables that rank 0 has opened,
        until `_go_back`."""
        failure: Exception | None = None
        try:
            votes = versions_of_ranks(self._objects)
        except Exception as error:
            failure, votes = error, {"refused": error_to_text(error)}
        said = self._all.settle(votes, failure).facts
        if all(len(values) == 1 for values in said.values()):
            return
        self._all.told_by_rank_0(self._put_indexes)
        rank = self._exchange.rank
        self._all.do(lambda: self._undo.append(go_to(self._objects, pins_of_rank_0(self._storage, said, rank=rank))))

    def _put_indexes(self) -> dict[str, str]:
        for reader in self._objects.values():
            for path, document in documents_of(reader).items():
                self._storage.put(path, [document.dumps()])
        return {}

    def _load_readers(self, chosen: _Chosen) -> bool:
        """Let readers go to the versions that they need, and load their states, on all ranks; False where it turns out
        to be damaged. What raises leaves readers and versions to `_go_back`."""
        self._all.do(lambda: self._undo.append(go_to(self._objects, chosen.pins.indexes)))
        # Readers that give their epoch up, or go on elsewhere, are at what each rank has opened by itself.
        self._same_versions()
        self._settle_selections(keep=False)
        records = records_at(self._objects, chosen.readers, chosen.pins)
        readers = {name: self._objects[name] for name in records}
        return self._vote(lambda: self._undo.append(apply(readers, chosen.loaded, records)), chosen)

    def _apply(self, chosen: _Chosen) -> bool:
        """Load all other states, on all ranks; False where the checkpoint turns out to be damaged. What raises leaves
        small objects to `_go_back`."""
        loaded, held = chosen.loaded, self._held(chosen.loaded, chosen.readers)
        others = {name: one for name, one in held.items() if name not in chosen.readers}
        self._settle_selections(keep=True)

        def apply_small() -> None:
            loaded.check()
            self._undo.append(apply(others, loaded, {}))

        if not self._vote(apply_small, chosen) or not self._vote(lambda: self._load_in_place(held, loaded), chosen):
            return False
        self._is_mixed = False
        return True

    def _refuse_mixture(self) -> None:
        """Nothing is restored: then nothing may have been changed."""
        if self._is_mixed:
            raise CheckpointDamaged(
                "what memory held was damaged while it was restored, and no checkpoint was committed to replace it"
            )

    def _load_in_place(self, objects: Mapping[str, Any], loaded: Loaded) -> None:
        self._is_mixed = any(map(is_large, objects.values()))
        load_in_place(objects, loaded)

    def _vote(self, work: Callable[[], None], chosen: _Chosen) -> bool:
        """Do ``work`` of restoring what is ``chosen`` on every rank; False where it found damage on one. What else it
        raises on one is raised on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        votes = {} if failure is None else {verdict(failure): error_to_text(failure)}
        tally = self._all.settle(votes, failure, f"other ranks could not apply {chosen.name}: ")
        if "damaged" in tally.facts:
            self._go_back()
            self._reject((None if chosen.manifest is None else chosen.manifest.slot, chosen.captured), tally)
            return False
        return True

    def _check_indexes(self, readers: Mapping[str, ReaderRecord]) -> None:
        """Verify the saved footer indexes and row selections; what is damaged is written anew from the live reader, not
        what cannot be read, or a newer lakeckpt wrote."""
        for name, reader in readers.items():
            if self._exchange.rank or reader.index is None:
                continue
            live = documents_of(self._objects[name])
            try:
                damaged = index_damage(self._storage, [reader])
            except (NewerFormat, StorageError) as error:
                damaged, live = [Damage(path=index_path(reader.index), reason=str(error))], {}
            # Told, not raised: the state has been applied on all ranks, and training does without this index.
            for damage in damaged:
                self._chooser.report(damage)
                if damage.path in live:
                    with contextlib.suppress(StorageError):
                        self._storage.put(damage.path, [live[damage.path].dumps()])

"""This module restores a run on all ranks: it chooses what to restore, takes the run over, reads and applies.

1. *Choose and compare.* Rank 0 reads the log and chooses the newest checkpoint of the history. Every rank compares the
   names, shapes and dtypes in the records of parts with its live objects, and readers load their states, which can be
   undone. No tensor of the checkpoint is read. The ranks vote: a misfit anywhere raises on all, nothing was changed, no
   entry was written, and a job that is alive goes on.
2. *Claim.* Rank 0 begins the attempt: from now on no other job commits into the run or removes anything of it.
3. *Look again.* If another job has committed in between, its commit is compared in the same way.
4. *Read and apply.* Small objects load their states, and all ranks vote: a refusal leaves them as they were. Last, the
   tensors of modules and optimizers are read in place, and verified as they come. If any rank finds damage, all ranks
   try the checkpoint before; it replaces whatever a damaged one has left.
5. *Record.* Rank 0 writes what was restored into the log. A job that dies before has changed nothing of the history.

If all ranks still have a newer cut in their nodes' memory (``from_memory``), that is restored instead, in the same
way; if it is damaged or does not fit, the checkpoint is restored. Before the claim, a checkpoint that vanishes while a
newer one was committed was removed by the job that is alive: that is no damage, and the newer one is chosen.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.consumed.reports import of_all_ranks, reports_of
from lakeckpt.checkpoint.format.fields import CutId
from lakeckpt.checkpoint.format.manifest import CheckpointInfo, ReaderRecord
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.indexes import documents_of, filtered
from lakeckpt.checkpoint.persist.log import LOG, Damage, slot_path
from lakeckpt.checkpoint.restore.choosing import Chooser
from lakeckpt.checkpoint.restore.from_memory import Offer, Remembered
from lakeckpt.checkpoint.restore.presence import Presence
from lakeckpt.checkpoint.restore.table_versions import opened_versions, openings_at, pins_as_on, records_at
from lakeckpt.checkpoint.restore.trial import Candidate, RestoreReport, Trial
from lakeckpt.checkpoint.state.random_states import derive_random, restore_random
from lakeckpt.errors import ArenaError, CheckpointDamaged, DamageWarning
from lakeckpt.lake.storage.base import Storage, expect_folder
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.tally import Tally
from lakeckpt.tracking.votes import texts

__all__ = ["Restorer"]

_LOG = logging.getLogger("lakeckpt")
_SKIPPED = "rest of the epoch skipped by "
_PLACES = "places of reader "
_UNCHECKED = "a rank's memory has no checksums"
_MOST_LOOKS = 10
"""So often a choice is compared before the claim. A live job that removes each one before its records are read is rare:
the run is claimed all the same, and what that job committed last is compared then."""
_MOST_ROUNDS = 100
_ADVICE = "Build the same objects as when it was saved, or start a run at another place"
_MIXED = "the modules and optimizers hold a mixture of states now: build them anew before they are used"
_UNSEEN = (
    "rank {} cannot look at what its node's memory holds, so all ranks restore a checkpoint, perhaps an older one: {}"
)
_Which = tuple[int | None, CutId | None]
"""The slot of a checkpoint (None: none yet), and the cut in memory that goes on from it, if that is restored."""


class Restorer:
    """Restores ``objects`` (tracked readers included) and begins an attempt; from the memory in ``arenas``, if all
    ranks give it and have something newer there than what was committed. Objects named in ``allow_missing`` keep the
    state that they have, if what is restored does not hold them. ``step``: see `Chooser`."""

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
        self._chooser = Chooser(
            storage,
            world_size=exchange.world_size,
            speaker=exchange.rank == 0,
            step=step,
            objects=objects,
            clock=clock,
        )
        self._memory = (
            None if arenas is None else Remembered(arenas, storage, rank=exchange.rank, world_size=exchange.world_size)
        )
        self._unfit: set[CutId] = set()
        self._trial = Trial(storage, exchange, objects, allow_missing=allow_missing, advice=_ADVICE, mixed=_MIXED)
        self._all = self._trial.together
        self._presence: Presence | None = None
        self._fits: tuple[_Which, Candidate] | None = None  # what was compared, and whose reader states are loaded

    def restore(self, presence: Presence | None = None) -> tuple[int, Attempt, RestoreReport]:
        """Restore, collectively. Returns the optimizer steps done, the attempt that began and the report.

        ``presence``: this job's; without one, nobody waits for a run that is away, or looks whether another job lives.
        """
        self._presence = presence
        try:
            with self._trial.undone_if_it_fails():
                return self._restore()
        finally:
            if self._memory is not None:
                self._memory.release()

    def _restore(self) -> tuple[int, Attempt, RestoreReport]:
        run = self._compare_first()
        take_over = None if self._presence is None else self._presence.take_over
        if self._presence is not None:
            self._presence.meet()
        begun = int(self._all.ask_rank_0(lambda: self._chooser.claim(run, take_over))["begun"])
        expect_folder(self._storage, LOG)
        if self._presence is not None:
            self._presence.begin(begun, 0 if self._fits is None else self._fits[1].step)
        for _ in range(_MOST_ROUNDS):
            choice, which = self._choose()
            chosen: Candidate | None = None
            if which == (None, None):
                self._go_back()
                self._all.do(self._refuse_mixture)
            else:
                chosen = self._compare(choice["run"], which)
                if chosen is None or not self._apply(chosen):
                    continue
            skipped = {} if chosen is None else _epochs_skipped(chosen)
            work = partial(self._chooser.restored, choice, begun, skipped, which[1])
            last = int(self._all.ask_rank_0(work)["last"])
            self._trial.done()
            attempt = Attempt(
                run=choice["run"], number=begun, last=last, parent=None, seed=torch.initial_seed() % 2**63
            )
            return self._finish(attempt, chosen)
        raise CheckpointDamaged(f"{_MOST_ROUNDS} checkpoints of this run were tried, and none is whole")

    def _compare_first(self) -> str:
        """Before anything is written: refuse what does not fit, and let the job that is alive go on. The run's id."""
        for _ in range(_MOST_LOOKS):
            choice, which = self._choose()
            if choice["empty"] and self._presence is not None and self._presence.await_run():
                continue
            if which == (None, None) or self._compare(choice["run"], which) is not None:
                break
        return choice["run"]

    def _choose(self) -> tuple[Mapping[str, str], _Which]:
        choice = self._all.ask_rank_0(self._chooser.choose)
        return choice, (None if choice["slot"] == "none" else int(choice["slot"]), self._in_memory(choice))

    def _in_memory(self, choice: Mapping[str, str]) -> CutId | None:
        """Return the newest cut that goes on from rank 0's ``choice`` and that all ranks have in memory."""
        if not choice["offer"]:
            return None
        mine: dict[CutId, bytes] = {}
        if self._memory is not None:
            try:
                mine = self._memory.found(choice["run"], Offer.from_text(choice["offer"]))
            except (ArenaError, OSError) as error:
                warnings.warn(_UNSEEN.format(self._exchange.rank, error), DamageWarning, stacklevel=6)
        text = " ".join(sorted(f"{one.to_text()}={cut.hex()}" for one, cut in mine.items()))
        every = self._exchange.everyone({"memory": text}).facts["memory"]
        common = set.intersection(*(set(text.split()) for text in every))
        cuts = {CutId.from_text(one.partition("=")[0]) for one in common} - self._unfit
        return max(cuts, key=lambda one: one.age, default=None)

    def _go_back(self) -> None:
        self._fits = None
        self._trial.go_back()

    # --- comparing, on every rank

    def _compare(self, run: str, which: _Which) -> Candidate | None:
        """Return what is to be restored, which fits the live objects on all ranks and whose reader states are loaded;
        None if it is damaged, or was removed behind a newer commit."""
        if self._fits is not None and self._fits[0] == which:
            return self._fits[1]
        self._go_back()
        chosen = self._read_and_vote(run, which)
        if chosen is None or not self._load_readers(chosen):
            return None
        self._fits = (which, chosen)
        return chosen

    def _read_and_vote(self, run: str, which: _Which) -> Candidate | None:
        found: list[Candidate] = []

        def read() -> dict[str, str]:
            found.append(self._candidate(run, which))
            facts = {f"{_SKIPPED}{name}": reason for name, reason in found[0].pins.skipped.items()}
            return facts if found[0].is_checked else {**facts, _UNCHECKED: "yes"}

        tally = self._trial.vote(read, of_memory=which[1] is not None)
        if not {"damaged", "unfit"}.isdisjoint(tally.facts):
            self._reject(which, tally)
            return None
        (chosen,) = found
        skipped = {
            fact.removeprefix(_SKIPPED): next(iter(reasons))
            for fact, reasons in tally.facts.items()
            if fact.startswith(_SKIPPED)
        }
        indexes = {name: index for name, index in chosen.pins.indexes.items() if name not in skipped}
        states = {name: state for name, state in chosen.pins.states.items() if name not in skipped}
        readers = chosen.readers if which[1] is None else self._merged(chosen.step, chosen.readers)
        changes = {name: every for name, every in chosen.pins.changes.items() if name not in skipped}
        pins = replace(chosen.pins, indexes=indexes, states=states, changes=changes, skipped=skipped)
        return replace(chosen, readers=readers, pins=pins, is_checked=_UNCHECKED not in tally.facts)

    def _merged(self, step: int, readers: Mapping[str, ReaderRecord]) -> dict[str, ReaderRecord]:
        """Return the records of ``readers`` in the memory of this node, with the states of the whole job: each rank has
        its own part of a flow (`lakeckpt.checkpoint.consumed.reports`)."""
        pending = {
            name: (PendingRecord(first=step, step=step, record=replace(one, stretches=())),)
            for name, one in readers.items()
        }
        own = {f"{_PLACES}{name}": report.hex() for name, report in reports_of(pending).items()}
        every: list[dict[str, bytes]] = [{} for _ in range(self._exchange.world_size)]
        for fact, values in self._exchange.everyone(own).facts.items() if own else ():
            for report, ranks in values.items():
                for rank in (rank for start, stop in ranks for rank in range(start, stop)):
                    every[rank][fact.removeprefix(_PLACES)] = bytes.fromhex(report)
        return {name: of_all_ranks(name, some, every)[0].record for name, some in pending.items()}

    def _candidate(self, run: str, which: _Which) -> Candidate:
        slot, captured = which
        if captured is None:
            assert slot is not None
            return self._trial.checkpoint(slot)
        assert self._memory is not None
        manifest = None if slot is None else self._trial.manifest(slot)
        recalled = self._memory.recall(run, captured, recorded=None if manifest is None else manifest.step)
        pins = self._trial.compare(recalled.loaded, recalled.last, f"of step {captured.step} in memory")
        return Candidate(
            manifest=manifest,
            captured=captured,
            is_checked=recalled.is_checked,
            step=captured.step,
            readers=recalled.last,
            pending=recalled.pending,
            loaded=recalled.loaded,
            pins=pins,
        )

    def _reject(self, which: _Which, tally: Tally) -> None:
        """Report what is damaged, and do not choose it again; do neither if a newer commit has removed it."""
        slot, captured = which
        if captured is None and self._all.ask_rank_0(self._overtaken)["overtaken"]:
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
            self._unfit.add(captured)

    def _overtaken(self) -> dict[str, str]:
        return {"overtaken": "yes" if self._chooser.has_grown() else ""}

    # --- applying, on every rank

    def _load_readers(self, chosen: Candidate) -> bool:
        """Let readers go to the versions that they need, and load their states; False if a rank found damage."""
        self._all.do(lambda: self._trial.pin(chosen.pins.indexes))
        # Readers that skip the rest of an epoch, or go on elsewhere, are at what each rank has opened by itself.
        self._same_versions()
        self._settle_selections(keep=False)
        records = records_at(self._objects, chosen.readers, chosen.pins)
        return self._vote(lambda: self._trial.load_readers(chosen, records), chosen)

    def _apply(self, chosen: Candidate) -> bool:
        """Load all other states; False if a rank found damage."""
        self._settle_selections(keep=True)
        small, large = partial(self._trial.load_small, chosen), partial(self._trial.load_large, chosen)
        if not self._vote(small, chosen) or not self._vote(large, chosen):
            return False
        self._trial.is_mixed = False
        return True

    def _vote(self, work: Callable[[], None], chosen: Candidate) -> bool:
        """Do ``work`` of restoring what is ``chosen``; False if a rank found damage."""
        tally = self._trial.vote(work, f"other ranks could not apply {chosen.name}: ")
        if "damaged" in tally.facts:
            self._go_back()
            self._reject((None if chosen.manifest is None else chosen.manifest.slot, chosen.captured), tally)
            return False
        return True

    def _refuse_mixture(self) -> None:
        """Nothing is restored: then nothing may have been changed."""
        if self._trial.is_mixed:
            raise CheckpointDamaged(
                "what memory held was damaged while it was restored, and no checkpoint was committed to replace it"
            )

    def _settle_selections(self, *, keep: bool) -> None:
        if filtered(self._objects.values()):
            self._all.do(lambda: self._trial.settle_selections(keep=keep))

    def _same_versions(self) -> None:
        """Let all ranks read the versions of their tables that rank 0 has opened, if no state names a version."""
        opened = {}

        def say() -> dict[str, str]:
            opened.update(opened_versions(self._objects))
            return {f"version of {name!r}": text for name, text in opened.items()}

        if all(len(texts) == 1 for texts in self._trial.vote(say).facts.values()):
            return
        first = self._all.ask_rank_0(lambda: self._put_indexes(opened))
        self._all.do(lambda: self._trial.pin(pins_as_on(self._storage, first, self._objects)))

    def _put_indexes(self, opened: dict[str, str]) -> dict[str, str]:
        for reader in self._objects.values():
            for path, document in documents_of(reader).items():
                self._storage.put(path, [document.dumps()])
        return opened

    # --- the end

    def _finish(self, attempt: Attempt, chosen: Candidate | None) -> tuple[int, Attempt, RestoreReport]:
        step, restored = 0, None
        if chosen is None:
            self._same_versions()
            self._settle_selections(keep=True)
        else:
            manifest, step = chosen.manifest, chosen.step
            attempt.pending, attempt.openings = chosen.pending, openings_at(chosen.readers, chosen.pins, step)
            if manifest is not None:
                attempt.parent, attempt.seed, attempt.recorded = manifest.slot, manifest.seed, manifest.step
                restored = CheckpointInfo.of(manifest)
            if chosen.loaded.random is None:
                derive_random(attempt.seed, step, self._exchange.rank)
            else:
                restore_random(chosen.loaded.random)
            if self._exchange.rank == 0:
                if not chosen.is_checked:
                    _LOG.info("what was restored of step %d in memory was not checked: it has no checksums", step)
                self._warn_of(chosen.pins.skipped)
                for name, grown in chosen.pins.grown.items():
                    _LOG.info("%r: %s", name, grown)
        report = RestoreReport(
            restored=restored,
            captured=None if chosen is None or chosen.captured is None else chosen.step,
            checked=chosen is None or chosen.is_checked,
            attempt=attempt.number,
            damaged=tuple(self._chooser.damaged.values()),
            per_rank=() if chosen is None else chosen.loaded.per_rank,
            skipped={} if chosen is None else chosen.pins.skipped,
        )
        return step, attempt, report

    def _warn_of(self, skipped: Mapping[str, str]) -> None:
        for name, reason in skipped.items():
            text = f"{name!r} skips the rest of its epoch, and goes on with the next one: {reason}"
            warnings.warn(text, DamageWarning, stacklevel=5)


def _epochs_skipped(chosen: Candidate) -> dict[str, int]:
    """Return reader → the epoch of which the rest is skipped."""
    return {name: int(chosen.readers[name].state["epoch"]) for name in chosen.pins.skipped}

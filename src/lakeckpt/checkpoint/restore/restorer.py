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

If the nodes' memory holds a newer cut that all ranks can read, that is restored instead, in the same way; if it is
damaged or does not fit, an older cut or the checkpoint is restored. One rank of each node states what the memory holds,
and rank 0 decides (`lakeckpt.recovery.decide`). `lakeckpt.checkpoint.restore.applying` compares and applies both.
Before the claim, a checkpoint that vanishes while a newer one was committed was removed by the job that is alive: that
is no damage, and the newer one is chosen.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.consumed.exclusions import exclusions_from_text, said_of_every
from lakeckpt.checkpoint.faults.aftermath import Aftermath
from lakeckpt.checkpoint.format.manifest import CheckpointInfo, Exclusion
from lakeckpt.checkpoint.peers.wire import KEY_BYTES
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.history import exclusions_in
from lakeckpt.checkpoint.persist.log import LOG, Damage, slot_path
from lakeckpt.checkpoint.presence.presence import Presence
from lakeckpt.checkpoint.restore.applying import Applying, Unusable
from lakeckpt.checkpoint.restore.choosing import Chooser
from lakeckpt.checkpoint.restore.compare import Candidate
from lakeckpt.checkpoint.restore.from_memory import Offer, Remembered
from lakeckpt.checkpoint.restore.from_storage import committed
from lakeckpt.checkpoint.restore.report import RestoreReport
from lakeckpt.checkpoint.restore.table_versions import openings_at
from lakeckpt.checkpoint.state.loaded import counted
from lakeckpt.checkpoint.state.random_states import derive_random, restore_random
from lakeckpt.errors import ArenaError, CheckpointDamaged, DamageWarning
from lakeckpt.lake.storage.base import Storage, expect_folder
from lakeckpt.recovery.decide import Decision, decide
from lakeckpt.recovery.facts import CutId, NodeFacts
from lakeckpt.recovery.faults import Fault, Tier
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.tally import Tally

__all__ = ["Restorer"]

_LOG = logging.getLogger("lakeckpt")
_MOST_LOOKS = 10
"""So often a choice is compared before the claim. A live job that removes each one before its records are read is rare:
the run is claimed all the same, and what that job committed last is compared then."""
_MOST_ROUNDS = 100
_ADVICE = "Build the same objects as when it was saved, or start a run at another place"
_MIXED = "the modules and optimizers hold a mixture of states now: build them anew before they are used"
_UNSEEN = (
    "rank {} cannot look at what its node's memory holds, so all ranks restore a checkpoint, perhaps an older one: {}"
)
_FACTS, _DECISION, _KEY = "what a node holds", "decision", "key"
_Which = tuple[int | None, Decision | None, str]
"""The slot of a checkpoint (None: none yet), what was decided of the cut in memory that goes on from it, if that is
restored, and the text of what leaves the deal."""
_NOTHING: _Which = (None, None, "")


class Restorer:
    """Restores ``objects`` (tracked readers included) and begins an attempt; from the memory in ``arenas``, which all
    ranks give or none, if it holds something newer than what was committed. Objects named in ``allow_missing`` keep the
    state that they have, where what is restored does not hold them. ``serves``: nodes read from each other's memory.
    ``step``, ``exclude_steps``: see `Chooser`. ``copies`` copies another run to the place of this one, collectively; it
    is called if there is none yet."""

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        objects: Mapping[str, Any],
        *,
        step: int | None = None,
        exclude_steps: tuple[int, int] | None = None,
        arenas: ArenaFolder | None = None,
        allow_missing: Collection[str] = (),
        serves: bool = True,
        aftermath: Aftermath | None = None,
        copies: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._copies = copies
        self._exchange = exchange
        rank, world_size = exchange.rank, exchange.world_size
        self._chooser = Chooser(
            storage,
            world_size=world_size,
            speaker=rank == 0,
            step=step,
            exclude_steps=exclude_steps,
            objects=objects,
            clock=clock,
        )
        self._memory = (
            None if arenas is None else Remembered(arenas, storage, rank=rank, world_size=world_size, count=self._count)
        )
        self._serves, self._key = serves, b""
        self._read_bytes: Counter[str] = Counter()
        self._aftermath = aftermath
        self._objects = objects
        self._unfit: dict[CutId, str] = {}
        self._passed_over: dict[CutId, str] = {}
        self._applying = Applying(storage, exchange, objects, allow_missing=allow_missing, advice=_ADVICE, mixed=_MIXED)
        self._all = self._applying.all
        self._compared: tuple[_Which, Candidate | None] = _NOTHING, None  # its reader states are loaded

    def restore(self, presence: Presence | None = None) -> tuple[int, Attempt, RestoreReport]:
        """Restore, collectively. Returns the optimizer steps done, the attempt that began and the report.

        ``presence``: this job's; without one, nobody waits for a run that is away, or looks whether another job lives.
        """
        try:
            with self._applying.undone_if_it_fails():
                return self._restore(presence)
        finally:
            if self._memory is not None:
                self._memory.close()

    def _restore(self, presence: Presence | None) -> tuple[int, Attempt, RestoreReport]:
        begun: int | None = None
        has_learned, has_excluded = self._aftermath is None, False
        for look in range(_MOST_ROUNDS):
            choice = self._all.ask_rank_0(self._chooser.choose)
            if not (has_learned or choice["empty"]):
                has_learned = True
                if self._learn(choice):
                    continue
            which = self._which(choice)
            if begun is None and choice["empty"]:
                if presence is not None and presence.await_run():
                    continue
                if self._copies is not None:
                    self._copies()
                    continue
            try:
                chosen = self._compare(choice["run"], which)
                if begun is None and self._aftermath is not None and not has_excluded:
                    if has_excluded := self._aftermath.level.excludes:
                        self._exclude(self._aftermath.refuse(self._objects))
                        continue
                    self._aftermath.refuse(self._objects)
                if begun is not None:
                    self._apply(chosen)
                    return self._record(choice, begun, chosen)
            except Unusable as unusable:
                self._pass_over(which, unusable)
                if begun is not None or look + 1 < _MOST_LOOKS:
                    continue
                chosen = None
            begun = self._claim(choice["run"], 0 if chosen is None else chosen.step, presence)
        raise CheckpointDamaged(f"{_MOST_ROUNDS} checkpoints of this run were tried, and none is whole")

    def _learn(self, choice: Mapping[str, str]) -> bool:
        """Learn from the faults of earlier attempts. Return whether another choice is to be made."""
        assert self._aftermath is not None
        self._aftermath.learn(choice["run"], lambda: self._chooser.view)
        self._chooser.go_back, self._chooser.reached = self._aftermath.level.go_back, self._aftermath.reached
        if self._exchange.rank == 0:
            self._chooser.exclusions = self._aftermath.kept(exclusions_in(self._chooser.view))
        return self._aftermath.reached > 0

    def _exclude(self, found: tuple[Exclusion, ...]) -> None:
        """Let ``found`` leave the deal, beside what has left it. Only rank 0's counts."""
        self._chooser.exclusions = (*(self._chooser.exclusions or ()), *found)

    def _claim(self, run: str, step: int, presence: Presence | None) -> int:
        """Begin the attempt, whose number is returned: from now on no other job commits into the run."""
        if presence is not None:
            presence.meet()
        take_over = None if presence is None else presence.take_over
        restarts = 0 if self._aftermath is None else self._aftermath.restarts
        begun = int(self._all.ask_rank_0(lambda: self._chooser.claim(run, take_over, restarts))["begun"])
        expect_folder(self._storage, LOG)
        if self._aftermath is not None:
            self._aftermath.begin(run, begun)
        if presence is not None:
            presence.begin(begun, step)
        return begun

    # --- choosing

    def _which(self, choice: Mapping[str, str]) -> _Which:
        """Return rank 0's ``choice``, and what it decides of the cuts that go on from it in the memory of all nodes."""
        slot = None if choice["slot"] == "none" else int(choice["slot"])
        if slot is None and not choice["offer"]:
            return _NOTHING
        if not choice["offer"] or self._memory is None:
            return slot, None, choice["exclusions"]
        exchange, facts = self._exchange, dict[str, str]()
        if exchange.rank == exchange.neighbours[0]:
            facts[_FACTS] = self._facts(choice["run"]).to_text()
        decided = exchange.answered(facts, partial(self._decide, Offer.from_text(choice["offer"])))
        decision = Decision.from_text(decided.value(_DECISION))
        if decision.has_servers:
            self._key = bytes.fromhex(decided.value(_KEY))
            self._memory.admit(choice["run"], self._key)
        self._passed_over |= dict(decision.passed_over)
        return slot, None if decision.cut is None else decision, choice["exclusions"]

    def _facts(self, run: str) -> NodeFacts:
        """Return what the memory of this node holds of the run; nothing, with a warning, if it cannot be looked at."""
        assert self._memory is not None
        ranks = self._exchange.neighbours
        try:
            return self._memory.found(run, ranks, serves=self._serves and len(ranks) < self._exchange.world_size)
        except (ArenaError, OSError) as error:
            warnings.warn(_UNSEEN.format(self._exchange.rank, error), DamageWarning, stacklevel=7)
            return NodeFacts(node=socket.gethostname(), ranks=tuple(ranks))

    def _decide(self, offer: Offer, facts: Tally) -> Tally:
        """Decide on rank 0, from the facts of all nodes."""
        nodes = [NodeFacts.from_text(text) for text in facts.facts.get(_FACTS, ())]
        decision = decide(
            nodes,
            world_size=self._exchange.world_size,
            takes=offer.takes,
            recorded=offer.least,
            unfit=self._unfit,
        )
        key = self._key or os.urandom(KEY_BYTES)  # it is rank 0's, and new for each restore
        return Tally.of([{_DECISION: decision.to_text(), _KEY: key.hex() if decision.has_servers else ""}])

    def _pass_over(self, which: _Which, unusable: Unusable) -> None:
        """Report what is damaged, and do not choose it again; do neither if a newer commit has removed it."""
        self._compared = _NOTHING, None
        slot, decision, _ = which
        captured = None if decision is None else decision.cut
        if captured is None and self._all.ask_rank_0(self._overtaken)["overtaken"]:
            return
        for text in unusable.damaged:
            if captured is not None:
                path, reason = f"memory/{captured.to_text()}", f"this cut is not restored from memory: {text}"
            else:
                assert slot is not None
                path, reason = slot_path(slot), f"this checkpoint is not whole: {text}"
            self._chooser.report(Damage(path=path, reason=reason))
        if captured is not None:
            self._chooser.pass_over(captured, unusable.unfit)
            self._unfit[captured] = str(unusable)

    def _overtaken(self) -> dict[str, str]:
        return {"overtaken": "yes" if self._chooser.has_grown() else ""}

    # --- comparing and applying, on every rank

    def _compare(self, run: str, which: _Which) -> Candidate | None:
        """Return what is to be restored, which fits the live objects on all ranks and whose reader states are loaded;
        None if nothing is."""
        if self._compared[0] != which:
            self._compared = _NOTHING, None
            self._applying.go_back()
            slot, decision, exclusions = which
            if slot is not None or decision is not None:
                read = partial(self._read, run, slot, decision)
                found = self._applying.compare(read, exclusions_from_text(exclusions), of_memory=decision is not None)
                self._compared = which, found
        return self._compared[1]

    def _read(self, run: str, slot: int | None, decision: Decision | None) -> Candidate:
        if decision is not None:
            assert self._memory is not None
            return self._memory.recall(run, decision, slot=slot, key=self._key)
        assert slot is not None
        found = committed(self._storage, slot, rank=self._exchange.rank, world_size=self._exchange.world_size)
        return replace(found, loaded=counted(found.loaded, partial(self._count, "storage")))

    def _count(self, source: str, size_bytes: int) -> None:
        if size_bytes:
            self._read_bytes[source] += size_bytes

    def _apply(self, chosen: Candidate | None) -> None:
        self._read_bytes.clear()
        if chosen is None:
            self._all.do(self._refuse_mixture)
            self._applying.same_versions()
        self._applying.settle_selections(keep=True)
        if chosen is not None:
            self._applying.apply(chosen)

    def _refuse_mixture(self) -> None:
        """Nothing is restored: then nothing may have been changed."""
        if self._applying.is_mixed:
            raise CheckpointDamaged(
                "what memory held was damaged while it was restored, and no checkpoint was committed to replace it"
            )

    # --- the end

    def _record(
        self, choice: Mapping[str, str], begun: int, chosen: Candidate | None
    ) -> tuple[int, Attempt, RestoreReport]:
        """Write into the log what was restored, and return the results."""
        captured = None if chosen is None else chosen.captured
        pins = None if chosen is None else chosen.pins
        skipped = {} if pins is None else dict(pins.skipped)
        epochs = {name: int(chosen.readers[name].state["epoch"]) for name in skipped} if chosen is not None else {}
        faults = self._faults(chosen)
        work = partial(self._chooser.restored, choice, begun, epochs, captured, faults)
        last = int(self._all.ask_rank_0(work)["last"])
        if self._aftermath is not None:
            self._aftermath.forget()
        self._applying.done()
        attempt = Attempt(run=choice["run"], number=begun, last=last, parent=None, seed=torch.initial_seed() % 2**63)
        if chosen is not None:
            self._go_on(attempt, chosen)
        manifest = None if chosen is None else chosen.manifest
        report = RestoreReport(
            restored=None if manifest is None else CheckpointInfo.of(manifest),
            captured=None if captured is None else captured.step,
            checked=chosen is None or chosen.is_checked,
            attempt=begun,
            damaged=tuple(self._chooser.damaged.values()),
            per_rank=() if chosen is None else chosen.loaded.per_rank,
            passed_over=self._newer_than(chosen),
            read=dict(self._read_bytes),
            derived_random=chosen is not None and chosen.loaded.random is None,
            excluded=said_of_every(exclusions_from_text(choice["exclusions"])),
            skipped=skipped,
        )
        return 0 if chosen is None else chosen.step, attempt, report

    def _faults(self, chosen: Candidate | None) -> tuple[Fault, ...]:
        """Return the faults that ended the attempts before, on rank 0."""
        if self._aftermath is None or self._exchange.rank:
            return ()
        if chosen is None:
            return self._aftermath.joined(0, "nothing", 0)
        tier: Tier = (
            "storage" if chosen.captured is None else "other nodes" if self._read_bytes["other nodes"] else "memory"
        )
        return self._aftermath.joined(chosen.step, tier, self._read_bytes.total())

    def _newer_than(self, chosen: Candidate | None) -> tuple[str, ...]:
        """Return which newer cuts in memory were passed over, the newest first, and why."""
        done = 0 if chosen is None else chosen.step
        every = sorted(self._passed_over.items(), key=lambda one: one[0].age, reverse=True)
        found = tuple(f"step {cut.step} of attempt {cut.attempt}: {why}" for cut, why in every if cut.step > done)
        for text in found if self._exchange.rank == 0 else ():
            _LOG.info("a newer cut in memory was passed over: %s", text)
        said = "" if self._aftermath is None else self._aftermath.level.said
        return (*found, said) if said else found

    def _go_on(self, attempt: Attempt, chosen: Candidate) -> None:
        """Let the attempt, and the random states of this process, go on from what was restored."""
        attempt.pending, attempt.openings = chosen.pending, openings_at(chosen.readers, chosen.pins, chosen.step)
        if (manifest := chosen.manifest) is not None:
            attempt.parent, attempt.seed, attempt.recorded = manifest.slot, manifest.seed, manifest.step
        if chosen.loaded.random is None:
            if chosen.captured is not None:
                text = "rank %d derives its random states: those of a rank of its number are not in memory"
                _LOG.info(text, self._exchange.rank)
            derive_random(attempt.seed, chosen.step, self._exchange.rank)
        else:
            restore_random(chosen.loaded.random)
        if self._exchange.rank:
            return
        if not chosen.is_checked:
            _LOG.info("what was restored of step %d in memory was not checked: it has no checksums", chosen.step)
        for name, reason in chosen.pins.skipped.items():
            text = f"{name!r} skips the rest of its epoch, and goes on with the next one: {reason}"
            warnings.warn(text, DamageWarning, stacklevel=6)
        for name, grown in chosen.pins.grown.items():
            _LOG.info("%r: %s", name, grown)

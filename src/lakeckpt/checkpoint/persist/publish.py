"""This module publishes a staged cut as a checkpoint: all ranks agree, persist their shares and commit, in one attempt.

All ranks publish the same cuts in the same order. They compare facts once, when they agree; from then on each rank
writes its share, rank 0 commits and the other ranks watch the log. A failure leaves the newest checkpoint as it was.
``attempt`` holds what this process knows of the log.

How ranks compare facts is an argument: trainers do it over the store of their job, agents through storage. The module
imports without torch; it starts no threads of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from lakeckpt.checkpoint.bubbles.record import waits_of_job
from lakeckpt.checkpoint.consumed.excluded import excluded_of, with_excluded
from lakeckpt.checkpoint.consumed.pending import joined, since, unstated
from lakeckpt.checkpoint.consumed.reports import of_all_ranks, reports_of, shared_fields
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING, PartRecord, SaveId, TreeRecord
from lakeckpt.checkpoint.format.register import KeptCheckpoint, Register
from lakeckpt.checkpoint.format.sharing import tilings_of
from lakeckpt.checkpoint.format.units import SUMS, sum_of, tensor_unit, tree_unit
from lakeckpt.checkpoint.persist.agreement import Agreed, agree
from lakeckpt.checkpoint.persist.attempt import Attempt, Tip
from lakeckpt.checkpoint.persist.commit import Collected, Expected, Remarks, await_commit, collect_parts, verify_objects
from lakeckpt.checkpoint.persist.failures import save_failed
from lakeckpt.checkpoint.persist.log import signed
from lakeckpt.checkpoint.persist.persist import OwnedTensor, persist
from lakeckpt.checkpoint.persist.retention import Retention
from lakeckpt.checkpoint.persist.unchanged import Earlier
from lakeckpt.checkpoint.state.staged import StagedCut
from lakeckpt.errors import (
    CheckpointDamaged,
    LakeckptError,
    MissingRanksError,
    SaveFailed,
    SaveSkipped,
    StorageError,
)
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.facts import facts_of
from lakeckpt.tracking.notes import error_to_text, save_error
from lakeckpt.tracking.rounds import Rounds
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Publisher", "Settings"]

_FAILURE, _SKIPPED = "failure", "skipped"
_SHARING, _ = tree_unit(SHARING, b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How checkpoints are published."""

    keep: Keep
    """The rule by which checkpoints keep their data."""
    timeout_s: float
    """How long a rank waits for the part or the commit of another rank."""


class Publisher:
    """Publishes the cuts of ``rank`` of ``world_size``, for one attempt.

    ``refuse(save)`` is called while this rank waits for others in a save, and raises why it waits in vain.
    ``tell(save, error)`` tells the other ranks why a save fails on this one. ``still`` is called right before a commit,
    and raises if nothing may be committed any more.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: Attempt,
        *,
        rank: int,
        world_size: int,
        settings: Settings,
        waiter: Waiter,
        clock: Callable[[], float] = time.time,
        refuse: Callable[[SaveId], None],
        tell: Callable[[SaveId, Exception], object],
        still: Callable[[], None] = lambda: None,
    ) -> None:
        self.attempt = attempt
        self._storage = storage
        self._rank, self._world_size = rank, world_size
        self._settings = settings
        self._refuse, self._tell = refuse, tell
        self._waiter = waiter
        self._clock = clock
        self._still = still
        self.tip = Tip(storage, attempt)
        self._lost = ""  # of the log, as the current save has found
        self._retention = Retention(storage, attempt)
        self.remarks = Remarks()  # on the last commit
        self._earlier: tuple[int | None, Earlier] = (None, Earlier())  # a slot, and this rank's part of its commit

    def publish(self, save: SaveId, taken: StagedCut | Exception, talk: Rounds) -> Manifest:
        """Publish a cut; collective. ``taken`` is the cut, or the error that kept this rank from having it, which then
        fails the save on all ranks. Returns the commit.

        Raises `SaveFailed`, `AttemptSuperseded`, `TrackingError` if the ranks are not at
        one cut, and ``taken`` itself if it is an error.
        """
        try:
            announced = self._announce(save, taken)
            cut, agreement = self._agree(save, taken, announced, talk)
            part = self._write(cut, save, agreement)
            found = self._collect(cut, save, agreement)
            with self._telling(save) if found is not None else contextlib.nullcontext():
                manifest = self._commit(save, agreement, found)
        except Exception as error:
            self.tip.failed.add(save)
            if not isinstance(error, SaveSkipped):  # what was referred to may be what is not there: written anew
                self._earlier = (self._earlier[0], Earlier())
            raise
        self._prune(manifest, found, part)
        return manifest

    # --- announce

    def _announce(self, save: SaveId, taken: StagedCut | Exception) -> dict[str, str] | Exception:
        """Return what this rank announces: on rank 0 the slot of the next commit and of its parent, on other ranks what
        their training loops have not stated. Return why there is nothing to publish, if there is not."""
        try:
            if self._rank == 0:
                self._clear_failed(save)
            if isinstance(taken, Exception):
                return taken
            if self._rank:
                return unstated(taken.readers)
            slot, parent, self._lost = self.tip.next_slot(), self.attempt.parent, self.tip.lost()
            return {"slot": str(slot), "parent": "" if parent is None or self._lost else str(parent)}
        except StorageError as error:
            return save_failed(f"nothing was saved at step {save.step}: {error}", error)
        except Exception as error:
            return error

    # --- agree

    def _agree(
        self, save: SaveId, taken: StagedCut | Exception, announced: dict[str, str] | Exception, talk: Rounds
    ) -> tuple[StagedCut, Agreed]:
        """Agree with all ranks on who writes what. A failure of one rank is raised on all."""
        facts = {"optimizer step": str(save.step), "attempt": str(save.attempt), "save": str(save.number)}
        failure = announced if isinstance(announced, Exception) else None
        states: dict[str, Mapping[str, str]] = {}
        sums: Mapping[str, str] = {}
        if isinstance(announced, Exception):
            what = _SKIPPED if isinstance(announced, SaveSkipped) else _FAILURE
            announced = {f"{what} of rank {self._rank}": error_to_text(announced)}
        if isinstance(taken, StagedCut):
            facts["tracked readers"] = ", ".join(map(repr, sorted(taken.readers))) or "none"
            states = {
                f"state of reader {name!r}": facts_of(shared_fields(pending[-1].record.state))
                for name, pending in taken.readers.items()
            }
            sums = {key: one.decode() for key, one in taken.sums.items()}
        try:
            units = taken.staged.units() if isinstance(taken, StagedCut) else []
            agreement = agree(talk, facts=facts, units=units, announce=announced, states=states, replicas=sums)
        except MissingRanksError as error:
            self._refuse(save)
            raise failure or SaveFailed(f"the checkpoint of step {save.step}: {error}") from error
        failures = sorted(  # the first one is a failure, if any is
            (name, *text.split(": ", 1))
            for name, text in agreement.announced.items()
            if name.startswith((_FAILURE, _SKIPPED))
        )
        if failures:
            texts = "; ".join(f"{name}: {text}" for name, _, text in failures)
            raise failure or save_error(f"{failures[0][1]}: nothing was saved at step {save.step}. {texts}")
        assert isinstance(taken, StagedCut)
        return taken, agreement

    # --- write

    def _write(self, cut: StagedCut, save: SaveId, agreement: Agreed) -> PartRecord:
        """Write this rank's share and publish its part. The other ranks learn why it could not, if it could not."""
        try:
            return self._written(cut, save, agreement)
        except Exception as error:
            if not isinstance(error, (LakeckptError, OSError)):
                self._tell(save, error)
                raise
            failure = save_failed(f"rank {self._rank} could not write its part of step {save.step}: {error}", error)
            self._tell(save, failure)
            raise failure from error

    def _written(self, cut: StagedCut, save: SaveId, agreement: Agreed) -> PartRecord:
        own, staged = ((self._rank, self._rank + 1),), cut.staged
        share = agreement.share(self._rank)
        tensors = [
            OwnedTensor(staged=one, ranks=share[unit])
            for _, one in sorted(staged.tensors.items())
            if (unit := tensor_unit(one.spec, one.digest)) in share
        ]
        share[tree_unit(RANDOM, staged.trees[RANDOM].digest)] = own
        trees = [
            TreeRecord(item=item, document=one.document, digest=one.digest, ranks=share[unit])
            for item, one in sorted(staged.trees.items())
            if (unit := tree_unit(item, one.digest)) in share
        ]
        outline = agreement.outline(self._rank)
        return persist(
            self._storage,
            run=self.attempt.run,
            save=save,
            rank=self._rank,
            world_size=self._world_size,
            cut=agreement.cut,
            tensors=tensors,
            trees=trees,
            tilings=tilings_of((one.spec for one in staged.tensors.values()), staged.shared),
            outline=replace(outline, different=tuple(name for name in outline.different if name != _SHARING)),
            earlier=self._part_of(int(agreement.announced["parent"]) if agreement.announced["parent"] else None),
            intact=cut.intact,
            reports=reports_of(cut.readers),
            excluded=excluded_of(cut.readers),
            waits=cut.waits,
        )

    def _part_of(self, parent: int | None) -> Earlier:
        """Return what this rank wrote for the commit ``parent``; nothing if it cannot be read.

        Rank 0 announces the parent: a rank that does not know of the last commit must not refer to files that
        retention has removed since.
        """
        if self._earlier[0] != parent:
            found = Earlier() if parent is None else Earlier.read(self._storage, parent, self._rank)
            self._earlier = (parent, found)
        return self._earlier[1]

    # --- collect

    def _collect(self, cut: StagedCut, save: SaveId, agreement: Agreed) -> tuple[Manifest, Register] | None:
        """On rank 0, wait for the parts of all ranks, verify them, and return what is to be committed."""
        if self._rank:
            return None
        with self._telling(save):
            alone = [0] * self._world_size
            for what, (owner, _) in agreement.owners.items():
                alone[owner] += sum_of([what])
            collected = collect_parts(
                self._storage,
                save,
                world_size=self._world_size,
                cut=agreement.cut,
                expected=Expected(alone=[one % SUMS for one in alone], bundles=agreement.bundles),
                waiter=self._waiter,
                timeout_s=self._settings.timeout_s,
                obstacles=partial(self._refuse, save),
            )
            verify_objects(self._storage, collected.heads)
            return self._checkpoint(cut, save, agreement, collected)

    def _checkpoint(
        self, cut: StagedCut, save: SaveId, agreement: Agreed, collected: Collected
    ) -> tuple[Manifest, Register]:
        readers = {
            name: joined(
                name,
                of_all_ranks(name, since(pending, self.attempt.recorded), [one.reports for one in collected.heads]),
                agreement.announced,
            )
            for name, pending in cut.readers.items()
        }
        excluded = (one.excluded for one in collected.heads)
        slot = int(agreement.announced["slot"])
        one = KeptCheckpoint(slot=slot, attempt=save.attempt, step=cut.step, number=save.number, metric=cut.metric)
        register = self._retention.register(one, collected, self._settings.keep)
        data = register.to_bytes()
        self._storage.put(save.register_path, [data])
        manifest = Manifest(
            run=self.attempt.run,
            slot=slot,
            attempt=save.attempt,
            parent=self.attempt.parent,
            step=cut.step,
            number=save.number,
            world_size=self._world_size,
            cut=agreement.cut,
            register=short_digest(data),
            kept=register.slots,
            readers=with_excluded(readers, excluded, after=self.attempt.recorded, upto=cut.step),
            seed=self.attempt.seed,
            **signed(self._clock),
            keep=self._settings.keep,
            metric=cut.metric,
            waits=waits_of_job([one.waits for one in collected.heads]),
        )
        return manifest, register

    @contextlib.contextmanager
    def _telling(self, save: SaveId) -> Iterator[None]:
        """Rank 0 verifies or commits in the block: tell the other ranks why it fails, if it does. A successor may have
        removed what is missing: then this attempt is superseded."""
        try:
            yield
        except Exception as error:
            self._still()
            if isinstance(error, (LakeckptError, OSError)):
                self._committed(save)
            if not isinstance(error, OSError):
                self._tell(save, error)
                raise
            failure = save_failed(f"the checkpoint of step {save.step} could not be committed: {error}", error)
            self._tell(save, failure)
            raise failure from error

    # --- commit

    def _commit(self, save: SaveId, agreement: Agreed, found: tuple[Manifest, Register] | None) -> Manifest:
        """Put the manifest into the log; on other ranks, wait until rank 0 has done so."""
        try:
            if found is not None:
                self._still()
                self.tip.put(found[0])
                return found[0]
            timeout_s = 2 * self._settings.timeout_s  # rank 0 may wait as long for a part before it commits
            return await_commit(
                self._storage,
                save,
                int(agreement.announced["slot"]),
                waiter=self._waiter,
                timeout_s=timeout_s,
                obstacles=partial(self._refuse, save),
            )
        except (LakeckptError, OSError) as error:  # the answer to a commit may be lost; rank 0 may end right behind it
            may_be_there = found is not None or isinstance(error, SaveFailed)
            if may_be_there and (late := self._committed(save)) is not None:
                return late
            raise

    def _committed(self, save: SaveId) -> Manifest | None:
        """Return the commit of ``save`` if only its answer was lost. Raises `AttemptSuperseded` if a successor, which
        removes what this attempt has not committed yet, has taken the run over."""
        with contextlib.suppress(StorageError):
            return next((one for one in self.tip.catch_up() if one.save == save), None)
        return None

    # --- prune

    def _prune(self, manifest: Manifest, found: tuple[Manifest, Register] | None, part: PartRecord) -> None:
        """Go on from the commit, and let rank 0 remove what is not to be kept."""
        self.tip.adopt(manifest)
        self._earlier = (manifest.slot, Earlier.of(part))
        if found is None:
            return
        unpruned = ""
        try:
            self._retention.prune(manifest, found[1])
        except (StorageError, CheckpointDamaged) as error:  # it is committed; what should have gone goes after the next
            unpruned = str(error)
        self.remarks = Remarks(lost=self._lost, unpruned=unpruned)

    def _clear_failed(self, now: SaveId) -> None:
        """Remove the files of saves that failed, before any rank writes for the save ``now``: a full store may have no
        room for both. A save that may still turn out to be committed stays. Files that a late rank adds to a failed
        save are removed with the next commit."""
        with contextlib.suppress(StorageError):  # they go with the next commit
            for save in self.tip.abandoned - {now}:
                self._retention.clear(save)
                self.tip.failed.discard(save)

"""How does a staged cut become a checkpoint?  Agreed on, persisted and committed by all ranks, in one attempt.

(agree) → persist → commit. All ranks publish the same cuts in the same order. They talk once, when they agree; from
then on each writes its share, rank 0 commits and the others watch the log. What fails leaves the newest checkpoint as
it was. What is known of the log is kept in ``attempt``.

How ranks talk is an argument, so that trainers do it over their process group and agents through storage. Imports
without torch.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lakeckpt import __version__
from lakeckpt.checkpoint.consumed.pending import joined, since, weakest
from lakeckpt.checkpoint.failures import (
    ListeningWaiter,
    Notes,
    error_said,
    failure_noted,
    leave_note,
    publish_failure,
    said_of,
)
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING, PartRecord, SaveId, TreeRecord
from lakeckpt.checkpoint.format.units import tensor_unit, tree_unit
from lakeckpt.checkpoint.format.verified_reads import fetch_part
from lakeckpt.checkpoint.keep import Keep
from lakeckpt.checkpoint.persist.agreement import Agreement, Talk, agree
from lakeckpt.checkpoint.persist.attempt import Attempt, Tip
from lakeckpt.checkpoint.persist.commit import Expected, Verify, await_commit, collect_parts, verify_objects
from lakeckpt.checkpoint.persist.indexes import Documents
from lakeckpt.checkpoint.persist.log import read_entry
from lakeckpt.checkpoint.persist.persist import OwnedTensor, persist
from lakeckpt.checkpoint.persist.retention import Retention
from lakeckpt.checkpoint.persist.unchanged import Earlier
from lakeckpt.checkpoint.report import Remarks
from lakeckpt.checkpoint.state.staged import StagedCut
from lakeckpt.core.read_ahead import BASES, Basis
from lakeckpt.errors import (
    CheckpointDamaged,
    LakeckptError,
    MissingRanksError,
    SaveFailed,
    SaveSkipped,
    StorageError,
    WireError,
)
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.facts import facts_of
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Publisher", "Settings"]

_FAILURE, _LEFT_OUT = "failure", "left out"
_SHARING, _ = tree_unit(SHARING, b"")


def _weaker(cut: StagedCut) -> dict[str, str]:
    """What another rank than 0 tells of how it is known that its rows were used, where its loop did not state it."""
    found = {name: weakest(pending) for name, pending in cut.readers.items()}
    return {f"{name!r} is {basis}": reason for name, (basis, reason) in found.items() if basis != "stated"}


def _weakest_of_others(reader: str, told: Mapping[str, str]) -> tuple[Basis, str]:
    """The weakest basis that other ranks told of ``reader``."""
    for basis in reversed(BASES):
        if f"{reader!r} is {basis}" in told:
            return basis, told[f"{reader!r} is {basis}"]
    return "stated", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How checkpoints are published."""

    keep: Keep
    """Which checkpoints keep their data."""
    verify: Verify
    """How the committer looks at what was written: its ``"sizes"``, or all ``"bytes"`` again."""
    timeout_s: float
    """How long a rank waits for another's part or commit."""


class Publisher:
    """Publishes the cuts of ``rank`` of ``world_size``, for one attempt.

    ``still`` raises, while others' parts are waited for and right before a commit, where there is to be none any more;
    nothing is written then, either. ``notes``: where ranks tell each other of failures beside storage, if anywhere.
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
        still: Callable[[], None] = lambda: None,
        notes: Notes | None = None,
    ) -> None:
        self.attempt = attempt
        self._storage = storage
        self._rank, self._world_size = rank, world_size
        self._settings = settings
        self._notes = notes
        self._waiter = waiter if notes is None else ListeningWaiter(waiter, self._listen)
        self._current: SaveId | None = None
        self._clock = clock
        self._still = still
        self._tip = Tip(storage, attempt)
        self._lost = ""  # of the log, as the save at hand has found
        self._documents = Documents(storage)
        self._retention = Retention(storage)
        self.remarks = Remarks()  # on the last commit
        self._earlier: tuple[int | None, Earlier] = (None, Earlier())  # a slot, and this rank's part of its commit

    def publish(self, save: SaveId, taken: StagedCut | Exception, talk: Talk) -> Manifest:
        """Publish a cut, or tell the other ranks why this one has none; collective. Returns what was committed.

        Raises `SaveFailed` and `AttemptSuperseded`; `TrackingError` where the ranks are not
        at one cut; what was ``taken`` where it is an error.
        """
        self._current = save
        try:
            manifest = self._publish(save, taken, talk)
        except Exception as error:
            self._tip.failed.add(save)
            if not isinstance(error, SaveSkipped):  # what was referred to may be what is not there: written anew
                self._earlier = (self._earlier[0], Earlier())
            raise
        if self._rank == 0:
            self._prune(manifest)
        return manifest

    def _publish(self, save: SaveId, taken: StagedCut | Exception, talk: Talk) -> Manifest:
        if self._rank == 0:
            self._clear_failed(save)
        cut, agreement = self._agree(save, taken, talk)
        try:
            part = self._persist(cut, save, agreement)
        except Exception as error:
            if not isinstance(error, (LakeckptError, OSError)):
                self._tell_others(save, error)
                raise
            failure = SaveFailed(f"rank {self._rank} could not write its part of step {save.step}: {error}")
            self._tell_others(save, failure)
            raise failure from error
        if self._rank == 0:
            manifest = self._commit(cut, save, agreement)
        else:
            timeout_s = 2 * self._settings.timeout_s  # rank 0 may wait as long for a part before it commits
            slot = int(agreement.told["slot"])
            manifest = await_commit(self._storage, save, slot, waiter=self._waiter, timeout_s=timeout_s)
        self._tip.adopt(manifest)
        self._earlier = (manifest.slot, Earlier.of(part))
        return manifest

    def _tell_others(self, save: SaveId, failure: Exception) -> None:
        if self._notes is not None:
            leave_note(self._notes, save, self._rank, failure)
        publish_failure(self._storage, save, self._rank, failure)

    def _listen(self) -> None:
        """Raise what another rank has noted of the save at hand."""
        assert self._notes is not None and self._current is not None
        failure = failure_noted(self._notes, self._current)
        if failure is not None:
            raise failure

    def lost(self) -> str:
        """What the log has lost since this attempt wrote it (`Tip.lost`)."""
        return self._tip.lost()

    def refuse_later(self) -> None:
        """Raise where another attempt has begun (`Tip.refuse_later`)."""
        self._tip.refuse_later()

    def catch_up(self) -> list[Manifest]:
        """Adopt what this attempt has committed without this publisher's knowledge (`Tip.catch_up`)."""
        return self._tip.catch_up()

    # --- agree

    def _agree(self, save: SaveId, taken: StagedCut | Exception, talk: Talk) -> tuple[StagedCut, Agreement]:
        """Settle with all ranks what is where. What fails on one rank fails on all."""
        facts = {"optimizer step": str(save.step), "attempt": str(save.attempt), "save": str(save.number)}
        failure = taken if isinstance(taken, Exception) else None
        tell: dict[str, str] = {}
        try:
            tell = self._told() if self._rank == 0 else {}
            if isinstance(taken, StagedCut):
                facts["tracked readers"] = ", ".join(map(repr, sorted(taken.readers))) or "none"
                facts |= {
                    f"state of reader {name!r}, {what}": said
                    for name, pending in taken.readers.items()
                    for what, said in facts_of(pending[-1].record.state).items()
                }
                tell |= _weaker(taken) if self._rank else {}
        except Exception as error:
            failure = failure or error
        if failure is not None:
            what = _LEFT_OUT if isinstance(failure, SaveSkipped) else _FAILURE
            tell = {f"{what} of rank {self._rank}": said_of(failure)}
        try:
            agreement = agree(
                talk, facts=facts, units=taken.staged.units() if isinstance(taken, StagedCut) else [], tell=tell
            )
        except MissingRanksError as error:
            raise failure or SaveFailed(f"the checkpoint of step {save.step}: {error}") from error
        failures = sorted(  # the first one is a failure, if any is
            (name, *said.split("\n", 1))
            for name, said in agreement.told.items()
            if name.startswith((_FAILURE, _LEFT_OUT))
        )
        if failures:
            texts = "; ".join(f"{name}: {text}" for name, _, text in failures)
            raise failure or error_said(f"{failures[0][1]}\nnothing was saved at step {save.step}. {texts}")
        assert isinstance(taken, StagedCut)
        return taken, agreement

    def _told(self) -> dict[str, str]:
        """What rank 0 tells all: the slot of the next commit, and that of the one that it goes on from."""
        slot, parent, self._lost = self._tip.next_slot(), self.attempt.parent, self._tip.lost()
        return {
            "slot": str(slot),
            "parent": "" if parent is None or self._lost else str(parent),
        }

    # --- persist

    def _persist(self, cut: StagedCut, save: SaveId, agreement: Agreement) -> PartRecord:
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
            outline=replace(outline, different=tuple(name for name in outline.different if name != _SHARING)),
            earlier=self._part_of(int(agreement.told["parent"]) if agreement.told["parent"] else None),
            intact=cut.intact,
        )

    def _part_of(self, parent: int | None) -> Earlier:
        """What this rank wrote for the commit that rank 0 goes on from; nothing where that cannot be read.

        Rank 0 says which: a rank that did not hear of the last commit must not refer to what is removed by now.
        """
        if self._earlier[0] != parent:
            self._earlier = (parent, Earlier())
            with contextlib.suppress(WireError, CheckpointDamaged, StorageError):
                found = None if parent is None else read_entry(self._storage, parent)
                if isinstance(found, Manifest) and self._rank < found.world_size:
                    part = fetch_part(self._storage, found, found.parts[self._rank])
                    self._earlier = (parent, Earlier.of(part))
        return self._earlier[1]

    # --- commit

    def _commit(self, cut: StagedCut, save: SaveId, agreement: Agreement) -> Manifest:
        try:
            manifest = self._verified(cut, save, agreement)
            self._still()
            self._tip.put(manifest)
        except Exception as error:
            self._still()
            self._tip.refuse_later()  # a successor removes what this attempt has not committed yet
            if not isinstance(error, OSError):
                self._tell_others(save, error)
                raise
            failure = SaveFailed(f"the checkpoint of step {cut.step} could not be committed: {error}")
            self._tell_others(save, failure)
            raise failure from error
        return manifest

    def _verified(self, cut: StagedCut, save: SaveId, agreement: Agreement) -> Manifest:
        """The manifest of the parts of all ranks, when all of them are there and verified."""
        alone = [{tree_unit(RANDOM, b"")} for _ in range(self._world_size)]
        for what, (owner, _) in agreement.owners.items():
            alone[owner].add(what)
        refs, parts = collect_parts(
            self._storage,
            save,
            world_size=self._world_size,
            cut=agreement.cut,
            expected=Expected(alone=alone, bundles=agreement.bundles),
            waiter=self._waiter,
            timeout_s=self._settings.timeout_s,
            still=self._still,
        )
        verify_objects(self._storage, parts, verify=self._settings.verify)
        self._retention.remember(refs, parts)
        if self._lost:
            self._documents.forget_written()
        self._documents.write(cut.documents)
        return Manifest(
            run=self.attempt.run,
            slot=int(agreement.told["slot"]),
            attempt=save.attempt,
            parent=self.attempt.parent,
            step=cut.step,
            number=save.number,
            world_size=self._world_size,
            cut=agreement.cut,
            parts=tuple(refs),
            readers={
                name: joined(
                    since(pending, self.attempt.recorded),
                    others=_weakest_of_others(name, agreement.told),
                )
                for name, pending in cut.readers.items()
            },
            seed=self.attempt.seed,
            library=__version__,
            created_s=float(self._clock()),
            write_id=uuid.uuid4().hex,
            keep=self._settings.keep,
            metric=cut.metric,
        )

    def _clear_failed(self, now: SaveId) -> None:
        """Remove the files of saves that failed, before any rank writes for the one that comes ``now``: a full store
        may have no room for another beside them. What may still turn up as committed stays. What a rank that is late
        adds to a failed save goes with the next commit."""
        for save in self._tip.given_up - {now}:
            with contextlib.suppress(StorageError):  # it goes with the next commit
                self._retention.clear(save)
                self._tip.failed.discard(save)

    def _prune(self, manifest: Manifest) -> None:
        unpruned = ""
        try:
            self._retention.prune(manifest, self._settings.keep)
        except (StorageError, CheckpointDamaged) as error:  # it is committed; what should have gone goes after the next
            unpruned = str(error)
        self.remarks = Remarks(lost=self._lost, unpruned=unpruned)
        self._documents.keep(record.index for record in manifest.readers.values())

"""How does a run go on?  The newest checkpoint that is whole is chosen, agreed on, and applied on every rank.

Rank 0 reads the log and chooses; every rank looks at what it needs and compares it with its live objects; they vote. A
misfit anywhere: all raise, nothing was changed. Then readers and small objects load their states, and all vote again: a
refusal leaves them as they were. Last, the tensors of modules and optimizers are read in place, and verified as they
come. Damage anywhere, found early or late: the checkpoint before is tried, on all ranks; it replaces whatever a damaged
one has left. At the end rank 0 begins the attempt, in the slot right after the last one it has seen, so that no commit
can slip in between.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from lakeckpt.checkpoint.agreement import everyone
from lakeckpt.checkpoint.apply import apply, differences, is_large, refuse
from lakeckpt.checkpoint.choosing import Chooser
from lakeckpt.checkpoint.in_place import load_in_place
from lakeckpt.checkpoint.indexes import documents_of, filtered, offer, save
from lakeckpt.checkpoint.ledger import index_path
from lakeckpt.checkpoint.load import Loaded, load
from lakeckpt.checkpoint.log import Damage, read_entry, slot_path
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.pinning import Pins, fit_readers, go_to, pins_of_rank_0, records_at, versions_of_ranks
from lakeckpt.checkpoint.publish import Attempt
from lakeckpt.checkpoint.random_states import derive_random, restore_random
from lakeckpt.checkpoint.remap import records_remapped
from lakeckpt.checkpoint.report import CheckpointInfo, DamageWarning, RestoreReport
from lakeckpt.checkpoint.verify import index_damage
from lakeckpt.errors import (
    AttemptSuperseded,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    LakeckptError,
    StorageError,
    WireError,
    error_of,
)
from lakeckpt.lake.storage import Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.readers import selection_of
from lakeckpt.tracking.tally import Tally

__all__ = ["Restorer"]

_GIVEN_UP = "given up by "
_POLITE_ROUNDS = 3
_MOST_ROUNDS = 100
_MIXED = "the modules and optimizers hold a mixture of states now: build them anew before they are used"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    manifest: Manifest
    loaded: Loaded
    pins: Pins

    @property
    def epochs_given_up(self) -> dict[str, int]:
        """reader → the epoch of which the rest is given up."""
        return {name: int(self.manifest.readers[name].state["epoch"]) for name in self.pins.given_up}


class Restorer:
    """Restores ``objects`` (tracked readers included) and begins an attempt."""

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        objects: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._chooser = Chooser(storage, world_size=exchange.world_size, speaker=exchange.rank == 0, clock=clock)
        self._undo: list[Callable[[], None]] = []
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

    def _restore(self) -> tuple[int, Attempt, RestoreReport]:
        chosen: _Chosen | None = None
        for round_ in range(_MOST_ROUNDS):
            told = self._told_by_rank_0(partial(self._chooser.choose, fence=round_ >= _POLITE_ROUNDS))
            if told["slot"] == "none":
                self._go_back()
                chosen = None
            elif chosen is None or chosen.manifest.slot != int(told["slot"]):
                self._go_back()
                chosen = self._load_and_vote(int(told["slot"]))
                chosen = None if chosen is None else self._apply_at_versions(chosen)
                if chosen is None:
                    continue
            given_up = {} if chosen is None else chosen.epochs_given_up
            begun = self._told_by_rank_0(partial(self._chooser.begin, told, given_up))["begun"]
            if begun != "no":
                self._undo.clear()
                return self._finish(told["run"], int(begun), chosen)
        raise AttemptSuperseded(f"other jobs kept writing to this run through {_MOST_ROUNDS} tries: stop them first")

    def _go_back(self) -> None:
        """Readers and small objects, and the versions of tables, are as they were before the last try."""
        while self._undo:
            self._undo.pop()()

    # --- what filters keep

    def _settle_selections(self) -> None:
        """Take from the run what the filters of readers keep, or count it, all ranks together; rank 0 saves it."""
        readers = filtered(self._objects.values())
        if not readers:
            return

        def settle() -> None:
            for reader in readers:
                offer(self._storage, reader)
                selection_of(reader)
                if self._exchange.rank == 0:
                    save(self._storage, reader)

        self._together(settle)

    # --- verifying, on every rank

    def _load_and_vote(self, slot: int) -> _Chosen | None:
        """The checkpoint as this rank has verified it, or None where it is damaged on any rank."""
        chosen, failure = None, None
        try:
            chosen = self._load(slot)
        except Exception as error:
            failure = error
        votes = {} if failure is None else {_verdict(failure): _said(failure)}
        if chosen is not None:
            votes = {f"{_GIVEN_UP}{name}": reason for name, reason in chosen.pins.given_up.items()}
        tally = everyone(self._exchange, votes)
        if "refused" in tally.facts:
            if failure is not None and "refused" in votes:
                raise failure
            _raise_said(next(iter(tally.facts["refused"])), tally.describe("refused"))
        if "damaged" in tally.facts:
            self._reject(slot, tally)
            return None
        assert chosen is not None
        given_up = {
            fact.removeprefix(_GIVEN_UP): next(iter(said))
            for fact, said in tally.facts.items()
            if fact.startswith(_GIVEN_UP)
        }
        indexes = {name: index for name, index in chosen.pins.indexes.items() if name not in given_up}
        return replace(chosen, pins=Pins(indexes=indexes, given_up=given_up))

    def _reject(self, slot: int, tally: Tally) -> None:
        self._chooser.reject(slot)
        for said in tally.facts["damaged"]:
            text = said.partition(": ")[2]
            self._chooser.report(Damage(path=slot_path(slot), reason=f"this checkpoint is not whole: {text}"))

    def _load(self, slot: int) -> _Chosen:
        try:
            manifest = read_entry(self._storage, slot)
        except WireError as error:
            raise CheckpointDamaged(f"{slot_path(slot)}: {error}") from error
        if not isinstance(manifest, Manifest):
            raise CheckpointDamaged(f"{slot_path(slot)}: expected a commit")
        loaded = load(self._storage, manifest, rank=self._exchange.rank, world_size=self._exchange.world_size)
        manifest = replace(manifest, readers=records_remapped(self._storage, manifest))
        lines = differences(self._objects, loaded, manifest.readers)
        if lines:
            raise refuse(lines, slot=manifest.slot)
        pins = fit_readers(self._storage, self._objects, manifest.readers, look=self._exchange.rank == 0)
        return _Chosen(manifest=manifest, loaded=loaded, pins=pins)

    # --- applying, on every rank

    def _finish(self, run: str, number: int, chosen: _Chosen | None) -> tuple[int, Attempt, RestoreReport]:
        attempt = Attempt(run=run, number=number, last=number, parent=None, seed=torch.initial_seed() % 2**63)
        step, restored = 0, None
        per_rank: tuple[str, ...] = ()
        given_up: Mapping[str, str] = {}
        if chosen is None:
            self._together(self._same_versions)
            self._settle_selections()
        else:
            manifest = chosen.manifest
            if chosen.loaded.random is None:
                derive_random(manifest.seed, manifest.step, self._exchange.rank)
            else:
                restore_random(chosen.loaded.random)
            self._check_indexes(manifest)
            attempt.parent, attempt.seed, attempt.recorded = manifest.slot, manifest.seed, manifest.step
            step, restored, per_rank = manifest.step, CheckpointInfo.of(manifest), chosen.loaded.per_rank
            given_up = chosen.pins.given_up
            self._warn_of(given_up)
        damaged = self._chooser.damaged
        report = RestoreReport(restored=restored, attempt=number, damaged=damaged, per_rank=per_rank, given_up=given_up)
        return step, attempt, report

    def _warn_of(self, given_up: Mapping[str, str]) -> None:
        for name, reason in given_up.items():
            if self._exchange.rank == 0:
                text = f"{name!r} gives the rest of its epoch up, and goes on with the next one: {reason}"
                warnings.warn(text, DamageWarning, stacklevel=5)

    def _same_versions(self) -> Callable[[], None]:
        """Where no state says which versions are read, all ranks read those of their tables that rank 0 has opened;
        returns what undoes it."""
        said = everyone(self._exchange, versions_of_ranks(self._objects)).facts
        if all(len(values) == 1 for values in said.values()):
            return lambda: None
        self._told_by_rank_0(self._put_indexes)
        return go_to(self._objects, pins_of_rank_0(self._storage, said, rank=self._exchange.rank))

    def _put_indexes(self) -> dict[str, str]:
        for reader in self._objects.values():
            for path, document in documents_of(reader).items():
                self._storage.put(path, [document.dumps()])
        return {}

    def _apply_at_versions(self, chosen: _Chosen) -> _Chosen | None:
        """Let readers go to the versions that they need, and load all states, on all ranks; None where the checkpoint
        turns out to be damaged. What raises leaves readers, small objects and versions to `_go_back`."""
        self._together(lambda: self._undo.append(go_to(self._objects, chosen.pins.indexes)))
        # Readers that give their epoch up, or go on elsewhere, are at what each rank has opened by itself.
        self._together(lambda: self._undo.append(self._same_versions()))
        self._settle_selections()
        records = records_at(self._objects, chosen.manifest.readers, chosen.pins.given_up)
        loaded, slot = chosen.loaded, chosen.manifest.slot
        small = self._vote(lambda: self._undo.append(apply(self._objects, loaded, records)), slot)
        if not small or not self._vote(lambda: self._load_in_place(loaded), slot):
            return None
        self._is_mixed = False
        return chosen

    def _load_in_place(self, loaded: Loaded) -> None:
        self._is_mixed = any(map(is_large, self._objects.values()))
        load_in_place(self._objects, loaded)

    def _vote(self, work: Callable[[], None], slot: int) -> bool:
        """Do ``work`` of restoring ``slot`` on every rank; False where it found damage on one. What else it raises on
        one is raised on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        tally = everyone(self._exchange, {} if failure is None else {_verdict(failure): _said(failure)})
        if "refused" in tally.facts:
            if failure is not None and _verdict(failure) == "refused":
                raise failure
            raise CheckpointMismatch(f"other ranks could not apply slot {slot}: {tally.describe('refused')}")
        if "damaged" in tally.facts:
            self._reject(slot, tally)
            self._go_back()
            return False
        return True

    def _check_indexes(self, manifest: Manifest) -> None:
        """Verify the saved footer indexes and row selections; a damaged one is written anew if the live reader still
        has the same."""
        if self._exchange.rank:
            return
        for name, reader in manifest.readers.items():
            if reader.index is None:
                continue
            live = documents_of(self._objects[name])
            try:
                damaged = index_damage(self._storage, [reader])
            except StorageError as error:
                damaged = [Damage(path=index_path(reader.index), reason=str(error))]
            # Told, not raised: the state has been applied on all ranks, and training does without this index.
            for damage in damaged:
                self._chooser.report(damage)
                if damage.path in live:
                    with contextlib.suppress(StorageError):
                        self._storage.put(damage.path, [live[damage.path].dumps()])

    # --- talking

    def _together(self, work: Callable[[], object]) -> None:
        """Do ``work`` on every rank; what it raises on one is raised on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        tally = everyone(self._exchange, {} if failure is None else {"refused": _said(failure)})
        if failure is not None:
            raise failure
        if "refused" in tally.facts:
            _raise_said(next(iter(tally.facts["refused"])), tally.describe("refused"))

    def _told_by_rank_0(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """What ``work`` says on rank 0, on every rank; what it raises there is raised everywhere."""
        said: dict[str, str] = {}
        failure: Exception | None = None
        if self._exchange.rank == 0:
            try:
                said = work()
            except Exception as error:
                failure, said = error, {"failed": _said(error)}
        tally = everyone(self._exchange, said)
        if failure is not None:
            raise failure
        told = {name: next(iter(values)) for name, values in tally.facts.items()}
        if "failed" in told:
            _raise_said(told["failed"], f"rank 0 could not restore: {told['failed']}")
        return told


def _verdict(error: Exception) -> str:
    """Whether an older checkpoint may do."""
    return "damaged" if isinstance(error, CheckpointDamaged) else "refused"


def _said(error: Exception) -> str:
    kind = error.kind if isinstance(error, LakeckptError) else type(error).__name__
    return f"{kind}: {error}"


def _raise_said(said: str, text: str) -> NoReturn:
    raise error_of(said.partition(":")[0], text, otherwise=CheckpointError)

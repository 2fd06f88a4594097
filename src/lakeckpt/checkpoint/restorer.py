"""How does a run go on?  The newest checkpoint that is whole is chosen, verified, agreed on, and applied on every rank.

Rank 0 reads the log and chooses; every rank reads and verifies what it needs and compares it with its live objects;
they vote. Damage anywhere: the one before is tried. A misfit anywhere: all raise, nothing was changed. Else rank 0
begins the attempt, in the slot right after the last one it has seen, so that no commit can slip in between; then all
apply.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from lakeckpt import __version__
from lakeckpt.checkpoint.agreement import everyone
from lakeckpt.checkpoint.apply import apply, differences, refuse
from lakeckpt.checkpoint.indexes import documents_of, filtered, offer, save
from lakeckpt.checkpoint.ledger import index_path
from lakeckpt.checkpoint.load import Loaded, load
from lakeckpt.checkpoint.log import Damage, LogView, SlotTaken, list_slots, put_entry, read_entry, read_log, slot_path
from lakeckpt.checkpoint.manifest import Begin, Manifest
from lakeckpt.checkpoint.parts import PARTS
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
from lakeckpt.lake.storage import Storage, clear_leftovers
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.readers import selection_of

__all__ = ["Restorer"]

_MOST_ENTRIES = 4096
_GIVEN_UP = "given up by "
_POLITE_ROUNDS = 3
_MOST_ROUNDS = 100


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
        self._clock = clock
        self._damaged: dict[str, Damage] = {}
        self._rejected: set[int] = set()
        self._taken = -1  # the last slot that a put of ours has found taken
        self._view = LogView(entries={}, damaged=(), last=-1)

    def restore(self) -> tuple[int, Attempt, RestoreReport]:
        """Restore, collectively. Returns the optimizer steps done, the attempt that began and the report."""
        chosen: _Chosen | None = None
        for round_ in range(_MOST_ROUNDS):
            told = self._told_by_rank_0(partial(self._choose, fence=round_ >= _POLITE_ROUNDS))
            if told["slot"] == "none":
                chosen = None
            elif chosen is None or chosen.manifest.slot != int(told["slot"]):
                chosen = self._load_and_vote(int(told["slot"]))
                if chosen is None:
                    continue
            begun = self._told_by_rank_0(partial(self._begin, told, chosen))["begun"]
            if begun != "no":
                return self._finish(told["run"], int(begun), chosen)
        raise AttemptSuperseded(f"other jobs kept writing to this run through {_MOST_ROUNDS} tries: stop them first")

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

    # --- choosing, on rank 0

    def _choose(self, *, fence: bool) -> dict[str, str]:
        chosen = self._look()
        run = self._view.run or uuid.uuid4().hex
        last = self._view.last
        if fence:  # another job commits faster than we can verify: shut it out first, then look again
            last = self._fence(run, chosen)
            chosen = self._look()
        return {"slot": "none" if chosen is None else str(chosen.slot), "last": str(last), "run": run}

    def _look(self) -> Manifest | None:
        """Read the log; the newest commit that was not found damaged, or None on a fresh start."""
        listed = list_slots(self._storage, taken=self._taken)
        newest = None if len(listed) <= _MOST_ENTRIES else listed[-_MOST_ENTRIES:]
        self._view = read_log(self._storage, slots=newest, taken=self._taken)
        for damage in self._view.damaged:
            self._report(damage)
        manifests = self._view.manifests
        chosen = next((one for one in self._with_data(manifests) if one.slot not in self._rejected), None)
        if chosen is None and (manifests or self._view.damaged):
            listing = "\n  ".join(str(one) for one in self._damaged.values())
            raise CheckpointDamaged(
                f"no checkpoint of this run is whole, and starting anew would hide that:\n  {listing}\n"
                "Mend the storage, or start a run at another place"
            )
        return chosen

    def _with_data(self, manifests: list[Manifest]) -> list[Manifest]:
        """Where the newest one is damaged, those of the others of which retention has left something."""
        if not self._rejected:
            return manifests
        left = {info.path.removeprefix(f"{PARTS}/").rpartition("/")[0] for info in self._storage.list(PARTS)}
        return [one for one in manifests if one.save.folder in left]

    def _fence(self, run: str, chosen: Manifest | None) -> int:
        last = self._view.last
        for slot in range(last + 1, last + 1 + _MOST_ROUNDS):
            try:
                put_entry(self._storage, self._entry(run, slot, None if chosen is None else chosen.slot))
            except SlotTaken:
                self._taken = slot
                continue
            return slot
        raise AttemptSuperseded(f"other jobs took {_MOST_ROUNDS} slots of the log in a row: stop them first")

    def _begin(self, told: Mapping[str, str], chosen: _Chosen | None) -> dict[str, str]:
        slot = int(told["last"]) + 1
        restored = None if told["slot"] == "none" else int(told["slot"])
        try:
            put_entry(self._storage, self._entry(told["run"], slot, restored, chosen))
        except SlotTaken:
            self._taken = slot
            return {"begun": "no"}
        with contextlib.suppress(StorageError):  # what dead writers left is in nobody's way
            clear_leftovers(self._storage)
        return {"begun": str(slot)}

    def _entry(self, run: str, slot: int, restored: int | None, chosen: _Chosen | None = None) -> Begin:
        return Begin(
            run=run,
            slot=slot,
            restored=restored,
            world_size=self._exchange.world_size,
            library=__version__,
            created_s=float(self._clock()),
            write_id=uuid.uuid4().hex,
            given_up={} if chosen is None else chosen.epochs_given_up,
        )

    def _report(self, damage: Damage) -> None:
        if damage.path not in self._damaged:
            self._damaged[damage.path] = damage
            if self._exchange.rank == 0:
                warnings.warn(f"damage in the run: {damage}", DamageWarning, stacklevel=5)

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
            self._rejected.add(slot)
            for said in tally.facts["damaged"]:
                text = said.partition(": ")[2]
                self._report(Damage(path=slot_path(slot), reason=f"this checkpoint is not whole: {text}"))
            return None
        assert chosen is not None
        given_up = {
            fact.removeprefix(_GIVEN_UP): next(iter(said))
            for fact, said in tally.facts.items()
            if fact.startswith(_GIVEN_UP)
        }
        indexes = {name: index for name, index in chosen.pins.indexes.items() if name not in given_up}
        return replace(chosen, pins=Pins(indexes=indexes, given_up=given_up))

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
            self._apply_at_versions(chosen)
            self._check_indexes(manifest)
            attempt.parent, attempt.seed, attempt.recorded = manifest.slot, manifest.seed, manifest.step
            step, restored, per_rank = manifest.step, CheckpointInfo.of(manifest), chosen.loaded.per_rank
            given_up = chosen.pins.given_up
            self._warn_of(given_up)
        damaged = tuple(self._damaged.values())
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

    def _apply_at_versions(self, chosen: _Chosen) -> None:
        """Let readers go to the versions that they need, and load all states; all or nothing, on all ranks."""
        undo: list[Callable[[], None]] = []
        try:
            self._together(lambda: undo.append(go_to(self._objects, chosen.pins.indexes)))
            # Readers that give their epoch up, or go on elsewhere, are at what each rank has opened by itself.
            self._together(lambda: undo.append(self._same_versions()))
            self._settle_selections()
            records = records_at(self._objects, chosen.manifest.readers, chosen.pins.given_up)
            self._apply(replace(chosen.manifest, readers=records), chosen.loaded)
        except BaseException:
            for go_back in reversed(undo):
                go_back()
            raise

    def _apply(self, manifest: Manifest, loaded: Loaded) -> None:
        failure: Exception | None = None
        go_back: Callable[[], None] = lambda: None  # noqa: E731
        try:
            go_back = apply(self._objects, loaded, manifest.readers)
        except Exception as error:
            failure = error
        tally = everyone(self._exchange, {} if failure is None else {"refused": _said(failure)})
        if failure is not None:
            raise failure
        if "refused" in tally.facts:
            go_back()
            raise CheckpointMismatch(f"other ranks could not apply slot {manifest.slot}: {tally.describe('refused')}")
        if loaded.random is None:
            derive_random(manifest.seed, manifest.step, self._exchange.rank)
        else:
            restore_random(loaded.random)

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
                self._report(damage)
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

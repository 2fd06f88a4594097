"""How does a cut become a checkpoint?  The four stages of a save, one after the other, and what is settled between
them.

capture → stage → (agree) → persist → commit. All ranks call `Saver.save` for the same cut. They talk once, when they
agree; from then on each writes its share, rank 0 commits and the others watch the log. A save that fails leaves the
newest checkpoint as it was. Where the answer to a commit was lost and cannot be looked up, the next save looks first.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lakeckpt import __version__
from lakeckpt.checkpoint.agreement import Agreement, Unit, agree
from lakeckpt.checkpoint.capture import Staged, capture, stage
from lakeckpt.checkpoint.commit import (
    Verify,
    await_commit,
    collect_parts,
    publish_failure,
    superseded,
    verify_objects,
)
from lakeckpt.checkpoint.cuts import Place, ReaderTrack
from lakeckpt.checkpoint.fetch import fetch_part
from lakeckpt.checkpoint.indexes import documents_of
from lakeckpt.checkpoint.keep import Keep
from lakeckpt.checkpoint.log import SlotTaken, put_entry, read_entry
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import PartRecord, SaveId, TreeRecord
from lakeckpt.checkpoint.persist import OwnedTensor, persist
from lakeckpt.checkpoint.random_states import RANDOM
from lakeckpt.checkpoint.retention import Retention
from lakeckpt.checkpoint.unchanged import Earlier
from lakeckpt.checkpoint.waiting import Waiter
from lakeckpt.core.skips import SkipList
from lakeckpt.errors import (
    AttemptSuperseded,
    CheckpointDamaged,
    CheckpointIncomplete,
    LakeckptError,
    MissingRanksError,
    ObjectMissing,
    SaveFailed,
    StorageError,
    WireError,
)
from lakeckpt.lake.storage import Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.merge import is_part, merge_states
from lakeckpt.wire.codec import dumps, loads

__all__ = ["Attempt", "Saver", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a manager saves."""

    keep: Keep
    """Which checkpoints keep their data."""
    verify: Verify
    """How the committer looks at what was written: its ``"sizes"``, or all ``"bytes"`` again."""
    timeout_s: float
    """How long a rank waits for another's part or commit."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The attempt that this process is part of, as far as it knows the log."""

    run: str
    number: int
    """Its number: the slot of its begin."""
    last: int
    """The last slot that this attempt knows to be taken: its own."""
    parent: int | None
    seed: int
    saves: int = 0
    """How many saves have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    step: int
    places: Mapping[str, Place]
    metric: float | None


class Saver:
    """Saves cuts for one attempt. ``objects`` are all but the tracked readers, ``tracks`` those."""

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        attempt: Attempt,
        *,
        objects: Mapping[str, Any],
        tracks: Mapping[str, ReaderTrack],
        settings: Settings,
        waiter: Waiter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.attempt = attempt
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._tracks = tracks
        self._settings = settings
        self._waiter = waiter
        self._clock = clock
        self._unknown: dict[str, tuple[Manifest, _Cut]] = {}  # by write id: commits whose answer was lost
        self._indexes: set[str] = set()
        self._retention = Retention(storage)
        self._earlier: tuple[int | None, Earlier] = (None, Earlier())  # a slot, and this rank's part of its commit

    def save(self, step: int, *, metric: float | None = None) -> Manifest:
        """Save the cut after optimizer step ``step``, which is as good as ``metric``; collective. Returns what was
        committed.

        Raises `SaveFailed`, `CheckpointIncomplete` and `AttemptSuperseded`; `DisagreementError` where the ranks are not
        at one cut; `UnsupportedValue` for a state that cannot be written.
        """
        save = SaveId(attempt=self.attempt.number, step=step, number=self.attempt.saves)
        self.attempt.saves += 1
        cut, staged, agreement, states = self._agree(save, metric)
        rank = self._exchange.rank
        slot = int(agreement.told["slot"])
        try:
            part = self._persist(cut, save, staged, agreement)
        except Exception as error:
            publish_failure(self._storage, save, rank, error)
            if not isinstance(error, LakeckptError):
                raise
            raise SaveFailed(f"rank {rank} could not write its part of step {step}: {error}") from error
        if rank == 0:
            manifest = self._commit(cut, save, agreement, states, slot)
        else:
            timeout_s = 2 * self._settings.timeout_s  # rank 0 may wait as long for a part before it commits
            manifest = await_commit(self._storage, save, slot, waiter=self._waiter, timeout_s=timeout_s)
        self._adopt(manifest, cut)
        self._earlier = (manifest.slot, Earlier.of(part))
        if rank == 0:
            self._prune(manifest)
        return manifest

    # --- capture, stage, agree

    def _agree(self, save: SaveId, metric: float | None) -> tuple[_Cut, Staged, Agreement, dict[str, Any]]:
        """Capture and stage, and settle with all ranks what is where. What fails on one rank fails on all."""
        facts = {"optimizer step": str(save.step), "attempt": str(save.attempt), "save": str(save.number)}
        taken: tuple[_Cut, Staged] | None = None
        failure: Exception | None = None
        try:
            tell = self._told() if self._exchange.rank == 0 else {}
            taken = self._take(save.step, metric)
            facts |= {
                f"state of reader {name!r}": _digest(place.state)
                for name, place in taken[0].places.items()
                if not is_part(place.state)
            }
        except Exception as error:
            failure, tell = error, {f"failure of rank {self._exchange.rank}": str(error)}
        try:
            agreement = agree(self._exchange, facts=facts, units=_units(taken), tell=tell)
        except MissingRanksError as error:
            raise failure or CheckpointIncomplete(f"the checkpoint of step {save.step}: {error}") from error
        failures = sorted(f"{name}: {text}" for name, text in agreement.told.items() if name.startswith("failure"))
        if failures:
            raise failure or SaveFailed(f"nothing was saved at step {save.step}. {'; '.join(failures)}")
        assert taken is not None
        cut, staged = taken
        return cut, staged, agreement, {name: self._joined(name, place) for name, place in cut.places.items()}

    def _take(self, step: int, metric: float | None) -> tuple[_Cut, Staged]:
        places = {name: track.place() for name, track in self._tracks.items()}
        return _Cut(step=step, places=places, metric=metric), stage(capture(self._objects))

    def _joined(self, name: str, place: Place) -> Any:
        """The state of the whole job, from this rank's state of a reader."""
        if not is_part(place.state):
            return place.state
        mine = _packed([dict(place.state)])
        every = self._exchange.combine(mine, lambda messages: _packed([one for m in messages for one in _unpacked(m)]))
        return merge_states(_unpacked(every))

    def _told(self) -> dict[str, str]:
        """What rank 0 tells all: the slot of the next commit, and the slot of the one that it goes on from."""
        slot = self._next_slot()
        return {"slot": str(slot), "parent": "" if self.attempt.parent is None else str(self.attempt.parent)}

    def _next_slot(self) -> int:
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

    def _settle(self, taken: SlotTaken) -> None:
        """Adopt the entry in the next slot if it is one of ours whose answer was lost; else we are superseded."""
        ours = self._unknown.get(taken.found.write_id) if taken.found is not None else None
        if ours is None:
            raise AttemptSuperseded(superseded(self.attempt.number, taken))
        self._adopt(*ours)

    # --- persist

    def _persist(self, cut: _Cut, save: SaveId, staged: Staged, agreement: Agreement) -> PartRecord:
        rank, world_size = self._exchange.rank, self._exchange.world_size
        share = agreement.share(rank)
        tensors = [
            OwnedTensor(spec=one.spec, data=one.data, digest=one.digest, ranks=share[f"tensor:{key}", one.digest])
            for key, one in sorted(staged.tensors.items())
            if (f"tensor:{key}", one.digest) in share
        ]
        ranks = {**share, (f"tree:{RANDOM}", staged.trees[RANDOM].digest): ((rank, rank + 1),)}
        trees = [
            TreeRecord(item=item, document=one.document, digest=one.digest, ranks=ranks[f"tree:{item}", one.digest])
            for item, one in sorted(staged.trees.items())
            if (f"tree:{item}", one.digest) in ranks
        ]
        return persist(
            self._storage,
            run=self.attempt.run,
            save=save,
            rank=rank,
            world_size=world_size,
            cut=agreement.cut,
            tensors=tensors,
            trees=trees,
            skips={name: place.skips for name, place in cut.places.items() if place.skips},
            earlier=self._part_of(int(agreement.told["parent"]) if agreement.told["parent"] else None),
        )

    def _part_of(self, parent: int | None) -> Earlier:
        """What this rank wrote for the commit that rank 0 goes on from; nothing where that cannot be read.

        Rank 0 says which: a rank that did not hear of the last commit must not refer to what is removed by now.
        """
        if self._earlier[0] != parent:
            self._earlier = (parent, Earlier())
            with contextlib.suppress(WireError, CheckpointDamaged, StorageError):
                found = None if parent is None else read_entry(self._storage, parent)
                if isinstance(found, Manifest) and self._exchange.rank < found.world_size:
                    part = fetch_part(self._storage, found, found.parts[self._exchange.rank])
                    self._earlier = (parent, Earlier.of(part))
        return self._earlier[1]

    # --- commit

    def _commit(self, cut: _Cut, save: SaveId, agreement: Agreement, states: Mapping[str, Any], slot: int) -> Manifest:
        try:
            manifest = self._verified(cut, save, agreement, states, slot)
            self._put(manifest, cut)
        except Exception as error:
            publish_failure(self._storage, save, 0, error)
            if isinstance(error, StorageError):
                raise SaveFailed(f"the checkpoint of step {cut.step} could not be committed: {error}") from error
            raise
        return manifest

    def _verified(
        self, cut: _Cut, save: SaveId, agreement: Agreement, states: Mapping[str, Any], slot: int
    ) -> Manifest:
        """The manifest of the parts of all ranks, when all of them are there and verified."""
        world_size = self._exchange.world_size
        refs, parts = collect_parts(
            self._storage,
            save,
            world_size=world_size,
            expected={rank: frozenset({*agreement.share(rank), (f"tree:{RANDOM}", b"")}) for rank in range(world_size)},
            waiter=self._waiter,
            timeout_s=self._settings.timeout_s,
        )
        verify_objects(self._storage, parts, verify=self._settings.verify)
        self._write_indexes()
        return Manifest(
            run=self.attempt.run,
            slot=slot,
            attempt=save.attempt,
            parent=self.attempt.parent,
            step=cut.step,
            number=save.number,
            world_size=world_size,
            cut=agreement.cut,
            parts=tuple(refs),
            readers={
                name: track.record(
                    cut.places[name],
                    step=cut.step,
                    state=states[name],
                    skips=SkipList().union(*(part.skips[name] for part in parts if name in part.skips)),
                )
                for name, track in self._tracks.items()
            },
            seed=self.attempt.seed,
            library=__version__,
            created_s=float(self._clock()),
            write_id=uuid.uuid4().hex,
            keep=self._settings.keep,
            metric=cut.metric,
        )

    def _put(self, manifest: Manifest, cut: _Cut) -> None:
        """Put the manifest into its slot. Where the store fails, it is not known whether it is there."""
        try:
            put_entry(self._storage, manifest)
        except SlotTaken as taken:
            self._settle(taken)
            raise SaveFailed(
                f"slot {manifest.slot} holds an earlier commit of this attempt, whose answer was lost and which came "
                f"late: it counts, and step {manifest.step} was not saved"
            ) from None
        except StorageError as error:
            self._unknown[manifest.write_id] = (manifest, cut)
            raise SaveFailed(f"the manifest of step {manifest.step} could not be put: {error}") from error

    def _write_indexes(self) -> None:
        for track in self._tracks.values():
            for path, document in documents_of(track.reader).items():
                if path not in self._indexes and not self._storage.list(path):
                    self._storage.put(path, [document.dumps()])
                self._indexes.add(path)

    def _adopt(self, manifest: Manifest, cut: _Cut) -> None:
        """The manifest is committed: what follows builds on it."""
        self._unknown.clear()
        self.attempt.last = self.attempt.parent = manifest.slot
        for name, place in cut.places.items():
            self._tracks[name].committed(place, step=cut.step)

    def _prune(self, manifest: Manifest) -> None:
        try:
            self._retention.prune(manifest, self._settings.keep)
        except StorageError:
            return  # the checkpoint is committed; what should have gone goes after the next one


def _units(taken: tuple[_Cut, Staged] | None) -> list[Unit]:
    if taken is None:
        return []
    _, staged = taken
    tensors = [
        Unit(name=f"tensor:{key}", digest=one.digest, size_bytes=one.spec.size_bytes)
        for key, one in staged.tensors.items()
    ]
    trees = [
        Unit(name=f"tree:{item}", digest=one.digest, size_bytes=len(one.document))
        for item, one in staged.trees.items()
        if item != RANDOM
    ]
    return tensors + trees


def _digest(state: Mapping[str, Any]) -> str:
    return dumps(dict(state), kind="value", version=(1, 0))[-16:].hex()


def _packed(states: list[dict[str, Any]]) -> bytes:
    return dumps(states, kind="states", version=(1, 0))


def _unpacked(data: bytes) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = loads(data, kind="states", supported=(1, 0)).value
    return states

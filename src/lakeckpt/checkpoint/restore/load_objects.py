"""This module loads a checkpoint of a run into live objects, beside a trainer that goes on.

`load` begins no attempt and writes nothing to the run, so that no trainer is superseded. Rank 0 chooses the checkpoint
from the log. All ranks compare it with their objects and vote. Then all ranks load it and vote again, as a restore
does. The trainer may remove a checkpoint while it is read. Rank 0 then reads the log once more: where a newer commit
had leave to remove the checkpoint, the checkpoint is not damaged, and the newest (or best) one of that time is taken.
Objects that the caller did not name are not read. Random states stay as they are.

Threads are started and joined inside of calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Literal

from lakeckpt.checkpoint.arguments import checked_state
from lakeckpt.checkpoint.format.manifest import Entry, Manifest, ReaderRecord
from lakeckpt.checkpoint.keep import Keep, best_first, kept_ever_since
from lakeckpt.checkpoint.persist.history import History, history_of
from lakeckpt.checkpoint.persist.indexes import filtered, offer
from lakeckpt.checkpoint.persist.log import read_entry, read_log, slot_path
from lakeckpt.checkpoint.ranks import check_topology, exchange_of
from lakeckpt.checkpoint.read import load as stored
from lakeckpt.checkpoint.read.loaded import Loaded
from lakeckpt.checkpoint.report import CheckpointInfo, DamageWarning
from lakeckpt.checkpoint.restore.apply import apply, differences, is_large, refuse
from lakeckpt.checkpoint.restore.in_place import load_in_place
from lakeckpt.checkpoint.restore.pinning import Pins, fit_readers, go_to, records_at
from lakeckpt.checkpoint.restore.remap import records_remapped
from lakeckpt.checkpoint.restore.votes import Together, texts, verdict
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.notes import error_to_text
from lakeckpt.tracking.readers import selection_of

__all__ = ["MOST_TRIES", "Choice", "load"]

MOST_TRIES = 16
"""A reader gives up after so many checkpoints that the run removed while they were read."""
_MIXED = "the modules and optimizers hold a mixture of states now: build them anew, or load another checkpoint"
_ADVICE = "Build these objects as they were when it was saved, or name fewer of them"

Step = int | Literal["best"] | None


def load(
    uri: str | PathLike[str] | Storage,
    state: Mapping[str, Any],
    *,
    step: int | Literal["best"] | None = None,
    group: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    exchange: Exchange | None = None,
) -> CheckpointInfo:
    """Load a checkpoint of the run at ``uri`` into the objects of ``state``, without taking part in the run.

    Nothing is written to the run, and no attempt begins: a trainer that works on the run is not disturbed. Only storage
    is read, never the memory that ``capture_every`` fills.

    Args:
        uri: where the run lies: a local folder or any URL that fsspec knows, or a `Storage`.
        state: name → object with ``state_dict`` and ``load_state_dict``, under the names that the run has for them. All
            of them, or some: what is not named is not read.
        step: the optimizer step whose checkpoint is loaded; ``"best"``: the one with the best ``metric`` of those that
            are kept (the lowest, or the highest where the run's ``Keep(best=…, best_is="highest")`` says so); None: the
            newest. Where the newest (or best) checkpoint is damaged, the next one is loaded, with a `DamageWarning`.
        group: the torch process group (or one-dimensional DeviceMesh) whose ranks load together; default: all ranks of
            torch.distributed, where that is initialized. As many as saved, or more, or fewer.
        rank, world_size: checked against the group's, where given. ``world_size=1``: this process loads alone, whatever
            torch.distributed says.
        storage_options: for fsspec.
        timeout_s: how long a rank waits for another one, in seconds.

    Returns which checkpoint was loaded: its ``step``, ``metric``, ``slot`` and more. Random states stay as they are.
    Collective over the ranks; all of them load the same checkpoint.

    Raises, on every rank, `CheckpointMismatch` listing all that does not fit and `StateError` where a reader refuses
    its state, with nothing changed on any; `CheckpointNotFound` where there is no such checkpoint (any more), with the
    steps that can be loaded; `CheckpointDamaged` where none is whole; `NewerFormat`, `ConfigError` and `StorageError`.
    """
    objects = checked_state(state)
    if step != "best" and step is not None and (type(step) is not int or step < 0):
        raise ConfigError(f"step is a number of optimizer steps, 'best', or None for the newest, got {step!r}")
    if not isinstance(uri, (str, PathLike, Storage)):
        raise ConfigError(f"a run lies at a folder, a URL or in a Storage, got {uri!r}")
    storage = uri if isinstance(uri, Storage) else open_storage(uri, storage_options=storage_options)
    if exchange is None:
        alone = world_size == 1 and group is None
        exchange = Exchange() if alone else exchange_of(group, timeout_s, alone=False)
    try:
        check_topology(exchange, rank, world_size)
        return _Loading(storage, exchange, objects, step).run()
    finally:
        exchange.close()


class _Loading:
    """One call of `load`, on one rank."""

    def __init__(self, storage: Storage, exchange: Exchange, objects: Mapping[str, Any], step: Step) -> None:
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._all = Together(exchange)
        self._choice = Choice(storage, step)
        self._undo: list[Callable[[], None]] = []
        self._is_mixed = False

    def run(self) -> CheckpointInfo:
        try:
            for _ in range(MOST_TRIES):
                slot = int(self._all.told_by_rank_0(self._choice.choose)["slot"])
                found = self._load(slot)
                if found is not None:
                    return CheckpointInfo.of(found)
                self._go_back()
            raise CheckpointNotFound(
                f"{describe(self._storage)} removed each of {MOST_TRIES} checkpoints while it was read: keep more "
                "(keep=), or save less often"
            )
        except BaseException as error:
            self._go_back()
            if self._is_mixed:
                error.add_note(_MIXED)
            raise

    def _load(self, slot: int) -> Manifest | None:
        """Load what ``slot`` committed, on all ranks; None where it is not whole (any more) on any rank."""
        found: list[Any] = []
        if not self._vote(slot, lambda: found.extend(self._compared(slot))):
            return None
        manifest, loaded, readers, pins = found

        def apply_small() -> None:
            self._undo.append(go_to(self._objects, pins.indexes))
            for reader in filtered(self._objects.values()):
                offer(self._storage, reader)
                selection_of(reader)
            self._undo.append(apply(self._objects, loaded, records_at(self._objects, readers, pins)))

        def apply_large() -> None:
            self._is_mixed = any(map(is_large, self._objects.values()))
            load_in_place(self._objects, loaded)

        if not self._vote(slot, apply_small) or not self._vote(slot, apply_large):
            return None
        assert isinstance(manifest, Manifest)
        return manifest

    def _compared(self, slot: int) -> tuple[Manifest, Loaded, dict[str, ReaderRecord], Pins]:
        """What was saved of the objects, the records of the readers among them, and the table versions of these."""
        manifest = read_entry(self._storage, slot)
        assert isinstance(manifest, Manifest), "rank 0 has read that it is a commit"
        rank, world_size, names = self._exchange.rank, self._exchange.world_size, frozenset(self._objects)
        loaded = None
        if world_size == manifest.world_size:
            loaded = stored.load_own(self._storage, manifest, rank=rank, items=names)
        if loaded is None:
            loaded = stored.load(self._storage, manifest, rank=rank, world_size=world_size, items=names)
        readers = {name: one for name, one in records_remapped(self._storage, manifest).items() if name in names}
        lines = differences(self._objects, loaded, readers)
        if lines:
            raise refuse(lines, where=f"in slot {manifest.slot}", advice=_ADVICE)
        pins = fit_readers(self._storage, self._objects, readers, look=rank == 0)
        for name, reason in pins.given_up.items():
            raise CheckpointMismatch(f"the state of {name!r} cannot be loaded, and nothing was changed: {reason}")
        loaded.check()
        return manifest, loaded, readers, pins

    def _vote(self, slot: int, work: Callable[[], object]) -> bool:
        """Do ``work`` on every rank; False where one found the checkpoint damaged. What else it raises, all raise."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        votes = {} if failure is None else {verdict(failure): error_to_text(failure)}
        tally = self._all.settle(votes, failure, f"other ranks could not load slot {slot}: ")
        reasons = texts(tally, "damaged")
        if reasons:
            self._choice.failed = slot, reasons
        return not reasons

    def _go_back(self) -> None:
        """Readers, small objects and the versions of tables are as they were before the last try."""
        while self._undo:
            self._undo.pop()()


class Choice:
    """Chooses which checkpoint is read, beside a run that may remove it meanwhile. One process chooses and warns."""

    def __init__(self, storage: Storage, step: Step) -> None:
        self._storage = storage
        self._step = step
        self._damaged: dict[str, str] = {}
        self._known: Mapping[int, Entry] = {}  # of the log, whose entries never change
        self.failed: tuple[int, list[str]] | None = None
        """The slot that was tried last, and why it could not be loaded."""

    def choose(self) -> dict[str, str]:
        """The ``slot`` of the checkpoint, by what the log says now."""
        view = read_log(self._storage, known=self._known)
        self._known = view.entries
        for damage in view.damaged:
            self._report(damage.path, damage.reason)
        history = history_of(view)
        tip = history.tip
        if tip is None:
            raise self._empty(history)
        commits = sorted([*history.chain, *history.abandoned], key=lambda one: one.slot)
        must_stay = kept_ever_since(commits, tip.slot) | {tip.slot}
        kept = [one for one in history.chain if one.slot in must_stay]
        if self.failed is not None and self.failed[0] in must_stay:
            slot, reasons = self.failed
            self._report(slot_path(slot), f"this checkpoint is not whole: {reasons[0]}")
        elif self.failed is not None and type(self._step) is int:
            what = f"the checkpoint of step {self._step} (slot {self.failed[0]}) was removed by the run's rule (keep=)"
            raise self._not_there(what, kept)
        self.failed = None
        wanted = self._wanted(history, kept, tip.keep or Keep())
        chosen = next((one for one in wanted if slot_path(one.slot) not in self._damaged), None)
        if chosen is None:
            raise self._all_damaged()
        return {"slot": str(chosen.slot)}

    def _wanted(self, history: History, kept: list[Manifest], rule: Keep) -> list[Manifest]:
        """The checkpoints that may be loaded, the one to be tried first at first. At least one."""
        if self._step is None:
            return kept[::-1]
        if self._step == "best":
            rated = best_first(kept, rule.best_is)
            if not rated:
                raise CheckpointNotFound(
                    f"no checkpoint that {describe(self._storage)} keeps has a metric: give one to manager.step() or "
                    "save(), and keep the best ones with keep=lakeckpt.Keep(best=1)"
                )
            return rated
        of_step = [one for one in reversed(history.chain) if one.step == self._step]
        if not of_step:
            raise self._not_there(f"the history of the run has no checkpoint of step {self._step}", kept)
        return of_step

    def _not_there(self, what: str, kept: list[Manifest]) -> CheckpointNotFound:
        steps = ", ".join(map(str, sorted({one.step for one in kept})))
        return CheckpointNotFound(
            f"{describe(self._storage)}: {what}. The steps that can be loaded are {steps}; step=None loads the newest"
        )

    def _empty(self, history: History) -> CheckpointDamaged | CheckpointNotFound:
        if self._damaged:
            return self._all_damaged()
        if history.run is None:
            return CheckpointNotFound(f"there is no run at {describe(self._storage)}: name the place of a run")
        return CheckpointNotFound(f"the run at {describe(self._storage)} has no checkpoint yet: load it after a save")

    def _all_damaged(self) -> CheckpointDamaged:
        listing = "\n  ".join(f"{path}: {reason}" for path, reason in self._damaged.items())
        return CheckpointDamaged(
            f"{describe(self._storage)}: no checkpoint that could be loaded is whole:\n  {listing}\n"
            "Mend the storage, or load another step"
        )

    def _report(self, path: str, reason: str) -> None:
        if path not in self._damaged:
            self._damaged[path] = reason
            warnings.warn(f"damage in the run: {path}: {reason}", DamageWarning, stacklevel=6)

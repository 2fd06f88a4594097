"""This module chooses a checkpoint from the log of a run, and takes the run over: what rank 0 does with the log.

`Chooser` serves a restore. `Chooser.choose` reads the log and writes nothing: it returns the newest commit of the
history that was not found damaged, or the one that a roll-back asks for. `Chooser.claim` begins the attempt, after
which nobody else commits or removes anything. `Chooser.restored` records at the end what was restored. A run whose
attempt dies between the two goes on as if that attempt had never begun. All ranks have a chooser, so that all report
the same damage; only rank 0 asks it to choose.

`Choice` serves whoever reads beside a run that goes on and may remove checkpoints. It writes nothing.

Each reports a damage once. The module starts no threads that outlive a call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from lakeckpt import __version__
from lakeckpt.checkpoint.format.begins import said_of
from lakeckpt.checkpoint.format.manifest import Begin, Captured, Entry, Manifest, Restored
from lakeckpt.checkpoint.keep import Keep, best_first, kept_ever_since
from lakeckpt.checkpoint.persist.commit import superseded
from lakeckpt.checkpoint.persist.history import (
    History,
    at_work,
    folders_there,
    has_obeyed,
    history_of,
    not_rolled_back,
    removed_by_the_unknown,
)
from lakeckpt.checkpoint.persist.log import (
    LOG,
    Damage,
    LogView,
    SlotTaken,
    list_slots,
    put_entry,
    read_log,
    slot_path,
)
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.checkpoint.restore.from_memory import Offer, where_it_goes_on
from lakeckpt.checkpoint.restore.rest_of_epoch import is_carried_over
from lakeckpt.checkpoint.restore.rollback import before_orders, no_such_step, restorable
from lakeckpt.errors import AttemptSuperseded, CheckpointDamaged, CheckpointNotFound, StorageError
from lakeckpt.lake.storage.base import Storage, clear_leftovers, describe

__all__ = ["MOST_TRIES", "Choice", "Chooser", "Step", "too_often_removed"]

MOST_TRIES = 16
"""A reader gives up after so many checkpoints that the run removed while they were read."""
Step = int | Literal["best"] | None

_LOG = logging.getLogger("lakeckpt")
_FIRST_ENTRIES = 64
"""So many of the newest entries of the log are read at first."""
_MOST_SLOTS = 100
_UNFIT = (
    "the cut of step {} that attempt {} left in memory is not restored, though nothing of it is damaged; a checkpoint "
    "is taken if one fits: {}"
)


class Chooser:
    """Chooses for one rank of ``world_size``; only the ``speaker`` warns. ``step``: roll back to that checkpoint, if
    the history does not descend from such a roll-back yet."""

    def __init__(
        self,
        storage: Storage,
        *,
        world_size: int,
        speaker: bool,
        step: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._world_size = world_size
        self._speaker = speaker
        self._step = step
        self._clock = clock
        self._damaged: dict[str, Damage] = {}
        self._rejected: set[int] = set()
        self._most = _FIRST_ENTRIES
        self._reads_all = False
        self._taken = -1  # the last slot that a put of ours has found taken, or has taken
        self._view = LogView(entries={}, damaged=(), last=-1)

    @property
    def damaged(self) -> tuple[Damage, ...]:
        """What was found damaged."""
        return tuple(self._damaged.values())

    def reject(self, slot: int) -> None:
        """The checkpoint in ``slot`` is not chosen again."""
        self._rejected.add(slot)

    # --- before the claim, and once more after it

    def choose(self) -> dict[str, str]:
        """Return the ``slot`` that is chosen (``none`` on a fresh start), the ``run``, which cuts in memory go on from
        there (an ``offer``, or nothing), and the step of the roll-back that this ``obeys`` (or nothing)."""
        self._look()
        obeys = self._step is not None and not has_obeyed(self._view, self._step)
        chosen = self._rolled_back(self._step) if self._step is not None and obeys else self._newest()
        offer = None if obeys else self._offer(chosen)
        return {
            "slot": "none" if chosen is None else str(chosen.slot),
            "run": self._view.run or uuid.uuid4().hex,
            "offer": "" if offer is None else offer.to_text(),
            "obeys": str(self._step) if obeys else "",
        }

    def is_overtaken(self) -> bool:
        """Return whether the log has grown since the choice: a new commit may have removed what was chosen."""
        return any(slot > self._view.last for slot in list_slots(self._storage, taken=self._taken))

    def find_lost(self) -> dict[str, str]:
        """Return why newer entries of the log seem to be ``lost``, if something says so; after `choose`."""
        try:
            there = folders_there(self._storage)
        except StorageError:  # no reason to refuse a restore
            return {"lost": ""}
        return {"lost": removed_by_the_unknown(history_of(self._view), there)}

    def _offer(self, chosen: Manifest | None) -> Offer | None:
        if chosen is not None and is_carried_over(self._storage, chosen):
            return None  # somebody carried the place of this checkpoint over: it is this one that is to be restored
        return where_it_goes_on(at_work(self._view), chosen)

    def _look(self) -> None:
        """Read the newest entries of the log, and report damaged ones.

        An attempt begins in the slot that is its number, and says in the next one what it restored. So these two
        entries of the newest commit's attempt are read, too, where newer commits have left them behind.
        """
        listed = list_slots(self._storage, taken=self._taken)
        self._reads_all = self._step is not None or len(listed) <= self._most
        newest = None if self._reads_all else listed[-self._most :]
        self._view = read_log(self._storage, slots=newest, taken=self._taken, known=self._view.entries)
        if newest is not None and self._view.manifests:
            attempt = self._view.manifests[0].attempt
            its = {slot for slot in (attempt, attempt + 1) if slot < newest[0]}
            self._view = read_log(self._storage, slots=[*its, *newest], known=self._view.entries)
        for damage in self._view.damaged:
            self.report(damage)

    def _look_further(self) -> bool:
        """Read more of the log; False where all of it was read."""
        if self._reads_all:
            return False
        self._most *= 8
        self._look()
        return True

    def _newest(self) -> Manifest | None:
        """Return the newest commit of the history that was not found damaged, or None on a fresh start."""
        commits = not_rolled_back(self._view)
        if commits and commits[0].slot not in self._rejected:
            return commits[0]
        left = folders_there(self._storage) if commits else set()  # the others: of which retention has left something
        chosen = next((one for one in commits if one.slot not in self._rejected and one.save.folder in left), None)
        if chosen is None and self._look_further():
            return self._newest()
        if chosen is None and (commits or self._view.damaged):
            if self.is_overtaken():
                self._look()
                return self._newest()
            self.report_lost(self.find_lost()["lost"])
            listing = "\n  ".join(str(one) for one in self._damaged.values())
            raise CheckpointDamaged(
                f"no checkpoint of this run is whole, and starting anew would hide that:\n  {listing}\n"
                f"Mend the storage, or start a run at another place{self._behind_an_order(commits)}"
            )
        return chosen

    def _behind_an_order(self, commits: Sequence[Manifest]) -> str:
        """Return which checkpoints other than ``commits`` a roll-back hides that no commit has followed."""
        order = next((one for one in reversed(self._view.restores) if one.rolled_back_to is not None), None)
        slots = {one.slot for one in commits} | self._rejected
        every = restorable(self._storage, before_orders(self._view))
        steps = ", ".join(f"{one.step:,} (slot {one.slot})" for one in reversed(every) if one.slot not in slots)
        if order is None or not steps:
            return ""
        return (
            f". The roll-back to step {order.rolled_back_to:,} in slot {order.slot} hides newer checkpoints: "
            f"step {steps}. To go on from one of these instead: lakeckpt rollback RUN --step K"
        )

    def _rolled_back(self, step: int) -> Manifest:
        """Return the checkpoint of ``step``, from which the history is to go on."""
        commits = [one for one in restorable(self._storage, self._view) if one.slot not in self._rejected]
        found = next((one for one in commits if one.step == step), None)
        if found is None:
            listing = "".join(f"\n  {one}" for one in self._damaged.values())
            raise no_such_step(step, commits, f" Found damaged:{listing}" if listing else "")
        return found

    # --- the claim, and its end

    def claim(self, run: str) -> dict[str, str]:
        """Begin the attempt: from now on nobody else commits into the run, or removes anything of it. Returns the
        attempt's number, as ``begun``."""
        before = self._view.begins
        slot = self._view.last + 1
        for _ in range(_MOST_SLOTS):
            begin = Begin(
                run=run,
                slot=slot,
                world_size=self._world_size,
                library=__version__,
                created_s=float(self._clock()),
                write_id=uuid.uuid4().hex,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self._taken = slot
            try:
                put_entry(self._storage, begin)
            except SlotTaken as taken:
                if self._step is not None:  # that commit may have had leave to remove what is asked for
                    self.choose()
                    slot = self._view.last + 1
                else:
                    slot = list_slots(self._storage, taken=slot)[-1] + 1  # it may be several commits ahead by now
                if taken.found is not None:
                    run = taken.found.run
                    before = [*before, taken.found] if isinstance(taken.found, Begin) else before
                continue
            if before:
                _LOG.info("%s takes the run over from %s", said_of(begin), said_of(before[-1]))
            with contextlib.suppress(StorageError):  # what dead writers left is in nobody's way
                clear_leftovers(self._storage)
            return {"begun": str(slot)}
        raise AttemptSuperseded(f"other jobs took {_MOST_SLOTS} slots of the log in a row: stop them first")

    def restored(
        self, choice: Mapping[str, str], begun: int, skipped: Mapping[str, int], captured: Captured | None
    ) -> dict[str, str]:
        """Record in the log what the attempt ``begun`` has restored by the ``choice`` of `choose`; return the slot that
        the attempt has reached, as ``last``. The first attempt of a run records nothing.

        ``skipped``: reader → the epoch of which it skips the rest."""
        if begun == 0:
            return {"last": "0"}
        entry = Restored(
            run=choice["run"],
            slot=begun + 1,
            attempt=begun,
            restored=None if choice["slot"] == "none" else int(choice["slot"]),
            library=__version__,
            created_s=float(self._clock()),
            write_id=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            given_up=dict(skipped),
            captured=captured,
            rolled_back_to=int(choice["obeys"]) if choice["obeys"] else None,
        )
        try:
            put_entry(self._storage, entry)
        except SlotTaken as taken:
            raise AttemptSuperseded(superseded(begun, taken)) from None
        return {"last": str(entry.slot)}

    # --- reports

    def pass_over(self, captured: Captured, reasons: Iterable[str]) -> None:
        """Warn of a cut in memory that is not damaged, and cannot be restored."""
        for reason in reasons if self._speaker else ():
            warnings.warn(_UNFIT.format(captured.step, captured.attempt, reason), DamageWarning, stacklevel=6)

    def report(self, damage: Damage) -> None:
        """Report a damage, once."""
        if damage.path not in self._damaged:
            self._damaged[damage.path] = damage
            if self._speaker:
                warnings.warn(f"damage in the run: {damage}", DamageWarning, stacklevel=6)

    def report_lost(self, reason: str) -> None:
        """Report that newer entries of the log seem to be lost (`find_lost`)."""
        if reason:
            self.report(Damage(path=LOG, reason=reason))


def too_often_removed(storage: Storage) -> CheckpointNotFound:
    """Return the error for a reader that has tried `MOST_TRIES` times."""
    return CheckpointNotFound(
        f"{describe(storage)} removed each of {MOST_TRIES} checkpoints while it was read: keep more (keep=), or save "
        "less often"
    )


class Choice:
    """Chooses which checkpoint is read beside a run that may remove it meanwhile. One process chooses and warns."""

    def __init__(self, storage: Storage, step: Step) -> None:
        self._storage = storage
        self._step = step
        self._damaged: dict[str, str] = {}
        self._known: Mapping[int, Entry] = {}  # of the log, whose entries never change
        self.failed: tuple[int, list[str]] | None = None
        """The slot that was tried last, and why it could not be loaded."""

    def choose(self) -> dict[str, str]:
        """Return the ``slot`` of the checkpoint, by what the log says now."""
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
        """Return the checkpoints that may be loaded, in the order in which they are tried. At least one."""
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

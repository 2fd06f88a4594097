"""This module chooses a checkpoint from the log of a run, and takes the run over: what rank 0 does with the log.

`Chooser` serves a restore. `Chooser.choose` reads the log and writes nothing: it returns the newest commit of the
history that was not found damaged, or the one that a roll-back asks for. `Chooser.claim` begins the attempt, after
which nobody else commits or removes anything. `Chooser.restored` records at the end what was restored. A run whose
attempt dies between the two goes on as if that attempt had never begun. All ranks have a chooser, so that all report
the same damage; only rank 0 asks it to choose.

`Choice` serves whoever reads beside a run that goes on and may remove checkpoints. It writes nothing.

Both are a `LogReader`: they read the newest entries of the log first, and more only where they need more. The module
starts no threads that outlive a call.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lakeckpt import __version__
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Begin, Captured, Manifest, Restored
from lakeckpt.checkpoint.persist.commit import superseded
from lakeckpt.checkpoint.persist.history import (
    at_work,
    best_first,
    folders_there,
    has_obeyed,
    history_of,
    lost_entries,
    not_rolled_back,
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
from lakeckpt.checkpoint.restore.changes import facts_of, recorded, say_changes
from lakeckpt.checkpoint.restore.from_memory import Offer, where_it_goes_on
from lakeckpt.checkpoint.restore.rest_of_epoch import is_carried_over
from lakeckpt.checkpoint.restore.rollback import before_orders, never_removed, no_such_step, restorable
from lakeckpt.errors import AttemptSuperseded, CheckpointDamaged, CheckpointNotFound, DamageWarning, StorageError
from lakeckpt.lake.storage.base import Storage, clear_leftovers, describe, expect_folder

__all__ = ["MOST_TRIES", "Choice", "Chooser", "LogReader", "Step", "too_often_removed"]

MOST_TRIES = 16
"""A reader gives up after so many checkpoints that the run removed while they were read."""
Step = int | Literal["best"] | None

_FIRST_ENTRIES = 64
"""So many of the newest entries of the log are read at first."""
_MOST_SLOTS = 100
_UNFIT = (
    "the cut of step {} that attempt {} left in memory is not restored, though nothing of it is damaged; a checkpoint "
    "is taken if one fits: {}"
)


class LogReader:
    """Reads the log of a run: all of it if ``step`` names a checkpoint, else from its newest entries on. Reports each
    damage once, by a warning of the ``speaker``."""

    def __init__(self, storage: Storage, step: Step, *, speaker: bool = True) -> None:
        self._storage = storage
        self._step = step
        self._speaker = speaker
        self._most = _FIRST_ENTRIES
        self._reads_all = False
        self.view = LogView(entries={}, damaged=(), last=-1)
        self.damaged: dict[str, Damage] = {}
        """What was found damaged, by path."""
        self._taken = -1  # the last slot that a put of ours has found taken, or has taken

    def look(self) -> None:
        """Read the log, and report damaged entries.

        An attempt begins in the slot that is its number, and says in the next one what it restored. So these two
        entries of the newest commit's attempt are read, too, where newer commits have left them behind.
        """
        listed = list_slots(self._storage, taken=self._taken)
        self._reads_all = self._step is not None or len(listed) <= self._most
        newest = None if self._reads_all else listed[-self._most :]
        self.view = read_log(self._storage, slots=newest, taken=self._taken, known=self.view.entries)
        if newest is not None and self.view.manifests:
            attempt = self.view.manifests[0].attempt
            its = {slot for slot in (attempt, attempt + 1) if slot < newest[0]}
            self.view = read_log(self._storage, slots=[*its, *newest], known=self.view.entries)
        for damage in self.view.damaged:
            self.report(damage)

    def look_further(self) -> bool:
        """Read more of the log; False where all of it was read."""
        if self._reads_all:
            return False
        self._most *= 8
        self.look()
        return True

    def has_grown(self) -> bool:
        """Return whether the log has grown since the last look: a new commit may have removed older checkpoints."""
        return any(slot > self.view.last for slot in list_slots(self._storage, taken=self._taken))

    def report(self, damage: Damage) -> None:
        """Report a damage, once."""
        if damage.path not in self.damaged:
            self.damaged[damage.path] = damage
            if self._speaker:
                warnings.warn(f"damage in the run: {damage}", DamageWarning, stacklevel=7)

    def whole(self, commits: Iterable[Manifest]) -> Iterator[Manifest]:
        """Yield those of ``commits`` that were not found damaged."""
        return (one for one in commits if slot_path(one.slot) not in self.damaged)

    def listing(self) -> str:
        """Return a line for each damage, for an error."""
        return "".join(f"\n  {one}" for one in self.damaged.values())


class Chooser(LogReader):
    """Chooses for one rank of ``world_size``; only the ``speaker`` warns. ``step``: roll back to that checkpoint, if
    the history does not descend from such a roll-back yet."""

    def __init__(
        self,
        storage: Storage,
        *,
        world_size: int,
        speaker: bool,
        step: int | None = None,
        objects: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(storage, step, speaker=speaker)
        self._goes_back_to = step
        self._objects = objects or {}
        self._world_size = world_size
        self._clock = clock

    # --- before the claim, and once more after it

    def choose(self) -> dict[str, str]:
        """Return the ``slot`` that is chosen (``none`` on a fresh start), the ``run``, which cuts in memory go on from
        there (an ``offer``, or nothing), the step of the roll-back that this ``obeys`` (or nothing), and whether the
        log is ``empty``."""
        self.look()
        obeys = self._obeys()
        chosen = self._chosen()
        offer = self._offer(chosen) if obeys is None else None
        return {
            "slot": "none" if chosen is None else str(chosen.slot),
            "run": self.view.run or uuid.uuid4().hex,
            "offer": "" if offer is None else offer.to_text(),
            "obeys": "" if obeys is None else str(obeys),
            "empty": "yes" if self.view.last < 0 else "",
        }

    def _obeys(self) -> int | None:
        """Return the step of the roll-back that is carried out; None if there is none, or if it was before."""
        step = self._goes_back_to
        return None if step is None or has_obeyed(self.view, step) else step

    def _chosen(self) -> Manifest | None:
        step = self._obeys()
        return self._newest() if step is None else self._rolled_back(step)

    def find_lost(self) -> dict[str, str]:
        """Return why newer entries of the log seem to be ``lost``, if something says so; after `choose`."""
        try:
            there = folders_there(self._storage)
        except StorageError:  # no reason to refuse a restore
            return {"lost": ""}
        return {"lost": lost_entries(history_of(self.view), there)}

    def report_lost(self, reason: str) -> None:
        """Report what `find_lost` found."""
        if reason:
            self.report(Damage(path=LOG, reason=reason))

    def _offer(self, chosen: Manifest | None) -> Offer | None:
        if chosen is not None and is_carried_over(self._storage, chosen):
            return None  # somebody carried the place of this checkpoint over: it is this one that is to be restored
        return where_it_goes_on(at_work(self.view), chosen)

    def _newest(self) -> Manifest | None:
        """Return the newest commit of the history that was not found damaged, or None on a fresh start."""
        commits = not_rolled_back(self.view)
        chosen = next(self.whole(commits), None)
        if chosen is not None and chosen is not commits[0]:  # retention has left something of others
            left = folders_there(self._storage)
            chosen = next((one for one in self.whole(commits) if one.save.folder in left), None)
        if chosen is None and self.look_further():
            return self._newest()
        if chosen is None and (commits or self.view.damaged):
            if self.has_grown():
                self.look()
                return self._newest()
            self.report_lost(self.find_lost()["lost"])
            raise CheckpointDamaged(
                f"no checkpoint of this run is whole, and starting anew would hide that:{self.listing()}\n"
                f"Mend the storage, or start a run at another place{self._behind_an_order(commits)}"
            )
        return chosen

    def _behind_an_order(self, commits: Sequence[Manifest]) -> str:
        """Return which checkpoints other than ``commits`` a roll-back hides that no commit has followed."""
        order = next((one for one in reversed(self.view.restores) if one.rolled_back_to is not None), None)
        slots = {one.slot for one in commits}
        every = self.whole(restorable(self._storage, before_orders(self.view))[::-1])
        steps = ", ".join(f"{one.step:,} (slot {one.slot})" for one in every if one.slot not in slots)
        if order is None or not steps:
            return ""
        return (
            f". The roll-back to step {order.rolled_back_to:,} in slot {order.slot} hides newer checkpoints: "
            f"step {steps}. To go on from one of these instead: lakeckpt rollback RUN --step K"
        )

    def _rolled_back(self, step: int) -> Manifest:
        """Return the checkpoint of ``step``, from which the history is to go on."""
        commits = list(self.whole(restorable(self._storage, self.view)))
        found = next((one for one in commits if one.step == step), None)
        if found is None:
            listing = self.listing()
            raise no_such_step(step, commits, f" Found damaged:{listing}" if listing else "")
        return found

    # --- the claim, and its end

    def claim(self, run: str, take_over: Callable[[Begin, Begin], object] | None = None) -> dict[str, str]:
        """Begin the attempt: from now on nobody else commits into the run, or removes anything of it. Returns the
        attempt's number, as ``begun``.

        ``take_over(begin, other)`` is called before the run is taken over from the ``other`` attempt, and may raise."""
        for _ in range(_MOST_SLOTS):
            slot, before = self.view.last + 1, self.view.begins
            begin = Begin(
                run=self.view.run or run,
                slot=slot,
                world_size=self._world_size,
                library=__version__,
                created_s=float(self._clock()),
                write_id=uuid.uuid4().hex,
                host=socket.gethostname(),
                pid=os.getpid(),
                facts=recorded(facts_of(self._objects), before[-1] if before else None, self._objects),
            )
            if before and take_over is not None:
                take_over(begin, before[-1])
            if slot:  # only the first attempt makes the place
                expect_folder(self._storage, LOG)
            self._taken = slot
            try:
                put_entry(self._storage, begin)
            except SlotTaken:
                self.look()
                if self._goes_back_to is not None:  # a commit may have been allowed to remove what is asked for
                    self._chosen()
                continue
            if before:
                say_changes(begin, before[-1], self._objects)
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
            skipped=dict(skipped),
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


def too_often_removed(storage: Storage) -> CheckpointNotFound:
    """Return the error for a reader that has tried `MOST_TRIES` times."""
    return CheckpointNotFound(
        f"{describe(storage)} removed each of {MOST_TRIES} checkpoints while it was read: keep more (keep=), or save "
        "less often"
    )


class Choice(LogReader):
    """Chooses which checkpoint is read beside a run that may remove it meanwhile. One process chooses and warns."""

    def __init__(self, storage: Storage, step: Step) -> None:
        super().__init__(storage, step)
        self.failed: tuple[int, list[str]] | None = None
        """The slot that was tried last, and why it could not be loaded."""

    def choose(self) -> dict[str, str]:
        """Return the ``slot`` of the checkpoint, by what the log says now."""
        self.look()
        self._judge_failed()
        while (chosen := self._first_whole()) is None:
            if not self.look_further():
                raise self._none_whole()
        return {"slot": str(chosen.slot)}

    def _history(self) -> list[Manifest]:
        """Return the checkpoints of the history, newest first."""
        return list(reversed(history_of(self.view).chain))

    def _kept(self) -> list[Manifest]:
        return never_removed(self.view, self._history())

    def _judge_failed(self) -> None:
        """Report the checkpoint that was tried last as damaged, if no commit was allowed to remove it."""
        kept = self._kept()
        if self.failed is not None and self.failed[0] in {one.slot for one in kept}:
            slot, reasons = self.failed
            self.report(Damage(path=slot_path(slot), reason=f"this checkpoint is not whole: {reasons[0]}"))
        elif self.failed is not None and type(self._step) is int:
            what = f"the checkpoint of step {self._step} (slot {self.failed[0]}) was removed by the run's rule (keep=)"
            raise self._not_there(what, kept)
        self.failed = None

    def _first_whole(self) -> Manifest | None:
        """Return the checkpoint that is tried next: the first that was not found damaged."""
        kept = self._kept()
        return next(self.whole(self._wanted(kept)), None) if kept else None

    def _wanted(self, kept: list[Manifest]) -> list[Manifest]:
        """Return the checkpoints that may be loaded, in the order in which they are tried. At least one."""
        if self._step is None:
            return kept
        if self._step == "best":
            rated = best_first(kept, (kept[0].keep or Keep()).best_is)
            if not rated:
                raise CheckpointNotFound(
                    f"no checkpoint that {describe(self._storage)} keeps has a metric: give one to manager.step() or "
                    "save(), and keep the best ones with keep=lakeckpt.Keep(best=1)"
                )
            return rated
        of_step = [one for one in self._history() if one.step == self._step]
        if not of_step:
            raise self._not_there(f"the history of the run has no checkpoint of step {self._step}", kept)
        return of_step

    def _not_there(self, what: str, kept: list[Manifest]) -> CheckpointNotFound:
        steps = ", ".join(map(str, sorted({one.step for one in kept})))
        return CheckpointNotFound(
            f"{describe(self._storage)}: {what}. The steps that can be loaded are {steps}; step=None loads the newest"
        )

    def _none_whole(self) -> CheckpointDamaged | CheckpointNotFound:
        if self.damaged:
            return CheckpointDamaged(
                f"{describe(self._storage)}: no checkpoint that could be loaded is whole:{self.listing()}\n"
                "Mend the storage, or load another step"
            )
        if self.view.run is None:
            return CheckpointNotFound(f"there is no run at {describe(self._storage)}: name the place of a run")
        return CheckpointNotFound(f"the run at {describe(self._storage)} has no checkpoint yet: load it after a save")

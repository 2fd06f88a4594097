"""This module reads the log of a run, and lists which checkpoints may be tried, in the order in which they are.

A checkpoint may be tried if it is of the history, and no commit was allowed to remove its data: the newest commit names
the slots whose data it kept. So the newest entries of the log are read, and others only if a checkpoint in an older
slot is tried. Which steps and metrics the kept checkpoints have stands in the register of the newest one.

A restore, a roll-back and `BesideRun`, which reads a run that goes on, use one `RunLog`. It writes nothing, reports
each damage once, and starts no threads that outlive a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Literal

from lakeckpt.checkpoint.consumed.steps_used import exclusions_of_steps
from lakeckpt.checkpoint.format.manifest import Exclusion, Manifest
from lakeckpt.checkpoint.format.register import KeptCheckpoint, best_first
from lakeckpt.checkpoint.format.verified_reads import fetch_register
from lakeckpt.checkpoint.persist.history import history_of, must_stay, newest_slot, not_rolled_back
from lakeckpt.checkpoint.persist.log import Damage, LogView, list_slots, read_log, slot_path
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, DamageWarning
from lakeckpt.lake.storage.base import Storage, describe

__all__ = ["BesideRun", "RunLog", "Step", "before_orders", "exclusions_of", "newest_checkpoint", "no_such_step"]

Step = int | Literal["best"] | None
_FIRST_ENTRIES = 16
"""So many of the newest entries of the log are read at first."""
_MOST_TRIES = 16
"""A reader gives up after so many checkpoints that the run removed while they were read."""


class RunLog:
    """The log of the run at ``storage``. Only the ``speaker`` warns of damage. ``reads_all``: `look` reads the log to
    its beginning."""

    def __init__(self, storage: Storage, *, speaker: bool = True, reads_all: bool = False) -> None:
        self._storage = storage
        self._speaker = speaker
        self._most = 10**10 if reads_all else _FIRST_ENTRIES
        self._reads_all = reads_all
        self.view = LogView(entries={}, damaged=(), last=-1)
        self.damaged: dict[str, Damage] = {}
        """What was found damaged, by path."""
        self.taken = -1
        """The last slot that a put of ours has found taken, or has taken."""

    def look(self) -> None:
        """Read the log, and report damaged entries.

        An attempt begins in the slot that is its number, and says in the next one what it restored. So these two
        entries of the newest commit's attempt are read, too, if newer commits have left them behind.
        """
        listed = list_slots(self._storage, taken=self.taken)
        self._reads_all = len(listed) <= self._most
        newest = None if self._reads_all else listed[-self._most :]
        self.view = read_log(self._storage, slots=newest, taken=self.taken, known=self.view.entries)
        if newest is not None and self.view.manifests:
            attempt = self.view.manifests[0].attempt
            its = {slot for slot in (attempt, attempt + 1) if slot < newest[0]}
            self.view = read_log(self._storage, slots=[*its, *newest], known=self.view.entries)
        for damage in self.view.damaged:
            self.report(damage)

    def look_further(self) -> bool:
        """Read more of the log; False if all of it was read."""
        if self._reads_all:
            return False
        self._most *= 8
        self.look()
        return True

    def has_grown(self) -> bool:
        """Return whether the log has grown since the last look: a new commit may have removed older checkpoints."""
        return any(slot > self.view.last for slot in list_slots(self._storage, taken=self.taken))

    def report(self, damage: Damage) -> None:
        """Report a damage, once."""
        if damage.path not in self.damaged:
            self.damaged[damage.path] = damage
            if self._speaker:
                warnings.warn(f"damage in the run: {damage}", DamageWarning, stacklevel=7)

    def listing(self) -> str:
        """Return a line for each damage, for an error."""
        return "".join(f"\n  {one}" for one in self.damaged.values())

    # --- what may be tried

    def tip(self, view: LogView | None = None) -> Manifest | None:
        """Return the newest commit of the history that can be read; None if there is none in what was read."""
        return next(iter(not_rolled_back(self.view if view is None else view)), None)

    def slots(self, view: LogView | None = None) -> set[int]:
        """Return the slots of the history whose data no commit was allowed to remove."""
        view = self.view if view is None else view
        tip = self.tip(view)
        return set() if tip is None else must_stay(tip, view.manifests)

    def kept(self, view: LogView | None = None) -> list[KeptCheckpoint]:
        """Return the checkpoints of the history whose data no commit was allowed to remove, newest first."""
        view = self.view if view is None else view
        tip, slots = self.tip(view), self.slots(view)
        if tip is None:
            return []
        try:
            return [one for one in reversed(fetch_register(self._storage, tip).kept) if one.slot in slots]
        except CheckpointDamaged:  # the entries of the log say the same, one by one
            every = (self.manifest(slot) for slot in sorted(slots, reverse=True))
            return [
                KeptCheckpoint(slot=one.slot, attempt=one.attempt, step=one.step, number=one.number, metric=one.metric)
                for one in every
                if one is not None
            ]

    def candidates(self, step: Step = None, view: LogView | None = None) -> Iterator[Manifest]:
        """Yield the checkpoints that may be tried, in that order, without those that were found damaged: all of them,
        the newest first; those of a ``step``; or those with a metric, the best first."""
        tip = self.tip(view)
        if tip is None:
            return
        if step is None:
            slots: Iterable[int] = sorted(self.slots(view), reverse=True)
        elif step == "best":
            slots = [one.slot for one in best_first(self.kept(view), tip.keep.best_is)]
        else:
            slots = [one.slot for one in self.kept(view) if one.step == step]
        for slot in slots:
            if slot_path(slot) not in self.damaged and (found := self.manifest(slot)) is not None:
                yield found

    def manifest(self, slot: int) -> Manifest | None:
        """Return the commit in ``slot``; None if it cannot be read."""
        if slot not in self.view.entries:
            read = read_log(self._storage, slots=[slot])
            for damage in read.damaged:
                self.report(damage)
            self.view = LogView(
                entries={**self.view.entries, **read.entries}, damaged=self.view.damaged, last=self.view.last
            )
        entry = self.view.entries.get(slot)
        return entry if isinstance(entry, Manifest) else None


class BesideRun(RunLog):
    """Chooses which checkpoint is read beside a run that may remove it meanwhile. One process chooses and warns.
    ``step``: see `RunLog.candidates`."""

    def __init__(self, storage: Storage, step: Step) -> None:
        super().__init__(storage)
        self._step = step
        self._tries = 0
        self.failed: tuple[int, str] | None = None
        """The slot that was tried last, and why it could not be read."""

    def choose(self) -> dict[str, str]:
        """Return the ``slot`` of the checkpoint, by what the log says now. Raises `CheckpointNotFound` and
        `CheckpointDamaged`."""
        if self._tries == _MOST_TRIES:
            raise CheckpointNotFound(
                f"{describe(self._storage)} removed each of {_MOST_TRIES} checkpoints while it was read: keep more "
                "(keep=), or save less often"
            )
        self._tries += 1
        self.look()
        self._judge_failed()
        while (chosen := next(self.candidates(self._step), None)) is None:
            if self.tip() is not None or not self.look_further():
                raise self._none_whole()
        return {"slot": str(chosen.slot)}

    def tip(self, view: LogView | None = None) -> Manifest | None:
        """Return the newest checkpoint of the history: the one that the newest attempt restored, if it has committed
        nothing since."""
        slot = newest_slot(self.view if view is None else view)
        return None if slot is None else self.manifest(slot)

    def _judge_failed(self) -> None:
        """Report the checkpoint that was tried last as damaged, if no commit was allowed to remove it."""
        if self.failed is not None and self.failed[0] in self.slots():
            slot, reason = self.failed
            self.report(Damage(path=slot_path(slot), reason=f"this checkpoint is not whole: {reason}"))

    def _none_whole(self) -> CheckpointDamaged | CheckpointNotFound:
        place, kept = describe(self._storage), self.kept()
        if kept and self._step == "best" and not best_first(kept, "lowest"):
            return CheckpointNotFound(
                f"no checkpoint that {place} keeps has a metric: give one to manager.step() or save(), and keep the "
                "best ones with keep=lakeckpt.Keep(best=1)"
            )
        if kept and type(self._step) is int and all(one.step != self._step for one in kept):
            steps = ", ".join(map(str, sorted({one.step for one in kept})))
            return CheckpointNotFound(
                f"{place}: the history of the run has no checkpoint of step {self._step} that its rule (keep=) keeps. "
                f"The steps that can be loaded are {steps}; step=None loads the newest"
            )
        if self.damaged:
            return CheckpointDamaged(
                f"{place}: no checkpoint that could be loaded is whole:{self.listing()}\n"
                "Mend the storage, or load another step"
            )
        if self.view.run is None:
            return CheckpointNotFound(f"there is no run at {place}: name the place of a run")
        return CheckpointNotFound(f"the run at {place} has no checkpoint yet: load it after a save")


def newest_checkpoint(storage: Storage) -> Manifest | None:
    """Return the newest commit of the history of a run that can be read, or None. `NewerFormat` if a newer lakeckpt
    wrote into the log."""
    log = RunLog(storage, speaker=False)
    log.look()
    while (found := log.tip()) is None and log.look_further():
        pass
    return found


def before_orders(view: LogView) -> LogView:
    """Return the log up to its newest commit. No commit has followed the roll-backs behind it, so no data has been
    removed since: a new roll-back may name any checkpoint that was there before them."""
    return view.until(view.manifests[0].slot) if view.manifests else view


def exclusions_of(view: LogView, goes_back_to: Manifest, steps: tuple[int, int]) -> tuple[Exclusion, ...]:
    """Return what excludes the batches of ``steps`` from a checkpoint on, in the history of the newest commit. ``view``
    is the whole log. Raises what `exclusions_of_steps` does."""
    return exclusions_of_steps(history_of(view, tip=view.manifests[0].slot).chain, goes_back_to, steps)


def no_such_step(step: int, kept: Iterable[KeptCheckpoint], more: str = "") -> CheckpointNotFound:
    """Return the error for a roll-back to a ``step`` that none of ``kept``, newest first, has."""
    steps = ", ".join(f"{one.step:,} (slot {one.slot})" for one in reversed(list(kept))) or "none"
    return CheckpointNotFound(
        f"the run cannot be rolled back to step {step:,}: its history has no checkpoint of that step that stays. "
        f"Checkpoints that can be restored: {steps}. Name one of these steps; keep= says which checkpoints stay.{more}"
    )

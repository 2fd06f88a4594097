"""This module chooses a checkpoint from the log of a run, and takes the run over: what rank 0 does with the log.

`Chooser` serves a restore. `Chooser.choose` reads the log and writes nothing: it returns the newest commit of the
history that was not found damaged, or the one that a roll-back asks for. `Chooser.claim` begins the attempt, after
which nobody else commits or removes anything. `Chooser.restored` records at the end what was restored. A run whose
attempt dies between the two goes on as if that attempt had never begun. All ranks have a chooser, so that all report
the same damage; only rank 0 asks it to choose.

The module starts no threads that outlive a call.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lakeckpt.checkpoint.consumed.exclusions import exclusions_from_text, exclusions_to_text
from lakeckpt.checkpoint.format.manifest import Begin, Exclusion, Manifest, Restored
from lakeckpt.checkpoint.persist.commit import superseded
from lakeckpt.checkpoint.persist.history import at_work, exclusions_in, has_obeyed
from lakeckpt.checkpoint.persist.log import LOG, SlotTaken, put_entry, signed, slot_path
from lakeckpt.checkpoint.restore.changes import facts_of, recorded, say_changes
from lakeckpt.checkpoint.restore.from_memory import Offer, where_it_goes_on
from lakeckpt.checkpoint.restore.run_log import RunLog, before_orders, exclusions_of, no_such_step
from lakeckpt.errors import AttemptSuperseded, CheckpointDamaged, DamageWarning, StorageError
from lakeckpt.lake.storage.base import Storage, clear_leftovers, expect_folder
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.faults import Fault

__all__ = ["Chooser"]

_MOST_SLOTS = 100
_UNFIT = (
    "the cut of step {} that attempt {} left in memory is not restored, though nothing of it is damaged: {}. An older "
    "cut or a checkpoint is taken if one fits"
)


class Chooser(RunLog):
    """Chooses for one rank of ``world_size``; only the ``speaker`` warns. ``step``: roll back to that checkpoint, if
    the history does not descend from such a roll-back yet; without the batches of ``exclude_steps`` (A, B)."""

    def __init__(
        self,
        storage: Storage,
        *,
        world_size: int,
        speaker: bool,
        step: int | None = None,
        exclude_steps: tuple[int, int] | None = None,
        objects: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(storage, speaker=speaker, reads_all=step is not None)
        self._goes_back_to, self._exclude_steps = step, exclude_steps
        self._of_steps: tuple[Exclusion, ...] = ()
        self.exclusions: tuple[Exclusion, ...] | None = None
        """What leaves the deal, if that is not what the log has: what a verdict adds to that, or withdraws. Rank 0."""
        self._objects = objects or {}
        self._world_size = world_size
        self._clock = clock
        self.go_back: int | None = None
        """Choose the newest checkpoint before this optimizer step, if there is one, and no cut in memory
        (`lakeckpt.recovery.progress`). An order to roll back is carried out all the same."""
        self.reached = 0
        """The optimizer step at which the newest attempt died; 0 if that is not known."""

    # --- before the claim, and once more after it

    def choose(self) -> dict[str, str]:
        """Return the ``slot`` that is chosen (``none`` on a fresh start), the ``run``, which cuts in memory go on from
        there (an ``offer``, or nothing), the step of the roll-back that this ``obeys`` (or nothing), what leaves the
        deal (``exclusions``), and whether the log is ``empty``."""
        self.look()
        obeys = self._obeys()
        chosen = self._chosen()
        passes_over = self.go_back is not None and chosen is not None  # without a checkpoint, memory is all there is
        offer = self._offer(chosen) if obeys is None and not passes_over else None
        return {
            "slot": "none" if chosen is None else str(chosen.slot),
            "run": self.view.run or uuid.uuid4().hex,
            "offer": "" if offer is None else offer.to_text(),
            "obeys": "" if obeys is None else str(obeys),
            "exclusions": exclusions_to_text(self._exclusions(None if obeys is None else chosen)),
            "empty": "yes" if self.view.last < 0 else "",
        }

    def _obeys(self) -> int | None:
        """Return the step of the roll-back that is carried out; None if there is none, or if it was before."""
        step = self._goes_back_to
        return None if step is None or has_obeyed(self.view, step, self._exclude_steps) else step

    def _exclusions(self, goes_back_to: Manifest | None) -> tuple[Exclusion, ...]:
        """Return what leaves the deal. A roll-back to a checkpoint begins anew with what it names."""
        if goes_back_to is None:
            return exclusions_in(self.view) if self.exclusions is None else self.exclusions
        if self._exclude_steps is not None and not self._of_steps:
            self._of_steps = exclusions_of(self.view, goes_back_to, self._exclude_steps)
        return self._of_steps

    def _chosen(self) -> Manifest | None:
        step = self._obeys()
        return self._newest() if step is None else self._rolled_back(step)

    def _offer(self, chosen: Manifest | None) -> Offer | None:
        return where_it_goes_on(at_work(self.view), chosen)

    def _newest(self) -> Manifest | None:
        """Return the newest commit of the history that was not found damaged, or None on a fresh start."""
        chosen = next(self.candidates(), None)
        if chosen is not None:
            return self._older(chosen)
        if chosen is None and self.look_further():
            return self._newest()
        if chosen is None and (self.slots() or self.view.damaged):
            if self.has_grown():
                self.look()
                return self._newest()
            raise CheckpointDamaged(
                f"no checkpoint of this run is whole, and starting anew would hide that:{self.listing()}\n"
                f"Mend the storage, or start a run at another place{self._behind_an_order()}"
            )
        return chosen

    def _older(self, newest: Manifest) -> Manifest:
        """Return the commit to go back to instead of the ``newest`` one, if deaths ask for that; or the one from which
        the last attempt went on, if that attempt has come past the newest."""
        if self.go_back is not None:
            return next((one for one in self.candidates() if one.step < (self.go_back or 0)), newest)
        work = at_work(self.view)
        if work is not None and work.restored in self.slots() and work.attempt != newest.attempt:
            older = self.manifest(work.restored)
            if older is not None and slot_path(older.slot) not in self.damaged and self.reached > newest.step:
                return older
        return newest

    def _behind_an_order(self) -> str:
        """Return which checkpoints a roll-back hides that no commit has followed."""
        order = next((one for one in reversed(self.view.restores) if one.rolled_back_to is not None), None)
        hidden = [one for one in reversed(self.kept(before_orders(self.view))) if one.slot not in self.slots()]
        steps = ", ".join(
            f"{one.step:,} (slot {one.slot})" for one in hidden if slot_path(one.slot) not in self.damaged
        )
        if order is None or not steps:
            return ""
        return (
            f". The roll-back to step {order.rolled_back_to:,} in slot {order.slot} hides newer checkpoints: "
            f"step {steps}. To go on from one of these instead: lakeckpt rollback RUN --step K"
        )

    def _rolled_back(self, step: int) -> Manifest:
        """Return the checkpoint of ``step``, from which the history is to go on."""
        found = next(self.candidates(step), None)
        if found is None:
            listing = self.listing()
            whole = [one for one in self.kept() if slot_path(one.slot) not in self.damaged]
            raise no_such_step(step, whole, f" Found damaged:{listing}" if listing else "")
        return found

    # --- the claim, and its end

    def claim(
        self, run: str, take_over: Callable[[Begin, Begin], object] | None = None, restarts: int = 0
    ) -> dict[str, str]:
        """Begin the attempt: from now on nobody else commits into the run, or removes anything of it. Returns the
        attempt's number, as ``begun``. ``restarts``: as in `Begin`.

        ``take_over(begin, other)`` is called before the run is taken over from the ``other`` attempt, and may raise."""
        for _ in range(_MOST_SLOTS):
            slot, before = self.view.last + 1, self.view.begins
            begin = Begin(
                run=self.view.run or run,
                slot=slot,
                world_size=self._world_size,
                restarts=restarts,
                **signed(self._clock),
                facts=recorded(facts_of(self._objects), before[-1] if before else None, self._objects),
            )
            if before and take_over is not None:
                take_over(begin, before[-1])
            if slot:  # only the first attempt makes the place
                expect_folder(self._storage, LOG)
            self.taken = slot
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
        self,
        choice: Mapping[str, str],
        begun: int,
        skipped: Mapping[str, int],
        captured: CutId | None,
        faults: tuple[Fault, ...] = (),
    ) -> dict[str, str]:
        """Record in the log what the attempt ``begun`` has restored by the ``choice`` of `choose`; return the slot that
        the attempt has reached, as ``last``. The first attempt of a run records nothing.

        ``skipped``: reader → the epoch of which it skips the rest. ``faults``: as in `Restored`."""
        if begun == 0:
            return {"last": "0"}
        entry = Restored(
            run=choice["run"],
            slot=begun + 1,
            attempt=begun,
            restored=None if choice["slot"] == "none" else int(choice["slot"]),
            **signed(self._clock),
            skipped=dict(skipped),
            captured=captured,
            rolled_back_to=int(choice["obeys"]) if choice["obeys"] else None,
            faults=faults,
            exclude_steps=self._exclude_steps if choice["obeys"] else None,
            exclusions=exclusions_from_text(choice["exclusions"]),
        )
        try:
            put_entry(self._storage, entry)
        except SlotTaken as taken:
            raise AttemptSuperseded(superseded(begun, taken)) from None
        return {"last": str(entry.slot)}

    # --- reports

    def pass_over(self, captured: CutId, reasons: Iterable[str]) -> None:
        """Warn of a cut in memory that is not damaged, and cannot be restored."""
        for reason in reasons if self._speaker else ():
            warnings.warn(_UNFIT.format(captured.step, captured.attempt, reason), DamageWarning, stacklevel=6)

"""Which checkpoint does a run go on from, and whose attempt is it?  What rank 0 does of a restore, with the log.

The newest commit that was not found damaged is chosen. Then the attempt begins, in the slot right after the last one
that was seen; where another job has taken that, it is looked anew. What is damaged is told once. All ranks have one,
for the telling; only rank 0 asks it to choose and to begin.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping

from lakeckpt import __version__
from lakeckpt.checkpoint.log import Damage, LogView, SlotTaken, list_slots, put_entry, read_log
from lakeckpt.checkpoint.manifest import Begin, Captured, Manifest
from lakeckpt.checkpoint.parts import OBJECT_NAME, PARTS
from lakeckpt.checkpoint.remap import has_remapped
from lakeckpt.checkpoint.remembered import Offer, where_it_goes_on
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.errors import AttemptSuperseded, CheckpointDamaged, StorageError
from lakeckpt.lake.storage import Storage, clear_leftovers

__all__ = ["Chooser"]

_MOST_ENTRIES = 4096
_MOST_SLOTS = 100
_UNFIT = (
    "the cut of step {} that attempt {} left in memory is not restored, though nothing of it is damaged; a checkpoint "
    "is taken if one fits: {}"
)


class Chooser:
    """Chooses for one rank of ``world_size``; only the ``speaker`` warns."""

    def __init__(
        self, storage: Storage, *, world_size: int, speaker: bool, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._world_size = world_size
        self._speaker = speaker
        self._clock = clock
        self._damaged: dict[str, Damage] = {}
        self._rejected: set[int] = set()
        self._taken = -1  # the last slot that a put of ours has found taken
        self._view = LogView(entries={}, damaged=(), last=-1)

    @property
    def damaged(self) -> tuple[Damage, ...]:
        """What was found damaged."""
        return tuple(self._damaged.values())

    def reject(self, slot: int) -> None:
        """The checkpoint in ``slot`` is not chosen again."""
        self._rejected.add(slot)

    def choose(self, *, fence: bool) -> dict[str, str]:
        """The slot that is chosen (``none`` on a fresh start), the last one that is taken, the run, and which cuts in
        memory go on from there (an `Offer`, or nothing). ``fence``: begin an attempt first, so that no other job
        commits any more."""
        chosen = self._look()
        run = self._view.run or uuid.uuid4().hex
        last = self._view.last
        if fence:  # another job commits faster than we can verify: shut it out first, then look again
            last = self._fence(run, chosen)
            chosen = self._look()
        offer = None if fence else self._offer(chosen)
        return {
            "slot": "none" if chosen is None else str(chosen.slot),
            "last": str(last),
            "run": run,
            "offer": "" if offer is None else offer.to_text(),
        }

    def _offer(self, chosen: Manifest | None) -> Offer | None:
        if chosen is not None and has_remapped(self._storage, chosen):
            return None  # somebody carried the place of this checkpoint over: it is this one that is to be restored
        begins = self._view.begins
        return where_it_goes_on(begins[-1] if begins else None, chosen)

    def _look(self) -> Manifest | None:
        """Read the log; the newest commit that was not found damaged, or None on a fresh start."""
        listed = list_slots(self._storage, taken=self._taken)
        newest = None if len(listed) <= _MOST_ENTRIES else listed[-_MOST_ENTRIES:]
        self._view = read_log(self._storage, slots=newest, taken=self._taken)
        for damage in self._view.damaged:
            self.report(damage)
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
        for slot in range(last + 1, last + 1 + _MOST_SLOTS):
            try:
                put_entry(self._storage, self._entry(run, slot, None if chosen is None else chosen.slot, {}))
            except SlotTaken:
                self._taken = slot
                continue
            return slot
        raise AttemptSuperseded(f"other jobs took {_MOST_SLOTS} slots of the log in a row: stop them first")

    def begin(
        self, told: Mapping[str, str], given_up: Mapping[str, int], captured: Captured | None = None
    ) -> dict[str, str]:
        """Begin the attempt that goes on from what `choose` has ``told``; ``begun`` is its slot, or ``no``."""
        slot = int(told["last"]) + 1
        restored = None if told["slot"] == "none" else int(told["slot"])
        try:
            put_entry(self._storage, self._entry(told["run"], slot, restored, given_up, captured))
        except SlotTaken:
            self._taken = slot
            return {"begun": "no"}
        with contextlib.suppress(StorageError):  # what dead writers left is in nobody's way
            clear_leftovers(self._storage, uploads=OBJECT_NAME)
        return {"begun": str(slot)}

    def _entry(
        self,
        run: str,
        slot: int,
        restored: int | None,
        given_up: Mapping[str, int],
        captured: Captured | None = None,
    ) -> Begin:
        return Begin(
            run=run,
            slot=slot,
            restored=restored,
            world_size=self._world_size,
            library=__version__,
            created_s=float(self._clock()),
            write_id=uuid.uuid4().hex,
            given_up=dict(given_up),
            captured=captured,
        )

    def pass_over(self, captured: Captured, reasons: Iterable[str]) -> None:
        """Tell of a cut in memory that is not damaged, and cannot be restored."""
        for reason in reasons if self._speaker else ():
            warnings.warn(_UNFIT.format(captured.step, captured.attempt, reason), DamageWarning, stacklevel=6)

    def report(self, damage: Damage) -> None:
        """Tell of a damage, once."""
        if damage.path not in self._damaged:
            self._damaged[damage.path] = damage
            if self._speaker:
                warnings.warn(f"damage in the run: {damage}", DamageWarning, stacklevel=6)

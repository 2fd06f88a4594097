"""This module rolls a run back: one log entry says that its history goes on from an earlier checkpoint.

The next restore obeys the entry, once, and later commits make up the history. A job that is alive finds its next slot
taken, and ends. The module removes no data: retention removes what was rolled back, with the next save.

The module never imports torch, and starts no threads that outlive a call.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence

from lakeckpt import __version__
from lakeckpt.checkpoint.format.manifest import Manifest, Restored
from lakeckpt.checkpoint.persist.history import folders_there, kept_ever_since, not_rolled_back
from lakeckpt.checkpoint.persist.log import LogView, SlotTaken, put_entry, read_log
from lakeckpt.errors import AttemptSuperseded, CheckpointNotFound
from lakeckpt.lake.storage.base import Storage, describe

__all__ = ["before_orders", "never_removed", "no_such_step", "restorable", "roll_back"]

_MOST_TRIES = 100


def never_removed(view: LogView, history: Sequence[Manifest]) -> list[Manifest]:
    """Return the checkpoints of ``history``, which are given newest first, whose data no commit in the log was allowed
    to remove."""
    commits = sorted(view.manifests, key=lambda one: one.slot)
    stay = {one.slot for one in history[:1]}
    stay |= {slot for newest in stay for slot in kept_ever_since(commits, newest)}
    return [one for one in history if one.slot in stay]


def restorable(storage: Storage, view: LogView) -> list[Manifest]:
    """Return the checkpoints of the history whose data is there and no commit in the log was allowed to remove, newest
    first. The data of others may be removed by a job that is alive."""
    found = never_removed(view, not_rolled_back(view))
    there = folders_there(storage) if found else ()
    return [one for one in found if one.save.folder in there]


def before_orders(view: LogView) -> LogView:
    """Return the log up to its newest commit. An order that no commit has followed has removed nothing yet, so the next
    order may replace it: by one to a checkpoint behind the first, where the checkpoint that it names is damaged."""
    return view.until(view.manifests[0].slot) if view.manifests else view


def no_such_step(step: int, commits: Sequence[Manifest], more: str = "") -> CheckpointNotFound:
    """Return the error for a roll-back to a ``step`` that none of ``commits``, which can be restored, has."""
    steps = ", ".join(f"{one.step:,} (slot {one.slot})" for one in reversed(commits)) or "none"
    return CheckpointNotFound(
        f"the run cannot be rolled back to step {step:,}: its history has no checkpoint of that step that stays. "
        f"Checkpoints that can be restored: {steps}. Name one of these steps; keep= says which checkpoints stay.{more}"
    )


def roll_back(storage: Storage, step: int, *, clock: Callable[[], float] = time.time) -> Manifest:
    """Order that the history of the run at ``storage`` goes on from its newest checkpoint of ``step``; returns that.

    Writes one entry into the log: a job that is alive is superseded by it, and ends at its next save. Raises
    `CheckpointNotFound`, and `AttemptSuperseded` where other jobs keep writing.
    """
    for _ in range(_MOST_TRIES):
        view = read_log(storage)
        if view.run is None:
            raise CheckpointNotFound(f"there is no run at {describe(storage)}: it has no log. Name the place of a run")
        commits = restorable(storage, before_orders(view))
        found = next((one for one in commits if one.step == step), None)
        if found is None:
            raise no_such_step(step, commits)
        order = Restored(
            run=view.run,
            slot=view.last + 1,
            attempt=None,
            restored=found.slot,
            library=__version__,
            created_s=float(clock()),
            write_id=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            rolled_back_to=step,
        )
        with contextlib.suppress(SlotTaken):
            put_entry(storage, order)
            return found
    raise AttemptSuperseded(f"other jobs took {_MOST_TRIES} slots of the log in a row: stop them first")

"""This module rolls a run back: one log entry says that its history goes on from an earlier checkpoint.

The next restore obeys the entry, once, and later commits make up the history. A job that is alive finds its next slot
taken, and ends. The module removes no data: retention removes what was rolled back, with the next save.

The module never imports torch, and starts no threads that outlive a call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from lakeckpt.checkpoint.consumed.steps_used import check_steps
from lakeckpt.checkpoint.format.manifest import Exclusion, Manifest, Restored
from lakeckpt.checkpoint.persist.log import SlotTaken, put_entry, signed
from lakeckpt.checkpoint.restore.run_log import RunLog, before_orders, exclusions_of, no_such_step
from lakeckpt.errors import AttemptSuperseded, CheckpointNotFound
from lakeckpt.lake.storage.base import Storage, describe

__all__ = ["roll_back"]

_MOST_TRIES = 100


def roll_back(
    storage: Storage,
    step: int,
    *,
    exclude_steps: tuple[int, int] | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[Manifest, tuple[Exclusion, ...]]:
    """Order that the history of the run at ``storage`` goes on from its newest checkpoint of ``step``, without the
    batches that the optimizer steps ``exclude_steps`` (A, B), half-open, have used. Returns the checkpoint, and what
    is excluded.

    Writes one entry into the log: a job that is alive is superseded by it, and ends at its next save. Raises
    `CheckpointNotFound`, `ConfigError` for steps that do not come after ``step``, what
    `lakeckpt.checkpoint.consumed.steps_used.exclusions_of_steps` raises, and `AttemptSuperseded` if other jobs keep
    writing.
    """
    steps = None if exclude_steps is None else check_steps(step, exclude_steps)
    log = RunLog(storage, reads_all=steps is not None)
    for _ in range(_MOST_TRIES):
        log.look()
        while not log.view.manifests and log.look_further():
            pass
        if log.view.run is None:
            raise CheckpointNotFound(f"there is no run at {describe(storage)}: it has no log. Name the place of a run")
        view = before_orders(log.view)
        found = next(log.candidates(step, view), None)
        if found is None or not storage.list(found.save.register_path):
            raise no_such_step(step, [one for one in log.kept(view) if storage.list(one.save.register_path)])
        exclusions = () if steps is None else exclusions_of(log.view, found, steps)
        order = Restored(
            run=log.view.run,
            slot=log.view.last + 1,
            attempt=None,
            restored=found.slot,
            **signed(clock),
            rolled_back_to=step,
            exclude_steps=steps,
            exclusions=exclusions,
        )
        with contextlib.suppress(SlotTaken):
            put_entry(storage, order)
            return found, exclusions
    raise AttemptSuperseded(f"other jobs took {_MOST_TRIES} slots of the log in a row: stop them first")

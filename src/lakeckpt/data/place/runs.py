"""This module keeps the runs of a loader: stretches of unbroken progress since the last checkpoint.

A run is what was delivered of one epoch (or one endless stream) between two states, without a gap. Where a state was
loaded, or an epoch was begun again, another run begins, so the ledger records both. A checkpoint *marks* the place up
to which it recorded them, and everything before the mark is forgotten.

A receipt is of the run that dealt its micro-batch. The module reads no rows, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import EPOCH_NUMBERS, Receipt
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import ConfigError, StateUnavailable

__all__ = ["Run", "Runs"]


@dataclass(eq=False)
class Run:
    """Unbroken progress through one epoch (or one endless stream)."""

    start: ReaderState
    end: ReaderState
    ended_without_step: bool = False
    """True where an epoch ended without a step, and no other state shows that: the ledger must have the run."""

    @property
    def is_recorded(self) -> bool:
        """True where the ledger must have the run."""
        return self.ended_without_step or self.start.step != self.end.step

    def has(self, receipt: Receipt) -> bool:
        """Return whether the batch of ``receipt`` was delivered in this run, or just before its start (a mark)."""
        segment = self.end.segment
        if (self.end.epoch, segment.world_size) != (receipt.epoch, receipt.world_size) or receipt.step < segment.step:
            return False
        if not self.start.step <= receipt.step + 1 <= self.end.step:
            return False
        return self._plan.assignment(receipt.step, receipt.rank).receipt == receipt

    def numbered(self, number: int, rank: int) -> Receipt | None:
        """Return the receipt of ``rank`` with this `Receipt.number`; None where it was not delivered in this run."""
        endless = self.end.identity.endless
        epoch, step = (0, number) if endless else divmod(number, EPOCH_NUMBERS)
        if epoch != self.end.epoch or not self.end.segment.step <= step < self.end.step or step < self.start.step - 1:
            return None
        return self._plan.assignment(step, rank).receipt

    def after(self, receipt: Receipt) -> ReaderState:
        """Return the state of all up to ``receipt``, which was delivered in this run."""
        return self.end.moved(step=receipt.step + 1)

    def cut(self, state: ReaderState) -> Run:
        """Return the run that begins and ends at ``state``, to which this one has come."""
        return Run(start=state, end=state)

    @cached_property
    def _plan(self) -> Plan:
        """The plan of the whole run, which is of one segment. It is made when a receipt is first looked up."""
        return Plan(self.end)


class Runs:
    """The runs since the mark, of one ``kind``. The last one goes on."""

    def __init__(self, kind: type[Run] = Run, runs: Sequence[Run] = ()) -> None:
        self._kind, self._runs = kind, list(runs)

    def copy(self) -> Runs:
        """Return the same runs; what changes the copy does not change these."""
        return Runs(self._kind, [replace(run) for run in self._runs])

    # --- what is asked

    @property
    def last(self) -> Any:
        """The run that goes on."""
        return self._runs[-1]

    @property
    def tables(self) -> set[str]:
        """The digests of the tables that the runs are of."""
        return {run.end.identity.table for run in self._runs}

    def at(self, receipt: Receipt) -> ReaderState:
        """Return the state of all up to ``receipt``; StateUnavailable where it is of none of the runs."""
        return self._run_of(receipt).after(receipt)

    def numbered(self, number: int, rank: int) -> Receipt:
        """Return the receipt of ``rank`` with this `Receipt.number`; StateUnavailable where no run has it."""
        for run in reversed(self._runs):
            found = run.numbered(number, rank)
            if found is not None:
                return found
        raise StateUnavailable(
            f"number {number} is not of a batch that this loader has delivered since the last checkpoint, or since "
            "restore(): pass what the loader's receipt_column held in the batch that the step used"
        )

    def stretches(self, receipt: Receipt | None) -> list[tuple[ReaderState, ReaderState]]:
        """Return (from, to) of each run since the mark, up to ``receipt`` (None: all)."""
        runs = self._runs
        if receipt is not None:
            last = self._run_of(receipt)
            runs = [*runs[: runs.index(last)], self._kind(start=last.start, end=last.after(receipt))]
        return [(run.start, run.end) for run in runs if run.is_recorded]

    # --- what changes them

    def begin(self, state: ReaderState) -> None:
        """Begin a run at ``state``, in place of a run before it that the ledger need not have."""
        if self._runs and not self._runs[-1].is_recorded:
            self._runs.pop()
        self._runs.append(self._kind(start=state, end=state))

    def reach(self, state: ReaderState) -> None:
        """Note that the last run has come to ``state``."""
        self._runs[-1].end = state

    def finish(self, *, moves: bool) -> None:
        """Note that the loop saw the end of the epoch. ``moves``: the next epoch may be of another table version."""
        for run in self._runs[-1:]:
            begin = run.start
            is_needed = moves if begin.base is None else begin.identity.rows > 0
            run.ended_without_step = is_needed and begin == run.end and begin.step == 0

    def mark(self, receipt: Receipt | None) -> None:
        """Forget what was consumed up to ``receipt`` (None: all)."""
        if receipt is None:
            self._runs = [run.cut(run.end) for run in self._runs[-1:]]
            return
        run = self._run_of(receipt)
        run.start = run.after(receipt)
        self._runs = self._runs[self._runs.index(run) :]

    def _run_of(self, receipt: Receipt) -> Run:
        if not isinstance(receipt, Receipt):
            raise ConfigError(f"this is the receipt of a batch (batch.receipt), or None, got {receipt!r}")
        for run in reversed(self._runs):
            if run.has(receipt):
                return run
        raise StateUnavailable(
            f"epoch {receipt.epoch}, step {receipt.step}, micro-batch {receipt.micro_batch} is not among what this "
            "loader has delivered since the last checkpoint, or since restore(): pass the receipt of a batch that the "
            "loop received since then, and begin to iterate after restore()"
        )

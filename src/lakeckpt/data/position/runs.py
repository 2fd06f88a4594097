"""This module keeps the runs of a loader: stretches of unbroken progress since the last checkpoint.

A run is what was delivered of one epoch (or one endless stream) between two states, without a gap. If a state was
loaded, or an epoch was begun again, another run begins, so the ledger records both. A checkpoint *marks* the place up
to which it recorded them, and everything before the mark is forgotten.

A receipt is of the run that dealt its micro-batch. The state moves by what the loop received: in lockstep by steps;
else by the moves of lanes that receipts name. Before the first batch it is that of the whole job; afterwards, if there
are several ranks and consumption depends on the data, it is the part of this rank. The module reads no rows, and starts
no threads.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lakeckpt.cached import cached_property
from lakeckpt.core.changes import moved, part_of
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import EPOCH_NUMBERS
from lakeckpt.core.state import Frontier, State
from lakeckpt.core.streams.mixed_batches import AnyReceipt
from lakeckpt.core.streams.mixture import MixedPlan, plan_of
from lakeckpt.errors import ConfigError, StateUnavailable

__all__ = ["Run", "Runs"]

_RECENT = 4096
"""Receipts that are kept of a run if consumption depends on the data: no state can be had as of an older one."""


@dataclass(eq=False)
class Run:
    """Unbroken progress through one epoch (or one endless stream)."""

    start: State
    end: State
    """Its end; of a state that is a part, the part of this rank."""
    ended_without_step: bool = False
    """True if an epoch ended without a step, and no other state shows that: the ledger must have the run."""
    receipts: deque[AnyReceipt] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """The receipts delivered last, the one before the start included, if consumption depends on the data. Steps follow
    one another."""
    delivered: State | None = None
    """The state of all that was delivered, if the end of the epoch came after it; else ``end`` is that."""

    @property
    def is_recorded(self) -> bool:
        """True if the ledger must have the run."""
        return self.ended_without_step or self.start.step != self.end.step

    def receipt(self, step: int, rank: int) -> AnyReceipt | None:
        """Return the receipt of ``rank`` in ``step``; None if it was delivered neither in this run nor just before its
        start (a mark)."""
        if not max(self.end.segment.step, self.start.step - 1) <= step < self.end.step:
            return None
        if self.end.held is None:
            return self._plan.assignment(step, rank).receipt
        at = step - self.receipts[0].step if self.receipts else -1
        return self.receipts[at] if 0 <= at < len(self.receipts) else None

    def has(self, receipt: AnyReceipt) -> bool:
        """Return whether the batch of ``receipt`` was delivered in this run, or just before its start (a mark)."""
        if (self.end.epoch, self.end.segment.world_size) != (receipt.epoch, receipt.world_size):
            return False
        return self.receipt(receipt.step, receipt.rank) == receipt

    def numbered(self, number: int, rank: int) -> AnyReceipt | None:
        """Return the receipt of ``rank`` with this `Receipt.number`; None if it was not delivered in this run."""
        epoch, step = (0, number) if self.end.is_endless else divmod(number, EPOCH_NUMBERS)
        return self.receipt(step, rank) if epoch == self.end.epoch else None

    def after(self, receipt: AnyReceipt) -> State:
        """Return the state of all up to ``receipt``, which was delivered in this run: what came later is undone."""
        frontiers: dict[Any, Frontier] = {}
        for one in reversed(self.receipts):
            if one.step == receipt.step:
                break
            frontiers |= {move.key: move.before for move in reversed(one.moves)}
        return moved(self.delivered or self.end, step=receipt.step + 1, frontiers=frontiers)

    def cut(self, state: State) -> None:
        """Let the run begin at ``state``, to which it has come. Receipts from before it are forgotten."""
        self.start = state
        while self.receipts and self.receipts[0].step + 1 < state.step:
            self.receipts.popleft()

    @cached_property
    def _plan(self) -> Plan | MixedPlan:
        """The plan of the whole run, which is of one segment. It is made when a receipt is first looked up."""
        return plan_of(self.end)


class Runs:
    """The runs since the mark, and the state at the end of the last one, which goes on."""

    def __init__(self) -> None:
        self._every: list[Run] = []
        self._state: State | None = None
        self.reached = 0
        """The steps that were delivered. `state` makes a state of it: one for each micro-batch would be felt."""
        self._moved: dict[Any, Frontier] = {}
        """Lane (of a mixture, source and lane) → the frontier delivered, which ``_state`` does not have yet."""
        self.origin: State | None = None
        """The state of the whole job that the last run began with; None: nothing is read."""

    def copy(self) -> Runs:
        """Return the same runs; what changes the copy does not change these."""
        found = copy.copy(self)
        found._every = [replace(run, receipts=run.receipts.copy()) for run in self._every]
        found._moved = dict(self._moved)
        return found

    # --- what is asked

    @property
    def state(self) -> State | None:
        """The state of all that was delivered; None if there is no place to go on from. The last run ends there."""
        self._settle()
        return self._state

    def _settle(self) -> None:
        """Move the current state, and the end of the last run, to all that was delivered."""
        state = self._state
        if state is not None and state.step != self.reached:
            frontiers, self._moved = self._moved, {}
            self._reach(moved(state, step=self.reached, frontiers=frontiers))

    def glance(self) -> State | None:
        """Return the state of all that was delivered, and change nothing, for another thread. Frontiers that are held
        may be older."""
        state, reached = self._state, self.reached
        return state if state is None or state.step == reached else state.moved(step=reached)

    @property
    def _runs(self) -> list[Run]:
        """The runs, the last of which ends with the current state."""
        self._settle()
        return self._every

    @property
    def last(self) -> Run:
        """The run that goes on."""
        return self._runs[-1]

    @property
    def tables(self) -> set[str]:
        """The digests of the tables that the runs are of."""
        return {one.table for run in self._runs for one in run.end.orders}

    def at(self, receipt: AnyReceipt) -> State:
        """Return the state of all up to ``receipt``; StateUnavailable if it is of none of the runs."""
        return self._run_of(receipt).after(receipt)

    def numbered(self, number: int, rank: int) -> AnyReceipt:
        """Return the receipt of ``rank`` with this `Receipt.number`; StateUnavailable if no run has it."""
        for run in reversed(self._runs):
            found = run.numbered(number, rank)
            if found is not None:
                return found
        raise StateUnavailable(
            f"number {number} is not of a batch that this loader has delivered since the last checkpoint, or since "
            "restore(): pass what the loader's receipt_column held in the batch that the step used"
        )

    def stretches(self, receipt: AnyReceipt | None) -> list[tuple[State, State]]:
        """Return (from, to) of each run since the mark, up to ``receipt`` (None: all)."""
        runs = self._runs
        if receipt is not None:
            last = self._run_of(receipt)
            runs = [*runs[: runs.index(last)], Run(start=last.start, end=last.after(receipt))]
        return [(run.start, run.end) for run in runs if run.is_recorded]

    # --- what changes them

    def begin(self, state: State) -> None:
        """Go on from ``state``: begin a run there, in place of a run before it that the ledger need not have."""
        self.leave()
        self._begin(state)
        self.origin, self.reached = state, state.step

    def _begin(self, state: State) -> None:
        if self._every and not self._every[-1].is_recorded:
            self._every.pop()
        self._every.append(Run(start=state, end=state))
        self._state = state

    def add(self, done: Sequence[tuple[State, State]]) -> None:
        """Note that what lies between each pair of states was delivered elsewhere, and go on from the current state."""
        here = self.state
        assert here is not None
        for begin, end in done:
            self.begin(begin)
            self._reach(end)
            self.reached = end.step
        self.begin(here)

    def leave(self) -> None:
        """Leave the place: there is none to go on from until the next run begins."""
        self._settle()  # the last run ends where the place was
        self._state = self.origin = None

    def advance(self, receipt: AnyReceipt) -> None:
        """Note that the loop got what ``receipt`` is of."""
        assert self.reached == receipt.step, f"{receipt} was delivered at step {self.reached}"
        assert self._state is not None
        if self._state.held is not None:
            if receipt.world_size > 1 and self._state.is_whole:  # lanes of other ranks move elsewhere from now on
                self._begin(part_of(self._state, receipt.rank))
            self._moved |= {move.key: move.after for move in receipt.moves}
            self._every[-1].receipts.append(receipt)
        self.reached = receipt.step + 1

    def finish(self, steps: int | None, *, moves: bool) -> None:
        """Note that the loop saw the end of the epoch, which has ``steps`` steps in lockstep. ``moves``: the next epoch
        may be of another table version."""
        if self.origin is not None and self.origin.held is not None:
            self._finish_lanes(self.origin)
            return
        self.reached = self.reached if steps is None else steps
        state = self.state
        if state is not None:
            begin = self.last.start
            is_needed = begin.identity.rows > 0 if begin.bases else moves
            self.last.ended_without_step = is_needed and begin == state and begin.step == 0

    def _finish_lanes(self, origin: State) -> None:
        """Note that the positions that are left yield nothing."""
        state, sizes = self.state, Plan(origin).sizes
        assert state is not None and sizes is not None
        self._reach(moved(state, step=state.step, frontiers={lane: (sizes[lane], 0) for lane in state.frontiers}))
        # Lanes move here on some ranks only, and all ranks must record the same stretches.
        self.last.delivered, self.last.ended_without_step = state, True

    def _reach(self, state: State) -> None:
        self._state = self._every[-1].end = state

    def mark(self, receipt: AnyReceipt | None) -> None:
        """Forget what was consumed up to ``receipt`` (None: all)."""
        if receipt is None:
            self._every = [Run(start=run.end, end=run.end, receipts=run.receipts) for run in self._runs[-1:]]
            for run in self._every:
                run.cut(run.end)
            return
        run = self._run_of(receipt)
        run.cut(run.after(receipt))
        self._every = self._every[self._every.index(run) :]

    def _run_of(self, receipt: AnyReceipt) -> Run:
        if not isinstance(receipt, AnyReceipt):
            raise ConfigError(f"this is the receipt of a batch (batch.receipt), or None, got {receipt!r}")
        for run in reversed(self._runs):
            if run.has(receipt):
                return run
        raise StateUnavailable(
            f"epoch {receipt.epoch}, step {receipt.step}, micro-batch {receipt.micro_batch} is not among what this "
            "loader has delivered since the last checkpoint, or since restore(): pass the receipt of a batch that the "
            "loop received since then, and begin to iterate after restore()"
        )

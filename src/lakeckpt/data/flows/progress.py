"""This module keeps the place of one process in a flow.

A `FlowProgress` is a `lakeckpt.data.place.progress.Progress` whose state is a `FlowState`: the place moves by what the
receipts of delivered batches say. Before the first batch the state is that of the whole job; afterwards, where there
are several ranks, it is the part of this rank. The module reads no rows, asks no other process, and starts no threads.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from lakeckpt.core.flows.plan import FlowPlan, Frontier, flow_start, frontiers_of, moved, part_of, replan_flow
from lakeckpt.core.flows.receipts import FlowReceipt
from lakeckpt.core.flows.state import FlowState, Maker
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.place.identity import Pinned, differing
from lakeckpt.data.place.progress import Progress
from lakeckpt.data.place.runs import Run, Runs
from lakeckpt.errors import StateError, StateUnavailable

__all__ = ["FlowProgress", "FlowRun"]

_RECENT = 4096
"""Receipts that are kept of a run: as of an older one, no state can be had."""


@dataclass(eq=False)
class FlowRun(Run):
    """Unbroken progress through one epoch of a flow; ``end`` is the part of this rank once a batch was delivered."""

    start: Any
    end: Any
    receipts: deque[FlowReceipt] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """The receipts delivered last, one before the start included."""

    delivered: Any = None
    """The state of all that was delivered, where the end of the epoch came after it; else ``end`` is that."""

    def has(self, receipt: Receipt) -> bool:
        """See `Run.has`."""
        at = receipt.step - self.receipts[0].step if self.receipts else 0  # steps follow one another
        found = tuple(itertools.islice(self.receipts, max(0, at), max(0, at + 1)))
        return receipt in found and receipt.step + 1 >= self.start.step

    def numbered(self, number: int, rank: int) -> Receipt | None:
        """See `Run.numbered`."""
        return next((one for one in reversed(self.receipts) if one.number == number and self.has(one)), None)

    def after(self, receipt: Receipt) -> Any:
        """See `Run.after`: what was delivered later is undone."""
        frontiers: dict[int, Frontier] = {}
        for one in reversed(self.receipts):
            if one.step == receipt.step:
                break
            frontiers |= {move.lane: move.before for move in reversed(one.moves)}
        return moved(self.delivered or self.end, step=receipt.step + 1, frontiers=frontiers)

    def cut(self, state: Any) -> FlowRun:
        """See `Run.cut`."""
        return FlowRun(start=state, end=state, receipts=self.receipts.copy())


class FlowProgress(Progress):
    """The place of one rank in a flow, which ``source`` reads."""

    _state: Any

    def __init__(
        self,
        identity: Pinned,
        source: FlowSource,
        *,
        batch_size: int,
        num_lanes: int | None,
        accept_changes: Collection[str],
    ) -> None:
        super().__init__(
            identity, batch_size=batch_size, num_lanes=num_lanes, row_wise=False, accept_changes=accept_changes
        )
        self._source = source
        self._made: tuple[str, Maker] | None = None
        """The table version and the row selection of which the fingerprint is, and what makes items there."""
        self._begun = Runs(FlowRun)
        self._origin: FlowState | None = None
        """The state of the whole job that this segment began with, or that was loaded."""
        self._moved: dict[int, Frontier] = {}
        """Lane → the frontier that was delivered, and that ``_state`` does not have yet."""
        self._steps: int | None = None

    # --- what is asked

    @property
    def maker(self) -> Maker:
        """What makes items. A few rows are read for the fingerprint of what has no serialised form, once."""
        identity = self.identity
        rows = f"{identity.table} {identity.selection}"
        if self._made is None or self._made[0] != rows:
            maker = self._source.maker
            found = maker.fingerprint or self._source.fingerprint(identity)
            self._made = rows, replace(maker, fingerprint=found)
        return self._made[1]

    @property
    def steps(self) -> int | None:
        """None: how many steps the epoch has is known at its end."""
        return None

    @property
    def at_start(self) -> bool:
        """True where nothing of the epoch at hand has been delivered."""
        state = self._now()
        return state is None or self.over or state.is_start

    @property
    def origin(self) -> FlowState:
        """The state of the whole job that all ranks went on from last; `settle` first."""
        assert self._origin is not None
        return self._origin

    @property
    def flow_state(self) -> FlowState:
        """The state of all that was delivered; `settle` first."""
        found = self.state
        assert isinstance(found, FlowState)
        return found

    def goes_on_elsewhere(self, state: Any) -> bool:
        """Never: a flow stays at the version of its table."""
        return False

    def read(self, plain: object) -> Any:
        """Return the state of which `FlowState.to_plain` made ``plain``. Raises StateError where it is none."""
        return FlowState.from_plain(plain)

    # --- what changes the place

    def load(self, state: Any, *, ahead: int = 0) -> None:
        """Go on from ``state``, of the whole job; StateMismatch, without a change, if it belongs to another flow."""
        if not state.is_whole:
            raise StateError(
                f"this is the part of the ranks {state.ranks} of {state.segment.world_size}: lakeckpt.merge_states "
                "joins the states of all ranks, and every rank loads the result"
            )
        differences = differing(self.identity, state.identity, kept=self._kept)
        same_rows = (self.identity.table, self.identity.selection) == (state.identity.table, state.identity.selection)
        made = self.maker.differences(state.maker, same_rows=same_rows)
        if made and not self.maker.name:  # the packing of whole documents is a part of their selection
            differences = [line for line in differences if not line.startswith("selection:")]
        self.check_accepted([*made, *differences])
        self.last_receipt = None
        self._iteration += 1
        self._set(replace(state, identity=self.identity, maker=self.maker))
        self._settled = None

    def delivered(self, receipt: Receipt) -> None:
        """Note that the loop got what ``receipt`` is of."""
        assert isinstance(receipt, FlowReceipt)
        if receipt.world_size > 1 and self._state.is_whole:
            self._restrict(receipt.rank)
        super().delivered(receipt)
        self._moved |= {move.lane: move.after for move in receipt.moves}
        self._begun.last.receipts.append(receipt)

    def turn(self, rank: int, *, loaded: bool = False) -> None:
        """Do nothing: a rank alone does not know whether the epoch is over."""

    def ends_at(self, steps: int) -> None:
        """Note that the epoch has ``steps`` steps, on all ranks."""
        self._steps = steps

    def end(self, step: int) -> None:
        """Note that the iteration ended before ``step``. Raises StateUnavailable where there is more of the epoch."""
        if step != self._steps:
            raise StateUnavailable(
                f"the iterator over epoch {self.epoch} was closed and ended before step {step}: go on with a new "
                "iterator, iter(loader)"
            )
        self.finish()

    def finish(self) -> None:
        """Note that the loop saw the end of the epoch: the positions that are left yield nothing."""
        state, sizes = self._now(), FlowPlan(self.origin).sizes
        assert state is not None and sizes is not None
        ends = {lane: (sizes[lane], 0) for lane in frontiers_of(state)}
        self._reach(moved(state, step=state.step, frontiers=ends))
        self._leave(moves=False)
        run = self._begun.last
        # Lanes move here on some ranks only, and all ranks must record the same stretches.
        run.delivered, run.ended_without_step = state, True

    # --- inside

    def _restrict(self, rank: int) -> None:
        """Keep the lanes of ``rank`` alone: the others move elsewhere from now on."""
        self._state = part_of(self._state, rank)
        self._begun.begin(self._state)

    def _now(self) -> Any:
        if self._state is not None and self._state.step != self._reached:
            moves, self._moved = self._moved, {}
            self._reach(moved(self._state, step=self._reached, frontiers=moves))
        return self._state

    def _reach(self, state: Any) -> None:
        self._state = state
        self._begun.reach(state)

    def _set(self, state: Any) -> None:
        self._now()
        super()._set(state)
        self._origin, self._steps = state, None

    def _begin(self, epoch: int, **topology: Any) -> Any:
        return flow_start(self.identity, self.maker, epoch=epoch, **topology)

    def _go_on(self, state: Any, **topology: Any) -> Any:
        return replan_flow(state, **topology)

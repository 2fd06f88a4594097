"""How are cuts saved without training waiting?  Captured into the arena beside training, persisted by the agent.

capture (this process, beside training) → stage (the arena) → persist and commit (the agent). At every cut that falls
due a capture begins; where a save falls due, too, the agent is told as soon as the capture is complete, and what came
of it is heard at a later cut. All ranks do this alike, and none talks to another: but for the first save, when they
settle whether all of them have an arena at all. Where one has not, all save as without one.

Called by the training thread alone. Its threads are those of the capture engine and of the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.link import AgentLike
from lakeckpt.checkpoint.agent.orders import Order, Outcome
from lakeckpt.checkpoint.agreement import everyone
from lakeckpt.checkpoint.attempt import Attempt
from lakeckpt.checkpoint.capturing.engine import CaptureEngine
from lakeckpt.checkpoint.cuts import Journal, ReaderTrack
from lakeckpt.checkpoint.digests import short_digest
from lakeckpt.checkpoint.indexes import documents_of
from lakeckpt.checkpoint.journal import Leg, legs_to_bytes
from lakeckpt.checkpoint.keep import checked_metric
from lakeckpt.checkpoint.report import CheckpointInfo, Remarks
from lakeckpt.checkpoint.waiting import Waiter
from lakeckpt.errors import (
    ArenaError,
    CheckpointError,
    CheckpointIncomplete,
    LakeckptError,
    MissingRanksError,
    SaveFailed,
    StateError,
    TrackingError,
    error_of,
)
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.merge import is_part
from lakeckpt.wire.codec import dumps

__all__ = ["Background", "Saved"]

_NOTHING_SPARE_S = 0.01
_PATIENCE = 3
"""How many saves in a row may be left out, with nothing under way, before that is a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What came of a save: what was committed, or why nothing was."""

    step: int
    info: CheckpointInfo | None
    error: LakeckptError | None
    took_s: float
    remarks: Remarks = field(default_factory=Remarks)
    """On the commit."""


class Background:
    """Captures cuts with ``engine`` and has them persisted by ``agent``, for one attempt."""

    def __init__(
        self,
        engine: CaptureEngine,
        agent: AgentLike,
        generations: Generations,
        exchange: Exchange,
        attempt: Attempt,
        *,
        tracks: Mapping[str, ReaderTrack],
        journal: Journal,
        waiter: Waiter,
        timeout_s: float,
    ) -> None:
        self.attempt = attempt
        self._engine = engine
        self._agent = agent
        self._generations = generations
        self._exchange = exchange
        self._tracks = tracks
        self._journal = journal
        self._waiter = waiter
        self._timeout_s = timeout_s
        self._ready: dict[tuple[int, int], Order] = {}  # to be given when its capture is complete
        self._given: dict[tuple[int, int], Order] = {}
        self._held: dict[tuple[int, int], ExitStack] = {}
        self._saved: list[Saved] = []
        self._told: set[str] = set()
        self._captured: int | None = None  # the last cut of which a capture began, if it was not handed over
        self._settled = False
        self._no_arena: ArenaError | None = None
        self._has_told = False  # that there is none any more
        self._missed = 0  # saves in a row without a capture, with nothing under way that would explain it

    # --- cuts

    def cut(self, step: int) -> None:
        """Begin to capture the cut of ``step``, if that can be done now.

        `SaveFailed` where there is no arena any more: once, until there is one again.
        """
        failure: SaveFailed | None = None
        if self._no_arena is None:
            try:
                if self._capture(step, self._journal.legs(step), must=False):
                    self._has_told = False
                    if documents := self._new_documents():  # this cut may be a last will
                        self._agent.keep(documents)
                        self._told |= documents.keys()
            except ArenaError as error:
                if not self._settled:
                    self._no_arena = error
                elif not self._has_told:
                    self._has_told, failure = True, _no_arena_any_more(step, error)
        self._give()
        if failure is not None:
            raise failure

    def save(self, step: int, metric: Any, *, patient: bool) -> bool:
        """Capture the cut of ``step``, which is as good as ``metric`` (`held_metric`), and have it persisted. False
        where some rank has no arena: nothing was begun, and nothing will be; the first call settles that with all
        ranks.

        ``patient``: wait where all memory of the arena is still being persisted, instead of giving this save up.
        Whatever is raised here, the agents of all ranks give the save up together.
        """
        failure: Exception | None = None
        captured, legs, good = False, self._journal.legs(step), None
        try:
            if self._ready:  # an order of this very step, perhaps: all ranks give it before they give the next one
                self._engine.wait()
                self._give()
            good = checked_metric(metric)
            captured = self._no_arena is None and (
                self._has_captured(step) or self._capture(step, legs, must=True, patient=patient)
            )
        except ArenaError as error:
            failure = _no_arena_any_more(step, error)
            self._no_arena = None if self._settled else error
        except Exception as error:
            failure = error
        if not self._settled and not self._all_have_arenas():
            return False
        self._missed = 0 if captured or failure or self._given else self._missed + 1
        if self._missed and not self._missed % _PATIENCE:
            failure = SaveFailed(
                f"step {step} was not captured, nor were the {self._missed - 1} saves before it: no memory of the "
                "arena was to spare, though nothing is being persisted. `lakeckpt doctor` lists what lies in memory"
            )
        self._journal.handed_over(legs, step)
        self._captured = None
        documents = self._new_documents()
        self._told |= documents.keys()
        order = Order(step=step, number=self.attempt.saves, metric=good, documents=documents)
        self.attempt.saves += 1
        if captured:
            self._ready[step, order.number] = order
            self._give()
        else:
            self._give()  # in the order of saves, on all ranks
            self._give_now(order)  # so that the agents of all ranks hear that this one has not got it
        if failure is not None:
            raise failure
        return True

    def _all_have_arenas(self) -> bool:
        facts = {} if self._no_arena is None else {"no arena": str(self._no_arena)}
        try:
            without = everyone(self._exchange, facts).facts.get("no arena")
        except MissingRanksError as error:
            raise CheckpointIncomplete(f"whether all ranks have an arena is not known: {error}") from error
        if without:
            self._no_arena = self._no_arena or ArenaError("; ".join(sorted(without)))
            return False
        self._settled = True
        return True

    @property
    def problem(self) -> str:
        """Why there is no arena."""
        return str(self._no_arena)

    def _has_captured(self, step: int) -> bool:
        """Whether the cut of ``step`` was captured as it was called, and nothing was handed over since."""
        return self._captured == step and self._engine.wait() == step

    def _capture(self, step: int, legs: Mapping[str, tuple[Leg, ...]], *, must: bool, patient: bool = False) -> bool:
        states = {name: dict(one[-1].record.state) for name, one in legs.items()}
        agreed = {name: None if is_part(state) else state for name, state in states.items()}
        digest = short_digest(b"%d of %d" % (step, self.attempt.number), dumps(agreed, kind="value", version=(1, 0)))
        readers = {name: legs_to_bytes(one) for name, one in legs.items()}
        deadline_s = self._waiter.now() + self._timeout_s
        while True:
            if must:
                self._engine.wait()  # what is complete then makes room
            # Of several ranks, nobody knows what the others have complete.
            common = self._engine.completed if self._exchange.world_size == 1 else None
            attempt = str(self.attempt.number)
            if self._engine.cut(step, attempt=attempt, cut=digest, readers=readers, common=common, must=must):
                self._captured = step
                return True
            if not patient or not self._given or self._waiter.now() > deadline_s:
                return False
            self._agent.wait(_NOTHING_SPARE_S)
            self._hear()

    def _new_documents(self) -> dict[str, bytes]:
        if self._exchange.rank:
            return {}
        every = {path: one for track in self._tracks.values() for path, one in documents_of(track.reader).items()}
        return {path: one.dumps() for path, one in every.items() if path not in self._told}

    # --- orders

    def _give(self) -> None:
        """Give the orders whose captures are complete, and those whose captures were given up."""
        completed = self._engine.completed
        for step, number in sorted(self._ready):
            if completed is not None and step <= completed:
                self._give_now(self._ready.pop((step, number)))

    def _give_now(self, order: Order) -> None:
        self._given[order.step, order.number] = order
        self._hold(order)
        self._agent.order(order)

    def _hold(self, order: Order) -> None:
        """Keep the generation until it is persisted, if no other order is out: the agent may keep that one's where this
        does not, and captures need the others. Where it cannot be opened now, the agent alone keeps it."""
        if len(self._given) == 1:
            with ExitStack() as stack, suppress(ArenaError):
                stack.enter_context(self._generations.hold(order.step, str(self.attempt.number)))
                self._held[order.step, order.number] = stack.pop_all()

    def heard(self) -> list[Saved]:
        """What came of saves since the last call; never waits."""
        self._hear()
        found, self._saved = self._saved, []
        return found

    def _hear(self) -> None:
        self._give()
        for outcome in self._agent.outcomes():
            if self._given.pop((outcome.step, outcome.number), None) is None:
                continue
            if (held := self._held.pop((outcome.step, outcome.number), None)) is not None:
                held.close()
            saved = self._of(outcome)
            if saved.info is not None:
                self.attempt.last = self.attempt.parent = saved.info.slot
                self.attempt.recorded = outcome.step
                self._journal.committed(outcome.step)
            else:
                self._told.clear()  # documents may have been lost with it
            self._saved.append(saved)

    def _of(self, outcome: Outcome) -> Saved:
        info, error = None, None
        if outcome.slot is not None:
            info = CheckpointInfo(
                slot=outcome.slot,
                step=outcome.step,
                attempt=self.attempt.number,
                world_size=self._exchange.world_size,
                created_s=outcome.created_s,
            )
        else:
            error = error_of(outcome.kind, outcome.text, otherwise=SaveFailed)
            if isinstance(error, MissingRanksError):
                error = CheckpointIncomplete(outcome.text)
            elif not isinstance(error, (CheckpointError, TrackingError, StateError)):
                error = SaveFailed(outcome.text)
        remarks = Remarks() if info is None else Remarks(lost=outcome.lost, unpruned=outcome.text)
        return Saved(step=outcome.step, info=info, error=error, took_s=outcome.took_s, remarks=remarks)

    def wait(self) -> None:
        """Return when something came of every save, or raise `CheckpointIncomplete` where the agent is silent."""
        with suppress(ArenaError):  # a save has said so, or the next one will
            self._engine.wait()
        self._give()
        for order in [self._ready.pop(one) for one in sorted(self._ready)]:
            self._give_now(order)  # its capture was given up
        deadline_s = self._waiter.now() + 4 * self._timeout_s  # the agent reports what takes longer
        self._hear()
        while self._given:
            if self._waiter.now() > deadline_s:
                steps = sorted(step for step, _ in self._given)
                raise CheckpointIncomplete(f"nothing was heard of the saves of the steps {steps} for a long time")
            self._agent.wait(self._timeout_s)
            self._hear()

    def close(self, *, well: bool) -> None:
        """Let go. ``well``: what was saved is persisted, and the arenas are removed; else the agent does the last will
        of a trainer that died."""
        with suppress(CheckpointError, ArenaError):
            if well:
                self._engine.wait()
                self._give()
        for held in self._held.values():
            held.close()
        self._generations.close()
        self._engine.close()
        self._agent.close(well=well)


def _no_arena_any_more(step: int, error: ArenaError) -> SaveFailed:
    failure = SaveFailed(
        f"step {step} was not captured: {error}. A job that is started where arenas do not fit saves synchronously"
    )
    failure.__cause__ = error
    return failure

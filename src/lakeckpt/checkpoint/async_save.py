"""How are cuts saved without training waiting?  Captured into the arena beside training, persisted by the agent.

capture (this process, beside training) → stage (the arena) → persist and commit (the agent). At every cut that falls
due a capture begins; where a save falls due, too, the agent is told as soon as the capture is complete, and what came
of it is heard at a later cut. All ranks do this alike, and none talks to another: but for the first save, when they
settle whether all of them have an arena at all. Where one has not, all save as without one.

A rank whose save fails tells the other ranks why: its order says so to its agent, which tells the other agents through
storage; and a note in the exchange says so to the other trainers, which hand it to their agents. So does a rank that
stops by an exception, of the saves in which it takes no part any more.

Called by the training thread alone. Its threads are those of the capture engine and of the agent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.link import AgentLike
from lakeckpt.checkpoint.agent.orders import AGENT_LOST, GivenUp, Order, Outcome
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.consumed.pending import pending_to_bytes
from lakeckpt.checkpoint.consumed.tracks import Journal, Pending, ReaderTrack
from lakeckpt.checkpoint.failures import error_said, failure_noted, leave_note, leave_word, said_of, word_left
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.keep import checked_metric
from lakeckpt.checkpoint.persist.agreement import everyone
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.indexes import documents_of
from lakeckpt.checkpoint.report import CaptureWarning, CheckpointInfo, Remarks
from lakeckpt.errors import (
    AgentError,
    ArenaError,
    LakeckptError,
    MissingRanksError,
    SaveFailed,
    SaveSkipped,
    UnannouncedChange,
)
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import SystemWaiter, Waiter
from lakeckpt.wire.envelope import dumps

__all__ = ["Background", "Saved"]

_NOTHING_SPARE_S = 0.01
_LISTEN_S = 0.5
"""How often a trainer looks whether another rank has given up a save that is under way."""
_ROUNDS = 8
"""How often the others can look before rank 0 ends whose last save failed: they may be a step and a save behind."""
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
        self._told_here: set[tuple[int, int]] = set()  # saves whose failure this rank has raised already
        self._passed_on: set[tuple[int, int]] = set()  # saves that another rank gave up, as the agent knows
        self._listens_s = float("-inf")  # when to look for such saves again
        self._missed = 0  # saves in a row without a capture, with nothing under way that would explain it

    # --- cuts

    def cut(self, step: int) -> None:
        """Begin to capture the cut of ``step``, if that can be done now.

        Raises what goes wrong on this rank. `SaveFailed` where there is no arena any more: once, until there is one
        again. The other ranks hear of it at the next save, if it is still wrong then, or this rank has stopped.
        """
        failure: SaveFailed | None = None
        self._give()  # what failed of a save is told with its order
        if self._no_arena is None:
            try:
                if self._capture(step, self._journal.pending(step), must=False):
                    self._has_told = False
                    if documents := self._new_documents():  # this cut may be that of a final save
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
        pending: Pending = {}
        documents: dict[str, bytes] = {}
        captured, good = False, None
        try:
            if self._ready:  # an order of this very step, perhaps: all ranks give it before they give the next one
                self._engine.finish()
                self._give()
            pending = self._journal.pending(step)
            documents = self._new_documents()
            good = checked_metric(metric)
            captured = self._no_arena is None and (
                self._has_captured(step) or self._capture(step, pending, must=True, patient=patient)
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
        if failure is None:
            try:
                self._journal.handed_over(pending, step)
            except Exception as error:
                failure = error
        self._captured = None
        self._told |= documents.keys()
        order = Order(
            step=step,
            number=self.attempt.saves,
            metric=good,
            documents=documents,
            failure="" if failure is None else said_of(failure),
        )
        self.attempt.saves += 1
        if captured and failure is None:
            self._ready[step, order.number] = order
            self._give()
            return True
        if failure is not None:
            self._told_here.add((step, order.number))
            self._note(order, failure)
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
            if (stopped := word_left(self._exchange, self.attempt.number)) is not None:
                raise stopped[1] from error
            raise SaveFailed(f"whether all ranks have an arena is not known: {error}") from error
        if without:
            self._no_arena = self._no_arena or ArenaError("; ".join(sorted(without)))
            return False
        self._settled = True
        return True

    def fence(self) -> None:
        """Return when the state may change. See `CaptureEngine.fence`."""
        self._engine.fence()

    @property
    def problem(self) -> str:
        """Why there is no arena."""
        return str(self._no_arena)

    def _has_captured(self, step: int) -> bool:
        """Whether the cut of ``step`` was captured as it was called, and nothing was handed over since."""
        return self._captured == step and self._engine.wait() == step

    def _capture(self, step: int, pending: Pending, *, must: bool, patient: bool = False) -> bool:
        states = {name: dict(one[-1].record.state) for name, one in pending.items()}
        digest = short_digest(b"%d of %d" % (step, self.attempt.number), dumps(states, kind="value", version=(1, 0)))
        readers = {name: pending_to_bytes(one) for name, one in pending.items()}
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
        for step, number in sorted(self._ready):
            completed = self._engine.completed
            over = completed is not None and step <= completed
            if over:
                self._give_now(self._ready.pop((step, number)))
                continue
            over, failure = self._engine.given_up(step)
            if over:
                said = "" if failure is None else said_of(failure)
                self._give_now(replace(self._ready.pop((step, number)), failure=said))

    def _give_now(self, order: Order) -> None:
        self._given[order.step, order.number] = order
        self._hold(order)
        try:
            self._agent.order(order)
        except AgentError as error:
            self._over(order.step, order.number, Saved(step=order.step, info=None, error=error, took_s=0.0))

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
        self._listen()
        try:
            outcomes = self._agent.outcomes()
        except AgentError as error:
            if not self._given:
                raise
            for step, number in list(self._given):
                self._over(step, number, Saved(step=step, info=None, error=error, took_s=0.0))
            return
        lost = ""
        for outcome in outcomes:
            if outcome.step == AGENT_LOST:
                self._told.clear()  # the next agent is to have these documents, too
                lost = outcome.text
            elif (outcome.step, outcome.number) in self._given:
                self._over(outcome.step, outcome.number, self._of(outcome))
        if lost:  # no save was pending, so that nothing is lost but a final save before the next agent begins
            warnings.warn(f"no save was lost, but {lost}", CaptureWarning, stacklevel=5)

    def _over(self, step: int, number: int, saved: Saved) -> None:
        """Something came of an order."""
        order = self._given.pop((step, number))
        if (held := self._held.pop((step, number), None)) is not None:
            held.close()
        self._passed_on.discard((step, number))
        if saved.info is not None:
            self.attempt.last = self.attempt.parent = saved.info.slot
            self.attempt.recorded = step
            self._journal.committed(step)
            self._saved.append(saved)
            return
        self._told.clear()  # documents may have been lost with it
        if (step, number) in self._told_here:
            self._told_here.remove((step, number))
            return
        assert saved.error is not None
        self._note(order, saved.error)
        self._saved.append(saved)

    def _note(self, order: Order, failure: Exception) -> None:
        """Tell the other trainers of a save that failed. One that is left out for another is none."""
        if self._exchange.world_size > 1 and not isinstance(failure, SaveSkipped):
            leave_note(self._exchange, self._save_of(order), self._exchange.rank, failure)

    def _listen(self, *, now: bool = False) -> None:
        """Hand to the agent which saves other ranks gave up: it stops waiting for them, and its outcome says why."""
        is_due = now or self._waiter.now() >= self._listens_s
        if self._exchange.world_size == 1 or not is_due or not (self._given or self._ready):
            return
        self._listens_s = self._waiter.now() + _LISTEN_S
        stopped = word_left(self._exchange, self.attempt.number)
        for order in [*self._given.values(), *self._ready.values()]:
            key = order.step, order.number
            if key in self._passed_on or key in self._told_here:
                continue
            failure = failure_noted(self._exchange, self._save_of(order))
            if failure is None and stopped is not None and order.number >= stopped[0]:
                failure = stopped[1]
            if failure is not None:
                self._passed_on.add(key)
                self._agent.order(GivenUp(step=order.step, number=order.number, failure=said_of(failure)))

    def _save_of(self, order: Order) -> SaveId:
        return SaveId(attempt=self.attempt.number, step=order.step, number=order.number)

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
            error = error_said(f"{outcome.kind}\n{outcome.text}")
        remarks = Remarks() if info is None else Remarks(lost=outcome.lost, unpruned=outcome.text)
        return Saved(step=outcome.step, info=info, error=error, took_s=outcome.took_s, remarks=remarks)

    def wait(self) -> None:
        """Return when something came of every save, or raise `SaveFailed` where the agent is silent."""
        self._engine.finish()
        self._give()
        for order in [self._ready.pop(one) for one in sorted(self._ready)]:
            self._give_now(order)  # its capture was given up, too long ago to say why
        deadline_s = self._waiter.now() + 4 * self._timeout_s  # the agent reports what takes longer
        self._hear()
        while self._given:
            if self._waiter.now() > deadline_s:
                steps = sorted(step for step, _ in self._given)
                raise SaveFailed(f"nothing was heard of the saves of the steps {steps} for a long time")
            self._agent.wait(self._timeout_s if self._exchange.world_size == 1 else _LISTEN_S)
            self._listen(now=True)
            self._hear()
        self._tell_captures(raises=True)

    def _tell_captures(self, *, raises: bool = False) -> None:
        """Warn of what else went wrong in captures that are over. ``raises``: an `UnannouncedChange` is raised."""
        try:
            self._engine.wait()
        except ArenaError:
            pass  # a save has said so, or the next one will
        except LakeckptError as error:
            if raises and isinstance(error, UnannouncedChange):
                raise
            text = f"rank {self._exchange.rank} has not captured all that it was to: {error}"
            warnings.warn(text, CaptureWarning, stacklevel=4)

    def is_saving(self, step: int) -> bool:
        """Whether a save of the cut of ``step`` is under way."""
        return any(step == one for one, _ in (*self._ready, *self._given))

    def stop(self, error: BaseException, *, at_exit: bool = False) -> None:
        """This rank stops for ``error``: the other ranks are not to wait for it in saves that it has not begun.

        ``at_exit``: the last save has failed. Where one that failed before it was a warning, the other ranks have to
        hear of two saves, one after the other."""
        if self._exchange.world_size > 1:
            first = min((number for _, number in self._ready), default=self.attempt.saves)
            leave_word(self._exchange, self.attempt.number, self._exchange.rank, error, first=first)
            if self._exchange.rank == 0:  # the store that has the word may end with this process
                SystemWaiter().wait((_ROUNDS if at_exit else 2) * _LISTEN_S)

    def close(self, *, well: bool) -> None:
        """Let go. ``well``: what was saved is persisted, and the arenas are removed; else the agent makes the final
        save of a trainer that died."""
        if well:
            self._engine.finish()
            self._give()
            self._tell_captures()
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

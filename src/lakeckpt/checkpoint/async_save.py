"""This module saves cuts without making training wait: captures go into the arena, and the agent persists them.

At every cut that falls due a capture begins, in this process, beside training. If a save falls due, too, the agent gets
an order as soon as the capture is complete; its outcome is read at a later cut. All ranks do this alike, and compare no
facts. A rank on which no arena fits raises an error at its first capture.

A rank whose save fails tells the other ranks why: its order says so to its agent, which tells the other agents through
storage, and an obstacle (`lakeckpt.tracking.obstacles`) says so to the other trainers, which pass all obstacles on to
their agents.

The training thread alone calls this module. Its threads are those of the capture engine and of the agent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.link import AgentLink
from lakeckpt.checkpoint.agent.orders import Order, TableDocuments
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.consumed.pending import pending_to_bytes
from lakeckpt.checkpoint.consumed.reports import shared_fields
from lakeckpt.checkpoint.consumed.tracks import Journal, Pending, ReaderTrack
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.keep import checked_metric
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.peers.alike import ShareFinder
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.indexes import Document, documents_of_all
from lakeckpt.checkpoint.report import Saved
from lakeckpt.core.state import depends_on_data
from lakeckpt.errors import (
    ArenaError,
    CaptureWarning,
    LakeckptError,
    ReplicasDiffer,
    SaveFailed,
    SaveSkipped,
    UnannouncedChange,
)
from lakeckpt.recovery.facts import CutId
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.notes import error_to_text, save_error
from lakeckpt.tracking.obstacles import Obstacle
from lakeckpt.tracking.waiting import SystemWaiter, Waiter
from lakeckpt.wire.envelope import dumps

__all__ = ["Background"]

_NOTHING_SPARE_S = 0.01
_LOOK_S = 0.5
"""How often a trainer looks for obstacles of the saves that are under way."""
_LOOKS = 8
"""Rank 0 hosts the store. After a failed last save it waits for this many looks of the other ranks, which may be one
step and one save behind, and then ends."""


@dataclass(slots=True)
class _Pending:
    """A save whose result is not known."""

    order: Order
    is_ordered: bool = False
    """The agent has the order; before, the capture is not complete."""
    lock: ExitStack = field(default_factory=ExitStack)
    """Keeps the generation in the arena."""
    was_raised: bool = False
    """This rank has raised its failure already."""


class Background:
    """Captures cuts with ``engine`` and has them persisted by ``agent``, for one attempt."""

    def __init__(
        self,
        engine: CaptureEngine,
        agent: AgentLink,
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
        self._pending: dict[int, _Pending] = {}  # by the number of the save
        self._results: list[Saved] = []
        self._sent: set[str] = set()  # documents of tables that the agent has
        self._captured: int | None = None  # the last cut of which a capture began, if no save has used it
        self._last: tuple[int, Pending] = (-1, {})  # the last cut that was to be captured: its step, what it recorded
        self._has_had_arena = False
        self._has_reported = False  # that there is no arena any more
        self._passed_on: set[Obstacle] = set()  # to the agent
        self._next_look_s = float("-inf")
        self._finder = ShareFinder(exchange, rank=exchange.rank, world_size=exchange.world_size, now=waiter.now)

    @property
    def agent(self) -> AgentLink:
        """What persists them, and copies them to other nodes."""
        return self._agent

    @property
    def engine(self) -> CaptureEngine:
        """What captures the cuts."""
        return self._engine

    # --- cuts

    def cut(self, step: int) -> None:
        """Begin to capture the cut of ``step``, if that can be done now.

        Raises what goes wrong on this rank. `ArenaError` if there never was an arena. `SaveFailed` if there is no arena
        any more: once, until there is one again. The other ranks learn of it at the next save, if it is still wrong
        then, or when this rank stops.
        """
        failure: Exception | None = None
        self._order_ready()  # the failure of a save goes with its order
        self._last = (step, self._journal.pending(step))
        is_alone = any(depends_on_data(one[-1].record.state) for one in self._last[1].values())
        self._finder.begins(step, is_alone=is_alone)
        self._finder.look()
        try:
            if self._capture(*self._last, must=False):
                self._has_reported = False
                self._send_documents(self._documents())  # this cut may be that of a final save
        except ArenaError as error:
            if not self._has_reported:
                self._has_reported, failure = self._has_had_arena, self._without_arena(step, error)
        self._order_ready()
        if failure is not None:
            raise failure

    def save(self, step: int, metric: Any, *, patient: bool) -> None:
        """Capture the cut of ``step``, which is as good as ``metric`` (`held_metric`), and have it persisted.

        ``patient``: wait if all memory of the arena is still being persisted, instead of skipping this save. Whatever
        is raised here, the agents of all ranks drop the save together.
        """
        good: float | None = None
        captured = False
        failure: Exception | None = None
        try:
            pending = self._pending_of(step)
            documents = self._documents()  # the readers forget versions that they have left once all is handed over
            self._journal.handed_over(pending, step)  # on all ranks, also if one of them fails below
            if any(not one.is_ordered for one in self._pending.values()):
                self._engine.finish()  # all ranks order a save before the next one
                self._order_ready()
            self._send_documents(documents)
            good = checked_metric(metric)
            is_again = self._captured == step  # a capture of this cut is complete: the order must not name that
            captured = self._has_captured(step) or self._capture(step, pending, must=True, patient=patient)
            if is_again:
                self._engine.finish()
            if not captured and not self._pending:
                raise SaveFailed(
                    f"step {step} was not captured: no memory of the arena was to spare, though nothing is being "
                    "persisted. `lakeckpt doctor` lists what lies in memory"
                )
        except ArenaError as error:
            failure = self._without_arena(step, error)
        except Exception as error:
            failure = error
        self._captured = None
        order = Order(
            step=step,
            number=self.attempt.saves,
            metric=good,
            waits=self._engine.waits(),
            failure="" if failure is None else error_to_text(failure),
        )
        self.attempt.saves += 1
        one = _Pending(order=order, was_raised=failure is not None)
        if captured and failure is None:
            self._pending[order.number] = one
            self._order_ready()
            return
        if failure is not None:
            self._note(order, failure)
        self._order_ready()  # all ranks order their saves in one order
        self._pending[order.number] = one
        self._send(one)  # the agents of all ranks must learn that this rank has not captured it
        if failure is not None:
            raise failure

    def _pending_of(self, step: int) -> Pending:
        """Return what is to be recorded of the cut of ``step``. Other ranks may have captured it before the loop saw
        the end of the epoch: then this rank records what it would have captured."""
        is_captured = self._exchange.world_size > 1 and self._last[0] == step
        return self._last[1] if is_captured else self._journal.pending(step)

    def _without_arena(self, step: int, error: ArenaError) -> LakeckptError:
        """Return the error of a cut for which there is no memory. A job that never had an arena is refused."""
        if not self._has_had_arena:
            return type(error)(f"{error}. Without capture_every, saves are synchronous and need no arena")
        failure = SaveFailed(f"step {step} was not captured: {error}")
        failure.__cause__ = error
        return failure

    def fence(self) -> None:
        """Return when the state may change. See `CaptureEngine.fence`."""
        self._engine.fence()

    def _has_captured(self, step: int) -> bool:
        """Return whether `cut` has captured the cut of ``step`` without skipping a tensor, and no save has used it
        since."""
        return self._captured == step and self._engine.wait() == step and self._engine.has_whole

    def _capture(self, step: int, pending: Pending, *, must: bool, patient: bool = False) -> bool:
        states = {name: shared_fields(one[-1].record.state) for name, one in pending.items()}
        cut = CutId(attempt=self.attempt.number, step=step)
        digest = short_digest(cut.to_text().encode(), dumps(states, kind="value", version=(1, 0)))
        readers = {name: pending_to_bytes(one) for name, one in pending.items()}
        deadline_s = self._waiter.now() + self._timeout_s
        while True:
            if must:
                self._engine.wait()  # a complete capture then makes room
            # With several ranks, no rank knows what the others have complete.
            common = self._engine.completed if self._exchange.world_size == 1 else None
            named = self._finder.named
            if self._engine.cut(cut, digest=digest, readers=readers, common=common, must=must, named=named):
                self._captured, self._has_had_arena = step, True
                return True
            if not patient or not self._pending or self._waiter.now() > deadline_s:
                return False
            self._agent.wait(_NOTHING_SPARE_S)
            self._read_outcomes()

    def _documents(self) -> dict[str, Document]:
        return documents_of_all([track.reader for track in self._tracks.values()])

    def _send_documents(self, every: Mapping[str, Document]) -> None:
        """Send the documents of the tables that are read, if the agent does not have them. It asks no store."""
        if self._exchange.rank == 0 and every.keys() != self._sent:
            self._agent.keep(TableDocuments(data={path: one.dumps() for path, one in every.items()}))
            self._sent = set(every)

    # --- orders

    def _order_ready(self) -> None:
        """Send the orders whose captures are complete, and those whose captures were dropped."""
        for one in [one for one in self._pending.values() if not one.is_ordered]:
            completed = self._engine.completed
            if completed is not None and one.order.step <= completed:
                self._send(one)
                continue
            is_over, failure = self._engine.dropped(one.order.step)
            if is_over:
                one.order = replace(one.order, failure="" if failure is None else error_to_text(failure))
                self._send(one)

    def _send(self, one: _Pending) -> None:
        if one.is_ordered:
            return
        is_alone = not any(other.is_ordered for other in self._pending.values())
        one.is_ordered = True
        if is_alone:
            self._lock(one)
        self._agent.order(one.order)

    def _lock(self, one: _Pending) -> None:
        """Lock the generation, so that no capture overwrites it before the agent has persisted it. Only one order holds
        a lock: locking more would leave captures without a free generation. If the generation cannot be opened now,
        the agent alone locks it."""
        with suppress(ArenaError):
            one.lock.enter_context(self._generations.hold(self._save_of(one.order).cut))

    def results(self) -> list[Saved]:
        """Return the results of saves since the last call; never waits."""
        self._read_outcomes()
        found, self._results = self._results, []
        return found

    def _read_outcomes(self) -> None:
        self._order_ready()
        self._look_for_obstacles()
        for outcome in self._agent.outcomes():
            if outcome.number in self._pending:
                error = save_error(f"{outcome.kind}: {outcome.text}") if outcome.info is None else None
                result = Saved(
                    step=outcome.step, info=outcome.info, error=error, remarks=outcome.remarks, took_s=outcome.took_s
                )
                self._settle(self._pending.pop(outcome.number), result)

    def _settle(self, one: _Pending, result: Saved) -> None:
        one.lock.close()
        if result.info is not None:
            self.attempt.last = self.attempt.parent = result.info.slot
            self.attempt.recorded = result.step
            self._journal.committed(result.step)
            self._engine.distrust(result.remarks.changed)
        else:
            if one.was_raised:
                return
            assert result.error is not None
            if isinstance(result.error, ReplicasDiffer):
                self._engine.divide(None)
                text = f"{result.error}. From now on each rank captures all of its state"
                result = replace(result, error=ReplicasDiffer(text))
            assert result.error is not None
            self._note(one.order, result.error)
            is_covered = self.attempt.recorded >= one.order.step or self.is_saving(one.order.step)
            if is_covered and isinstance(result.error, SaveSkipped):
                return  # another save of the same step is the result, or is under way
        self._results.append(result)

    def _note(self, order: Order, failure: Exception) -> None:
        """Tell the other trainers of a save that failed. A save that was skipped for another has not failed."""
        if not isinstance(failure, SaveSkipped):
            self._exchange.obstacles.fail(order.number, failure)

    def _look_for_obstacles(self, *, now: bool = False) -> None:
        """Pass obstacles on to the agent, if saves are under way: it stops waiting, and its outcome says why."""
        if self._pending and (now or self._waiter.now() >= self._next_look_s):
            self._next_look_s = self._waiter.now() + _LOOK_S
            for one in self._exchange.obstacles.look():
                if one not in self._passed_on:
                    self._passed_on.add(one)
                    self._agent.pass_on(one)

    def _save_of(self, order: Order) -> SaveId:
        return SaveId(attempt=self.attempt.number, step=order.step, number=order.number)

    def wait(self) -> None:
        """Return when the results of all saves are known. Raises `SaveFailed` if the agent is silent."""
        self._engine.finish()
        self._order_ready()
        for one in list(self._pending.values()):
            self._send(one)  # a capture that is still not complete was dropped, too long ago to say why
        deadline_s = self._waiter.now() + 4 * self._timeout_s  # the agent reports what takes longer
        self._read_outcomes()
        while self._pending:
            if self._waiter.now() > deadline_s:
                steps = sorted(one.order.step for one in self._pending.values())
                raise SaveFailed(f"the agent has reported nothing of the saves of the steps {steps}")
            self._agent.wait(self._timeout_s if self._exchange.world_size == 1 else _LOOK_S)
            self._look_for_obstacles(now=True)
            self._read_outcomes()
        self._report_captures(raises=True)

    def _report_captures(self, *, raises: bool = False) -> None:
        """Warn of captures that failed otherwise. ``raises``: an `UnannouncedChange` is raised."""
        try:
            self._engine.wait()
        except ArenaError:
            pass  # a save has raised it, or the next save will
        except LakeckptError as error:
            if raises and isinstance(error, UnannouncedChange):
                raise
            text = f"rank {self._exchange.rank} has not captured all that it was to: {error}"
            warnings.warn(text, CaptureWarning, stacklevel=4)

    def is_saving(self, step: int) -> bool:
        """Return whether a save of the cut of ``step`` is under way."""
        return any(one.order.step == step for one in self._pending.values())

    def stop(self, error: BaseException, *, at_exit: bool = False) -> None:
        """This rank stops for ``error``: the other ranks must not wait for it in saves that it has not ordered.

        ``at_exit``: the last save has failed. If the failure before was a warning, the other ranks have to learn of two
        saves, one after the other."""
        if self._exchange.world_size > 1:
            unordered = [number for number, one in self._pending.items() if not one.is_ordered]
            self._exchange.obstacles.stop(error, first=min(unordered, default=self.attempt.saves))
            self._look_for_obstacles(now=True)  # the agent has saves under way, and hears of none any more
            if self._exchange.rank == 0:  # the store that has the note may end with this process
                SystemWaiter().wait((_LOOKS if at_exit else 2) * _LOOK_S)

    def close(self, *, well: bool) -> None:
        """Close the engine and the link to the agent. ``well``: what was saved is persisted, and the arenas are
        removed; else the agent makes the final save, as for a trainer that died."""
        if well:
            self._engine.finish()
            self._order_ready()
            self._report_captures()
        for one in self._pending.values():
            one.lock.close()
        self._generations.close()
        self._engine.close()
        self._agent.close(well=well)

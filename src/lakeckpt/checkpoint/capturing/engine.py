"""How does every cut get into host memory without training waiting for it?  The engine of a rank, and its copier.

At a cut (`CaptureEngine.cut`), between two optimizer steps, what may change at any time is taken at once: buffers, the
states of small objects, random states. All else is copied by the copier, a thread of the engine's own, slice by slice
as the gate admits them, and is fenced before the next update: see ``capture``. When the last slice has its checksum,
the generation is completed and ``on_complete`` is told, on the copier's thread.

A cut is left out where the arena is not made yet, the capture before is still under way (of a device: two are), or no
generation can be spared; never is a generation a mixture of two cuts, and never is training kept waiting for memory.
Where the next update may come unannounced (``hooks``) all is copied at the cut.

The first cut starts the copier; `close` stops and joins it. It never communicates, and never writes to storage.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capturing.capture import Capture
from lakeckpt.checkpoint.capturing.copier import Copier
from lakeckpt.checkpoint.capturing.doubts import Doubts
from lakeckpt.checkpoint.capturing.filler import Filler
from lakeckpt.checkpoint.capturing.graphs import before_graphs, refuses_within_a_graph
from lakeckpt.checkpoint.capturing.hooks import UpdateHooks
from lakeckpt.checkpoint.capturing.job import CaptureRecord, Facts, Job
from lakeckpt.checkpoint.capturing.links import Link, link_cuda
from lakeckpt.checkpoint.capturing.moves import Issued, Moves
from lakeckpt.checkpoint.capturing.plan import CapturePlan
from lakeckpt.checkpoint.capturing.planner import Planner
from lakeckpt.checkpoint.capturing.store import ArenaStore
from lakeckpt.checkpoint.capturing.witnesses import Witnesses
from lakeckpt.checkpoint.gate import Gate, OpenGate
from lakeckpt.checkpoint.report import CaptureWarning
from lakeckpt.errors import LakeckptError, SaveFailed

__all__ = ["CaptureEngine"]

_RECORDS = 4096
_DEFAULT_SCRATCH_BYTES = 256 * 2**20
_REMEMBERED = 1000
"""For so many steps it is known why a capture was given up."""


class CaptureEngine:
    """Captures the state of ``objects`` (name → anything with ``state_dict``) into the arena of ``identity``.

    Args:
        objects: all but the tracked readers, whose places are given at each cut.
        identity: of the run, and which rank of how many.
        folder: where arenas lie; default: this user's, in host memory.
        step: optimizer steps done when the history goes on: later generations of an earlier process are forgotten.
        gate: admits slices.
        on_complete: called with the step of each generation that became complete, by the copier.
        slice_bytes: how large slices are; default: what fits the size of the state.
        scratch_bytes: how much memory of a device may hold what was not copied off it when its update came.
        links: for devices other than CUDA's.

    One thread calls `cut`, `wait` and `close`; `fence` may be called by any thread that is about to change the state.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        identity: ArenaIdentity,
        *,
        folder: ArenaFolder | None = None,
        step: int = 0,
        gate: Gate | None = None,
        on_complete: Callable[[int], None] | None = None,
        slice_bytes: int | None = None,
        scratch_bytes: int = _DEFAULT_SCRATCH_BYTES,
        generations: int = 3,
        links: Mapping[torch.device, Link] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.records: deque[CaptureRecord] = deque(maxlen=_RECORDS)
        """What the last captures cost, the oldest first."""
        self.left_out = 0
        """How many cuts were left out."""
        self._objects = dict(objects)
        self._gate: Gate = OpenGate() if gate is None else gate
        self._on_complete, self._clock = on_complete, clock
        self._scratch_bytes = scratch_bytes
        self._links: dict[torch.device, Link] = dict(links or {})
        self._store = ArenaStore(
            ArenaFolder() if folder is None else folder,
            identity,
            step=step,
            generations=generations,
            joins=slice_bytes is None and not self._gate.paces,
        )
        self._forget_graphs = before_graphs(self.finish) if links or torch.cuda.is_available() else (lambda: None)
        self._hooks = UpdateHooks(self._objects, self.fence, self._void)
        self._linked: CapturePlan | None = None  # the plan for whose devices there are links
        self._documents_bytes = 0
        self._doubts = Doubts()
        self._planner = Planner(self._objects, hooks=self._hooks, doubts=self._doubts, slice_bytes=slice_bytes)
        self._witnesses: Witnesses | None = None
        self._current: Job | None = None  # the newest capture, as long as it is under way
        self._under_way = 0
        self._making = False
        self.completed: int | None = None
        """The step of the newest generation that became complete here; None before the first."""
        self._failures: deque[tuple[int | None, BaseException]] = deque()  # that nobody was told of, and of which cuts
        self._given_up: dict[int, BaseException | None] = {}  # cuts whose capture was given up, and what failed
        self._warning: str | None = None
        self._changed = threading.Condition()
        self._copier = Copier()
        self._closed = False
        self._process = os.getpid()

    # --- what a manager calls

    def cut(
        self,
        step: int,
        *,
        attempt: str,
        cut: bytes,
        readers: Mapping[str, bytes] | None = None,
        extra: Mapping[str, bytes] | None = None,
        common: int | None = None,
        must: bool = False,
    ) -> bool:
        """Begin to capture the state as it is now, after optimizer step ``step``. False where this cut is left out.

        ``cut`` (16 bytes) is its digest, the same on every rank; ``common`` the newest step that all ranks are known to
        have complete. ``must``: wait for the arena to be made and for the capture before, instead of leaving it out.

        Raises what went wrong since the last call: `ArenaTooLarge` and other `ArenaError` where there is no memory,
        `SaveFailed` for anything else; `UnsupportedValue` for a state that cannot be captured, with its path.
        """
        begin_s = self._clock()
        self._settle()
        if refuses_within_a_graph(step):
            self.left_out += 1
            return False
        self.fence()
        trusted = self._hooks.trusted()
        plan = self._planned()
        if must:
            self._make(plan)
            self._idle()
            self._settle()
        filling = self._begun(plan, common)
        if filling is None:
            self.left_out += 1
            return False
        try:
            facts = Facts(step=step, attempt=attempt, cut=cut, readers=readers or {}, extra=extra or {})
            job = self._taken(facts, plan, filling, begin_s)
            self._gate.start(plan.late_bytes)
            if not trusted or self._doubts.everything or (plan.parted.still and not self._planner.digests):
                job.capture.fence()
            self._copier.start()
        except BaseException:
            filling.abandon()
            raise
        job.cut_s = self._clock() - begin_s - job.capture.fence_s
        for over in [one for one in list(self._given_up) if one == step or one <= step - _REMEMBERED]:
            self._given_up.pop(over, None)
        with self._changed:
            self._current = job
            self._under_way += 1
        self._copier.do(lambda: self._run(job))
        return True

    def fence(self) -> None:
        """Call this before the state changes: what was not copied yet is copied, or kept, as it is now.

        Optimizers and ``load_state_dict`` of what was given do so by themselves. Whoever changes parameters in other
        ways between two cuts (weights swapped for an evaluation, say) calls it first.
        """
        job = self._current
        if job is not None and os.getpid() == self._process:  # a forked child has no copier, and no state of ours
            job.capture.fence()

    def wait(self) -> int | None:
        """Return when the capture under way is complete: the step of the newest generation. Raises as `cut` does."""
        self.finish()
        self._settle()
        return self.completed

    def finish(self) -> None:
        """Return when no capture is under way, however it ended. Raises nothing: `wait` and `given_up` tell."""
        if os.getpid() == self._process:
            self.fence()
            self._idle()

    def given_up(self, step: int) -> tuple[bool, LakeckptError | None]:
        """Whether the capture of ``step`` was given up, and what failed, if anything did. Told once: `cut` and `wait`
        do not raise it any more."""
        if step not in self._given_up:
            return False, None
        failure = self._given_up.pop(step)
        if failure is None:
            return True, None
        with suppress(ValueError):
            self._failures.remove((step, failure))
        return True, _told(step, failure)

    def close(self, *, remove: bool = False) -> None:
        """Finish the capture under way, and let go of everything. ``remove``: of the arena as well, the run is over."""
        if self._closed or os.getpid() != self._process:
            return  # a forked child has no copier, and the arena is its parent's
        self._closed = True
        self.fence()
        self._copier.stop()
        self._hooks.remove()
        self._forget_graphs()
        self._store.close(remove=remove)

    def _void(self) -> None:
        job = self._current
        if job is not None and os.getpid() == self._process:
            job.capture.void()

    # --- a cut, on the training thread

    def _planned(self) -> CapturePlan:
        """The plan for the state as it is now, with a link for each device that it lies on."""
        plan = self._planner.renewed()
        if plan is not self._linked:
            link_cuda((*plan.parted.early.values(), *plan.parted.late.values()), self._links)
            self._linked = plan
        return plan

    def _begun(self, plan: CapturePlan, common: int | None) -> Filling | None:
        """A generation to be filled; None where there is none now."""
        if self._making:
            return None
        if not self._store.ready(plan, self._documents_bytes):
            self._make(plan)  # behind the capture under way
            return None
        if self._under_way >= self._most_under_way():
            return None
        assert self._store.arena is not None
        return self._store.arena.begin(common=common)

    def _most_under_way(self) -> int:
        """Two where of the first, which was fenced, only copies off a device or checksums are to come: a host ahead of
        its device would leave out every other cut. A gate that paces knows of one."""
        return 2 if self._links and not self._gate.paces else 1

    def _taken(self, facts: Facts, plan: CapturePlan, filling: Filling, begin_s: float) -> Job:
        """Take what has to be taken at once."""
        early, late = self._store.moves(plan, filling.number)
        witnesses = self._witnesses_of(plan)
        taken = witnesses.take()
        issued = self._issued_early(early)
        for link in self._links.values():
            link.order()
        capture = Capture(
            self._filler_of(plan, filling),
            late,
            self._gate,
            live=list(plan.parted.late.values()),
            early=issued,
            gently=filling.bring,
            scratch_bytes=0 if self._under_way else self._scratch_bytes,  # all of it may be in use
            clock=self._clock,
        )
        trees = self._planner.trees()
        return Job(
            facts=facts,
            plan=plan,
            filling=filling,
            trees=trees,
            capture=capture,
            witnesses=witnesses,
            taken=taken,
            planned_for=self._planner.planned_for,
            begin_s=begin_s,
        )

    def _filler_of(self, plan: CapturePlan, filling: Filling) -> Filler:
        return Filler(
            plan,
            filling,
            digests=self._planner.digests,
            doubts=self._doubts,
            copier=self._copier,
            checksummer=self._store.checksummer,
            lost=self._lose_checksummer,
        )

    def _witnesses_of(self, plan: CapturePlan) -> Witnesses:
        if self._witnesses is None or not self._witnesses.are_of(plan):
            self._witnesses = Witnesses(plan, self._links)
        return self._witnesses

    def _issued_early(self, early: Moves) -> list[Issued]:
        """Take what may change as soon as training goes on."""
        try:
            return early.kept().make()
        except torch.OutOfMemoryError:  # then the device waits until it is in host memory
            for link in self._links.values():
                link.order()
            issued = early.make()
            for one in issued:
                one.link.hold(one.ticket)
            return issued

    def _settle(self) -> None:
        """Say what the copier had to say."""
        warning, self._warning = self._warning, None
        if warning is not None:
            warnings.warn(warning, CaptureWarning, stacklevel=4)
        if not self._failures:
            return
        first = _told(*self._failures.popleft())
        while self._failures:
            first.add_note(f"and then: {_told(*self._failures.popleft())}")
        raise first

    # --- the copier

    def _idle(self) -> None:
        with self._changed:
            while self._under_way or self._making:
                self._changed.wait()

    def _make(self, plan: CapturePlan) -> None:
        """Have the copier make the arena that fits, if it does not do so already."""
        if self._making or self._store.ready(plan, self._documents_bytes):
            return
        trees = self._planner.trees()
        links = dict(self._links)
        self._copier.start()
        self._making = True

        def make() -> None:
            try:
                size_bytes = sum(len(document()) for document in trees.values()) + len(plan.table.document)
                self._store.make(plan, max(size_bytes, self._documents_bytes), links)
                self._warning = self._store.warning() or self._warning
            except BaseException as error:
                self._failures.append((None, error))
            with self._changed:
                self._making = False
                self._changed.notify_all()

        self._copier.do(make)

    def _lose_checksummer(self, lost: Checksummer, why: str) -> None:
        self._store.lose_checksummer(lost, why)
        self._warning = self._store.warning() or self._warning

    def _run(self, job: Job) -> None:
        """Whatever fails here is told later (`_settle`): the copier goes on with the next job."""
        complete, failure = False, None
        try:
            complete = self._completes(job)
        except BaseException as error:
            failure = error
        if not complete:
            for leave in (job.capture.give_up, job.filling.abandon, self._planner.forget):
                try:
                    leave()
                except BaseException as error:
                    failure = failure or error
            self._given_up[job.facts.step] = failure
        if failure is not None:
            self._failures.append((job.facts.step, failure))
        self.records.append(job.record(self._clock(), complete=complete))
        with self._changed:
            self.completed = job.facts.step if complete else self.completed
            self._under_way -= 1
            if self._current is job:
                self._current = None
            self._changed.notify_all()
        if complete and self._on_complete is not None:
            try:
                self._on_complete(job.facts.step)
            except BaseException as error:
                self._failures.append((job.facts.step, error))

    def _completes(self, job: Job) -> bool:
        """Copy what is left of a cut, and complete its generation. False where it was given up."""
        made: list[bytes] = []
        intact = job.capture.run(lambda: made.append(job.documents()))
        if not intact or (changed := job.witnessed()):
            counted, witnessed = (frozenset[str](), changed) if intact else (job.changed(), frozenset[str]())
            self._warning = self._doubts.changed(job.facts.step, counted=counted, witnessed=witnessed)
            return False
        if self._doubts.moving != job.planned_for:
            return False  # what seemed still has moved: it is taken at the cut from the next one on
        self._doubts.intact()
        assert self._store.arena is not None
        (documents,) = made
        if len(documents) > self._store.arena.layout.documents_bytes:
            self._documents_bytes = len(documents)  # the next cut finds that the arena does not fit
            return False
        job.complete(documents)
        self._store.completed()
        return True


def _told(step: int | None, failure: BaseException) -> LakeckptError:
    """What the training thread raises for what failed in the copier."""
    if isinstance(failure, LakeckptError):
        return failure
    what = "memory for captures could not be made" if step is None else f"the capture of step {step} failed"
    told = SaveFailed(f"{what}: {failure!r}")
    told.__cause__ = failure
    return told

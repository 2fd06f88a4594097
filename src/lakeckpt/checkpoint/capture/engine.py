"""This module captures the cuts of a rank into its arena, beside training.

A cut (`CaptureEngine.cut`) lies between two optimizer steps. It copies the *early* tensors at once, because they may
change at any time. The copier, a thread, copies the *late* tensors slice by slice, when the gate admits a slice. Before
the next optimizer step the fence copies the remaining slices (``fence``, ``slice_copier``). The generation is complete
when the last slice was copied. Nothing is hashed here: the agent takes the checksums, behind the copy.

A cut is skipped if the arena does not exist yet, if the capture before is still under way (with a device: two
captures), if no generation is free, or if a device has no memory for a copy of its early tensors. A generation never
mixes two cuts: a capture during which a tensor changed is dropped, and the next call raises `UnannouncedChange`.

The first cut starts the copier; `close` stops and joins it, and an engine that is never closed ends it when nobody
holds the engine any more. The engine never communicates and never writes to storage.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lakeckpt.checkpoint.arena.dividing import Division
from lakeckpt.checkpoint.arena.drift import Drift
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture.copier import Capture, Copier, Failures, Naming
from lakeckpt.checkpoint.capture.fence import StepFence, captures_a_graph
from lakeckpt.checkpoint.capture.kept import Skipped, uncounted
from lakeckpt.checkpoint.capture.links import Link, open_link
from lakeckpt.checkpoint.capture.plan import CapturePlan, Planner
from lakeckpt.checkpoint.capture.samples import Samples
from lakeckpt.checkpoint.capture.slice_copier import SliceCopier
from lakeckpt.checkpoint.capture.store import ArenaStore
from lakeckpt.checkpoint.format.parts import SiteWaits
from lakeckpt.checkpoint.state.tensors import sums_of
from lakeckpt.counters import RunCounters
from lakeckpt.errors import ConfigError, LakeckptError
from lakeckpt.recovery.facts import CutId

__all__ = ["CaptureEngine"]

_SEAL_S = 1.0
"""A cut is skipped if the capture before has not ended by then. Sealing a generation takes milliseconds: this much only
passes on a machine that gives its thread no processor."""


class CaptureEngine:
    """Captures the state of ``objects`` (name → anything with ``state_dict``) into the arena of ``identity``.

    Args:
        objects: all objects of the state except the tracked readers, whose places are given at each cut.
        identity: the run, the rank and the world size.
        folder: the folder of the arenas; default: this user's folder in host memory.
        step: optimizer steps done when the run goes on. Generations of later steps, from an earlier process, are
            discarded.
        gate: admits slices.
        slice_bytes: the size of slices; default: a size that fits the size of the state.
        counters: count captures, and for how long fences hold up their threads.
        ranks_here: how many ranks of the run capture into the folder.

    One thread calls `cut`, `wait` and `close`. Any thread that is about to change the state calls `fence`.
    """

    open_link: Callable[[torch.device], Link | None] = staticmethod(open_link)

    def __init__(
        self,
        objects: Mapping[str, Any],
        identity: ArenaIdentity,
        *,
        folder: ArenaFolder | None = None,
        step: int = 0,
        gate: Gate | None = None,
        slice_bytes: int | None = None,
        generations: int = 3,
        counters: RunCounters | None = None,
        ranks_here: int = 1,
    ) -> None:
        self._counters = RunCounters() if counters is None else counters
        self._gate = Gate() if gate is None else gate
        self._links: dict[torch.device, Link] = {}
        self._folder, self._identity = ArenaFolder() if folder is None else folder, identity
        self._store = ArenaStore(
            self._folder,
            identity,
            step=step,
            generations=generations,
            joins=slice_bytes is None and not self._gate.paces,
            ranks_here=ranks_here,
        )
        self.objects = dict(objects)
        self.planner = Planner(self.objects, slice_bytes=slice_bytes)
        self._drift: Drift | None = None  # if replicas divide what they capture
        self._step_fence = StepFence(self.fence, self._late)
        self._linked: CapturePlan | None = None  # the plan whose devices have links
        self._documents_bytes = 0
        self._samples: Samples | None = None
        self._current: Capture | None = None  # the newest capture, as long as it is under way
        self._under_way = 0
        self._making = False
        self._is_whole = False
        self.completed: int | None = None
        """The step of the newest generation that became complete here; None before the first."""
        self._failures = Failures()
        self._changed = threading.Condition()
        self._copier = Copier()
        self._closed = False
        self._process = os.getpid()
        weakref.finalize(self, _release, self._process, self._step_fence, self._copier, self._store).atexit = False

    # --- what a manager calls

    def divide(self, division: Division | None) -> None:
        """Capture this rank's share of the state from the next cut on; None: all of it."""
        self.planner.divide(division)
        self._drift = None if division is None else Drift(self._folder, self._identity, division)

    def cut(
        self,
        cut: CutId,
        *,
        digest: bytes,
        readers: Mapping[str, bytes] | None = None,
        common: int | None = None,
        must: bool = False,
        named: Naming | None = None,
    ) -> bool:
        """Begin to capture the state as it is now, which is the ``cut``. Returns False if the cut is skipped.

        ``digest`` (16 bytes) is the same on every rank that is at this cut. ``common`` is the newest step whose
        generation is known to be complete on all ranks. ``must``: the cut is to be saved. Wait for the arena and for
        the capture before, instead of skipping the cut, and copy frozen tensors, too, so that they can be compared.
        ``named`` is called by the copier, and returns the list of shares that the capture names.

        Raises errors that occurred since the last call: `ArenaError` if there is no
        memory, `UnannouncedChange` for a tensor that changed before its fence, `SaveFailed` for anything else. Raises
        `UnsupportedValue` for a state that cannot be captured, with its path, and `ConfigError` in a CUDA graph.
        """
        self._failures.settle()
        if captures_a_graph():
            raise ConfigError(
                f"the cut of step {cut.step} lies in a CUDA graph: the copies would become a part of the graph. Call "
                "manager.step() outside of the graph"
            )
        self._fence()
        if self._drift is not None and self._drift.is_over(cut.step):
            self.divide(None)
        plan = self._planned()
        if must:
            self._make(plan)
            self._idle()
            self._failures.settle()
        filling = self._begun(plan, common)
        if filling is None:
            return False
        frozen = self.planner.unchanged()
        skipped = self._store.kept.begin(plan, filling.number, frozen, whole=must)
        try:
            capture = Capture(
                cut=cut,
                digest=digest,
                readers=readers or {},
                plan=plan,
                filling=filling,
                trees=self.planner.trees(),
                named=named,
                divided=bool(self.planner.divided),
                sums=sums_of(self.planner.divided) if must else {},
                skipped=skipped,
                samples=self._samples_of(plan, frozen),
                sample=self._samples_of(plan, frozen).take(),
                slices=self._slices_of(plan, filling, skipped),
            )
            self._gate.start(capture.slices.size_bytes)
            self._copier.start()
        except torch.OutOfMemoryError:  # of a device: the next cut tries again
            filling.abandon()
            return False
        except BaseException:
            filling.abandon()
            raise
        self._failures.begins(cut.step)
        with self._changed:
            self._current = capture
            self._under_way += 1
        self._copier.do(lambda: self._run(capture))
        return True

    def fence(self) -> None:
        """Return when the state may change. Slices that were not copied yet are copied now, or queued on the device.

        The hook of optimizers calls it before each step. Code that changes the state elsewhere between a cut and the
        next optimizer step (weights swapped for an evaluation, ``load_state_dict``) must call it first.
        """
        begin_s = time.perf_counter()
        self._fence()
        self._counters.stall_s += time.perf_counter() - begin_s

    def wait(self) -> int | None:
        """Wait for the capture under way, and return the step of the newest generation. Raises as `cut` does."""
        self.finish()
        self._failures.settle()
        return self.completed

    def finish(self) -> None:
        """Return when no capture is under way. Raises no error of a capture: `wait` and `dropped` report those."""
        if os.getpid() == self._process:
            self._fence()
            self._idle()

    @property
    def has_whole(self) -> bool:
        """True if the newest complete capture is fit to be saved: it has copied all tensors, and the sums of those that
        are divided."""
        return self._is_whole

    def distrust(self, keys: Iterable[str]) -> None:
        """Copy these frozen tensors at each cut, and warn: they changed, and torch has not counted it."""
        if changed := self._store.kept.distrust(keys):
            self._failures.warn(uncounted(changed))

    def dropped(self, step: int) -> tuple[bool, LakeckptError | None]:
        """Return whether the capture of ``step`` was dropped, and the error, if there was one. The error is returned
        once, and `cut` and `wait` do not raise it any more."""
        return self._failures.dropped(step)

    def waits(self) -> tuple[SiteWaits, ...]:
        """Return how long this rank waited, and how much of its captures moved meanwhile."""
        return self._gate.waits()

    def close(self) -> None:
        """Finish the capture under way and release everything. The arena stays: the agent removes it."""
        if self._closed or os.getpid() != self._process:
            return  # a forked child has no copier, and the arena is its parent's
        self._closed = True
        self._fence()
        self._copier.stop()
        self._step_fence.remove()
        self._store.close()

    # --- a cut, on the training thread

    def _late(self) -> Mapping[str, torch.Tensor]:
        return self.planner.late

    def _fence(self) -> None:
        capture = self._current
        if capture is not None and os.getpid() == self._process:  # a forked child has no copier, and no state of ours
            capture.slices.fence()

    def _planned(self) -> CapturePlan:
        """Return the plan for the state as it is now, and open a link for each of its devices."""
        plan = self.planner.renewed()
        if plan is not self._linked:
            for device in {one.device for one in (*plan.early.values(), *plan.late.values())} - self._links.keys():
                if (link := self.open_link(device)) is not None:
                    self._links[device] = link
            self._linked = plan
        return plan

    def _begun(self, plan: CapturePlan, common: int | None) -> Filling | None:
        """Return a generation to fill; None if there is none now."""
        if self._making:
            return None
        if not self._store.ready(plan, self._documents_bytes):
            self._make(plan)  # behind the capture under way
            return None
        if self._under_way >= self._most_under_way() and not self._ends_soon():
            return None
        assert self._store.arena is not None
        return self._store.arena.begin(common=common)

    def _most_under_way(self) -> int:
        """Return how many captures may be under way. With a device these are two: the first was fenced, and only its
        copies off the device remain. With a limit of one, a host that runs ahead of its device would skip
        every other cut. A gate that paces knows only one capture."""
        return 2 if self._links and not self._gate.paces else 1

    def _ends_soon(self) -> bool:
        """Wait a moment for the capture before, which has copied all data since its fence, and only has to seal its
        generation. Return whether another one may begin. Copies off a device may take long: nobody waits for these."""
        if self._links:
            return False
        begin_s = time.perf_counter()
        with self._changed:
            ended = self._changed.wait_for(lambda: self._under_way < self._most_under_way(), _SEAL_S)
        self._counters.stall_s += time.perf_counter() - begin_s
        return ended

    def _samples_of(self, plan: CapturePlan, frozen: Iterable[str]) -> Samples:
        if self._samples is None or not self._samples.are_of(plan, frozen):
            self._samples = Samples(plan, self._links, frozen, self.planner.divided)
        return self._samples

    def _slices_of(self, plan: CapturePlan, filling: Filling, skipped: Skipped) -> SliceCopier:
        """Copy the early tensors at once, and return the copies of the late tensors."""
        early, late = self._store.moves(plan, filling.number, skipped.keys)
        issued = early.kept().make()  # they may change as soon as training goes on
        for link in self._links.values():
            link.order()
        return SliceCopier(late, self._gate, live=list(plan.late.values()), early=issued)

    # --- the copier

    def _idle(self) -> None:
        with self._changed:
            while self._under_way or self._making:
                self._changed.wait()

    def _make(self, plan: CapturePlan) -> None:
        """Let the copier make an arena that fits, unless it is doing so already."""
        if self._making or self._store.ready(plan, self._documents_bytes):
            return
        trees = self.planner.trees()
        links = dict(self._links)
        self._copier.start()
        self._making = True

        def make() -> None:
            try:
                size_bytes = sum(len(document()) for document in trees.values()) + len(plan.table.document)
                warning = self._store.make(plan, max(size_bytes, self._documents_bytes), links)
                self._failures.warn(warning)
            except BaseException as error:
                self._failures.add(None, error)
            with self._changed:
                self._making = False
                self._changed.notify_all()

        self._copier.do(make)

    def _run(self, capture: Capture) -> None:
        """Complete a cut. Errors are raised later by a call: the copier goes on with the next capture."""
        complete, failure = False, None
        try:
            complete = self._completes(capture)
        except BaseException as error:
            failure = error
        if not complete:
            try:
                capture.drop()
            except BaseException as error:
                failure = failure or error
            self._failures.drop(capture.cut.step, failure)
        elif failure is not None:
            self._failures.add(capture.cut.step, failure)
        capture.count(self._counters, complete=complete, paces=self._gate.paces)
        with self._changed:
            self.completed = capture.cut.step if complete else self.completed
            self._under_way -= 1
            if self._current is capture:
                self._current = None
            self._changed.notify_all()

    def _completes(self, capture: Capture) -> bool:
        """Copy the rest of a cut, and complete its generation. False if the document is too large for the arena."""
        documents = capture.copy()
        assert self._store.arena is not None
        if capture.stale:
            self.distrust(capture.stale)
            return False
        if len(documents) > self._store.arena.layout.documents_bytes:
            self._documents_bytes = len(documents)  # the next cut finds that the arena does not fit
            return False
        self._store.kept.complete(capture.skipped, capture.filling.sequence + 1)
        capture.complete(documents)
        self._is_whole = not capture.skipped.keys and (bool(capture.sums) or not capture.divided)
        self._store.completed()
        if capture.divided and self._drift is not None:
            self._failures.warn(self._drift.look(self._store.arena, capture.samples.divided))
        return True


def _release(process: int, fence: StepFence, copier: Copier, store: ArenaStore) -> None:
    """Release what an engine has that nobody closed. The copier has no capture any more: a capture holds the engine."""
    if os.getpid() == process:
        fence.remove()
        copier.end()
        store.close()

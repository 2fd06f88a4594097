"""This module holds the captures that are under way, and the thread of the copier that completes them.

A `Capture` holds all that the capture of one cut needs. A `Copier` is a thread that does jobs one after the other. The
first job starts the thread; `stop` ends and joins it. The training thread waits for a job only if it asks to.
`Failures` hold what went wrong in jobs, until the training thread raises it.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from lakeckpt.checkpoint.arena.contents import GenerationDocuments, TensorTable
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.capture.kept import Skipped
from lakeckpt.checkpoint.capture.plan import CapturePlan
from lakeckpt.checkpoint.capture.samples import Sample, Samples
from lakeckpt.checkpoint.capture.slice_copier import SliceCopier
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.counters import RunCounters
from lakeckpt.errors import CaptureWarning, LakeckptError, SaveFailed, UnannouncedChange
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.shares import ShareList

__all__ = ["Capture", "Copier", "Failures", "Naming"]

_REMEMBERED = 1000
"""The reason why a capture was dropped is kept for so many steps."""
Naming = Callable[[CutId, TensorTable, Mapping[str, bytes], memoryview], ShareList | None]
"""Returns the list of shares that a capture names, from the cut, the table of tensors, the documents of trees, and the
data (`lakeckpt.checkpoint.peers.alike`)."""


@dataclass(slots=True, kw_only=True)
class Capture:
    """A capture on its way through the copier."""

    cut: CutId
    digest: bytes
    """The digest of the cut (16 bytes), the same on every rank. Of a cut that replicas divide, `copy` adds what they
    have sampled of it."""
    readers: Mapping[str, bytes]
    plan: CapturePlan
    filling: Filling
    slices: SliceCopier
    samples: Samples
    sample: Sample
    """The spots of this cut."""
    skipped: Skipped
    """The tensors that lie in the generation already."""
    stale: frozenset[str] = frozenset()
    """Skipped tensors that have changed. `copy` finds them."""
    trees: Mapping[str, Callable[[], bytes]]
    sums: Mapping[str, bytes] = field(default_factory=dict)
    """The sums of the tensors that are divided, as this rank has them."""
    divided: bool = False
    """The generation is a share of what the replicas of this node have divided."""
    named: Naming | None = None
    shares: ShareList | None = None
    begun_s: float = field(default_factory=time.perf_counter)

    def count(self, counters: RunCounters, *, complete: bool, paces: bool) -> None:
        """Add what this capture was. ``paces``: slices have moved in idle windows."""
        moved, fenced = self.slices.moved_bytes, self.slices.late_bytes + self.slices.fenced_bytes
        if complete:
            counters.captures += 1
            counters.captured_s = time.time()
            counters.capture_s += time.perf_counter() - self.begun_s
        counters.fence_bytes += fenced
        if paces:
            counters.bubble_bytes += moved
        else:
            counters.beside_bytes += moved

    def copy(self) -> bytes:
        """Copy the rest of the cut, and return the document of the generation. Raises `UnannouncedChange`, which names
        a tensor that changed meanwhile, and `SaveFailed` if an exception interrupted a copy."""
        if not self.slices.run():
            keys = list(self.plan.late)
            self._refuse([keys[number] for number in sorted(self.slices.changed)])
        changed = self.samples.changed(self.sample, self.filling.data)
        self.stale = changed & self.skipped.keys
        self._refuse(sorted(changed - self.stale))
        samples = self.samples.sums(self.sample) if self.divided else b""
        if self.divided:  # replicas that have drifted apart are not at one cut
            self.digest = short_digest(self.digest, samples)
        trees = {name: document() for name, document in self.trees.items()}
        if self.named is not None:
            self.shares = self.named(self.cut, self.plan.table, trees, self.filling.data)
        shares = b"" if self.shares is None else self.shares.document
        frozen = {} if self.skipped.keys else self.skipped.counts
        return GenerationDocuments(
            trees=trees,
            table=self.plan.table,
            readers=self.readers,
            shares=shares,
            frozen=frozen,
            sums=self.sums,
            samples=samples,
        ).to_bytes()

    def _refuse(self, changed: list[str]) -> None:
        if changed:
            others = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
            raise UnannouncedChange(
                f"{changed[0]!r}{others} changed after the cut of step {self.cut.step} and before an optimizer step "
                "announced it: the capture was dropped. Change the state in optimizer.step() or before manager.step(); "
                "call manager.fence() before you change it anywhere else (weights swapped for an evaluation, a step "
                "that is replayed from a CUDA graph)"
            )
        if self.slices.was_interrupted:
            raise SaveFailed(f"the capture of step {self.cut.step} was interrupted in the middle of a copy")

    def complete(self, documents: bytes) -> None:
        """Complete the generation."""
        shares, kept = b"" if self.shares is None else self.shares.digest, self.skipped.leaves()
        self.filling.complete(
            self.cut, digest=self.digest, documents=documents, kept=kept, shares=shares, divided=self.divided
        )

    def drop(self) -> None:
        """Abort the capture and release its generation. No thread reads or writes for the capture afterwards."""
        try:
            self.slices.abort()
        finally:
            self.filling.abandon()


class Copier:
    """The copier of an engine. One thread calls all methods. Jobs must not raise."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if there is none. `SaveFailed` if the system allows no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="lakeckpt-copier", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise SaveFailed(
                    f"no capture can begin, as its thread cannot be started: {error}. Allow this user, or the "
                    "container, more processes (ulimit -u, pids.max), or start fewer threads and workers"
                ) from error
            self._thread = thread

    def do(self, job: Callable[[], None]) -> None:
        """Queue ``job`` behind the jobs before it."""
        self.start()
        self._work.put(job)

    def end(self) -> None:
        """Let the thread end when all jobs are done. Any thread may call it."""
        self._work.put(None)

    def stop(self) -> None:
        """Return when all jobs are done, and the thread has ended."""
        if self._thread is not None:
            self.end()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            job()
            del job  # it holds the engine, which nobody may close


class Failures:
    """What went wrong beside training. The copier adds it, and the training thread calls the rest."""

    def __init__(self) -> None:
        self._raised: deque[tuple[int | None, BaseException]] = deque()  # (step of the cut, error), not raised yet
        self._dropped: dict[int, BaseException | None] = {}  # cuts whose capture was dropped, and what failed
        self._warning = ""

    def __bool__(self) -> bool:
        return bool(self._raised)

    def warn(self, text: str | None) -> None:
        """Warn the user at the next cut, if there is a text."""
        self._warning = text or self._warning

    def add(self, step: int | None, failure: BaseException) -> None:
        """Raise ``failure`` at the next cut. ``step``: of the cut; None: memory could not be made."""
        self._raised.append((step, failure))

    def drop(self, step: int, failure: BaseException | None) -> None:
        """The capture of ``step`` was dropped, for the ``failure`` if there is one."""
        self._dropped[step] = failure
        if failure is not None:
            self.add(step, failure)

    def begins(self, step: int) -> None:
        """Forget why an earlier capture of ``step`` was dropped, and captures of long ago."""
        for over in [one for one in list(self._dropped) if one == step or one <= step - _REMEMBERED]:
            self._dropped.pop(over, None)

    def dropped(self, step: int) -> tuple[bool, LakeckptError | None]:
        """Return whether the capture of ``step`` was dropped, and the error, if there was one. The error is returned
        once, and `settle` does not raise it any more."""
        if step not in self._dropped:
            return False, None
        failure = self._dropped.pop(step)
        if failure is None:
            return True, None
        with suppress(ValueError):
            self._raised.remove((step, failure))
        return True, _error_of(step, failure)

    def settle(self) -> None:
        """Issue the warning and raise the errors that nobody has seen."""
        warning, self._warning = self._warning, ""
        if warning:
            warnings.warn(warning, CaptureWarning, stacklevel=5)
        if not self._raised:
            return
        first = _error_of(*self._raised.popleft())
        while self._raised:
            first.add_note(f"and then: {_error_of(*self._raised.popleft())}")
        raise first


def _error_of(step: int | None, failure: BaseException) -> LakeckptError:
    """Return the error that the training thread raises for what failed in the copier."""
    if isinstance(failure, LakeckptError):
        return failure
    what = "memory for captures could not be made" if step is None else f"the capture of step {step} failed"
    error = SaveFailed(f"{what}: {failure!r}")
    error.__cause__ = failure
    return error

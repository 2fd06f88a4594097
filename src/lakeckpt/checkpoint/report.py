"""This module defines what a checkpoint manager reports: the results of saves.

The module starts no threads.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.outage import Outage
from lakeckpt.checkpoint.persist.commit import Remarks
from lakeckpt.counters import RunCounters
from lakeckpt.errors import CheckpointError, LakeckptError, SaveFailed, SaveSkipped, SaveWarning

__all__ = [
    "Reporter",
    "SaveHandle",
    "Saved",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The result of a save: the checkpoint, or the error."""

    step: int
    info: CheckpointInfo | None
    error: LakeckptError | None
    remarks: Remarks = field(default_factory=Remarks)
    """On the commit."""
    took_s: float = 0.0
    """Seconds from the order, or the call, to the commit."""


class SaveHandle:
    """A save that has begun, as ``manager.save(sync=False)`` returns it. Only the training thread uses it."""

    def __init__(self, step: int, wait: Callable[[], object]) -> None:
        self.step = step
        """The optimizer step that is saved."""
        self._wait = wait
        self._result: CheckpointInfo | LakeckptError | None = None

    @property
    def done(self) -> bool:
        """True if the result of the save is known. ``step`` and ``wait`` of the manager, and `wait`, update this."""
        return self._result is not None

    def wait(self) -> CheckpointInfo:
        """Wait for the commit and return the checkpoint. Raises the error of a save that failed, as
        `CheckpointManager.save` does."""
        if self._result is None:
            self._wait()
        if self._result is None:
            raise CheckpointError(f"the save of step {self.step} has no result: an earlier call raised it")
        if isinstance(self._result, LakeckptError):
            raise self._result
        return self._result


class Reporter:
    """Reports the results of saves to the user: by ``on_save``, as warnings, and as errors.

    The training thread calls it. ``outage`` decides which failures of saves by policy are warnings. ``counters`` count
    results.
    """

    def __init__(
        self, on_save: Callable[[CheckpointInfo], object] | None, *, outage: Outage, counters: RunCounters
    ) -> None:
        self._counters = counters
        self.newest: CheckpointInfo | None = None
        """The newest commit that was reported."""
        self.saved_step = 0
        """The optimizer step of the newest commit."""
        self._failed_step = 0
        self._on_save = on_save
        self._outage = outage
        self._handles: list[SaveHandle] = []

    def handle(self, step: int, wait: Callable[[], object]) -> SaveHandle:
        """Return a handle of the save of ``step``, which `report` gives its result; ``wait`` waits for all saves."""
        self._handles.append(SaveHandle(step, wait))
        return self._handles[-1]

    def report(self, results: Iterable[Saved], *, wanted: int | None = None) -> None:
        """Report ``results``. A failure after the newest commit is raised; the failure of a save that was skipped for
        another save is raised only if it is the save of step ``wanted``. An error of ``on_save`` is raised when all
        ``results`` are recorded."""
        failure, remarks = None, Remarks()
        raised: Exception | None = None
        for one in results:
            for handle in [handle for handle in self._handles if handle.step == one.step]:
                handle._result = one.info or one.error
                self._handles.remove(handle)
            if one.info is not None:
                remarks, failure = one.remarks, None
                self.saved_step, self.newest = one.step, one.info
                self._outage.committed()
                self._counters.committed(one.step, one.info.created_s, one.took_s)
                if self._on_save is not None:
                    try:
                        self._on_save(one.info)
                    except Exception as error:
                        raised = raised or error
            elif not isinstance(one.error, SaveSkipped) or one.step == wanted:
                failure, self._failed_step = one.error, one.step
                self._counters.failed += 1
        try:
            remarks.warn()
        finally:  # whether or not warnings are errors
            if (ends := raised or failure) is not None:
                raise ends

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Count for how long the block holds up the training thread."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._counters.stall_s += time.perf_counter() - begin_s

    @contextmanager
    def warning_of(self, step: int) -> Iterator[None]:
        """Warn of a save by policy that fails within, at ``step`` or at a step that was saved before; or let the error
        through."""
        self._failed_step, begin_s = step, self._outage.now()
        try:
            yield
        except SaveFailed as error:
            follows = self._outage.failed(error, begin_s)
            text = f"training goes on without a checkpoint of step {self._failed_step}: {error}. Meanwhile {follows}"
            warnings.warn(text, SaveWarning, stacklevel=4)

"""This module ends what a `CheckpointManager` has begun: at the end of its ``with``, after an exception, by ``close``.

At a good end, the last cut is saved, and all saves are waited for. After an exception nothing is saved. The other ranks
hear which of the two it was, so that none of them waits for this one. `Closing` is the part of the manager that does
so, and makes its other saves, too; it starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.consumed.watch import Watch
from lakeckpt.checkpoint.faults.aftermath import Aftermath
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.preemption.preemption import Preempted, Preemption
from lakeckpt.checkpoint.presence.presence import Presence
from lakeckpt.checkpoint.report import Reporter
from lakeckpt.checkpoint.sync_save import Saver
from lakeckpt.counters import RunCounters
from lakeckpt.errors import ConfigError
from lakeckpt.tracking.exchange import Exchange

__all__ = ["Closing"]


class Closing:
    """A manager that ends with its ``with``, or by `close`."""

    _aftermath: Aftermath
    _closed: bool
    _counters: RunCounters
    _exchange: Exchange
    _metric: Any
    _preemption: Preemption
    _presence: Presence
    _reporter: Reporter
    _saves: Saver | Background | None
    _step: int
    _uncount: Callable[[], object]
    _watch: Watch

    def save(self) -> object:
        """Save the last cut."""
        raise NotImplementedError

    def wait(self) -> CheckpointInfo | None:
        """Return when everything that was saved is committed: the newest checkpoint that this manager committed, or
        None if it committed none. Errors as for `save`."""
        self._refuse_closed()
        if self._saves is not None:
            with self._preemption.busy(), self._aftermath.saving():
                self._saves.wait()
            self._reporter.report(self._saves.results())
        return self._reporter.newest

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the training loop does in this ``with``, such as ``"evaluate"``, so that the watch learns how long
        it takes (docs/how-to/hangs.md). Nothing depends on it. `ConfigError` if the name is empty."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a phase has a name, such as 'evaluate', got {name!r}")
        self._aftermath.own_phase(name)
        try:
            yield
        finally:
            self._aftermath.phase("between")

    def close(self) -> None:
        """Close what the manager has opened; save nothing. It may be called again. An agent ends what it has begun."""
        self._close(well=True)

    def _close(self, *, well: bool) -> None:
        if not self._closed:
            self._closed = True
            self._uncount()
            try:
                if well:
                    self._watch.check_stepped()
                if self._saves is not None:
                    self._saves.close(well=well)
                if well:  # no rank that is behind waits for this one
                    first = self._saves.attempt.saves if self._saves else 0
                    self._exchange.obstacles.leave(self._step, first=first)
            finally:
                self._presence.close()
                self._exchange.close()
                self._aftermath.close(well=well)
                self._preemption.close(well=well)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the last cut if the body ended well and it is not saved yet. After an exception, save nothing; if
        cuts are captured, the newest that is complete on all ranks is persisted, as when processes die. A save that
        fails here is such an exception."""
        failure = None if isinstance(error, Preempted) else error
        try:
            if kind is None and not self._closed and self._saves is not None:
                with self._preemption.busy(last=True):
                    self._save_last()
                self._preemption.leave()
                self._presence.done()
        except BaseException as own:
            failure = None if isinstance(own, Preempted) else own
            raise
        finally:
            if failure is not None and not self._closed:
                self._aftermath.failed(failure)
                if self._saves is None:
                    self._exchange.obstacles.stop(failure)  # no rank waits for this one until its time is over
                else:
                    self._saves.stop(failure, at_exit=error is None)
            self._close(well=failure is None)

    def _save(self, saves: Saver | Background, *, sync: bool) -> None:
        """Save the last cut. ``sync``: wait for it, and raise what it raises."""
        try:
            saves.save(self._step, self._metric, patient=sync)
        except Exception:
            self._counters.failed += 1
            raise
        if sync:
            saves.wait()
        self._reporter.report(saves.results(), wanted=self._step if sync else None)
        self._presence.saved(self._reporter.saved_step)

    def _save_last(self) -> None:
        """Save the last cut if it is not saved, on all ranks or on none, and wait for all saves."""
        self._aftermath.phase("closing")
        if self._ready().is_saving(self._step):
            with self._reporter.warning_of(self._step):
                self.wait()
        if self._reporter.saved_step != self._step:
            self.save()
        self.wait()

    def _ready(self) -> Saver | Background:
        self._refuse_closed()
        if self._saves is None:
            raise ConfigError("call restore() before the first step: it begins the attempt (at 0 on a fresh start)")
        return self._saves

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConfigError("this manager is closed: make another one")

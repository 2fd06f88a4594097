"""This module saves the current cut and ends the process when one of its signals arrives on some rank.

Two daemon threads begin in `Preemption.start` and are joined in `Preemption.close`. The first waits for signals, and
ends the process if the training loop does not come to its next cut in time. It asks no other process, so nothing can
keep it waiting. The second exists with several ranks: it looks for the signals of other ranks, agrees with them on the
cut (`lakeckpt.checkpoint.preemption.agreement`), and ends the process if they cannot save.

The training thread asks at each cut, `Preemption.stops_at`. Without a signal this takes a lock, and no message is sent.
The thread saves the agreed cut, and leaves by `Preempted`, a SystemExit, so that ``with`` and ``finally`` blocks run.

If the ranks cannot save together, the process ends at once, as by the signal itself: nothing is saved anew, and an
agent that outlives it persists the newest cut that all ranks have captured. torchrun sends SIGTERM to the ranks that
live when a rank has died. The process of a dead rank on this node is found at once, and a rank elsewhere by its node's
other ranks, or by its silence of a few seconds.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import median
from typing import TYPE_CHECKING, NoReturn

from lakeckpt.checkpoint.preemption.agreement import Agreement
from lakeckpt.checkpoint.preemption.requeue import check_requeue, requeue_job
from lakeckpt.checkpoint.preemption.signals import Signals, check_handlers, checked_signals
from lakeckpt.errors import ConfigError, LakeckptError
from lakeckpt.tracking.obstacles import ABORTED, LATE, STOPPED
from lakeckpt.tracking.waiting import SystemWaiter, poll

if TYPE_CHECKING:
    from lakeckpt.tracking.exchange import Exchange

__all__ = ["Preempted", "Preemption"]

_LOG = logging.getLogger("lakeckpt")
_LEAST_GRACE_S = 15.0
_STEPS = 10
"""The usual step is the median of so many steps."""
_LEFT_S = 30.0
"""How long Slurm, Kubernetes and torchrun leave a process by default before they kill it."""
_LOOK_S = 1.0
"""How often a rank looks for the signal of another one; rarer in jobs of more than `_LOOKS_PER_S` ranks."""
_LOOKS_PER_S = 1000
_ANSWER_S = 5.0
"""How long the thread of a rank may take to answer, beyond the time between two looks."""
_PAUSE_S = 0.1
_JOIN_S = 5.0
_NOTE_S = 1.0


class Preempted(SystemExit):
    """The cut is saved, and the process is to end with status 128 + the number of the signal (143 for SIGTERM)."""


class _CannotSave(Exception):
    """The ranks cannot save together. ``is_late``: they all live; else one is gone, and its launcher starts the job
    again."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class Preemption:
    """The preemption of one rank.

    Args:
        save_on: the names of the signals; with none, nothing is started, and the methods do nothing.
        exchange: the other ranks.
        saved_step: returns the optimizer step of the newest checkpoint.
        grace_s: how long the training loop may take to its next cut, in seconds. None: three times its usual step, and
            at least 15 s.
        requeue: ``"slurm"``: rank 0 requeues the job. None: nobody does.

    Raises `ConfigError` for an argument that is not valid, and as `check_handlers` does.
    """

    def __init__(
        self,
        save_on: Collection[str],
        exchange: Exchange,
        saved_step: Callable[[], int],
        *,
        grace_s: float | None,
        requeue: str | None,
    ) -> None:
        self._numbers = checked_signals(save_on)
        check_handlers(self._numbers)
        check_requeue(requeue, is_used=bool(self._numbers))
        _check_grace(grace_s)
        self._exchange, self._saved_step, self._asked_s = exchange, saved_step, grace_s
        self._has_agent = False
        self._requeues = requeue is not None and exchange.rank == 0
        self._agreement = Agreement(exchange)
        self._signals: Signals | None = None
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._got = threading.Event()
        """Set with `_number`, and by `close`."""
        self._number: int | None = None
        self._passed = 0  # the newest cut behind which the loop trains on
        self._stated: int | None = None  # the cut behind which the loop does not go before the ranks agree
        self._cut: int | None = None  # the cut at which all ranks stop
        self._busy = 0
        self._since_s = 0.0  # when the loop left the manager's calls
        self._begun_s = 0.0  # when the step under way began, later by what the manager's calls took since
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._is_saving = False  # the agreed cut: a rank that has saved it may end
        self._is_last = False  # the loop is over: no rank waits for another one but in its last save
        self._is_over = False

    @property
    def names(self) -> str:
        """The names of the signals."""
        return " ".join(one.name for one in self._numbers)

    @property
    def grace_s(self) -> float:
        """How long the training loop may take to its next cut after a signal."""
        if self._asked_s is not None:
            return self._asked_s
        return max(_LEAST_GRACE_S, 3 * median(self._steps_s or [0.0]))

    # --- the training thread

    def start(self, step: int, *, has_agent: bool) -> None:
        """Take the signals over, in a history that goes on after ``step``; collective. Raises as `Signals` does.

        ``has_agent``: an agent persists the newest cut if this process ends without a save.
        """
        if not self._numbers:
            return
        self._passed, self._has_agent = step, has_agent
        self._since_s = self._begun_s = time.monotonic()
        self._signals = Signals(self._numbers)
        self._thread("lakeckpt-signals", self._listen, self._signals)
        if self._exchange.world_size > 1:
            self._thread("lakeckpt-preemption", self._talk, self._signals)

    def busy(self, *, last: bool = False) -> AbstractContextManager[None]:
        """Return a block that may take its time, because it saves. ``last``: all ranks make the last save of the
        job."""
        return nullcontext() if self._signals is None else self._counted(last)

    @contextmanager
    def _counted(self, last: bool) -> Iterator[None]:
        with self._changed:
            self._busy += 1
            self._is_last = self._is_last or last
            entered_s = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._since_s = time.monotonic()
                self._begun_s += self._since_s - entered_s
                self._changed.notify_all()

    def stops_at(self, step: int) -> bool:
        """Return whether all ranks save the cut of ``step`` and end. Called at every cut, when its own save is over."""
        if self._signals is None:
            return False
        with self._changed:
            if self._stated is not None:
                self._busy += 1
                self._changed.wait_for(lambda: self._cut is not None)
                self._busy, self._since_s = self._busy - 1, time.monotonic()
                assert self._cut is not None
                self._is_saving = step >= self._cut
            if not self._is_saving:
                self._passed = step
                self._count_step()
            return self._is_saving

    def _count_step(self) -> None:
        """Measure the step that ends now. Say after the first ones how long the loop has after a signal."""
        was_known, now_s = len(self._steps_s) == _STEPS, time.monotonic()
        self._steps_s.append(now_s - self._begun_s)
        self._begun_s = now_s
        if was_known or len(self._steps_s) < _STEPS or self._exchange.rank:
            return
        usual_s = median(self._steps_s)
        level = logging.INFO if usual_s <= self.grace_s <= max(_LEFT_S, self._asked_s or 0.0) else logging.WARNING
        text = "after a signal (%s) the loop has %g s to its next cut, and its steps usually take %.3g s. "
        text += "grace_s is to be longer than a step, and shorter than the time that the scheduler leaves (often %g s)"
        _LOG.log(level, text, self.names, round(self.grace_s, 1), usual_s, _LEFT_S)

    def leave(self) -> None:
        """Raise `Preempted` if there was a signal. Called when everything is saved."""
        with self._changed:
            number, self._is_over = self._number, self._number is not None
            self._changed.notify_all()
        if number is not None:
            if self._exchange.rank == 0:
                self._report(f"the job ends. The newest checkpoint is of step {self._saved_step()}")
            self._requeue()
            raise Preempted(128 + number)

    def close(self, *, well: bool) -> None:
        """Join the threads and restore the handlers. ``well``: a signal that nobody has acted on goes to the handler
        of before; else the process ends by an exception anyway."""
        signals, self._signals = self._signals, None
        if signals is None or not signals.is_own:
            return
        with self._changed:
            has_left, self._is_over = self._is_over, True
            self._got.set()
            self._changed.notify_all()
        signals.end()
        for thread in self._threads:
            thread.join(_JOIN_S)
        signals.close()
        if self._number is not None and well and not has_left:
            signal.raise_signal(self._number)

    # --- the thread that waits for signals

    def _thread(self, name: str, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args, name=name, daemon=True))
        self._threads[-1].start()

    def _listen(self, signals: Signals) -> None:
        number = signals.wait()
        if number is None:
            return
        with self._changed:
            self._number, begun_s = number, time.monotonic()
            if self._exchange.world_size == 1:
                self._stated = self._cut = self._passed + 1
            self._got.set()
            while not self._is_over:
                is_saving = self._busy or self._is_saving
                left_s = self.grace_s - (time.monotonic() - max(begun_s, self._since_s))
                if not is_saving and left_s <= 0:
                    break
                self._changed.wait(None if is_saving else left_s)
            else:
                return
        late = _CannotSave(f"the training loop came to no further cut within {self.grace_s:g} s", is_late=True)
        if self._exchange.world_size > 1:  # the store may be silent
            note = threading.Thread(target=self._abort, args=(late,), name="lakeckpt-abort", daemon=True)
            note.start()
            note.join(_NOTE_S)
        self._end(late)

    # --- the thread that talks with other ranks

    def _talk(self, signals: Signals) -> None:
        look_s = max(_LOOK_S, self._exchange.world_size / _LOOKS_PER_S)
        while not self._got.wait(look_s):
            number = self._agreement.signal()
            if number is not None:
                signals.pretend(number)
        number = self._number
        if number is None:
            return
        try:
            self._agree(number, _ANSWER_S + 2 * look_s)
            self._watch(float("inf"))
        except BaseException as error:
            text = str(error) if isinstance(error, LakeckptError) else repr(error)
            cannot = error if isinstance(error, _CannotSave) else _CannotSave(text)
            if not self._is_last:
                self._abort(cannot)
                self._end(cannot)

    def _agree(self, number: int, timeout_s: float) -> None:
        """Agree on the cut. Raises `_CannotSave`."""
        self._refuse()
        self._agreement.announce(number)
        with self._changed:
            self._stated = self._passed + 1
        self._agreement.state(self._stated)
        self._watch(timeout_s, until=self._has_cut)
        if self._cut is None and not self._is_over:
            silent = f"ranks {self._agreement.missing()}" if self._exchange.rank == 0 else "rank 0"
            raise _CannotSave(f"{silent} did not answer within {timeout_s:g} s")

    def _has_cut(self) -> bool:
        """Look for the answer of the ranks."""
        cut = self._agreement.cut()
        with self._changed:
            self._cut = cut
            self._changed.notify_all()
        return cut is not None

    def _watch(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Return when this rank has saved, ``until`` is true, or ``timeout_s`` have passed. Raises `_CannotSave` as
        soon as an obstacle is known."""
        poll(
            lambda: self._is_over or until() or None,
            waiter=SystemWaiter(),
            timeout_s=timeout_s,
            longest_s=_PAUSE_S,
            obstacles=self._refuse,
        )

    def _refuse(self) -> None:
        """Raise `_CannotSave` if an obstacle is known. A rank that has left well is none: it has saved."""
        for one in self._exchange.obstacles.look():
            if one.kind in (ABORTED, LATE, STOPPED):
                text = str(one.to_error()) if one.kind == STOPPED else one.cause
                raise _CannotSave(text, is_late=one.kind == LATE)

    # --- the end

    def _abort(self, error: _CannotSave) -> None:
        self._exchange.obstacles.abort(str(error), is_late=error.is_late)

    def _end(self, error: _CannotSave) -> NoReturn:
        """End this process without a save."""
        kept = f"the newest checkpoint is of step {self._saved_step()}"
        if self._has_agent:
            kept += ", unless all ranks have captured a newer cut, which their agents persist"
        self._report(f"{error}. Nothing is saved anew: {kept}")
        if error.is_late:
            self._requeue()
        with suppress(Exception):
            for child in multiprocessing.active_children():  # loader workers, which ignore the signal of others
                child.terminate()
        assert self._number is not None
        os._exit(128 + self._number)

    def _requeue(self) -> None:
        if self._requeues:
            self._report(requeue_job() or "the job is requeued")

    def _report(self, text: str) -> None:
        assert self._number is not None
        name = signal.Signals(self._number).name
        line = f"lakeckpt: rank {self._exchange.rank}, process {os.getpid()}, {name}: {text}\n"
        with suppress(OSError):
            os.write(2, line.encode())


def _check_grace(grace_s: object) -> None:
    if grace_s is None:
        return
    if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 < grace_s < float("inf"):
        raise ConfigError(f"grace_s is a positive number of seconds, or None, got {grace_s!r}")

"""This module starts the agent of a trainer, and exchanges messages with it on pipes.

`AgentLink` waits for the agent in `wait`; else it never blocks training: messages are queued until the agent has
started, and the pipe has room. An agent that ends early (killed for memory, say) takes its pending orders with it: the
link reports them as failed at the next call, and starts another agent at the next order. The link starts no threads.
Imports without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from lakeckpt.checkpoint.agent.logs import log_path, open_log
from lakeckpt.checkpoint.agent.orders import (
    Bye,
    Hello,
    Message,
    Order,
    Outcome,
    Protected,
    TableDocuments,
    Unable,
    message_from_bytes,
    message_to_bytes,
)
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.peers.grouping import Keeping
from lakeckpt.errors import AgentError, ArenaError, SaveFailed, WireError
from lakeckpt.tracking.obstacles import Obstacle
from lakeckpt.tracking.waiting import SystemWaiter

__all__ = ["IGNORED", "LINGER_S", "AgentLink"]

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that do not end an agent."""

LINGER_S = 900.0
"""How much longer than a save the final save waits for other ranks: a NCCL watchdog ends a trainer after ten
minutes."""
_BYE_S = 5.0
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_PTRACER = 0x59616D61
_LOOK_S = 1.0
"""How often the process itself is looked at: the end of its pipe does not show if a fork has a copy of the pipe."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """An agent process and this side of its pipes."""

    process: subprocess.Popen[bytes]
    orders: Connection
    outcomes: Connection
    looked_s: float = 0.0
    """When `has_ended` asked the system last."""

    def has_ended(self) -> bool:
        """Return whether the process has ended, as of the last second: each question is a call of the system, which
        releases the interpreter's lock. The end of the pipe shows an end at once."""
        if time.monotonic() - self.looked_s < _LOOK_S:
            return False
        self.looked_s = time.monotonic()
        return self.process.poll() is not None

    def hang_up(self) -> None:
        """Close the pipes."""
        self.orders.close()
        self.outcomes.close()
        if self.process.poll() is None:
            _ending.append(self.process.pid)
            self.process.returncode = 0  # nobody waits for it


_ending: list[int] = []
"""The processes of agents that outlive their link. They are reaped when the next agent is started."""


class AgentLink:
    """A trainer's link to its agent. ``begin`` describes the trainer and its attempt, from whose newest commit that is
    known then each agent goes on. Raises `AgentError` if no agent can serve.

    One thread calls all methods. They do nothing in a forked process.
    """

    def __init__(self, begin: Hello, *, python: str = sys.executable) -> None:
        self._begin = begin
        self._python = python
        self._log = log_path(begin.arenas, begin.digest.hex(), begin.rank)
        self._process = os.getpid()
        self._child: _Child | None = None
        self._lost = ""  # why there is no agent
        self._starts = 0
        self._unable = ""  # why the first agent cannot serve this trainer
        self._pending: set[tuple[int, int]] = set()
        self._got: list[Outcome] = []
        self._unsent: deque[Message] = deque()
        self._documents = TableDocuments(data={})
        self._keeping: Keeping | None = None
        self._protected: Callable[[int, float], object] = lambda step, at_s: None
        self._obstacles: list[Obstacle] = []
        self._start()

    @property
    def pid(self) -> int | None:
        """The agent's process."""
        return None if self._child is None else self._child.process.pid

    def order(self, order: Order, /) -> None:
        """Hand a cut over. An agent that is missing is an outcome, never an error here."""
        self._look()
        if self._child is None and not self._unable:
            self._start_again()
        self._pending.add((order.step, order.number))
        if self._child is None:
            self._fail()
        else:
            self._send(order)

    def copy(self, keeping: Keeping, protected: Callable[[int, float], object], /) -> None:
        """Let the agent send copies to another node; another agent does so, too. ``protected(step, at_s)`` is called
        when the share of a cut lies there."""
        self._keeping, self._protected = keeping, protected
        self._send(keeping)

    def keep(self, documents: TableDocuments, /) -> None:
        """Hand over what has to lie in the run before the next commit; another agent gets it, too."""
        self._documents = documents
        self._send(documents)

    def pass_on(self, obstacle: Obstacle, /) -> None:
        """Pass an obstacle on: the agent stops waiting, and the outcome names the cause; another agent gets it, too."""
        self._obstacles.append(obstacle)
        self._send(obstacle)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call, without waiting. Raises `AgentError` if the agent has started, and
        cannot serve this trainer."""
        self._look()
        if self._unable:
            raise AgentError(self._unable)
        found, self._got = self._got, []
        return found

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until there is an outcome (True), at most about ``timeout_s``."""
        waiter = SystemWaiter()
        until_s = waiter.now() + timeout_s
        self._look()
        while not self._got and (child := self._child) is not None and (left_s := until_s - waiter.now()) > 0:
            child.outcomes.poll(min(left_s, _LOOK_S))
            self._look()
        return bool(self._got)

    def close(self, *, well: bool) -> None:
        """End the agent's work: ``well``, or as for a trainer that died. The agent persists what was ordered first."""
        if os.getpid() != self._process:
            return
        self._look()
        if well and self._child is None and not self._unable:
            self._start_again()  # the arena is to be removed
        self._send(Bye(well=well))
        waiter = SystemWaiter()
        until_s = waiter.now() + _BYE_S
        while self._unsent and (child := self._child) is not None and (left_s := until_s - waiter.now()) > 0:
            _can(child.orders, select.POLLOUT, left_s)
            self._look()
        self._end()

    def __del__(self) -> None:
        """Hang up if nobody closed the link: the agent then does as for a trainer that died."""
        if getattr(self, "_child", None) is not None and os.getpid() == self._process:
            self._end()

    # --- the process

    def _start(self) -> None:
        """Start an agent. Raises `AgentError`."""
        _ending[:] = [pid for pid in _ending if not _is_over(pid)]
        try:
            ArenaFolder(self._begin.arenas).make()
            log = open_log(self._log)
        except (OSError, ArenaError) as error:
            raise AgentError(f"an agent cannot be started, as its log cannot be written: {error}") from error
        trainer = _own_pidfd()
        try:
            theirs_orders, orders = Pipe(duplex=False)
            outcomes, theirs_outcomes = Pipe(duplex=False)
            process = _spawned(self._python, theirs_orders, theirs_outcomes, trainer=trainer, log=log)
            theirs_orders.close()
            theirs_outcomes.close()
        except (OSError, subprocess.SubprocessError) as error:
            raise AgentError(f"an agent cannot be started with {self._python!r}: {error}") from error
        finally:
            os.close(log)
            if trainer >= 0:
                os.close(trainer)
        self._child = _Child(process=process, orders=orders, outcomes=outcomes)
        if self._begin.watch:
            _let_look(os.getppid() or process.pid)
        self._starts += 1
        self._send(replace(self._begin, attempt=replace(self._begin.attempt, pending={})))
        self._send(self._documents)
        if self._keeping is not None:
            self._send(self._keeping)
        for obstacle in self._obstacles:
            self._send(obstacle)

    def _start_again(self) -> None:
        self._lost = ""
        try:
            self._start()
        except AgentError as error:
            self._lost = str(error)

    def _look(self) -> None:
        """Read what the agent has sent, send what is to be sent, and find out whether the agent lives."""
        child = self._child
        if child is None or os.getpid() != self._process:
            return
        has_ended = child.has_ended()  # before the last bytes are read
        self._flush()
        try:
            while _can(child.outcomes, select.POLLIN):
                self._receive(message_from_bytes(child.outcomes.recv_bytes()))
        except EOFError:
            has_ended = True
        except (OSError, WireError, AgentError) as error:
            self._lost = self._lost or f"the agent's messages cannot be read: {error}"
            if isinstance(error, AgentError):
                self._refuse()
            has_ended = True
        if has_ended:
            self._lose(child)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Outcome):
            self._pending.discard((message.step, message.number))
            self._got.append(message)
        elif isinstance(message, Protected):
            self._protected(message.step, message.at_s)
        elif isinstance(message, Unable):
            self._lost = f"the agent cannot work for this trainer: {message.text}"
            self._refuse()

    def _refuse(self) -> None:
        """The agent cannot serve this trainer. If others have served it before, its saves fail, and training goes
        on."""
        if self._starts == 1:
            self._unable = self._lost

    def _lose(self, child: _Child) -> None:
        """The agent has ended, and its pending orders have failed."""
        try:
            status: int | None = child.process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            status = None
        self._end()
        how = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        self._lost = self._lost or f"the agent (process {child.process.pid}) {how}: see {self._log!r}"
        self._fail()

    def _fail(self) -> None:
        """Report that all pending orders have failed, as there is no agent."""
        for step, number in sorted(self._pending):
            self._got.append(Outcome(step=step, number=number, kind=SaveFailed.kind, text=self._lost))
        self._pending.clear()

    def _end(self) -> None:
        child, self._child = self._child, None
        self._unsent.clear()
        if child is not None:
            child.hang_up()

    # --- what is sent

    def _send(self, message: Message) -> None:
        if self._child is not None:
            self._unsent.append(message)
            self._flush()

    def _flush(self) -> None:
        """Send as much as the agent takes now: an agent that takes nothing does not block training."""
        with contextlib.suppress(OSError):  # `_look` finds that the agent is gone
            while (child := self._child) is not None and self._unsent and os.getpid() == self._process:
                if not _can(child.orders, select.POLLOUT):
                    return
                child.orders.send_bytes(message_to_bytes(self._unsent.popleft()))


def _can(pipe: Connection, what: int, timeout_s: float = 0.0) -> bool:
    """Wait until a pipe can be read or written, at most ``timeout_s``. Returns whether it can."""
    waits = select.poll()  # ``select`` refuses descriptors above 1023
    waits.register(pipe, what)
    return bool(waits.poll(1000 * timeout_s))


def _spawned(
    python: str, orders: Connection, outcomes: Connection, *, trainer: int, log: int
) -> subprocess.Popen[bytes]:
    """Start the process, which imports what this process imports. Signals are blocked until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        return subprocess.Popen(
            [python, "-P", "-m", "lakeckpt.checkpoint.agent", str(trainer)],
            stdin=orders.fileno(),
            stdout=outcomes.fileno(),
            stderr=log,
            pass_fds=() if trainer < 0 else (trainer,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _imported_from()},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _let_look(pid: int) -> None:
    """Let a process and its descendants read the stacks of this process where Yama forbids it.

    With ``ptrace_scope`` 1 an agent may not look at its own trainer, as it is a child. The agent of any trainer of the
    node may be the one that watches: all of them are descendants of the launcher, the parent of this process.
    """
    if os.path.exists(_YAMA):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _is_over(pid: int) -> bool:
    """Reap a child that has ended. Returns whether there is no such child any more."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _own_pidfd() -> int:
    """Return a pidfd of this process, or -1 if the system has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


def _imported_from() -> str:
    """Return the places from which this process imports, as absolute paths."""
    places = []
    for one in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the folder that this process was in is gone
            places.append(os.path.abspath(one))
    return os.pathsep.join(dict.fromkeys(places))

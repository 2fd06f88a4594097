"""This module connects a trainer to whoever persists its cuts: an agent process, or a thread of the trainer.

`AgentLink` starts an agent as a child of the trainer, and talks to it on pipes. It waits for the agent when it is
made, and in `wait`; else it never blocks training. An agent that ends early (killed for memory, say) takes its pending
orders with it: the link reports them as failed at the next look, starts one other agent at once, so that there is one
if the trainer dies, and tries again at each order where that fails. `InnerAgent` persists in a thread of the trainer,
where the storage is an object that no other process can open; it ends with the trainer.

Imports without torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.logs import log_path, open_log
from lakeckpt.checkpoint.agent.orders import (
    AGENT_LOST,
    Begin,
    Bye,
    Documents,
    Frames,
    GivenUp,
    Message,
    Order,
    Outcome,
    Ready,
    framed,
)
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.errors import AgentError, ArenaError, SaveFailed, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.waiting import SystemWaiter, Waiter

__all__ = ["LINGER_S", "AgentLike", "AgentLink", "InnerAgent"]

LINGER_S = 900.0
"""How much longer than a save the final save waits for other ranks: a NCCL watchdog ends a trainer after ten
minutes."""
_START_S = 60.0
_BYE_S = 5.0
_LOOK_S = 1.0
"""How often the process itself is looked at: the end of its pipe does not show where a fork has a copy of it."""


class AgentLike(Protocol):
    """Persists the cuts of this trainer. Called by one thread, but for `checksummer`."""

    @property
    def checksummer(self) -> Checksummer | None:
        """Takes the checksums of captured slices in another process, for as long as it lives; None: there is none."""
        ...

    def order(self, order: Order | GivenUp, /) -> None:
        """Hand a cut over; or say that another rank has given its save up: the agent stops waiting for that rank, and
        the outcome says why. An agent that is missing is an outcome, too, never an error here."""
        ...

    def keep(self, documents: Mapping[str, bytes], /) -> None:
        """Have these (path → document) in storage before the next commit, also before the final save."""
        ...

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call, without waiting. One of step `AGENT_LOST` is of no order: the agent
        ended, and has no documents any more."""
        ...

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until there is an outcome (True), at most about ``timeout_s``."""
        ...

    def close(self, *, well: bool) -> None:
        """End the agent's work: ``well``, or as a trainer that died. What was handed over is persisted all the same."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """An agent process and this side of its pipes."""

    process: subprocess.Popen[bytes]
    orders: int
    outcomes: int
    checksummer: Checksummer
    is_ready: bool = False

    def hang_up(self) -> None:
        """Close the pipes, but for those of checksums: the thread that copies may be about to use them."""
        os.close(self.orders)
        os.close(self.outcomes)


_links: weakref.WeakSet[AgentLink] = weakref.WeakSet()
_ending: list[subprocess.Popen[bytes]] = []
"""Agents that outlive their link; they are reaped when the next agent is started."""


def _leave_in_fork() -> None:
    """Close the pipes in a forked process, so that the agent sees their end when the trainer ends."""
    for link in list(_links):
        link._leave_in_fork()
    _forget_ending()


def _forget_ending() -> None:
    """Let agents that outlive this process be: nobody here waits for them."""
    for one in _ending:
        one.returncode = 0


os.register_at_fork(after_in_child=_leave_in_fork)
atexit.register(_forget_ending)


class AgentLink:
    """A trainer's link to its agent; ``begin`` says who the trainer is. Raises `AgentError` where no agent can
    serve."""

    def __init__(self, begin: Begin, *, python: str = sys.executable) -> None:
        self._begin = begin
        self._python = python
        self._log = log_path(begin.arenas, begin.digest.hex(), begin.rank)
        self._child: _Child | None = None
        self._pending: set[tuple[int, int]] = set()
        self._got: list[Outcome] = []
        self._unsent = bytearray()
        self._start()
        self._wait_until_ready()
        _links.add(self)

    @property
    def pid(self) -> int | None:
        """The agent's process."""
        return None if self._child is None else self._child.process.pid

    @property
    def checksummer(self) -> Checksummer | None:
        """Takes the checksums of captured slices in the agent, for as long as this agent lives."""
        return None if self._child is None else self._child.checksummer

    def order(self, order: Order | GivenUp, /) -> None:
        """See `AgentLike`."""
        self._look()
        if isinstance(order, Order):
            self._pending.add((order.step, order.number))
            if self._child is None:
                self._start_again()
        self._say(order)

    def keep(self, documents: Mapping[str, bytes], /) -> None:
        """See `AgentLike`."""
        self._look()
        self._say(Documents(documents=documents))

    def outcomes(self) -> list[Outcome]:
        """See `AgentLike`."""
        self._look()
        found, self._got = self._got, []
        return found

    def wait(self, timeout_s: float, /) -> bool:
        """See `AgentLike`."""
        waiter = SystemWaiter()
        until_s = waiter.now() + timeout_s
        self._look()
        while not self._got and (child := self._child) is not None:
            left_s = until_s - waiter.now()
            if left_s <= 0:
                return False
            _ready(child, sends=bool(self._unsent), timeout_s=min(left_s, _LOOK_S))
            self._look()
        return bool(self._got)

    def close(self, *, well: bool) -> None:
        """See `AgentLike`."""
        self._look()
        if well and self._child is None:
            self._start_again()  # the arena is to be removed
        if well and (child := self._child) is not None:
            self._say(Bye())
            waiter = SystemWaiter()
            until_s = waiter.now() + _BYE_S
            while self._unsent and self._child is child and (left_s := until_s - waiter.now()) > 0:
                _ready(child, sends=True, timeout_s=left_s, hears=False)
                self._send()
        self._end()

    # --- the process

    def _start(self) -> None:
        """Start an agent. Raises `AgentError`."""
        _ending[:] = [one for one in _ending if one.poll() is None]
        ours, theirs = [], []
        try:
            ArenaFolder(self._begin.arenas).make()
            log = open_log(self._log)
        except (OSError, ArenaError) as error:
            raise AgentError(f"an agent cannot be started, as its log cannot be written: {error}") from error
        theirs.append(log)
        try:
            for is_to_agent in (True, False, True, False):  # orders, outcomes, asked checksums, their answers
                reads, writes = os.pipe()
                ours.append(writes if is_to_agent else reads)
                theirs.append(reads if is_to_agent else writes)
            trainer = _own_pidfd()
            theirs += [] if trainer < 0 else [trainer]
            process = _spawned(self._python, theirs[1:5], trainer=trainer, log=log)
        except (OSError, subprocess.SubprocessError) as error:
            for one in ours:
                os.close(one)
            raise AgentError(f"an agent cannot be started with {self._python!r}: {error}") from error
        finally:
            for one in theirs:
                os.close(one)
        for one in ours:
            os.set_blocking(one, False)
        self._frames = Frames()
        self._child = _Child(
            process=process, orders=ours[0], outcomes=ours[1], checksummer=Checksummer(ours[2], ours[3])
        )
        self._say(self._begin)

    def _wait_until_ready(self) -> None:
        waiter = SystemWaiter()
        until_s = waiter.now() + _START_S
        while self._child is not None and not self._child.is_ready and waiter.now() < until_s:
            _ready(self._child, sends=bool(self._unsent), timeout_s=_LOOK_S)
            self._look(again=False)
        if self._child is None:
            raise AgentError(self._got[-1].text)
        if not self._child.is_ready:
            self._end()
            raise AgentError(f"the agent does not answer within {_START_S:g} s of being started: see {self._log!r}")

    def _look(self, *, again: bool = True) -> None:
        """Read what the agent says, send what is to be sent, and see whether it lives."""
        child = self._child
        if child is None:
            return
        has_ended = child.process.poll() is not None  # before the last bytes are read
        self._send()
        try:
            while data := os.read(child.outcomes, 2**16):
                for message in self._frames.add(data):
                    self._hear(child, message)
            has_ended = True
        except BlockingIOError:
            pass
        except (OSError, WireError):
            has_ended = True
        if has_ended and self._child is child:
            self._lose(child)
        if self._child is None and again and child.is_ready:
            self._start_again()

    def _hear(self, child: _Child, message: Message) -> None:
        if isinstance(message, Outcome):
            self._pending.discard((message.step, message.number))
            self._got.append(message)
        elif isinstance(message, Ready):
            child.is_ready = not message.kind
            if message.kind:
                self._fail(f"the agent cannot work for this trainer: {message.text}")
                self._end()

    def _lose(self, child: _Child) -> None:
        self._end()
        try:
            status: int | None = child.process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            status = None
        how = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        self._fail(f"the agent (process {child.process.pid}) {how}: see {self._log!r}")

    def _fail(self, text: str) -> None:
        """All that is pending has failed; where nothing is, the trainer hears of it all the same."""
        lost = sorted(self._pending) or [(AGENT_LOST, 0)]
        self._pending.clear()
        self._got += [Outcome(step=step, number=number, kind=SaveFailed.kind, text=text) for step, number in lost]

    def _start_again(self) -> None:
        try:
            self._start()
        except AgentError as error:
            self._fail(str(error))

    def _end(self) -> None:
        child, self._child = self._child, None
        self._unsent.clear()
        if child is not None:
            child.hang_up()
            if child.process.poll() is None:
                _ending.append(child.process)

    def _leave_in_fork(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.hang_up()
            child.checksummer.close()
            child.process.returncode = 0  # it is no child of this process

    # --- what is said

    def _say(self, message: Message) -> None:
        if self._child is not None:
            self._unsent += framed(message)
            self._send()

    def _send(self) -> None:
        """Send as much as the agent takes now: an agent that takes nothing does not block training."""
        with contextlib.suppress(OSError):  # it is full, or `_look` finds that the agent is gone
            while self._child is not None and self._unsent:
                del self._unsent[: os.write(self._child.orders, self._unsent)]


def _spawned(python: str, pipes: Sequence[int], *, trainer: int, log: int) -> subprocess.Popen[bytes]:
    """Start the process, which imports what this process imports."""
    orders, outcomes, asked, answers = pipes
    return subprocess.Popen(
        [python, "-P", "-m", "lakeckpt.checkpoint.agent", str(asked), str(answers), str(trainer)],
        stdin=orders,
        stdout=outcomes,
        stderr=log,
        pass_fds=[asked, answers, *([] if trainer < 0 else [trainer])],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": _imported_from()},
    )


def _own_pidfd() -> int:
    """Return a pidfd of this process, or -1 where the system has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


def _ready(child: _Child, *, sends: bool, timeout_s: float, hears: bool = True) -> None:
    """Wait until the agent says or, if it ``sends``, takes something. (``select`` refuses descriptors above 1023.)"""
    waits = select.poll()
    if hears:
        waits.register(child.outcomes, select.POLLIN)
    if sends:
        waits.register(child.orders, select.POLLOUT)
    waits.poll(1000 * timeout_s)


def _imported_from() -> str:
    """Return the places from which this process imports, as absolute paths."""
    places = []
    for one in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the folder that this process was in is gone
            places.append(os.path.abspath(one))
    return os.pathsep.join(dict.fromkeys(places))


class InnerAgent:
    """Persists in a thread of this process. Arguments as for `Persister`."""

    def __init__(
        self,
        storage: Storage,
        attempt: Attempt,
        *,
        generations: Generations,
        rank: int,
        world_size: int,
        settings: Settings,
        waiter: Waiter,
    ) -> None:
        self._generations = generations
        self._timeout_s = settings.timeout_s
        self._got: deque[Outcome] = deque()
        self._came = threading.Event()
        self._persister = Persister(
            storage,
            generations,
            attempt,
            rank=rank,
            world_size=world_size,
            settings=settings,
            waiter=waiter,
            report=self._report,
        )
        self._persister.start()

    @property
    def checksummer(self) -> None:
        """See `AgentLike`: threads of the trainer take them."""
        return

    def order(self, order: Order | GivenUp, /) -> None:
        """See `AgentLike`."""
        if isinstance(order, GivenUp):
            self._persister.give_up(order)
        else:
            self._persister.order(order)

    def keep(self, documents: Mapping[str, bytes], /) -> None:
        """See `AgentLike`."""
        self._persister.keep(documents)

    def outcomes(self) -> list[Outcome]:
        """See `AgentLike`."""
        self._came.clear()
        return [self._got.popleft() for _ in range(len(self._got))]

    def wait(self, timeout_s: float, /) -> bool:
        """See `AgentLike`."""
        return bool(self._got) or self._came.wait(timeout_s)

    def close(self, *, well: bool) -> None:
        """See `AgentLike`. Waits until all is persisted, as no other process would do it. Raises `SaveFailed`
        where that takes too long; the arena then stays as it is, since the thread still reads it."""
        self._persister.leave()
        if not self._persister.join(2 * self._timeout_s):
            if well:
                raise SaveFailed(
                    f"what was ordered is not in storage {2 * self._timeout_s:g} s after the end: its store is stuck"
                )
            return
        if well:
            self._generations.remove()
        self._generations.close()

    def _report(self, outcome: Outcome) -> None:
        self._got.append(outcome)
        self._came.set()

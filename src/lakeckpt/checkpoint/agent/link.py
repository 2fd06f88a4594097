"""How does a trainer reach its agent?  A socket to it, an agent started where there is none, and what came of orders.

`AgentLink` talks to the agent's process; `InnerAgent` persists in a thread of the trainer, where storage is an object
that no other process can open: it ends with the trainer. Neither makes the trainer wait, but for `wait`, and
`AgentLink` while it starts an agent: as it is made, and where one has died. The orders that a dead agent has left are
given to the next one, which goes on with them. Where none can be started any more, they have failed, and training goes
on: the next order tries again.

Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.orders import NOT_SERVED, Bye, Documents, GivenUp, Hello, Order, Outcome, framed, receive
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.agent.place import AgentPlace
from lakeckpt.checkpoint.agent.server import LINGER_S, STILL_ENDS
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.attempt import Attempt
from lakeckpt.checkpoint.publish import Settings
from lakeckpt.checkpoint.waiting import SystemWaiter, Waiter, poll
from lakeckpt.errors import AgentError, ArenaError, SaveFailed, WireError
from lakeckpt.lake.storage import Storage

__all__ = ["AgentLike", "AgentLink", "InnerAgent"]

_START_S = 60.0
_ANSWER_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 28.5)
"""How long an agent that was there, or was started, is waited for, until another one is started: it may have ended."""
_AGAIN_S = 0.05
"""How long a trainer waits before it tries again to reach an agent that has just turned it away, or has gone."""
_LONGEST_WAIT_S = 3600.0
_BYE_S = 5.0
"""How long a goodbye waits for an agent that takes no message."""


class AgentLike(Protocol):
    """Whoever persists the cuts of this trainer. Called by one thread."""

    def order(self, order: Order | GivenUp, /) -> None:
        """Hand a cut over, or say of one that another rank has given it up: nobody waits for that rank then, and the
        outcome says why. Never raises for want of an agent: that is an outcome, too."""
        ...

    def keep(self, documents: Mapping[str, bytes], /) -> None:
        """Have these (path → document) in storage before the next commit, also where it is a last will."""
        ...

    def outcomes(self) -> list[Outcome]:
        """What came of orders since the last call; never waits."""
        ...

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until something came of an order (True), at most about ``timeout_s``."""
        ...

    def close(self, *, well: bool) -> None:
        """The trainer ends: ``well``, or as one that died. What was handed over is persisted all the same."""
        ...


_links: weakref.WeakSet[AgentLink] = weakref.WeakSet()


def _let_go() -> None:
    """In a process that was forked: the agent is to notice when the trainer dies, not when this one ends."""
    for link in list(_links):
        link._hang_up()
        link._gone = True


os.register_at_fork(after_in_child=_let_go)


class AgentLink:
    """A trainer's link to the agent of its run on this node; ``hello`` says who it is."""

    def __init__(self, hello: Hello, *, linger_s: float = LINGER_S, python: str = sys.executable) -> None:
        self._hello = hello
        self._linger_s = linger_s
        self._python = python
        self._pending: dict[tuple[int, int], Order] = {}
        self._newest = -1  # the number of the last order
        self._kept: list[tuple[int, Mapping[str, bytes]]] = []
        """What was to be kept, and the last order before it: one after that takes it into storage when it commits."""
        self._got: list[Outcome] = []
        self._connection: socket.socket | None = None
        self._unsent = bytearray()
        self._gone = False  # no agent could be started any more
        self._was_served = False
        self._connect()
        _links.add(self)

    def order(self, order: Order | GivenUp, /) -> None:
        """See `AgentLike`."""
        if isinstance(order, GivenUp):
            if self._connection is not None:
                self._unsent += framed(order)
                self._send()
            return
        self._read_all()
        self._pending[order.step, order.number] = order
        self._newest = max(self._newest, order.number)
        if self._connection is not None:
            self._unsent += framed(order)
            self._send()
        if self._connection is None:
            self._go_on()

    def keep(self, documents: Mapping[str, bytes], /) -> None:
        """See `AgentLike`. An agent that takes the place of this one is told, too."""
        self._kept.append((self._newest, documents))
        self._read_all()
        if self._connection is not None:
            self._unsent += framed(Documents(documents=documents))
            self._send()

    def outcomes(self) -> list[Outcome]:
        """See `AgentLike`."""
        self._read_all()
        self._send()
        if self._connection is None and not self._gone:
            self._go_on()  # also where nothing is pending: an agent is to be there if the trainer dies
            self._read_all()
        found, self._got = self._got, []
        return found

    def wait(self, timeout_s: float, /) -> bool:
        """See `AgentLike`."""
        self._read_all()
        waiter = SystemWaiter()
        until_s = waiter.now() + timeout_s
        while not self._got and (connection := self._connection) is not None:
            left_s = max(until_s - waiter.now(), 0.0)
            found, takes = _ready(connection, sends=bool(self._unsent), timeout_s=left_s)
            if found or not takes:
                return found
            self._send()
        if not self._got:
            waiter.wait(min(timeout_s, _AGAIN_S))
        return True

    def close(self, *, well: bool) -> None:
        """See `AgentLike`."""
        with contextlib.suppress(AgentError, OSError):
            self._read_all()
            if well and self._connection is None:
                self._go_on()  # what is pending is to be persisted, and the arenas are to be removed
            if well and self._connection is not None:
                self._unsent += framed(Bye())
                self._connection.settimeout(_BYE_S)
                self._connection.sendall(self._unsent)
        self._hang_up()

    # --- the connection

    def _send(self) -> None:
        """Send as much as the agent takes now of what is to be sent: one that takes nothing holds nobody up."""
        try:
            while self._connection is not None and self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()

    def _read_all(self) -> None:
        while self._connection is not None and _ready(self._connection)[0]:
            try:
                message = receive(self._connection)
            except (WireError, OSError):
                message = None
            if not isinstance(message, Outcome):
                self._hang_up()
                return
            if message.step == NOT_SERVED:
                self._hang_up()
                text = f"the agent cannot work for this trainer: {message.text}"
                if not self._was_served:
                    raise AgentError(text)
                self._fail(text)
                return
            self._was_served = True
            self._pending.pop((message.step, message.number), None)
            if message.slot is not None:
                self._kept = [one for one in self._kept if one[0] >= message.number]
                known = max(self._hello.last, message.slot)
                self._hello = replace(
                    self._hello, last=known, parent=known, recorded=max(self._hello.recorded, message.step)
                )
            self._got.append(message)

    def _go_on(self) -> None:
        """Have an agent go on with what is pending, after one has died; where there can be none, it has failed."""
        try:
            self._connect()
            self._gone = False
        except AgentError as error:
            self._fail(str(error))

    def _fail(self, text: str) -> None:
        self._gone = True
        self._got += [
            Outcome(step=step, number=number, kind=SaveFailed.kind, text=text) for step, number in self._pending
        ]
        self._pending.clear()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._unsent.clear()

    def _connect(self) -> None:
        place = AgentPlace(self._hello.arenas, self._hello.digest.hex())
        for answer_s in _ANSWER_S:
            connection = place.connected()
            if connection is None:
                self._start(place)
                connection = poll(place.connected, waiter=SystemWaiter(), timeout_s=answer_s)
            if connection is not None:
                self._unsent += framed(self._hello)
                for _, documents in self._kept:
                    self._unsent += framed(Documents(documents=documents))
                for order in self._pending.values():
                    self._unsent += framed(replace(order, again=True))
                self._connection = connection
                self._send()
                if self._connection is not None:
                    return  # else it was about to end: another one is started
        raise AgentError(
            f"no agent answers at {place.socket!r} within {sum(_ANSWER_S):g} s of being started: see {place.log!r}"
        )

    def _start(self, place: AgentPlace) -> None:
        """Start an agent; the process that is started here ends as soon as the agent runs in the background."""
        log = place.log
        command = [
            self._python, "-P", "-m", "lakeckpt.checkpoint.agent",
            self._hello.arenas, self._hello.digest.hex(), str(self._linger_s),
        ]  # fmt: skip
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            ArenaFolder(self._hello.arenas).make()  # it may have been removed since
            told = os.open(log, flags, 0o600)
        except (OSError, ArenaError) as error:
            raise AgentError(f"an agent cannot be started, as its log cannot be written: {error}") from error
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=told, stderr=told, start_new_session=True, check=True,
                timeout=_START_S, env={**os.environ, "PYTHONPATH": _imported_from()},
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            if getattr(error, "returncode", None) == STILL_ENDS:
                raise AgentError(
                    f"the agent before, which was told to end, still works: process {place.agent()}, see {place.log!r}"
                ) from error
            raise AgentError(f"an agent cannot be started with {' '.join(command)}: {error}. See {log!r}") from error
        finally:
            os.close(told)


def _ready(connection: socket.socket, *, sends: bool = False, timeout_s: float = 0.0) -> tuple[bool, bool]:
    """Whether there is something to read, or the end; and, where that ``sends``, whether it takes something. Waits for
    either. (``select`` refuses a connection that was made when a thousand files were open.)"""
    waits = select.poll()
    waits.register(connection, select.POLLIN | (select.POLLOUT if sends else 0))
    (events,) = [found for _, found in waits.poll(1000 * min(timeout_s, _LONGEST_WAIT_S))] or [0]
    return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)


def _imported_from() -> str:
    """From where this process imports, so that an agent does, wherever either of them is by now."""
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
        """See `AgentLike`. Waits until all is persisted: nobody else would do it."""
        self._persister.leave()
        self._persister.join(2 * self._timeout_s)
        if well:
            self._generations.remove()
        self._generations.close()

    def _report(self, outcome: Outcome) -> None:
        self._got.append(outcome)
        self._came.set()

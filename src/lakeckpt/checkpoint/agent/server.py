"""Who starts an agent, whom does it serve, and when does it end?  The process of an agent, from its socket to its exit.

The first trainer of a run on a node starts it, in a session of its own, and it serves all trainers of that run there;
its socket lies in the folder of the arenas, which is this user's alone, and a lock beside it keeps a second one away.
It ends when all trainers have said goodbye and everything is persisted. Where trainers died, it does their last will
and waits for them to come back for a while. After SIGTERM it finishes what was ordered. A trainer that is started anew
finds it, or starts another one: nothing is kept in an agent that is not also in the arenas or in storage. What it does
stands in its log.

One thread for each trainer reads its messages, one for each rank persists (see ``persister``); all end with the
process. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

from lakeckpt.checkpoint.agent.environment import take_over
from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.orders import (
    NOT_SERVED,
    Bye,
    Documents,
    GivenUp,
    Hello,
    Message,
    Order,
    Outcome,
    receive,
    send,
)
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.agent.place import AgentPlace
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.attempt import Attempt
from lakeckpt.checkpoint.publish import Settings
from lakeckpt.checkpoint.waiting import SystemWaiter, Waiter, poll
from lakeckpt.errors import LakeckptError, SaveFailed, WireError
from lakeckpt.lake.storage import Storage, open_storage

__all__ = ["FIRST_TRAINER_S", "GRACE_S", "LINGER_S", "STILL_ENDS", "Agent", "main"]

FIRST_TRAINER_S = 60.0
"""How long an agent waits for its first trainer."""
LINGER_S = 900.0
"""How long it waits for trainers that died to come back, when their last will is done."""
GRACE_S = 20.0
"""How long an agent that was told to end goes on for trainers that live: mostly they were told to, too, and save."""
_END_S = 45.0
"""How long a new agent waits for one that is about to end."""
STILL_ENDS = 2
"""What `main` returns where that has not ended by then."""


class Agent:
    """Serves the trainers that connect to ``listener``; `serve` returns when there is nothing left to do."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        waiter: Waiter | None = None,
        open_place: Callable[[Hello], Storage] | None = None,
        linger_s: float = LINGER_S,
        first_trainer_s: float = FIRST_TRAINER_S,
        grace_s: float = GRACE_S,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._listener = listener
        self._log = log
        self._waiter = SystemWaiter() if waiter is None else waiter
        self._open_place = _opened if open_place is None else open_place
        self._linger_s, self._first_trainer_s = linger_s, first_trainer_s
        self._grace_s = min(grace_s, linger_s)
        self._changed = threading.Condition()
        self._connected = 0
        self._sessions: list[_Session] = []
        self._draining = False
        self._ends_s = float("inf")  # when orders are not taken any more
        self._idle_s = self._waiter.now()

    def serve(self) -> None:
        """Serve until all is done."""
        threading.Thread(target=self._accept, name="lakeckpt-agent-accept", daemon=True).start()
        while (left_s := self._left_s()) > 0:
            with self._changed:
                self._changed.wait(min(left_s, 1.0))
            self._dismiss()
        self._listener.close()
        current = _current(self._sessions)
        for session in self._sessions:
            if session in current or session.identity not in {one.identity for one in current}:
                session.tidy(is_current=session in current)
            session.close()

    def drain(self) -> None:
        """End when what was ordered is done; new trainers are turned away.

        Where a signal has told the trainers to end, too, they may save once more, or die: for a while orders are taken,
        and last wills done.
        """
        if not self._draining:
            self._ends_s = self._waiter.now() + self._grace_s
        self._draining = True  # a signal handler may not wait for the lock
        with contextlib.suppress(OSError):  # who comes now is to start another agent, which waits for this one's end
            self._listener.shutdown(socket.SHUT_RDWR)
        self._dismiss()

    def _dismiss(self) -> None:
        """Leave the trainers that are still there when the time is over; those that are gone have left a will."""
        if self._waiter.now() < self._ends_s:
            return
        for session in list(self._sessions):
            if session.is_alone():
                session.die()
            elif not session.left and not session.died:
                session.leave()
            session.persister.hurry()

    def _left_s(self) -> float:
        """How long to wait for more to do, in seconds."""
        with self._changed:
            sessions = list(self._sessions)
            if any(not one.is_done for one in sessions) or (self._connected and not self._draining):
                self._idle_s = self._waiter.now()
                return 1.0
            if self._draining:
                return 0.0
            died = any(one.died for one in _current(sessions))
            wait_s = self._first_trainer_s if not sessions else self._linger_s if died else 0.0
            return self._idle_s + wait_s - self._waiter.now()

    # --- trainers

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._draining or not _is_same_user(connection):
                connection.close()
                continue
            with self._changed:
                self._connected += 1
            name = f"lakeckpt-agent-trainer-{connection.fileno()}"
            threading.Thread(target=self._attend, args=(connection,), name=name, daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        session: _Session | None = None
        try:
            while (message := _received(connection)) is not None:
                if session is None:
                    if not isinstance(message, Hello):
                        return
                    if refused := take_over(message.environment):
                        self._log(f"variables of a trainer's environment cannot be set: {refused!r:.200}")
                    place = self._open_place(message)
                    session = _Session(message, connection, place, self._waiter, self._log, self._linger_s)
                    self._adopt(session)
                    session.start()
                elif isinstance(message, Order):
                    session.order(message)
                elif isinstance(message, GivenUp):
                    session.persister.give_up(message)
                elif isinstance(message, Documents):
                    session.persister.keep(message.documents)
                elif isinstance(message, Bye):
                    session.said_bye = True
                    session.leave()
                    return
        except LakeckptError as error:
            self._log(f"a trainer cannot be served: {error.kind}: {error}")
            with contextlib.suppress(OSError):
                send(connection, Outcome(step=NOT_SERVED, number=0, kind=error.kind, text=str(error)))
        finally:
            if session is not None and not session.left:
                session.die()
            with self._changed:
                self._connected -= 1
                self._changed.notify_all()
            connection.close()

    def _adopt(self, session: _Session) -> None:
        """Serve this one, too. Of those before it that have the same arenas, the ones that are done are forgotten."""
        with self._changed:
            over = [one for one in self._sessions if one.is_done and one.identity == session.identity]
            self._sessions = [one for one in self._sessions if one not in over] + [session]
        for one in over:
            one.close()


class _Session:
    """A trainer, and what is done for its rank."""

    def __init__(
        self,
        hello: Hello,
        connection: socket.socket,
        storage: Storage,
        waiter: Waiter,
        log: Callable[[str], None],
        linger_s: float,
    ) -> None:
        self.hello = hello
        self._name = f"rank {hello.rank} of {hello.world_size}, attempt {hello.attempt}"
        self._write = log
        self.left = self.died = self.said_bye = False
        self._ordered = 0
        self._connection = connection
        self._sending = threading.Lock()
        self.identity = identity_of(hello.digest, rank=hello.rank, world_size=hello.world_size)
        self._generations = Generations(ArenaFolder(hello.arenas), self.identity)
        attempt = Attempt(
            run=hello.run,
            number=hello.attempt,
            last=hello.last,
            parent=hello.parent,
            seed=hello.seed,
            recorded=hello.recorded,
        )
        self.persister = Persister(
            storage,
            self._generations,
            attempt,
            rank=hello.rank,
            world_size=hello.world_size,
            settings=Settings(keep=hello.keep, verify=hello.verify, timeout_s=hello.timeout_s),
            waiter=waiter,
            report=self._report,
            log=self._log,
            linger_s=linger_s,
        )

    def start(self) -> None:
        """Start to persist."""
        self._log(f"is served, to {self.hello.uri}")
        self.persister.start()

    def order(self, order: Order) -> None:
        """Persist what is ordered, or say that it comes too late."""
        self._ordered = max(self._ordered, order.step)
        if not self.left:
            self.persister.order(order)
            return
        text = f"step {order.step} was not saved: the agent was told to end (SIGTERM)"
        self._report(Outcome(step=order.step, number=order.number, kind=SaveFailed.kind, text=text))

    def is_alone(self) -> bool:
        """Whether the trainer is gone without a goodbye, and nobody has noticed that yet."""
        if self.left or self.died:
            return False
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def leave(self) -> None:
        """The trainer ended well, or the agent has to end."""
        self._log("leaves")
        self.left = True
        self.persister.leave()

    def die(self) -> None:
        """The trainer died."""
        self._log("is gone without a goodbye")
        self.died = True
        self.persister.die()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do for this trainer."""
        return self.persister.is_done

    def tidy(self, *, is_current: bool) -> None:
        """Remove the arena where nobody needs it: its trainer has ended well, and all that it ordered is in storage; or
        all that is complete in it is; or a later attempt has gone on without it.

        What an earlier attempt captured counts, too: this one may have gone on from there, and captured nothing yet.
        What a later one has captured, which another agent serves, is not this one's to judge.
        """
        if self._generations.holds_later(self.hello.attempt):
            self._log("its memory stays: a later attempt uses it")
            return
        captured = max(self._generations.steps(), default=0)
        needed = self._ordered if self.said_bye else captured
        if is_current and needed > self.persister.recorded and captured > self.persister.recorded:
            self._log(f"its memory stays, as step {captured} is not in storage: lakeckpt doctor removes it")
        else:
            self._generations.remove()

    def close(self) -> None:
        """Let go of the arenas."""
        self._generations.close()

    def _log(self, text: str) -> None:
        self._write(f"{self._name}: {text}")

    def _report(self, outcome: Outcome) -> None:
        with self._sending, contextlib.suppress(OSError):
            send(self._connection, outcome)


def _current(sessions: Sequence[_Session]) -> list[_Session]:
    """The last session of each rank in the newest attempt: what was before is over."""
    newest = max((one.hello.attempt for one in sessions), default=0)
    return list({one.identity: one for one in sessions if one.hello.attempt == newest}.values())


def _received(connection: socket.socket) -> Message | None:
    try:
        return receive(connection)
    except (WireError, OSError):
        return None


def _opened(hello: Hello) -> Storage:
    return open_storage(hello.uri, storage_options=hello.storage_options or None)


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _printed(text: str) -> None:
    """One line of the log, at once: threads do not mix. Where the log takes no more, as memory is full, it is left out:
    what is persisted counts for more."""
    told = " ".join(text.split())
    line = f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())} {told}\n"
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))


def main(folder: str, digest: str, *, linger_s: float = LINGER_S) -> int:
    """Be the agent of the run that is known by ``digest``, in the background, unless there is one.

    Returns in the process that called, when trainers can connect: 0, or 1 where it could not be, and 2 where the one
    before it has not ended.
    """
    told, tells = os.pipe()
    if os.fork():
        os.close(tells)
        return {b"+": 0, b"-": STILL_ENDS}.get(os.read(told, 1), 1)
    os.setsid()
    os.close(told)
    place = AgentPlace(folder, digest)
    lock = poll(lambda: _lock(place), waiter=SystemWaiter(), timeout_s=_END_S)
    if not lock:
        os.write(tells, b"-" if lock is None else b"+")
        return 0
    os.truncate(lock, 0)
    with contextlib.suppress(OSError):  # where there is no room, nobody is told who it is
        os.write(lock, b"%d" % os.getpid())
    agent = Agent(place.listener(), linger_s=linger_s, log=_printed)
    signal.signal(signal.SIGTERM, lambda *_: agent.drain())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    os.write(tells, b"+")
    os.close(tells)
    _printed(f"the agent of {digest} begins, process {os.getpid()}")
    try:
        agent.serve()
    finally:
        _printed("the agent ends")
        if place.has(lock):  # else the socket there is another agent's
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place.socket)
    return 0


def _lock(place: AgentPlace) -> int | None:
    """The lock, held until the process ends; 0 where another agent serves, None while one is about to end."""
    if (lock := place.take()) is not None:
        return lock
    if (connection := place.connected()) is not None:
        connection.close()
        return 0
    return None

"""This module runs the agent process: it reads its trainer's orders, persists cuts, and outlives the trainer.

The trainer starts the process with orders on standard input and outcomes on standard output. The process runs in a
session of its own, ignores SIGTERM, SIGINT and the like, and writes to its log only, so that nothing that ends a job
ends a save under way. The kernel reports the trainer's death through a pidfd of the trainer; without one, the agent
relies on the end of its standard input, which a forked loader worker may delay.

After a goodbye the agent persists what was ordered; after a death it makes the final save (`final_save`). Then it
removes the arena, if everything in it is in storage, and ends. One thread persists (`persister`), one takes the
checksums of captured slices (`lakeckpt.checkpoint.arena.checksummer`); both end with the process. Imports without
torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from lakeckpt import __version__
from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.orders import (
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
from lakeckpt.checkpoint.arena.checksummer import answer
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.errors import AgentError, LakeckptError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.tracking.waiting import SystemWaiter

__all__ = ["Agent", "main"]

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Agent:
    """Persists the cuts of one trainer into ``storage``. ``report`` gets the outcomes, on a thread of the
    persister's."""

    def __init__(
        self, begin: Begin, storage: Storage, *, report: Callable[[Outcome], None], log: Callable[[str], None]
    ) -> None:
        self._log = log
        self._attempt = begin.attempt
        self._ordered = 0
        identity = identity_of(begin.digest, rank=begin.rank, world_size=begin.world_size)
        self._generations = Generations(ArenaFolder(begin.arenas), identity)
        self._persister = Persister(
            storage,
            self._generations,
            Attempt(
                run=begin.run,
                number=begin.attempt,
                last=begin.last,
                parent=begin.parent,
                seed=begin.seed,
                recorded=begin.recorded,
            ),
            rank=begin.rank,
            world_size=begin.world_size,
            settings=Settings(keep=begin.keep, verify=begin.verify, timeout_s=begin.timeout_s),
            waiter=SystemWaiter(),
            report=report,
            log=log,
            linger_s=begin.linger_s,
        )
        self._persister.start()

    def serve(self, messages: Iterator[Message]) -> None:
        """Do what the trainer says until it ends, and then what is left to do. Returns when all is done."""
        said_bye = False
        for message in messages:
            if isinstance(message, Order):
                self._ordered = max(self._ordered, message.step)
                self._persister.order(message)
            elif isinstance(message, GivenUp):
                self._persister.give_up(message)
            elif isinstance(message, Documents):
                self._persister.keep(message.documents)
            said_bye = isinstance(message, Bye)
        self._log("the trainer ends" if said_bye else "the trainer is gone without a goodbye")
        self._persister.leave() if said_bye else self._persister.die()
        self._persister.join()
        self._tidy(said_bye=said_bye)
        self._generations.close()

    def _tidy(self, *, said_bye: bool) -> None:
        """Remove the arena, unless it holds a cut that is needed and not in storage, or a later attempt uses it.

        A cut of an earlier attempt counts: this attempt may have gone on from it and captured nothing yet.
        """
        if self._generations.holds_later(self._attempt):
            self._log("the arena stays: a later attempt uses it")
            return
        captured = max(self._generations.steps(), default=0)
        needed = self._ordered if said_bye else captured
        if min(needed, captured) > self._persister.recorded:
            self._log(f"the arena stays, as step {captured} is not in storage: lakeckpt doctor removes it")
        else:
            self._generations.remove()


def _messages(orders: int, trainer: int) -> Iterator[Message]:
    """Yield what comes on the pipe ``orders``, until a goodbye, the pipe's end, or the end of the process that the
    pidfd ``trainer`` names (-1: there is none)."""
    frames = Frames()
    waits = select.poll()
    for one in (orders, trainer):
        if one >= 0:
            waits.register(one, select.POLLIN)
    while True:
        if orders not in {descriptor for descriptor, _ in waits.poll()}:
            return  # the trainer is dead, and everything that it wrote was read
        data = os.read(orders, 2**20)
        if not data:
            return
        for message in frames.add(data):
            yield message
            if isinstance(message, Bye):
                return


def main(asked: int, answers: int, trainer: int) -> int:
    """Be an agent, to its end. ``asked``, ``answers``: pipes for checksums; ``trainer``: a pidfd of the trainer, or -1.

    Returns 0, or 1 where this trainer cannot be served.
    """
    for one in _IGNORED:
        signal.signal(one, signal.SIG_IGN)
    orders, outcomes = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a library that prints must not print into the pipe
    messages = _messages(orders, trainer)
    begin = next(messages, None)
    if not isinstance(begin, Begin):
        return 1  # the trainer died at once
    name = f"rank {begin.rank} of {begin.world_size}, attempt {begin.attempt}"
    _log(f"begins: {name}, to {begin.uri}")

    def told(message: Message) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone
            os.write(outcomes, framed(message))

    threading.Thread(target=answer, args=(asked, answers, begin.arenas), name="lakeckpt-checksums", daemon=True).start()
    try:
        agent = Agent(begin, _opened(begin), report=told, log=lambda text: _log(f"{name}: {text}"))
    except LakeckptError as error:
        _log(f"{name} cannot be served: {error.kind}: {error}")
        told(Ready(kind=error.kind, text=str(error)))
        return 1
    told(Ready())
    agent.serve(messages)
    _log("ends")
    return 0


def _opened(begin: Begin) -> Storage:
    if begin.library != __version__:
        raise AgentError(
            f"lakeckpt {__version__} is installed now, and this trainer runs {begin.library}: start the job again"
        )
    return open_storage(begin.uri, storage_options=begin.storage_options or None)


def _log(text: str) -> None:
    """Write one line of the log in one call, so that threads do not mix. A full disk loses the line, not the save."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())} [{os.getpid()}] {' '.join(text.split())}\n"
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))

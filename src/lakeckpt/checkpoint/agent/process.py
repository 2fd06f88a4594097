"""This module runs the agent process: it reads its trainer's orders, persists cuts, and outlives the trainer.

The trainer starts the process with orders on standard input and outcomes on standard output. The process runs in a
session of its own, ignores SIGTERM, SIGINT and the like, and writes to its log only, so that nothing that ends a job
ends a save under way. The kernel reports the trainer's death through a pidfd of the trainer; without a pidfd (before
Linux 5.3), the agent relies on the end of its standard input, which a forked loader worker may delay.

The main thread persists, and takes the checksums of cuts (`persister`). One thread reads orders, and ends with the
process; others make backups, end a trainer that is stuck (`lakeckpt.checkpoint.faults.mates`), watch the ranks of the
node (`lakeckpt.checkpoint.faults.node_watch`), and talk to other nodes (`lakeckpt.checkpoint.agent.lost_nodes`,
`lakeckpt.checkpoint.peers.copies`).
After the last save the agent removes the arena, if everything in it is in storage.
Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait

from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.link import IGNORED
from lakeckpt.checkpoint.agent.lost_nodes import Ring, watch_next_node
from lakeckpt.checkpoint.agent.orders import (
    Bye,
    Hello,
    Message,
    Outcome,
    Protected,
    Unable,
    message_from_bytes,
    message_to_bytes,
)
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import remove_copies
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaKind
from lakeckpt.checkpoint.copying.backups import Backup, Backups
from lakeckpt.checkpoint.faults.deaths import note_death
from lakeckpt.checkpoint.faults.mates import watch_mates
from lakeckpt.checkpoint.faults.node_watch import Watched, watch_node
from lakeckpt.checkpoint.faults.notes import page_path
from lakeckpt.checkpoint.peers.copies import CopySender, start_copying
from lakeckpt.checkpoint.peers.grouping import Keeping
from lakeckpt.checkpoint.peers.next_node import agreed_stride, node_note
from lakeckpt.checkpoint.persist.log import LOG
from lakeckpt.errors import ArenaError, LakeckptError
from lakeckpt.lake.storage.base import Storage, expect_folder, redact_uri
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.recovery.facts import CutId
from lakeckpt.tracking.waiting import SystemWaiter

__all__ = ["main"]

_DEATH_S = 5.0
"""How long the agent waits for the end of a trainer that has closed its pipe: its locks on the arena end with it."""


def main(trainer: int) -> int:
    """Be an agent, to its end. ``trainer`` is a pidfd of the trainer, or -1. Returns 0, or 1 if this trainer cannot be
    served."""
    for one in IGNORED:
        signal.signal(one, signal.SIG_IGN)
    orders, outcomes = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a library that prints must not print into the pipe

    backups: Backups | None = None

    reporting = threading.Lock()

    def report(message: Message) -> None:
        if backups is not None and isinstance(message, Outcome) and message.info is not None:
            message = replace(message, remarks=replace(message.remarks, unmade=backups.failed))
            backups.committed()
        with reporting, contextlib.suppress(OSError):  # the trainer is gone
            outcomes.send_bytes(message_to_bytes(message))

    messages = _messages(orders, trainer)
    name = "an agent"
    try:
        begin = next(messages)
        if not isinstance(begin, Hello):
            return 1  # the trainer died at once
        name = f"rank {begin.rank} of {begin.world_size}, attempt {begin.attempt.number}"
        _log(f"begins: {name}, to {redact_uri(begin.uri)}")
        storage = open_storage(begin.uri, storage_options=begin.storage_options or None)
        expect_folder(storage, LOG, is_known=True)  # the trainer has begun there; the place may be away since then
    except LakeckptError as error:
        _log(f"{name} cannot be served: {error.kind}: {error}")
        report(Unable(kind=error.kind, text=str(error)))
        return 1

    def log(text: str) -> None:
        _log(f"{name}: {text}")

    identity = identity_of(begin.digest, rank=begin.rank, world_size=begin.world_size)
    generations = Generations(ArenaFolder(begin.arenas), identity)
    persister = Persister(
        storage,
        generations,
        begin.attempt,
        rank=begin.rank,
        world_size=begin.world_size,
        settings=begin.settings,
        waiter=SystemWaiter(),
        report=report,
        log=log,
        linger_s=begin.linger_s,
    )
    backups = Backups(storage, [Backup(**one) for one in begin.backups], log)
    page = page_path(begin.arenas, begin.digest, begin.attempt.number, begin.rank)
    noting = partial(note_death, storage, page, begin.attempt.number, trainer)
    copying = partial(_copy, begin, storage, identity, trainer, report, log)
    serving = threading.Thread(
        target=_serve, args=(messages, persister, log, noting, copying), name="lakeckpt-orders", daemon=True
    )
    serving.start()
    if trainer >= 0:
        _watch(begin, storage, page, trainer, log)
    persister.run()
    serving.join(_DEATH_S)
    backups.finish()
    log(f"{_tidied(persister, generations, begin)}; ends")
    return 0


def _watch(begin: Hello, storage: Storage, page: str, trainer: int, log: Callable[[str], None]) -> None:
    """Begin to look after the trainer's mates, the next node and this node, as far as the trainer asked for it."""
    attempt = begin.attempt.number
    if begin.perceives:
        watch_mates(page, attempt, trainer, log=log)
    if (begin.perceives or begin.copies) and begin.next_rank >= 0:
        ring = Ring(
            storage=storage,
            attempt=attempt,
            rank=begin.rank,
            next_rank=begin.next_rank,
            run=begin.digest,
            arenas=begin.arenas,
            perceives=begin.perceives,
        )
        watch_next_node(ring, page, trainer, log=log)
    if begin.watch:
        watched = Watched(
            storage=storage,
            attempt=attempt,
            world=begin.world_size,
            here=begin.here,
            page=page,
            acts=begin.watch == "restart",
        )
        watch_node(watched, trainer, log=log)


def _messages(orders: Connection, trainer: int) -> Iterator[Message]:
    """Yield what comes on the pipe ``orders``. The last message is a `Bye`: the trainer's, or that of a trainer that
    died, at the end of the pipe or of the process that the pidfd ``trainer`` names (-1: there is none)."""
    # Once the pipe is silent and the trainer is dead, everything that the trainer wrote was read.
    with contextlib.suppress(EOFError, OSError):
        while orders in wait([orders, trainer] if trainer >= 0 else [orders]):
            message = message_from_bytes(orders.recv_bytes())
            yield message
            if isinstance(message, Bye):
                return
    if trainer >= 0:  # the kernel closes the pipe of a process that ends before it releases all its locks
        wait([trainer], _DEATH_S)
    yield Bye(well=False)


def _copy(
    begin: Hello,
    storage: Storage,
    identity: ArenaIdentity,
    trainer: int,
    report: Callable[[Message], None],
    log: Callable[[str], None],
    keeping: Keeping,
) -> None:
    """Begin to send copies of the share of this rank, or pieces of it, to the nodes that keep them."""
    folder, attempt = ArenaFolder(begin.arenas), begin.attempt.number
    sender = CopySender(
        folder,
        identity,
        attempt,
        keeping,
        note=partial(node_note, storage, attempt),
        agree=partial(agreed_stride, storage, attempt, begin.rank),
        now=time.monotonic,
        log=log,
    )

    is_tidy = begin.rank != keeping.here[0]

    def protected(cut: CutId) -> None:
        nonlocal is_tidy
        report(Protected(step=cut.step, at_s=time.time()))
        if not is_tidy:
            is_tidy = True
            kind: ArenaKind = "parity" if keeping.members else "copy"
            own = keeping.here if keeping.members else keeping.keeps
            remove_copies(folder, begin.digest, but={"documents": keeping.keeps, kind: own})

    if trainer >= 0:
        start_copying(sender, trainer, report=protected, log=log)


def _serve(
    messages: Iterator[Message],
    persister: Persister,
    log: Callable[[str], None],
    noting: Callable[[], str],
    copying: Callable[[Keeping], None],
) -> None:
    """Hand the trainer's messages over. A message that cannot be read ends the process: the trainer is alive, and
    starts another agent. When the trainer has died, note why."""
    try:
        for message in messages:
            if isinstance(message, Bye):
                log(f"the trainer {'ends' if message.well else 'is gone without a goodbye'}")
            if isinstance(message, Keeping):
                copying(message)
            persister.take(message)
            if isinstance(message, Bye) and not message.well and (noted := noting()):
                log(f"the trainer died: {noted}")
    except BaseException as error:
        log(f"ends, as an order cannot be read: {error!r}")
        os._exit(1)


def _tidied(persister: Persister, generations: Generations, begin: Hello) -> str:
    """Remove the arena, unless it holds a cut that is needed and not in storage, or another trainer fills it; and the
    copies that this node keeps, if the trainer has ended well. Returns what was done.

    A cut of an earlier attempt counts: this attempt may have gone on from it and captured nothing yet.
    """
    with contextlib.closing(generations):
        captured = max(generations.steps(), default=0)
        needed = captured if persister.is_final else persister.ordered
        if min(needed, captured) > persister.recorded:
            return f"the arena stays, as step {captured} is not in storage: lakeckpt doctor removes it"
        if not generations.remove():
            return "the arena stays, as another trainer fills it"
        if begin.copies and not persister.is_final:
            with contextlib.suppress(ArenaError):
                remove_copies(ArenaFolder(begin.arenas), begin.digest)
        return "the arena is removed"


def _log(text: str) -> None:
    """Write one line of the log in one call, so that threads do not mix. A full disk loses the line, not the save."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())} [{os.getpid()}] {' '.join(text.split())}\n"
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))

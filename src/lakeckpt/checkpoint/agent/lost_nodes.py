"""This module ends a trainer that waits in vain for a node that is gone, in the trainer's agent.

No launcher notices that another node is gone while the ranks of its own node live, and collectives wait for minutes.
Two conditions must hold, never one: the next node is gone (`lakeckpt.checkpoint.peers.next_node`), and this trainer has
stood still (`lakeckpt.checkpoint.faults.mates.why_stuck`). So a link that is broken between two agents of a job that
trains ends nothing, and neither does an evaluation. The trainer is killed after a note of that; the launcher of its
node then starts all ranks again. Where nobody starts the job again, it is only logged.

The agent of the first rank of each node does this, if the job has several nodes, on one daemon thread; its server,
which takes the copies of other nodes, too, has threads of its own. Time during which this agent itself was stopped
counts for nothing, so a job that is frozen as a whole is left alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.ending import end_trainer, is_started_again
from lakeckpt.checkpoint.faults.mates import seen_of, why_stuck
from lakeckpt.checkpoint.peers.next_node import Contact, NextNode, NodeNote, node_note, put_node_note, why_gone
from lakeckpt.checkpoint.peers.serve import ShareServer, own_address
from lakeckpt.checkpoint.peers.wire import KEY_BYTES
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.watch.beat import read_page

__all__ = ["Ring", "watch_next_node"]

_LOOK_S, _LATE_S = 1.0, 10.0
"""A look at the node takes some seconds at most; later ones were held up with this whole process."""
_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The place of a node in the ring of nodes: the first ``rank`` of the node, and that of the ``next_rank`` node, in
    an ``attempt`` of the run in ``storage``, whose digest on a node is ``run``. ``arenas``: the folder of the node.
    ``perceives``: the next node is watched."""

    storage: Storage
    attempt: int
    rank: int
    next_rank: int
    run: bytes
    arenas: str
    perceives: bool = True


def watch_next_node(ring: Ring, page_path: str, trainer: int, *, log: Callable[[str], None]) -> None:
    """Serve this node, and watch the next one, on a thread of its own, for the process of the pidfd ``trainer``, whose
    page is ``page_path``."""
    work = (ring, page_path, trainer, log)
    threading.Thread(target=_watch, args=work, name="lakeckpt-next-node", daemon=True).start()


def _watch(ring: Ring, page_path: str, trainer: int, log: Callable[[str], None]) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(OSError))
        server = ShareServer(ArenaFolder(ring.arenas), own_address())
        stack.callback(server.close)
        own = NodeNote(node=socket.gethostname(), address=server.address, key=os.urandom(KEY_BYTES))
        server.admit(own.key, ring.run)
        ends = select.poll()
        ends.register(trainer, select.POLLIN)
        if not _is_put(ring, own, ends, log):
            return
        if not ring.perceives:
            ends.poll()
            return
        known: NodeNote | None = None
        while (note := _met(ring, known, ends)) is not None:
            known = note
            next_node = NextNode(note)
            with contextlib.closing(next_node):
                log(f"watches the node {note.node} at {note.address}")
                why = _wait_until_gone(next_node, page_path, ends)
            if why is None:
                return
            if why:
                _end(ring, note, why, page_path, trainer, log)
                return


def _is_put(ring: Ring, own: NodeNote, ends: select.poll, log: Callable[[str], None]) -> bool:
    """Put this node's own note into the run. Returns False if the trainer ends before that."""
    pause_s = _RETRY_S
    while True:
        try:
            put_node_note(ring.storage, ring.attempt, ring.rank, own)
        except StorageError as error:
            log(f"other nodes cannot see yet whether this one is there: {error}")
        else:
            return True
        if ends.poll(1000 * pause_s):
            return False
        pause_s = min(2 * pause_s, _LONGEST_RETRY_S)


def _met(ring: Ring, known: NodeNote | None, ends: select.poll) -> NodeNote | None:
    """Wait for the note of the next node, if ``known`` for another one than that. None if the trainer ends before."""
    pause_s = _RETRY_S
    while (note := node_note(ring.storage, ring.attempt, ring.next_rank)) is None or note == known:
        if ends.poll(1000 * pause_s):
            return None
        pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
    return note


def _wait_until_gone(next_node: NextNode, page_path: str, ends: select.poll) -> str | None:
    """Wait until the next node is gone and the trainer stands still. Return why it is taken for that; None if the
    trainer ends before, and '' if the node's agent alone has ended."""
    since_s = looked_s = time.monotonic()
    while not ends.poll(1000 * _LOOK_S):
        contact, now_s = next_node.look(), time.monotonic()
        if now_s - looked_s > _LATE_S:  # this agent did not run: nor, perhaps, did the trainer
            next_node.begin_anew()
            since_s, contact = now_s, Contact()
        looked_s = now_s
        if contact.ended:
            return ""
        gone = why_gone(contact)
        page = read_page(page_path) if gone else None
        if page is not None and (stuck := why_stuck(seen_of(page, page_path, since_s=since_s))):
            return f"{gone}, and {stuck}"
    return None


def _end(ring: Ring, note: NodeNote, why: str, page_path: str, trainer: int, log: Callable[[str], None]) -> None:
    """End the trainer, after a note of that."""
    text, page = f"the node {note.node} at {note.address} is gone: {why}", read_page(page_path)
    if page is None or not is_started_again():
        log(f"{text}. Nobody starts the job again, so that the trainer is left alone")
        return
    log(f"ends its trainer: {text}")
    end_trainer(page_path, page, ring.attempt, trainer, text=text, cause="lost node", what=note.node)

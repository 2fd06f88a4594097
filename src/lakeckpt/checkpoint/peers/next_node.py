"""This module finds out whether the next node of the job is there, by asking the server of its agent once a second.

The nodes of a job form a ring: the agent of the first rank of each node serves, puts its `NodeNote` into the folder
``nodes/`` of the run, and asks the node that follows. `NextNode.look` is one question, which takes at most some
seconds. A node counts as gone in two cases only:

* its machine does not answer, and could not be reached again for 5 s;
* its machine is reached, and its agent has said nothing for 30 s.

A machine that refuses the connection is there: only the agent has ended. Whoever waits for a rank of that machine gets
such an answer, too, so nobody has to perceive its death. The module imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from dataclasses import dataclass

from lakeckpt.checkpoint.peers.wire import KEY_BYTES, StillThere, limit_waits, prove, receive, send
from lakeckpt.errors import ArenaError, StorageError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "GONE_S",
    "SILENT_S",
    "Contact",
    "NextNode",
    "NodeNote",
    "agreed_stride",
    "connected_to",
    "node_note",
    "put_node_note",
    "why_gone",
]

GONE_S, SILENT_S = 5.0, 30.0
_USER_TIMEOUT_MS = 5000
_CONNECT_S, _ANSWER_S = 1.0, 1.0
_NODES = "nodes"
_KIND, _STRIDE_KIND, _VERSION = "node", "stride", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNote:
    """Where the agent of a node is asked (``host:port``), with which ``key``, and the name of the node."""

    node: str
    address: str
    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise WireError(f"the key of a node has {KEY_BYTES} bytes, got {len(self.key)}")


def put_node_note(storage: Storage, attempt: int, rank: int, note: NodeNote) -> None:
    """Put the note of the node whose first rank is ``rank`` into the run. The first one of the job removes the notes of
    earlier attempts. Raises `StorageError`."""
    storage.put(_path(attempt, rank), [dumps(to_plain(note), kind=_KIND, version=_VERSION)])
    if rank == 0:
        for one in storage.list(_NODES):
            if one.path < _path(attempt, 0):
                storage.delete(one.path)


def node_note(storage: Storage, attempt: int, rank: int) -> NodeNote | None:
    """Return the note of the node whose first rank is ``rank``; None if it cannot be read, or is not there yet."""
    with contextlib.suppress(StorageError, WireError):
        plain = loads(storage.read(_path(attempt, rank)), kind=_KIND, supported=_VERSION)
        found: NodeNote = from_plain(NodeNote, plain, "the note of a node")
        return found
    return None


def agreed_stride(storage: Storage, attempt: int, rank: int, stride: int) -> int | None:
    """Let rank 0 publish the ``stride`` of an attempt's copies (`lakeckpt.checkpoint.peers.copies`), unless it is 0.
    Return what it has published; None if it has not, or the run cannot be reached."""
    path = f"{_NODES}/{attempt:010d}.stride"
    with contextlib.suppress(StorageError, WireError):
        if rank == 0 and stride:
            storage.put(path, [dumps(stride, kind=_STRIDE_KIND, version=_VERSION)])
            return stride
        found: int = from_plain(int, loads(storage.read(path), kind=_STRIDE_KIND, supported=_VERSION), "a stride")
        return max(1, found)
    return None


def _path(attempt: int, rank: int) -> str:
    return f"{_NODES}/{attempt:010d}.{rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What is known of a node. ``lost_s``: for how long its machine has not been reached; 0: it is. ``silent_s``: for
    how long its agent has said nothing. ``ended``: the machine is there, and its agent is not."""

    lost_s: float = 0.0
    silent_s: float = 0.0
    ended: bool = False


def why_gone(contact: Contact) -> str:
    """Return why a node is taken for gone; empty if it is not.

    >>> why_gone(Contact(lost_s=5.5)), why_gone(Contact(lost_s=4.5, silent_s=10.0)), why_gone(Contact(silent_s=31.0))
    ('it could not be reached for 6 s', '', 'its agent was silent for 31 s')
    """
    if contact.ended:
        return ""
    if contact.lost_s > GONE_S:
        return f"it could not be reached for {contact.lost_s:.0f} s"
    return f"its agent was silent for {contact.silent_s:.0f} s" if contact.silent_s > SILENT_S else ""


class NextNode:
    """The node of ``note``. One thread calls all methods."""

    def __init__(self, note: NodeNote) -> None:
        self.note = note
        self._connection: socket.socket | None = None
        self._asked = self._has_ended = False
        self._lost_s = 0.0
        self._heard_s = 0.0

    def begin_anew(self) -> None:
        """Forget for how long the node has been gone: this process itself did not run meanwhile."""
        self._lost_s, self._heard_s = 0.0, time.monotonic()

    def look(self) -> Contact:
        """Ask the node, and return what is known of it then. Before the first answer, nothing is known."""
        try:
            if self._connection is None:
                self._connection = connected_to(self.note, _ANSWER_S)
                self._asked = False
            if not self._asked:
                send(self._connection, StillThere())
                self._asked = True
            self._lost_s = 0.0
            if _is_readable(self._connection, _ANSWER_S):
                receive(self._connection)
                self._asked, self._heard_s = False, time.monotonic()
        except (ConnectionError, EOFError, WireError, ArenaError):
            self._has_ended = self._connection is None  # else it is asked once more
            self.close()
        except BlockingIOError:  # its machine is there, and its agent is silent
            self.close()
            self._lost_s = 0.0
        except OSError:
            self.close()
            self._lost_s = self._lost_s or time.monotonic()
        if not self._heard_s:
            return Contact(ended=self._has_ended)
        now_s = time.monotonic()
        return Contact(
            lost_s=now_s - self._lost_s if self._lost_s else 0.0,
            silent_s=now_s - self._heard_s,
            ended=self._has_ended,
        )

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def connected_to(note: NodeNote, answer_s: float) -> socket.socket:
    """Return a connection to the server of a node's agent, on which no call waits longer than ``answer_s``. Raises
    ``OSError``, ``EOFError`` and `ArenaError`."""
    host, _, port = note.address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
    try:
        limit_waits(connection, answer_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        prove(connection, note.key)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    waits = select.poll()
    waits.register(connection, select.POLLIN)
    return bool(waits.poll(1000 * seconds))

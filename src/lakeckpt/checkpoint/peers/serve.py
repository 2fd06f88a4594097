"""This module serves the shares of cuts that lie in this node's memory, and takes copies of those of other nodes.

The first rank of each node makes a `ShareServer` before it states the facts of its node, which name the address. The
server listens from then on, and answers nobody before `ShareServer.admit`: it does so when all ranks know what to read.
It is closed at the end of the restore, when all ranks have read. A share is locked while a connection reads it. Data go
from the arena's file to the socket by ``os.sendfile``. While a job trains, the agent of the first rank has a server of
its own: other nodes ask it whether its node is there, and give it copies (`lakeckpt.checkpoint.agent.lost_nodes`).

`ShareServer.admit` starts a thread that accepts connections, and that starts one for each of them; `ShareServer.close`
ends them and waits for them. They cannot outlive the process. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping

from lakeckpt.checkpoint.arena.arena import HeldGeneration
from lakeckpt.checkpoint.arena.checksums import checked
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.filling import checksum
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import held_share
from lakeckpt.checkpoint.peers.joining import ParityKeeper
from lakeckpt.checkpoint.peers.slots import take_share
from lakeckpt.checkpoint.peers.wire import (
    KEY_BYTES,
    AskShare,
    FoundShare,
    NoShare,
    PutShare,
    ReadShare,
    StillThere,
    limit_waits,
    receive,
    send,
    verify,
)
from lakeckpt.errors import ArenaError, WireError

__all__ = ["ShareServer", "own_address", "send_data", "sizes_of"]

_MOST_CONNECTIONS = 768
_SILENT_S, _IDLE_S = 60.0, 86_400.0
"""A connection that takes nothing for so long is closed; and one that asks for nothing. Between two reads, a rank may
wait for storage."""
_NOWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737). A route to it is one to the outside; nothing is sent."""


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of this machine that the other nodes of the job reach.

    ``LAKECKPT_ADDRESS`` names it; else it is the address from which this machine reaches ``MASTER_ADDR``, the host of
    the job's store. On that host itself, this may be a loopback address: then it is the one of the route to the
    outside, if there is one, and if ``MASTER_ADDR`` is not a loopback address itself.
    """
    if given := environment.get("LAKECKPT_ADDRESS"):
        return given
    master = environment.get("MASTER_ADDR", "")
    found = _source_of(master or _NOWHERE)
    if found.startswith(("127.", "::1")) and not master.startswith(("127.", "::1", "localhost")):
        outside = _source_of(_NOWHERE)
        return outside or found
    return found or "127.0.0.1"


def _source_of(host: str) -> str:
    """Return the address from which this machine reaches a host; empty if there is no route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return ""


class ShareServer:
    """Serves the arenas in ``folder`` at a port of ``host``. Raises ``OSError`` if it cannot listen there."""

    def __init__(self, folder: ArenaFolder, host: str) -> None:
        self._folder = folder
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.bind((host, 0))
            self._listening.listen(_MOST_CONNECTIONS)
        except BaseException:
            self._listening.close()
            raise
        port = self._listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where it listens."""
        self._key, self._run = b"", b""
        self._parity = ParityKeeper(folder)
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread: threading.Thread | None = None

    def admit(self, key: bytes, run: bytes) -> None:
        """Begin to answer those that have the ``key``: they may read the run with this digest. May be called again."""
        assert len(key) == KEY_BYTES, "anybody could prove to have no key"
        self._key, self._run = key, run
        if self._thread is None:
            self._thread = threading.Thread(target=self._accept, name="lakeckpt-serve", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Hang up, and end all threads. May be called again."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            every = dict(self._connections)
        for connection in every:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._parity.close()
        for thread in every.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            with self._lock:
                if len(self._connections) >= _MOST_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="lakeckpt-serve-one", daemon=True
                )
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a connection, to its end."""
        with contextlib.suppress(OSError, EOFError, WireError, ArenaError), connection:
            limit_waits(connection, _SILENT_S)
            if verify(connection, self._key):
                limit_waits(connection, _SILENT_S, idle_s=_IDLE_S)
                while isinstance(asked := receive(connection), AskShare | PutShare | StillThere):
                    if isinstance(asked, StillThere):
                        send(connection, asked)
                    elif isinstance(asked, PutShare):
                        limit_waits(connection, _SILENT_S)
                        self._take(connection, asked)
                        limit_waits(connection, _SILENT_S, idle_s=_IDLE_S)
                    else:
                        self._share(connection, asked)
        with self._lock:
            self._connections.pop(connection, None)

    def _take(self, connection: socket.socket, put: PutShare) -> None:
        """Take a copy of a share, or pieces of one."""
        if put.identity.kind == "parity":
            self._parity.take(connection, self._run, put)
        else:
            take_share(connection, self._folder, self._run, put)

    def _share(self, connection: socket.socket, asked: AskShare) -> None:
        """Serve a share for as long as the client reads it."""
        with contextlib.ExitStack() as stack:
            try:
                held = self._held(asked, stack)
                with self._hashing:
                    leaves = _leaves_of(held)
            except (ArenaError, OSError) as error:
                send(connection, NoShare(why=str(error)[:1000]))
                return
            documents = held.documents()
            send(connection, sizes_of(held, documents, leaves))
            while isinstance(read := receive(connection), ReadShare):
                if read.part == "data":
                    send_data(connection, held, read.start, read.size)
                else:
                    part = documents if read.part == "documents" else leaves
                    connection.sendall(memoryview(part)[read.start : read.start + read.size])

    def _held(self, asked: AskShare, stack: contextlib.ExitStack) -> HeldGeneration:
        """Return the locked share. Raises `ArenaError` if it is not here."""
        if asked.identity.run != self._run:
            raise ArenaError("this node serves another run")
        held = stack.enter_context(held_share(self._folder, asked.identity, asked.cut, asked.digest))
        if held is None:
            where = "is not in the memory of this node any more"
            raise ArenaError(f"step {asked.cut.step} of attempt {asked.cut.attempt} {where}")
        return held


def _leaves_of(held: HeldGeneration) -> bytes:
    """Return the checksums of a share, which are taken if need be; parity has its own. `ArenaError`."""
    is_parity = held.arena.layout.identity.kind == "parity"
    return (held.checksums() if is_parity else checked(contents_of(held)).checksums) or b""


def sizes_of(held: HeldGeneration, documents: bytes, leaves: bytes) -> FoundShare:
    """Return the sizes of the parts of a share: its data, its ``documents``, and the checksums of its ``leaves``."""
    return FoundShare(
        data_bytes=held.data_bytes,
        documents_bytes=len(documents),
        documents_checksum=checksum(documents),
        checksums_bytes=len(leaves),
        checksums_checksum=checksum(leaves),
    )


def send_data(connection: socket.socket, held: HeldGeneration, start: int, size: int) -> None:
    """Send bytes of the data from the file to the socket. Raises ``OSError`` and ``EOFError``."""
    at = held.arena.layout.data_at(held.number)
    done, stop = start, min(start + size, held.data_bytes)
    while done < stop:
        count = os.sendfile(connection.fileno(), held.arena.fileno(), at + done, stop - done)
        if not count:
            raise EOFError("the arena was truncated")
        done += count

"""This module reads one share of a cut from the server of another node.

`PeerShare` has what `lakeckpt.checkpoint.arena.contents.Contents` needs of a generation. It verifies documents and
checksums; `Contents` verifies each leaf of the data as it comes. Each thread that reads has a connection of its own,
and connections are kept for the next reads. If anything goes wrong, `ArenaDamaged` is raised: the share is then read
from another source. The module starts no threads. Imports without torch.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from lakeckpt.checkpoint.arena.filling import checksum
from lakeckpt.checkpoint.peers.wire import (
    AskShare,
    FoundShare,
    NoShare,
    Part,
    ReadShare,
    limit_waits,
    prove,
    receive,
    receive_into,
)
from lakeckpt.checkpoint.peers.wire import send as send_message
from lakeckpt.errors import ArenaDamaged, ArenaError, WireError

__all__ = ["PeerShare"]

_CONNECT_S, _SILENT_S = 5.0, 60.0
_HASHING_S = 600.0
"""How long a node may take to answer: it may have to take the checksums of the share first."""
_MOST_DOCUMENTS_BYTES = 2**30


class PeerShare:
    """A share at ``address``, which is asked for with the job's ``key``: a
    `lakeckpt.checkpoint.arena.contents.Generation`. Any thread may read. Raises `ArenaDamaged`."""

    def __init__(self, address: str, key: bytes, asked: AskShare) -> None:
        self.address = address
        self._key, self._asked = key, asked
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []
        self._opened: FoundShare | None = None
        with self._wrapped():
            connection, self._opened = self._connected()
            self._free.append(connection)

    @property
    def data_bytes(self) -> int:
        """How many bytes its data have."""
        assert self._opened is not None
        return self._opened.data_bytes

    def documents(self) -> bytes:
        """Return the documents of the share. `ArenaDamaged`."""
        assert self._opened is not None
        return self._part("documents", self._opened.documents_bytes, self._opened.documents_checksum)

    def checksums(self) -> bytes:
        """Return the digests of the leaves of the data. `ArenaDamaged`."""
        assert self._opened is not None
        return self._part("checksums", self._opened.checksums_bytes, self._opened.checksums_checksum)

    def read_into(self, start: int, into: memoryview) -> None:
        """Read data from byte ``start`` on, not verified. `ArenaDamaged`."""
        self._read("data", start, into)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the data, not verified. `ArenaDamaged`."""
        found = memoryview(bytearray(stop - start))
        if stop > start:
            self.read_into(start, found)
        return found

    def damaged(self, what: str) -> ArenaDamaged:
        """Return the error that says that ``what`` of the share is not what was captured."""
        return ArenaDamaged(
            f"{what} of what rank {self._asked.identity.rank} captured of step {self._asked.cut.step} is not what was "
            f"written, as {self.address} sent it: take another source, an older cut, or a checkpoint"
        )

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def _part(self, part: Part, size: int, expected: bytes) -> bytes:
        if size > _MOST_DOCUMENTS_BYTES:
            raise self.damaged(f"the size of the {part}, {size} bytes,")
        found = memoryview(bytearray(size))
        self._read(part, 0, found)
        if checksum(found) != expected:
            raise self.damaged(f"the {part}")
        return bytes(found)

    def _read(self, part: Part, start: int, into: memoryview) -> None:
        with self._wrapped():
            with self._lock:
                connection = self._free.pop() if self._free else None
            if connection is None:
                connection, opened = self._connected()
                if opened != self._opened:
                    connection.close()
                    raise self.damaged("the size")
            try:
                send_message(connection, ReadShare(part=part, start=start, size=len(into)))
                receive_into(connection, into)
            except BaseException:
                connection.close()
                raise
            with self._lock:
                self._free.append(connection)

    def _connected(self) -> tuple[socket.socket, FoundShare]:
        """Connect, and open the share."""
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
        try:
            limit_waits(connection, _SILENT_S)
            prove(connection, self._key)
            send_message(connection, self._asked)
            limit_waits(connection, _HASHING_S)
            answer = receive(connection)
            limit_waits(connection, _SILENT_S)
            if not isinstance(answer, FoundShare):
                why = answer.why if isinstance(answer, NoShare) else f"it answers {type(answer).__name__}"
                raise ArenaError(why)
        except BaseException:
            connection.close()
            raise
        return connection, answer

    @contextlib.contextmanager
    def _wrapped(self) -> Iterator[None]:
        """Name the node in what goes wrong."""
        try:
            yield
        except ArenaDamaged:
            raise
        except BlockingIOError as error:
            raise self._unreadable("it is silent") from error
        except (OSError, EOFError, WireError, ArenaError, ValueError) as error:
            raise self._unreadable(str(error) or type(error).__name__) from error

    def _unreadable(self, why: str) -> ArenaDamaged:
        rank, step = self._asked.identity.rank, self._asked.cut.step
        return ArenaDamaged(f"what rank {rank} captured of step {step} cannot be read from {self.address}: {why}")

"""This module defines what a rank that restores, or an agent, and the server of a node say to each other.

::

    server → client    32 random bytes
    client → server    32 random bytes, and a proof that it has the job's key
    server → client    a proof that it has the key, too; a server that got no proof hangs up
    client → server    `AskShare`: which share of which cut
    server → client    `FoundShare`: how large its parts are; or `NoShare`, and why
    client → server    `ReadShare`: some bytes of a part
    server → client    these bytes, as they are
                       … and so on, until one of them hangs up

An agent that only wants to know whether the node is there sends `StillThere` instead, and gets the same back. An agent
that gives the node a copy of a share sends `PutShare`. The server answers `ShareTaken` when it has room, gets the
documents, the checksums and the data, one behind the other, and answers `ShareTaken` again when the copy is whole and
verified. It answers `NoShare` if it does not take the copy. Pieces for parity come the same way, and are answered once
more: when all members of the group have given theirs (`lakeckpt.checkpoint.peers.joining`).
A proof is an HMAC-SHA256 over both random texts. Messages are documents of ``wire`` behind their length, of at most 4
KiB; nothing is unpickled. The connection is not encrypted. Imports without torch, and starts no threads.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.format.fields import Digest
from lakeckpt.errors import ArenaError, WireDamaged
from lakeckpt.recovery.facts import CutId
from lakeckpt.wire.documents import Count, from_plain_of, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "KEY_BYTES",
    "AskShare",
    "FoundShare",
    "NoShare",
    "Part",
    "PutShare",
    "ReadShare",
    "ShareTaken",
    "StillThere",
    "limit_waits",
    "prove",
    "receive",
    "receive_into",
    "send",
    "verify",
]

KEY_BYTES = 32
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_MOST_BYTES = 4096
_LENGTH = struct.Struct(">I")
_OPTIONS = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""An end whose machine is gone is noticed after 11 seconds."""
_KIND, _VERSION = "peers", (1, 0)

Part = Literal["documents", "checksums", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskShare:
    """The client reads the share in the arena of ``identity``, of the cut with this digest."""

    identity: ArenaIdentity
    cut: CutId
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundShare:
    """The sizes of the parts of the share, and digests of the parts that have no checksums of their own."""

    data_bytes: Count
    documents_bytes: Count
    documents_checksum: Digest
    checksums_bytes: Count
    checksums_checksum: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class NoShare:
    """The server does not have the share, or does not take it, and why."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """Send bytes [start, start + size) of a part."""

    part: Part
    start: Count
    size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StillThere:
    """The client asks whether the node is there, and the server answers the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutShare:
    """The client gives a copy of the share in the arena of ``identity``, whose slices are laid out by the ``plan``.
    ``sizes``: of the parts. ``shares``, ``divided``: of its record. If the identity is of parity, the client is the
    agent of the rank ``giver``, and gives those pieces of its share that belong there."""

    identity: ArenaIdentity
    cut: CutId
    digest: Digest
    plan: Digest
    sizes: FoundShare
    shares: bytes
    divided: bool
    giver: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTaken:
    """The server takes the copy; or, the second time, has it whole. Pieces for parity: it takes them; it has them; and,
    the third time, the parity is whole."""


_Message = AskShare | FoundShare | NoShare | PutShare | ReadShare | ShareTaken | StillThere
_TYPES: dict[str, type[_Message]] = {
    one.__name__: one for one in (AskShare, FoundShare, NoShare, PutShare, ReadShare, ShareTaken, StillThere)
}


def send(connection: socket.socket, message: _Message) -> None:
    """Send a message. Raises ``OSError``."""
    plain = {"message": type(message).__name__, **to_plain(message)}
    data = dumps(plain, kind=_KIND, version=_VERSION)
    assert len(data) <= _MOST_BYTES, "its fields are of a few bytes"
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> _Message:
    """Wait for a message. Raises ``EOFError`` if the other end has hung up, `WireDamaged` for what is no message, and
    ``OSError``."""
    (size,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
    if size > _MOST_BYTES:
        raise WireDamaged(f"a message between nodes has at most {_MOST_BYTES} bytes, and {size} are announced")
    plain = loads(_received(connection, size), kind=_KIND, supported=_VERSION)
    return from_plain_of(_TYPES, "message", plain, "a message between nodes")


def receive_into(connection: socket.socket, into: memoryview) -> None:
    """Fill ``into`` with the bytes that come. Raises ``EOFError`` if the other end hangs up before, and ``OSError``."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:], 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError(f"the connection was closed after {done} of {len(into)} bytes")
        done += count


def _received(connection: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    receive_into(connection, memoryview(found))
    return bytes(found)


# --- the challenge


def verify(connection: socket.socket, key: bytes) -> bool:
    """Challenge the client of a new connection, and prove that this server has the ``key``. Return whether the client
    has it. Raises ``EOFError`` and ``OSError``."""
    own = os.urandom(_NONCE_BYTES)
    connection.sendall(own)
    answer = _received(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"client", own, theirs)):
        return False
    connection.sendall(_proof(key, b"server", own, theirs))
    return True


def prove(connection: socket.socket, key: bytes) -> None:
    """Do the client's part. Raises `ArenaError` if the server does not accept this key, or does not have it itself;
    ``EOFError`` if it hangs up before it asks, and ``OSError``."""
    theirs, own = _received(connection, _NONCE_BYTES), os.urandom(_NONCE_BYTES)
    connection.sendall(own + _proof(key, b"client", theirs, own))
    try:
        proof = _received(connection, _PROOF_BYTES)
    except (EOFError, ConnectionError):
        raise ArenaError("it does not take the key of this job") from None
    if not hmac.compare_digest(proof, _proof(key, b"server", theirs, own)):
        raise ArenaError("it does not have the key of this job")


def _proof(key: bytes, who: bytes, servers: bytes, clients: bytes) -> bytes:
    return hmac.digest(key, b"lakeckpt " + who + servers + clients, "sha256")


def limit_waits(connection: socket.socket, seconds: float, *, idle_s: float | None = None) -> None:
    """Let no call on a connection wait longer than ``seconds`` for the other end, ``os.sendfile`` included; calls that
    receive may wait ``idle_s``, if that is given. An end whose machine is gone is noticed anyway."""
    connection.settimeout(
        None
    )  # the limits are the system's: a timeout of Python makes the socket one that never waits
    limits = {socket.SO_RCVTIMEO: seconds if idle_s is None else idle_s, socket.SO_SNDTIMEO: seconds}
    for option, limit in limits.items():
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(limit), int(limit % 1 * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

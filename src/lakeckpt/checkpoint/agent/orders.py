"""What do trainers and their agent say to each other?  A few messages over a local socket, each one document.

A trainer says who it is (`Hello`), hands cuts over (`Order`), and what goes with them (`Documents`), tells which saves
other ranks gave up (`GivenUp`), and says goodbye (`Bye`); the agent answers each order with an `Outcome`. A trainer
that goes without a goodbye has died. Messages are documents of ``wire``: nothing is unpickled.

Imports without torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.checkpoint.commit import Verify
from lakeckpt.checkpoint.fields import fields_of, number, taken
from lakeckpt.checkpoint.keep import Keep
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import Limits, dumps, loads

__all__ = ["Bye", "Documents", "GivenUp", "Hello", "Message", "Order", "Outcome", "framed", "receive", "send"]

_KIND, _VERSION = "agent", (1, 0)
_LENGTH_BYTES = 8
_LARGEST_BYTES = 2**30
_LIMITS = Limits(total_bytes=_LARGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A trainer begins an attempt. The fields of the attempt are those of `lakeckpt.checkpoint.publish.Attempt`."""

    uri: str
    storage_options: Mapping[str, Any]
    environment: bytes
    """See `lakeckpt.checkpoint.agent.environment`."""
    run: str
    digest: bytes
    """By what the run is known on this node."""
    attempt: int
    last: int
    parent: int | None
    recorded: int
    seed: int
    rank: int
    world_size: int
    arenas: str
    """The folder of the arenas."""
    keep: Keep
    verify: Verify
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Persist the complete generation of ``step``."""

    step: int
    number: int
    """How many orders the attempt gave before this one."""
    metric: float | None = None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    """path → a document that must be there before the commit, where it was not handed over before."""
    again: bool = False
    """An agent that has died had it: whatever of it was done is there, and it may even be committed."""
    failure: str = ""
    """Why this rank has not captured the cut (`lakeckpt.checkpoint.failures.said_of`), for the other ranks; empty: it
    has, as far as its trainer knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Another rank has given up the save of an order, and its note in storage may be missing."""

    step: int
    number: int
    failure: str
    """What that rank has said: see `lakeckpt.checkpoint.failures.said_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """What must be there before a commit of any cut from now on, also of a last will: path → a document."""

    documents: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an order: a commit in ``slot``, or the ``kind`` and ``text`` of an error; ``text`` of a commit: why
    checkpoints that are not to be kept could not be removed behind it; ``lost``: what of the run was found to be gone.
    Of step `NOT_SERVED`: why none can be done."""

    step: int
    number: int
    slot: int | None = None
    created_s: float = 0.0
    took_s: float = 0.0
    kind: str = ""
    text: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The trainer ends well: everything that it handed over is to be persisted, its arena is not needed any more."""


NOT_SERVED = -1

Message = Hello | Order | GivenUp | Documents | Outcome | Bye
_KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "order": Order,
    "given_up": GivenUp,
    "documents": Documents,
    "outcome": Outcome,
    "bye": Bye,
}


def send(connection: socket.socket, message: Message) -> None:
    """Send a message whole. ``OSError`` where the other side is gone."""
    connection.sendall(framed(message))


def framed(message: Message) -> bytes:
    """The bytes of a message, as they are sent."""
    data = dumps(_to_plain(message), kind=_KIND, version=_VERSION, limits=_LIMITS)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def receive(connection: socket.socket) -> Message | None:
    """The next message, waiting for it; None where the other side is gone. `WireError` for what is none."""
    head = _exactly(connection, _LENGTH_BYTES)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > _LARGEST_BYTES:
        raise WireDamaged(f"a message of {size} bytes is more than the {_LARGEST_BYTES} that are ever sent")
    data = _exactly(connection, size)
    return None if data is None else _from_plain(loads(data, kind=_KIND, supported=_VERSION, limits=_LIMITS).value)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        try:
            part = connection.recv(min(count, 2**20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _to_plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(message, name) for name in message.__slots__}
    if isinstance(message, Hello):
        keep = message.keep
        plain["keep"] = [keep.last, keep.every, keep.best, keep.best_is]
        plain["storage_options"] = dict(message.storage_options)
    if isinstance(message, Order | Documents):
        plain["documents"] = dict(message.documents)
    plain["message"] = next(name for name, kind in _KINDS.items() if kind is type(message))
    return plain


def _from_plain(value: object) -> Message:
    plain = fields_of(value, "a message to or from an agent")
    kind = taken(plain, "message", str)
    if kind == "hello":
        return _hello(plain)
    if kind == "order":
        return Order(
            step=number(plain, "step"),
            number=number(plain, "number"),
            metric=None if plain.get("metric") is None else taken(plain, "metric", float),
            documents=taken(plain, "documents", dict),
            again=taken(plain, "again", bool),
            failure=taken(plain, "failure", str),
        )
    if kind == "given_up":
        return GivenUp(step=number(plain, "step"), number=number(plain, "number"), failure=taken(plain, "failure", str))
    if kind == "outcome":
        return Outcome(
            step=number(plain, "step", least=NOT_SERVED),
            number=number(plain, "number"),
            slot=_optional(plain, "slot"),
            created_s=taken(plain, "created_s", float),
            took_s=taken(plain, "took_s", float),
            kind=taken(plain, "kind", str),
            text=taken(plain, "text", str),
            lost=taken(plain, "lost", str),
        )
    if kind == "documents":
        return Documents(documents=taken(plain, "documents", dict))
    if kind == "bye":
        return Bye()
    raise WireDamaged(f"trainers and agents say hello, order, given_up, documents, outcome and bye, got {kind!r:.40}")


def _hello(plain: Mapping[str, Any]) -> Hello:
    last, every, best, best_is = taken(plain, "keep", list)
    return Hello(
        uri=taken(plain, "uri", str),
        storage_options=taken(plain, "storage_options", dict),
        environment=taken(plain, "environment", bytes),
        run=taken(plain, "run", str),
        digest=taken(plain, "digest", bytes),
        attempt=number(plain, "attempt"),
        last=number(plain, "last"),
        parent=_optional(plain, "parent"),
        recorded=number(plain, "recorded"),
        seed=taken(plain, "seed", int),
        rank=number(plain, "rank"),
        world_size=number(plain, "world_size", least=1),
        arenas=taken(plain, "arenas", str),
        keep=Keep(last=last, every=every, best=best, best_is=best_is),
        verify=taken(plain, "verify", str),  # type: ignore[arg-type]
        timeout_s=taken(plain, "timeout_s", float),
    )


def _optional(plain: Mapping[str, Any], name: str) -> int | None:
    return None if plain.get(name) is None else number(plain, name)

"""This module defines the messages between a trainer and its agent, and their bytes on a pipe.

The trainer sends `Hello` first, then `Keeping` if other nodes keep copies, `TableDocuments`, `Order` and each
`Obstacle`, and `Bye` at the end. The agent answers each order with an `Outcome`, and says which cuts are `Protected`;
if it cannot serve the trainer, it sends `Unable` and ends. A message is a document of ``wire`` that names the release
of lakeckpt that wrote it: both ends must be of one release. Nothing is unpickled. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lakeckpt import __version__
from lakeckpt.checkpoint.format.fields import fields_of
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.format.parts import SiteWaits
from lakeckpt.checkpoint.peers.grouping import Keeping
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.commit import Remarks
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.errors import AgentError
from lakeckpt.tracking.obstacles import Obstacle
from lakeckpt.wire.documents import from_plain_of, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "Bye",
    "Hello",
    "Message",
    "Order",
    "Outcome",
    "Protected",
    "TableDocuments",
    "Unable",
    "message_from_bytes",
    "message_to_bytes",
]

_KIND, _VERSION = "agent", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A trainer begins ``attempt``, whose checkpoints are published by ``settings``.

    ``digest`` identifies the run on this node, ``arenas`` is the folder of the arenas. ``linger_s``: how much longer
    than a save the final save waits for the agents of other ranks, whose trainers may die later. ``backups``: those
    that this agent makes, the fields of each. ``perceives``: end a trainer that is stuck after a death.
    ``next_rank``: the first rank of the next node, if this agent serves its node; -1: it does not. ``copies``: nodes
    keep copies of each other's shares. ``watch``: what is done about ranks ``here``, those of this node, that stand
    still: ``"report"``, ``"restart"``, or nothing.
    """

    uri: str
    storage_options: Mapping[str, Any]
    attempt: Attempt
    settings: Settings
    digest: bytes
    rank: int
    world_size: int
    arenas: str
    linger_s: float
    backups: tuple[Mapping[str, Any], ...] = ()
    perceives: bool = True
    next_rank: int = -1
    watch: str = ""
    here: tuple[int, ...] = ()
    copies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unable:
    """The agent cannot serve its trainer: ``kind`` and ``text`` of the error."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Persist the complete generation of ``step``.

    ``number``: how many orders the attempt gave before. ``failure``: why this rank has not captured the cut
    (`lakeckpt.tracking.notes.error_to_text`), for the other ranks; empty if it has captured the cut. ``waits``: this
    rank's, to be recorded.
    """

    step: int
    number: int
    metric: float | None = None
    waits: tuple[SiteWaits, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDocuments:
    """The documents of the tables that are read now, by path: written before the next commit if they are not there."""

    data: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an order: the checkpoint, or ``kind`` and ``text`` of an error."""

    step: int
    number: int
    info: CheckpointInfo | None = None
    remarks: Remarks = field(default_factory=Remarks)
    took_s: float = 0.0
    kind: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """The share of this rank of the cut of ``step`` lies on another node, too, since ``at_s`` (seconds since 1970)."""

    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The trainer ends. ``well``: after what is ordered is persisted, nobody needs its arena any more. Otherwise the
    agent makes the final save, as for a trainer that died."""

    well: bool = True


Message = Hello | Unable | Keeping | TableDocuments | Order | Obstacle | Outcome | Protected | Bye
_TYPES: dict[str, type[Message]] = {
    one.__name__: one for one in (Hello, Unable, Keeping, TableDocuments, Order, Obstacle, Outcome, Protected, Bye)
}


def message_to_bytes(message: Message) -> bytes:
    """Return the bytes of a message on a pipe."""
    plain = {"message": type(message).__name__, "library": __version__, **to_plain(message)}
    return dumps(plain, kind=_KIND, version=_VERSION)


def message_from_bytes(data: bytes) -> Message:
    """Return the message of which `message_to_bytes` made ``data``. Raises `WireError`, and `AgentError` for a message
    of another release."""
    what = "a message between a trainer and its agent"
    plain = dict(fields_of(loads(data, kind=_KIND, supported=_VERSION), what))
    library = plain.pop("library", None)
    if library != __version__:
        raise AgentError(
            f"lakeckpt {__version__} got a message of lakeckpt {library}: another release was installed while the job "
            "ran. Start the job again"
        )
    return from_plain_of(_TYPES, "message", plain, what)

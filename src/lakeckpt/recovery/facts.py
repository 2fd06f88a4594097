"""This module defines the facts of a node: the cuts that its memory holds, and the ranks that run there.

Each rank captures its *share* of a cut. A `Holding` is all that a node holds of one cut: the shares of some ranks of
the job that captured it. That job may have had another number of ranks, and these may run on other nodes now. The
module is pure: it defines values and their texts.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass

from lakeckpt.recovery.shares import SHARE_BYTES, UNKNOWN
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["CutId", "Holding", "NodeFacts"]

_KIND, _VERSION = "node-facts", (1, 0)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class CutId:
    """A cut: the state after optimizer step ``step``, as ``attempt`` had it. An attempt that goes on from a cut of a
    step may have another cut of that step."""

    attempt: Count
    step: Count

    @property
    def age(self) -> tuple[int, int]:
        """The key that orders cuts from old to new."""
        return self.step, self.attempt

    def to_text(self) -> str:
        """For messages between ranks.

        >>> CutId(attempt=3, step=70).to_text()
        '3:70'
        """
        return f"{self.attempt}:{self.step}"

    @classmethod
    def from_text(cls, text: str) -> CutId:
        """Return the cut from a text of `to_text`."""
        attempt, _, step = text.partition(":")
        return cls(attempt=int(attempt), step=int(step))


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """All that a node holds of one cut: the shares of ``ranks``, of the ``world`` ranks that captured it.

    ``digest`` is the same for all ranks that were at one cut. ``shares``: the ids of these shares, in the order of
    ``ranks``; equal ids are of equal contents, but for random states. Empty: all are `UNKNOWN`. ``listed``: the digest
    of the `ShareList` that the shares name; its ids then count. Empty: they name none. ``divided``: the replicas of
    each node have divided the state, and a restore needs all shares of it. ``documents``: only the documents of these
    shares lie here, without their tensors: the random states of these ranks. ``members``: no share lies here, but the
    parity that the node of the one rank keeps of the shares of the other ranks named (`lakeckpt.recovery.placement`).
    """

    cut: CutId
    digest: bytes
    world: Positive
    ranks: tuple[int, ...]
    shares: bytes = b""
    listed: bytes = b""
    divided: bool = False
    documents: bool = False
    members: tuple[int, ...] = ()

    @property
    def has_shares(self) -> bool:
        """True if the shares of the ranks lie here, with their tensors."""
        return not self.documents and not self.members

    @property
    def by_rank(self) -> dict[int, bytes]:
        """rank → the id of its share."""
        ids = self.shares or UNKNOWN * len(self.ranks)
        return {rank: ids[at * SHARE_BYTES : (at + 1) * SHARE_BYTES] for at, rank in enumerate(self.ranks)}


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one node states before a restore: its name, for messages, the ``ranks`` that run there, and what its memory
    holds.

    ``address``: where other nodes read it (``host:port``); empty: nowhere. ``lists``: the documents of the lists of
    shares that the holdings name.
    """

    node: str
    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...] = ()
    address: str = ""
    lists: tuple[bytes, ...] = ()

    def to_text(self) -> str:
        """For messages between ranks."""
        return b64encode(dumps(to_plain(self), kind=_KIND, version=_VERSION)).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> NodeFacts:
        """Return the facts from a text of `to_text`. Raises `WireError`."""
        plain = loads(b64decode(text), kind=_KIND, supported=_VERSION)
        found: NodeFacts = from_plain(cls, plain, "the facts of a node")
        return found

"""This module defines a stall: a time in which no rank of a job moved, who held up the others, and why.

A stall is one document of the run, which is written when it is perceived, and again when it ends or is acted on. The
looks at the ranks go with it, as its evidence. The looks of one node travel to the other nodes as a `NodeLooks`. The
module defines values and their documents, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lakeckpt.watch.looks import RankLook
from lakeckpt.watch.verdict import StallVerdict
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["NodeLooks", "Stall", "nodes_to_avoid"]

_DAY_S = 86_400.0
_STALL, _LOOKS, _VERSION = "stall", "looks of a node", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stall of an ``attempt``. Times are in seconds since 1970, by the clock of the node that wrote it."""

    attempt: Count
    verdict: StallVerdict
    step: Count
    """The furthest step that a rank had finished."""
    began_s: float
    perceived_s: float
    ended_s: float = 0.0
    """When a rank moved again, or all were killed; 0: neither, as far as is known."""
    acted: bool = False
    """The ranks were killed, so that the launcher starts the job again."""
    remark: str = ""
    """Why it was not acted on, if it would have been."""
    looks: tuple[RankLook, ...] = ()
    """The evidence: what was seen of all ranks."""
    events: tuple[str, ...] = ()
    """What the kernel saw in the first seconds: signals to ranks, and threads that wait for a disk."""

    @property
    def length_s(self) -> float:
        """For how long it lasted, as far as is known."""
        return max(0.0, (self.ended_s or self.perceived_s) - self.began_s)

    def to_plain(self, evidence: str) -> dict[str, Any]:
        """Return JSON-able values, as ``lakeckpt faults --json`` prints them. ``evidence``: where the document lies."""
        return {
            "attempt": self.attempt,
            "ranks": list(self.verdict.ranks),
            "kind": self.verdict.kind,
            "reason": self.verdict.reason,
            "certainty": self.verdict.certainty,
            "step": self.step,
            "began": self.began_s,
            "perceived": self.perceived_s,
            "ended": self.ended_s or None,
            "acted": self.acted,
            "remark": self.remark,
            "events": list(self.events),
            "evidence": evidence,
        }

    def to_bytes(self) -> bytes:
        """Return the document."""
        return dumps(to_plain(self), kind=_STALL, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> Stall:
        """Return the stall in a document of `to_bytes`. Raises `WireError`."""
        found: Stall = from_plain(cls, loads(data, kind=_STALL, supported=_VERSION), "a stall")
        return found


def nodes_to_avoid(stalls: Iterable[Stall], *, now_s: float) -> dict[str, str]:
    """Return the nodes that are to be avoided, each with the reason: ranks of theirs had to be ended twice within a day
    because they held up the job."""
    ended: dict[str, list[Stall]] = {}
    for stall in stalls:
        culprits = {look.node for look in stall.looks if look.rank in stall.verdict.ranks}
        if stall.acted and stall.began_s > now_s - _DAY_S and len(culprits) == 1:
            ended.setdefault(culprits.pop(), []).append(stall)
    found = {node: its for node, its in ended.items() if len(its) > 1}
    return {
        node: f"its ranks held up the job {len(its)} times in a day: {its[-1].verdict.reason}"
        for node, its in found.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLooks:
    """Two looks at the ranks of a node, a second apart. ``here``: the ranks that began there. ``step``: the furthest
    that one of them had finished."""

    here: tuple[Count, ...]
    step: Count
    first: tuple[RankLook, ...]
    second: tuple[RankLook, ...]

    def to_bytes(self) -> bytes:
        """Return the document."""
        return dumps(to_plain(self), kind=_LOOKS, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeLooks:
        """Return the looks in a document of `to_bytes`. Raises `WireError`."""
        found: NodeLooks = from_plain(cls, loads(data, kind=_LOOKS, supported=_VERSION), "the looks of a node")
        return found

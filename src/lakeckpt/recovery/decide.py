"""This module decides which cut in memory a job restores, and where each rank reads its share of the cut.

`decide` is a pure function of the facts of all nodes. It takes the newest cut that goes on from the history, that is
*complete*, which means that some node holds the share of each rank that captured it, and that each rank can read from
its own node:

1. A rank of a job of as many ranks reads the share that it has captured itself.
2. If that share lies on another node, because ranks have changed their nodes, the rank reads a share of the same id.
   Random states are a rank's own: this rank derives them, as a new rank does.
3. In a job of another number of ranks, each rank reads of all shares what it needs. Shares of the same id stand for
   each other.

Nodes serve each other nothing: a share that only another node holds is a reason to pass the cut over. Each newer cut is
passed over for a reason that people can read. If no cut is left, a checkpoint is restored.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lakeckpt.recovery.facts import CutId, Holding, NodeFacts
from lakeckpt.recovery.shares import UNKNOWN
from lakeckpt.tracking.tally import name_ranks, ranks_of
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Decision", "decide"]

_KIND, _VERSION = "decision", (1, 0)
_OTHER_HISTORY = "the history of the log does not go on from it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The ``cut`` in memory that all ranks restore; None: a checkpoint is restored.

    ``digest``: of the cut, as in a `Holding`. ``world``: how many ranks captured it. ``is_alike``: all their shares
    have one id. ``copies``: rank → the rank whose share it reads instead of its own, if not all are alike.
    ``passed_over``: the newer cuts, the newest first, and why each is not restored.
    """

    cut: CutId | None = None
    digest: bytes = b""
    world: int = 0
    is_alike: bool = False
    copies: Mapping[int, int] = field(default_factory=dict)
    passed_over: tuple[tuple[CutId, str], ...] = ()

    def shares_of(self, rank: int, world_size: int, held: Collection[int]) -> Sequence[int]:
        """Return whose shares ``rank`` of ``world_size`` reads on its node, which holds those of the ranks ``held``."""
        if self.world != world_size:
            return sorted(held)
        wanted = self.copies.get(rank, rank)
        return [wanted] if wanted in held or not self.is_alike else sorted(held)[:1]

    def to_text(self) -> str:
        """For messages between ranks."""
        return b64encode(dumps(to_plain(self), kind=_KIND, version=_VERSION)).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> Decision:
        """Return the decision from a text of `to_text`. Raises `WireError`."""
        found: Decision = from_plain(cls, loads(b64decode(text), kind=_KIND, supported=_VERSION), "a decision")
        return found


def decide(
    nodes: Sequence[NodeFacts],
    *,
    world_size: int,
    takes: Callable[[CutId], bool],
    recorded: int = 0,
    unfit: Mapping[CutId, str] | None = None,
) -> Decision:
    """Return what ``world_size`` ranks restore, which run on ``nodes``.

    ``takes`` says whether a cut goes on from the history. ``recorded``: the optimizer step of the checkpoint that is
    restored otherwise; an older cut needs no reason. ``unfit``: cuts that were tried, and why they cannot be restored.
    """
    passed: list[tuple[CutId, str]] = []
    by_cut: dict[CutId, list[tuple[int, Holding]]] = {}
    for at, node in enumerate(nodes):
        for one in node.holdings:
            by_cut.setdefault(one.cut, []).append((at, one))
    for cut in sorted(by_cut, key=lambda one: one.age, reverse=True):
        found: Decision | str = (unfit or {}).get(cut, "") or _OTHER_HISTORY
        if takes(cut) and cut not in (unfit or {}):
            found = _restorable(by_cut[cut], nodes, world_size)
        elif cut.step <= recorded and not takes(cut):
            continue
        if isinstance(found, Decision):
            return replace(found, cut=cut, passed_over=tuple(passed))
        passed.append((cut, found))
    return Decision(passed_over=tuple(passed))


def _restorable(held: Sequence[tuple[int, Holding]], nodes: Sequence[NodeFacts], world_size: int) -> Decision | str:
    """Return how all ranks restore one cut, of which the nodes (by number) hold shares; or why they cannot."""
    versions: dict[tuple[bytes, int], list[tuple[int, Holding]]] = {}
    for at, one in held:
        versions.setdefault((one.digest, one.world), []).append((at, one))
    found: list[str] = []
    for (digest, world), several in versions.items():
        way = _read_by_all(world, several, nodes, world_size)
        if isinstance(way, Decision):
            return replace(way, digest=digest)
        found.append(way)
    if len(found) == 1:
        return found[0]
    ranks = (_named(rank for _, one in several for rank in one.ranks) for several in versions.values())
    return f"the ranks had different states of readers: {', others than '.join(ranks)}"


def _read_by_all(
    world: int, held: Sequence[tuple[int, Holding]], nodes: Sequence[NodeFacts], world_size: int
) -> Decision | str:
    """Return how all ranks read the shares ``held`` of one cut of ``world`` ranks; or why some rank cannot."""
    on: list[dict[int, bytes]] = [{} for _ in nodes]
    for at, one in held:
        on[at].update(one.by_rank)
    ids: dict[int, bytes] = {}
    for shares in on:
        ids.update((rank, share) for rank, share in shares.items() if ids.get(rank, UNKNOWN) == UNKNOWN)
    if missing := [rank for rank in range(world) if rank not in ids]:
        return f"no node holds what {_named(missing)} captured"
    copies: dict[int, int] = {}
    every = {share for shares in on for share in shares.values()}
    is_alike = len(every) == 1 and UNKNOWN not in every
    for node, here in zip(nodes, on, strict=True):
        if world != world_size:
            if node.ranks and len(here) < world and not (here and is_alike):
                return _stranded(node, node.ranks, [rank for rank in range(world) if rank not in here])
            continue
        if (away := [rank for rank in node.ranks if rank not in here]) and not (here and is_alike):
            same = {share: rank for rank, share in here.items() if share != UNKNOWN}
            copies |= {rank: same[ids[rank]] for rank in away if ids[rank] in same}
            if lost := [rank for rank in away if rank not in copies]:
                return _stranded(node, lost, lost)
    if unseen := set(range(world_size)).difference(*(node.ranks for node in nodes)):
        return f"{_named(unseen)} stated nothing of a node"
    return Decision(world=world, is_alike=is_alike, copies=copies)


def _stranded(node: NodeFacts, ranks: Iterable[int], shares: Iterable[int]) -> str:
    return f"{_named(ranks)} on {node.node} cannot read what {_named(shares)} captured: only other nodes hold it"


def _named(ranks: Iterable[int]) -> str:
    return name_ranks(ranks_of(ranks))

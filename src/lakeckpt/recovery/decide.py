"""This module decides which cut in memory a job restores, and where each rank reads its share of the cut.

`decide` is a pure function of the facts of all nodes. It takes the newest cut that goes on from the history, that is
*complete*, which means that some node holds the share of each rank that captured it, and that each rank can read:

1. A rank of a job of as many ranks reads the share that it has captured itself, if its node holds it.
   If that is damaged, it reads a copy of the share from another node.
2. Else it reads a share of the same id on its node; else its own share, or one of the same id, from another node, if
   that node has an address. Random states are a rank's own: a rank reads them from the node that has its own share; if
   no node has it, another one may have kept its documents; else the rank derives them, as a new rank does.
3. A share that no node holds is computed from the parity of a group of nodes and from the shares of the other members.
4. In a job of another number of ranks, each rank reads of all shares what it needs. Shares of the same id stand for
   each other.

A share that no node holds is no loss if one of the same id is held: the list of shares that a cut names says so
(`lakeckpt.recovery.shares`). Each newer cut is passed over for a reason that people can read. If no cut is left, a
checkpoint is restored.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lakeckpt.recovery.facts import CutId, Holding, NodeFacts
from lakeckpt.recovery.shares import UNKNOWN, ShareList
from lakeckpt.tracking.tally import name_ranks, ranks_of
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Decision", "Source", "decide"]

_KIND, _VERSION = "decision", (1, 0)
_OTHER_HISTORY = "the history of the log does not go on from it"
_MOST_SOURCES, _MOST_SPARES, _MOST_MOVED = 3, 8, 1024
"""So many other nodes are named for a share; for a share that all ranks have alike; and so many ranks, whose node has
another rank's share, learn where their own lies. Each rank reads the whole decision."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a share is read: the share that ``rank`` has captured, from the node at ``address``; empty: this node.

    If there are ``members``, it is computed: member n of the group is a rank whose own share lies at the address n of
    ``addresses``, with the parity that is kept there (`lakeckpt.checkpoint.peers.rebuilt`).
    """

    rank: Count
    address: str = ""
    members: tuple[Count, ...] = ()
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The ``cut`` in memory that all ranks restore; None: a checkpoint is restored.

    ``digest``: of the cut, as in a `Holding`. ``world``: how many ranks captured it. ``is_divided``: the replicas of
    each node have divided the state, and each rank reads of all shares what it needs. ``is_alike``: all their shares
    have one id. ``copies``: rank → the rank whose share stands for its own, if not all are alike. ``away``: rank → the
    other nodes from which its share is read, if a node that needs the share does not hold it; or the node that has what
    the rank captured itself. ``spares``: other nodes that hold a share, if all are alike. ``documents``: rank → the
    node that has the documents of the rank's own share, with its random states, if no node has the share itself.
    ``passed_over``: the newer cuts, the newest first, and why each is not restored.
    """

    cut: CutId | None = None
    digest: bytes = b""
    world: int = 0
    is_divided: bool = False
    is_alike: bool = False
    copies: Mapping[int, int] = field(default_factory=dict)
    away: Mapping[int, tuple[Source, ...]] = field(default_factory=dict)
    spares: tuple[Source, ...] = ()
    documents: Mapping[int, Source] = field(default_factory=dict)
    passed_over: tuple[tuple[CutId, str], ...] = ()

    @property
    def has_servers(self) -> bool:
        """True if a rank may read from another node."""
        return bool(self.away or self.spares or self.documents)

    def reads(self, rank: int, world_size: int, held: Collection[int]) -> dict[int, tuple[Source, ...]]:
        """Return the shares that ``rank`` of ``world_size`` reads, by the rank whose share each is, and where it reads
        each, the best source first. Its node holds the shares of the ranks ``held``."""
        if self.world == world_size and not self.is_divided:
            stand_ins = sorted(held) if self.is_alike else [self.copies.get(rank, rank)]
            here = [one for one in dict.fromkeys([rank, *stand_ins]) if one in held]
            return {rank: (*(Source(rank=one) for one in here), *self._elsewhere(rank, rank))}
        found = {one: (Source(rank=one), *self._elsewhere(one, rank)) for one in sorted(held)}
        known = {self._leader(one) for one in held}
        for one in range(self.world):
            if (leader := self._leader(one)) not in known:
                known.add(leader)
                share = one if self.is_alike else leader
                found[share] = self._elsewhere(share, rank)
        return found

    def stand_in(self, rank: int, shares: Collection[int]) -> int:
        """Return which of ``shares``, as `reads` returned them to a rank of another number of ranks, is or stands for
        that of ``rank``. Raises ``KeyError``."""
        if rank in shares:
            return rank
        for one in shares:
            if self._leader(one) == self._leader(rank):
                return one
        raise KeyError(rank)

    def _leader(self, rank: int) -> int:
        return -1 if self.is_alike else self.copies.get(rank, rank)

    def _elsewhere(self, share: int, reader: int) -> tuple[Source, ...]:
        at = reader % len(self.spares) if self.spares else 0  # so that not all read from one node
        return (*self.away.get(share, ()), *self.spares[at:], *self.spares[:at])

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
        way = _Shares(world, several, nodes).read_by(world_size)
        if isinstance(way, Decision):
            return replace(way, digest=digest)
        found.append(way)
    if len(found) == 1:
        return found[0]
    ranks = (_named(rank for _, one in several for rank in one.ranks) for several in versions.values())
    what = "replicas that had drifted apart" if any(one.divided for _, one in held) else "different states of readers"
    return f"the ranks had {what}: {', others than '.join(ranks)}"


class _Shares:
    """The shares of one cut of ``world`` ranks that the ``nodes`` hold."""

    def __init__(self, world: int, held: Sequence[tuple[int, Holding]], nodes: Sequence[NodeFacts]) -> None:
        self._world, self._nodes = world, nodes
        self._on: list[dict[int, bytes]] = [{} for _ in nodes]
        self._documents: dict[int, int] = {}  # rank → the node that has the documents of its share
        self._parity: dict[tuple[int, ...], dict[int, int]] = {}  # a group's ranks → of which parity lies on which node
        for at, one in held:
            if one.documents:
                self._documents |= dict.fromkeys(one.ranks, at)
            elif one.members:
                self._parity.setdefault(one.members, {}).update(dict.fromkeys(one.ranks, at))
            else:
                self._on[at].update(one.by_rank)
        self._is_divided = any(one.divided for _, one in held)
        lists = _lists_of(world, held, nodes)
        self._keys = _keys_of(world, self._on, lists)
        self._holders: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for at, here in enumerate(self._on):
            for rank in sorted(here):
                self._holders[self._keys[rank]].append((at, rank))
        keys = set(self._keys.values())
        is_alike = len(keys) == 1 and (world > 1 or not isinstance(next(iter(keys)), int))
        self._is_alike = is_alike and not self._is_divided
        self._computed = {self._keys[one.rank]: one for one in self._from_parity() if one.rank in self._keys}

    def read_by(self, world_size: int) -> Decision | str:
        """Return how all of ``world_size`` ranks read these shares; or why some rank cannot."""
        known = self._holders.keys() | self._computed.keys()
        if lost := [rank for rank in range(self._world) if self._keys[rank] not in known]:
            return f"no node holds what {_named(lost)} captured, and no replica of it is known"
        is_same = world_size == self._world and not self._is_divided
        first = {key: one.rank for key, one in self._computed.items()}
        first |= {key: several[0][1] for key, several in self._holders.items()}
        copies = {} if is_same or self._is_alike else {rank: first[key] for rank, key in self._keys.items()}
        away: dict[int, tuple[Source, ...]] = {}
        spares = self._spares() if self._is_alike else ()
        owners = self._owners() if is_same else {}
        for at, node in enumerate(self._nodes):
            shares = node.ranks if is_same else sorted(first.values())
            absent = [share for share in shares if share not in self._on[at]] if node.ranks else []
            here = {self._keys[rank]: rank for rank in self._on[at]} if absent else {}
            stranded = []
            for share in absent:
                own, key = owners.get(share, ()), self._keys[share]
                if key in here:
                    copies |= {share: here[key]} if is_same and not self._is_alike else {}
                    away |= {share: own} if own and len(away) < _MOST_MOVED else {}
                elif found := own if self._is_alike else self._sources(share, at):
                    away[share] = found
                elif not spares:
                    stranded.append(share)
            if stranded:
                ranks = stranded if is_same else node.ranks
                why = "only nodes without an address hold it"
                return f"{_named(ranks)} on {node.node} cannot read what {_named(stranded)} captured: {why}"
            if is_same and not self._is_alike:
                for share in (one for one in node.ranks if one in self._on[at] and len(away) < _MOST_MOVED):
                    if copied := self._copies(share, at):
                        away.setdefault(share, copied)
        if unseen := set(range(world_size)).difference(*(node.ranks for node in self._nodes)):
            return f"{_named(unseen)} stated nothing of a node"
        copies = {rank: other for rank, other in copies.items() if rank != other}
        documents = {}
        if world_size == self._world:
            alone = sorted(rank for rank in self._documents if not any(rank in here for here in self._on))
            places = {rank: self._nodes[self._documents[rank]].address for rank in alone[:_MOST_MOVED]}
            documents = {rank: Source(rank=rank, address=address) for rank, address in places.items() if address}
        return Decision(
            world=self._world,
            is_divided=self._is_divided,
            is_alike=self._is_alike,
            copies=copies,
            away=away,
            spares=spares,
            documents=documents,
        )

    def _from_parity(self) -> Iterator[Source]:
        """Yield the shares that no node holds, and that can be computed: all other members of the group are there."""
        for members, parity in self._parity.items():
            absent = [rank for rank in members if rank not in parity or rank not in self._on[parity[rank]]]
            addresses = [self._nodes[parity[rank]].address if rank in parity else "" for rank in members]
            if len(absent) == 1 and self._keys.get(absent[0]) not in self._holders:
                there = [at for rank, at in zip(members, addresses, strict=True) if rank not in absent]
                if all(there):
                    yield Source(rank=absent[0], members=members, addresses=tuple(addresses))

    def _owners(self) -> dict[int, tuple[Source, ...]]:
        """Return rank → a node that serves what the rank has captured itself."""
        addresses = [node.address for node in self._nodes]
        return {
            rank: (Source(rank=rank, address=address),)
            for address, here in zip(addresses, self._on, strict=True)
            for rank in here
            if address
        }

    def _sources(self, share: int, reader: int) -> tuple[Source, ...]:
        """Return which other nodes serve a share to the node ``reader``: the share itself first, then the nearest."""
        every, count = self._holders.get(self._keys[share], []), len(self._nodes)
        holders = sorted(every, key=lambda one: (one[1] != share, (one[0] - reader) % count))
        computed = self._computed.get(self._keys[share])
        return (*self._served(holders)[:_MOST_SOURCES], *([] if computed is None else [computed]))

    def _copies(self, share: int, reader: int) -> tuple[Source, ...]:
        """Return which other nodes serve a copy of a share that the node ``reader`` holds itself: it may be damaged
        there."""
        holders = (one for one in self._holders[self._keys[share]] if one[1] == share and one[0] != reader)
        return tuple(self._served(holders)[:_MOST_SOURCES])

    def _spares(self) -> tuple[Source, ...]:
        """Return some nodes that serve a share, if all are alike, a part of all from each region of their order."""
        found = self._served(one for here in self._holders.values() for one in here)
        return tuple(found[:: max(1, -(-len(found) // _MOST_SPARES))])

    def _served(self, holders: Iterable[tuple[int, int]]) -> list[Source]:
        """Return the sources at ``holders`` (node, rank), the first one of each node that has an address."""
        nodes: dict[str, int] = {}
        for at, rank in holders:
            nodes.setdefault(self._nodes[at].address, rank)
        return [Source(rank=rank, address=address) for address, rank in nodes.items() if address]


def _lists_of(world: int, held: Sequence[tuple[int, Holding]], nodes: Sequence[NodeFacts]) -> list[ShareList]:
    """Return the lists of shares that the holdings of a cut name."""
    named = {one.listed for _, one in held if one.listed}
    every = {document for node in nodes for document in node.lists} if named else set()
    found = {one.digest: one for one in map(ShareList.from_document, sorted(every))}
    return [found[digest] for digest in sorted(named) if digest in found and found[digest].world == world]


def _keys_of(world: int, on: Sequence[Mapping[int, bytes]], lists: Sequence[ShareList]) -> dict[int, Hashable]:
    """Return rank → what shares that stand for each other have in common; the rank itself if that is not known. Shares
    that one of several lists tells apart are different."""
    if len(lists) == 1:
        return {rank: lists[0].id_of(rank) for rank in range(world)}
    if lists:
        return {rank: tuple(one.id_of(rank) for one in lists) for rank in range(world)}
    ids: dict[int, bytes] = {}
    for shares in on:
        ids.update((rank, share) for rank, share in shares.items() if ids.get(rank, UNKNOWN) == UNKNOWN)
    return {rank: rank if ids.get(rank, UNKNOWN) == UNKNOWN else ids[rank] for rank in range(world)}


def _named(ranks: Iterable[int]) -> str:
    return name_ranks(ranks_of(ranks))

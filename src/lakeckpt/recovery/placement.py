"""This module places what nodes keep of each other's shares: it joins the nodes of a job to groups.

A node that is lost takes its share of each cut with it, unless another node keeps a copy, or parity from which the
share is computed. Nodes of one *failure domain* (a rack, a block of switches) tend to be lost together, so the members
of a group lie in different domains if that is possible: the nodes, in the order of their domains, are dealt to the
groups in turn. A domain that has no more nodes than there are groups never has two nodes in one group.

`Mode` says what a group keeps:

    "copy"    pairs: each node keeps a copy of the share of the member before it. A group of three is a ring.
    "3+1"     groups of four: pieces of the members' shares make stripes. Stripe s is the piece that each member but
              one puts into it; that one, member s mod 4, keeps the parity (XOR) of the pieces.

Nodes that are left over join groups, one each as long as there are groups. Any one loss in a group leaves all shares.
Whether two losses do, `PeerGroup.survives` says. A node that is alone is unprotected. The module is pure: nodes compute
the same groups from the same nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["DOMAIN_VARIABLE", "Mode", "NodePlace", "PeerGroup", "domain_of", "groups_of", "lost_shares"]

Mode = Literal["copy", "3+1"]
_MEMBERS: Mapping[Mode, int] = {"copy": 2, "3+1": 4}
DOMAIN_VARIABLE = "LAKECKPT_DOMAIN"
"""The environment variable that names the failure domain of a node."""
_SLURM, _SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """A node of a job: its identity, which outlives ranks, and the failure domain in which it lies."""

    node: str
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGroup:
    """Nodes that keep copies (``"copy"``) or parity (``"3+1"``) of each other's shares."""

    mode: Mode
    members: tuple[str, ...]
    shared_domains: tuple[str, ...] = ()
    """The failure domains in which more than one member lies."""

    @property
    def warning(self) -> str:
        """What the group does not protect, for people; empty: nothing to say.

        >>> PeerGroup(mode="copy", members=("a",)).warning
        'unprotected: the node a has no other node that could keep its share'
        """
        if len(self.members) == 1:
            return f"unprotected: the node {self.members[0]} has no other node that could keep its share"
        if self.shared_domains:
            names = ", ".join(self.shared_domains)
            return f"the nodes {', '.join(self.members)} are not protected against the loss of all of {names}"
        return ""

    def keepers(self, node: str) -> tuple[str, ...]:
        """Return the members that keep something of the share of ``node``: the one with its copy, or all others, each
        of which has parity of some of its pieces."""
        at = self.members.index(node)
        others = (*self.members[at + 1 :], *self.members[:at])
        return others[:1] if self.mode == "copy" else others

    def kept(self, node: str) -> tuple[str, ...]:
        """Return the members of whose shares ``node`` keeps something."""
        return tuple(one for one in self.members if one != node and node in self.keepers(one))

    def parity_at(self, stripe: int) -> str:
        """Return the member that keeps the parity of a stripe."""
        return self.members[stripe % len(self.members)]

    def stripe_of(self, node: str, piece: int) -> int:
        """Return the stripe to which ``node`` gives a piece of its share: the next one of which it does not keep the
        parity. The group has at least two members.

        >>> group = PeerGroup(mode="3+1", members=("a", "b", "c", "d"))
        >>> [group.stripe_of("b", piece) for piece in range(6)]
        [0, 2, 3, 4, 6, 7]
        """
        at = self.members.index(node)
        turn, within = divmod(piece, len(self.members) - 1)
        return turn * len(self.members) + within + (within >= at)

    def piece_of(self, node: str, stripe: int) -> int | None:
        """Return the piece of its share that ``node`` gives to a stripe; None: it keeps the parity."""
        at = self.members.index(node)
        turn, within = divmod(stripe, len(self.members))
        return None if within == at else turn * (len(self.members) - 1) + within - (within > at)

    def survives(self, node: str, lost: Collection[str]) -> bool:
        """Return whether the share of ``node`` is still there, or can be computed, if the nodes ``lost`` are gone."""
        if node not in lost:
            return True
        keepers = self.keepers(node)
        return bool(keepers) and not any(one in lost for one in keepers)


def groups_of(places: Iterable[NodePlace], mode: Mode) -> tuple[PeerGroup, ...]:
    """Return the groups of the nodes of a job, whatever the order in which the nodes come.

    Raises ``ValueError`` if two places name one node, or the mode is unknown.

    >>> racks = [NodePlace(node=f"n{at}", domain="left" if at < 2 else "right") for at in range(4)]
    >>> [group.members for group in groups_of(racks, "copy")]
    [('n0', 'n2'), ('n1', 'n3')]
    """
    if mode not in _MEMBERS:
        raise ValueError(f"unknown placement {mode!r}: there are {', '.join(map(repr, _MEMBERS))}")
    inside = sorted(places, key=lambda one: (one.domain, one.node))
    if twice := [node for node, count in Counter(one.node for one in inside).items() if count > 1]:
        raise ValueError(f"each node has one place, but these have several: {', '.join(sorted(twice))}")
    count = max(1, len(inside) // _MEMBERS[mode])
    return tuple(_group(mode, inside[at::count]) for at in range(min(count, len(inside))))


def _group(mode: Mode, members: Iterable[NodePlace]) -> PeerGroup:
    several = tuple(members)
    domains = Counter(one.domain for one in several)
    shared = tuple(sorted(domain for domain, count in domains.items() if count > 1))
    return PeerGroup(mode=mode, members=tuple(one.node for one in several), shared_domains=shared)


def lost_shares(groups: Iterable[PeerGroup], lost: Collection[str]) -> list[str]:
    """Return the nodes whose shares are lost with the nodes ``lost``, in the order of groups."""
    return [node for group in groups for node in group.members if not group.survives(node, lost)]


def domain_of(environment: Mapping[str, str], host: str) -> str:
    """Return the failure domain of the node ``host``: what `DOMAIN_VARIABLE` names; else the switches above the node,
    of which Slurm tells its tasks; else the host itself.

    >>> domain_of({"SLURM_TOPOLOGY_ADDR": "s0.s4.n17", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}, "n17")
    's0.s4'
    """
    if named := environment.get(DOMAIN_VARIABLE, "").strip():
        return named
    pattern = environment.get(_SLURM_PATTERN, "").split(".")
    above = pattern.index("node") if "node" in pattern else 0
    parts = environment.get(_SLURM, "").split(".", above)
    return ".".join(parts[:above]) if above and len(parts) > above else host

"""Nodes in groups: every loss of one and of two nodes, in every size of a job from 2 to 64 nodes, with real copies and
real parity."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator
from functools import reduce
from itertools import combinations
from operator import xor

import pytest

from lakeckpt.recovery.placement import Mode, NodePlace, PeerGroup, domain_of, groups_of, lost_shares

MODES: tuple[Mode, ...] = ("copy", "3+1")
PIECES = 6


def racks(nodes: int, in_a_rack: int = 8) -> list[NodePlace]:
    return [NodePlace(node=f"n{at:02d}", domain=f"rack{at // in_a_rack}") for at in range(nodes)]


class Memory:
    """The nodes of a job, each with its share in pieces, and with what it keeps of others in its own memory."""

    def __init__(self, groups: tuple[PeerGroup, ...]) -> None:
        self._rng = random.Random(len(groups))
        self.shares = {node: self._share() for group in groups for node in group.members}
        self._groups = {node: group for group in groups for node in group.members}
        self._copies = {
            node: {other: self.shares[other] for other in group.kept(node)}
            for node, group in self._groups.items()
            if group.mode == "copy"
        }
        self._parity: dict[str, dict[int, int]] = {node: {} for node in self.shares}
        self._pieces: dict[tuple[str, int], dict[str, int]] = {}
        for group in groups:
            if group.mode == "3+1" and len(group.members) > 1:
                for stripe in {group.stripe_of(node, piece) for node in group.members for piece in range(PIECES)}:
                    keeper, pieces = group.parity_at(stripe), self._in(group, stripe)
                    self._pieces[keeper, stripe] = pieces
                    self._parity[keeper][stripe] = reduce(xor, pieces.values())

    def _share(self) -> list[int]:
        return [self._rng.getrandbits(64) for _ in range(PIECES)]

    def _in(self, group: PeerGroup, stripe: int) -> dict[str, int]:
        pieces = {node: group.piece_of(node, stripe) for node in group.members}
        return {
            node: self.shares[node][piece] if piece < PIECES else 0
            for node, piece in pieces.items()
            if piece is not None
        }

    def read(self, node: str, lost: Collection[str]) -> list[int] | None:
        """The share of a lost node, from the memory of the nodes that are left; None: it cannot be read."""
        group = self._groups[node]
        if group.mode == "copy":
            left = [held[node] for keeper, held in self._copies.items() if keeper not in lost and node in held]
            return left[0] if left else None
        found = []
        for piece in range(PIECES if len(group.members) > 1 else 0):
            stripe = group.stripe_of(node, piece)
            keeper = group.parity_at(stripe)
            others = {one: value for one, value in self._pieces[keeper, stripe].items() if one != node}
            if any(one == keeper or one in others for one in lost):
                return None
            found.append(reduce(xor, others.values(), self._parity[keeper][stripe]))
        return found or None


def losses(nodes: Collection[str]) -> Iterator[tuple[str, ...]]:
    yield from ((one,) for one in nodes)
    yield from combinations(nodes, 2)


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_of_one_node_leaves_all_shares_and_every_loss_of_two_those_that_it_says(mode: Mode) -> None:
    for size in range(2, 65):
        groups = groups_of(racks(size), mode)
        memory = Memory(groups)
        group_of = {node: group for group in groups for node in group.members}
        assert len(group_of) == size
        for lost in losses(memory.shares):
            said = lost_shares(groups, lost)
            for node in lost:
                assert memory.read(node, lost) == (None if node in said else memory.shares[node])
            assert set(said) <= set(lost)
            if len({id(group_of[node]) for node in lost}) == len(lost):
                assert not said, "one loss in a group leaves all its shares"
            else:
                assert len(said) == (1 if mode == "copy" and len(group_of[lost[0]].members) == 3 else 2)


@pytest.mark.parametrize(("mode", "members", "most"), [("copy", 2, 3), ("3+1", 4, 7)])
def test_groups_are_as_large_as_their_mode_and_nobody_is_alone(mode: Mode, members: int, most: int) -> None:
    for size in range(2, 65):
        sizes = [len(group.members) for group in groups_of(racks(size), mode)]
        assert len(sizes) == max(1, size // members)
        assert min(sizes) >= min(size, members)
        assert max(sizes) <= most
        if size >= members * (members - 1):
            assert max(sizes) <= members + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_domain_that_fits_has_no_two_nodes_in_a_group(mode: Mode) -> None:
    rng = random.Random(7)
    for _ in range(300):
        domains = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 9))]
        places = [
            NodePlace(node=f"n{at}-{of}", domain=f"d{of}") for of, size in enumerate(domains) for at in range(size)
        ]
        rng.shuffle(places)
        groups = groups_of(places, mode)
        sizes = Counter(one.domain for one in places)
        domain = {one.node: one.domain for one in places}
        for group in groups:
            for name, count in Counter(domain[node] for node in group.members).items():
                assert count <= -(-sizes[name] // len(groups))
                assert (name in group.shared_domains) == (count > 1)


def test_groups_do_not_depend_on_the_order_of_nodes() -> None:
    places = racks(23)
    for mode in MODES:
        assert groups_of(places, mode) == groups_of(places[::-1], mode)


def test_a_node_alone_is_unprotected_and_a_shared_domain_is_named() -> None:
    (alone,) = groups_of(racks(1), "3+1")
    assert alone.warning.startswith("unprotected: the node n00")
    assert not alone.survives("n00", ["n00"])
    assert groups_of([], "copy") == ()
    (pair,) = groups_of(racks(2), "copy")
    assert "not protected against the loss of all of rack0" in pair.warning
    (apart,) = groups_of(racks(2, in_a_rack=1), "copy")
    assert apart.warning == ""


def test_a_node_with_two_places_and_an_unknown_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="several: n00"):
        groups_of([*racks(3), NodePlace(node="n00", domain="elsewhere")], "copy")
    with pytest.raises(ValueError, match="unknown placement 'raid'"):
        groups_of(racks(3), "raid")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "domain"),
    [
        ({}, "host"),
        ({"LAKECKPT_DOMAIN": "row 7", "SLURM_TOPOLOGY_ADDR": "s1.host"}, "row 7"),
        ({"SLURM_TOPOLOGY_ADDR": "s1.host", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, "s1"),
        ({"SLURM_TOPOLOGY_ADDR": "b1.host.of.it", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}, "b1"),
        ({"SLURM_TOPOLOGY_ADDR": "host", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "host"),
        ({"SLURM_TOPOLOGY_ADDR": "host"}, "host"),
    ],
)
def test_the_domain_is_what_is_named_else_the_switches_above_the_node_else_the_host(
    environment: dict[str, str], domain: str
) -> None:
    assert domain_of(environment, "host") == domain

"""The newest cut is restored that all ranks can read, and each newer one is passed over for a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.recovery.decide import Decision, Source, decide
from lakeckpt.recovery.facts import CutId, Holding, NodeFacts
from lakeckpt.recovery.shares import UNKNOWN, ShareList

SHARES = [UNKNOWN, b"a" * 16, b"b" * 16]
DIGESTS = [b"1" * 16, b"2" * 16]


def subsets(every: Iterable[int]) -> list[tuple[int, ...]]:
    several = list(every)
    return list(chain.from_iterable(combinations(several, count) for count in range(len(several) + 1)))


def cut_at(step: int, attempt: int = 0) -> CutId:
    return CutId(attempt=attempt, step=step)


def held(step: int, *ranks: int, world: int = 4, shares: str = "", digest: bytes = DIGESTS[0]) -> Holding:
    """What a node holds of a step; ``shares``: a letter for each rank, equal ones for equal shares."""
    ids = b"".join(letter.encode() * 16 for letter in shares)
    return Holding(cut=cut_at(step), digest=digest, world=world, ranks=ranks, shares=ids)


def node(name: str, ranks: tuple[int, ...], *holdings: Holding) -> NodeFacts:
    return NodeFacts(node=name, ranks=ranks, holdings=holdings)


def decided(*nodes: NodeFacts, world_size: int = 4, least: int = 0) -> Decision:
    return decide(nodes, world_size=world_size, takes=lambda cut: cut.step >= least)


def reason(found: Decision) -> str:
    ((_, why),) = found.passed_over
    return why


def test_each_rank_reads_its_own_share_of_the_newest_step_that_all_have() -> None:
    found = decided(
        node("a", (0, 1), held(7, 0, 1), held(6, 0, 1)), node("b", (2, 3), held(7, 2), held(6, 2, 3), held(5, 2, 3))
    )
    assert (found.cut, found.world, found.copies) == (cut_at(6), 4, {})
    assert reason(found) == "no node holds what rank 3 captured, and no replica of it is known"


def test_ranks_that_changed_their_nodes_read_shares_that_are_alike() -> None:
    a, b = held(7, 0, 1, shares="xx"), held(7, 2, 3, shares="xx")
    found = decided(node("a", (2, 3), a), node("b", (0, 1), b))
    assert found.cut == cut_at(7) and found.is_alike and found.copies == {}
    reads = [found.reads(rank, 4, held) for rank, held in ((2, {0, 1}), (0, {2, 3}), (3, {3}))]
    assert [[one.rank for one in places[rank]] for places, rank in zip(reads, (2, 0, 3), strict=True)] == [
        [0, 1],
        [2, 3],
        [3],
    ]


def test_ranks_of_a_mesh_read_the_share_of_their_replica_alone() -> None:
    a, b = held(7, 0, 1, shares="xy"), held(7, 2, 3, shares="xy")
    assert decided(node("a", (2, 3), a), node("b", (0, 1), b)).copies == {2: 0, 3: 1, 0: 2, 1: 3}


@pytest.mark.parametrize("shares", [("xy", "zw"), ("", "")])
def test_a_share_that_only_another_node_holds_is_named(shares: tuple[str, str]) -> None:
    found = decided(
        node("a", (2, 3), held(7, 0, 1, shares=shares[0])), node("b", (0, 1), held(7, 2, 3, shares=shares[1]))
    )
    assert found.cut is None
    assert reason(found) == "ranks 2-3 on a cannot read what ranks 2-3 captured: only nodes without an address hold it"


def test_other_numbers_of_ranks_read_all_shares_of_their_node() -> None:
    for world_size in (1, 2, 3, 8):
        ranks = tuple(range(world_size))
        found = decided(node("a", ranks, held(7, 0, 1, 2, 3)), world_size=world_size)
        assert found.cut == cut_at(7) and list(found.reads(0, world_size, {0, 1, 2, 3})) in ([0], [0, 1, 2, 3])
    found = decided(node("a", (0,), held(7, 0, 1)), node("b", (1,), held(7, 2, 3)), world_size=2)
    assert reason(found) == "rank 0 on a cannot read what ranks 2-3 captured: only nodes without an address hold it"
    a, b = held(7, 0, 1, shares="xx"), held(7, 2, 3, shares="xx")
    assert decided(node("a", (0,), a), node("b", (1,), b), world_size=2).cut == cut_at(7)
    assert decided(node("a", (0, 1), held(7, 0, 1, 2, 3)), node("b", ()), world_size=2).cut == cut_at(7)
    assert decided(node("a", (0,), a), node("b", (), b), node("c", (1,)), world_size=2).cut is None


def test_ranks_that_had_other_states_of_readers_are_named() -> None:
    found = decided(node("a", (0, 1), held(7, 0, 1)), node("b", (2, 3), held(7, 2, 3, digest=DIGESTS[1])))
    assert reason(found) == "the ranks had different states of readers: ranks 0-1, others than ranks 2-3"


def test_a_cut_that_was_tried_and_one_of_another_history_are_passed_over() -> None:
    nodes = [node("a", (0, 1, 2, 3), *(held(step, 0, 1, 2, 3) for step in (5, 6, 7, 8)))]
    found = decide(nodes, world_size=4, takes=lambda cut: cut.step != 8, unfit={cut_at(7): "it is damaged"})
    assert found.cut == cut_at(6)
    assert found.passed_over == (
        (cut_at(8), "the history of the log does not go on from it"),
        (cut_at(7), "it is damaged"),
    )
    found = decide(nodes, world_size=4, takes=lambda cut: False, recorded=6)
    assert [cut.step for cut, _ in found.passed_over] == [8, 7]


MESHES = {"all alike": "xxxx", "two replicas": "xyxy", "no replicas": "wxyz"}
LISTS = {name: ShareList.of([letter.encode() for letter in letters]) for name, letters in MESHES.items()}
REACHED = [("", ""), ("a:1", ""), ("", "b:1"), ("a:1", "b:1")]
TWO_NODES = [(set(a), set(b)) for a in subsets(range(4)) for b in subsets(range(4))]


@pytest.mark.parametrize("mesh", [*MESHES, ""])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_cut_is_taken_if_each_share_can_be_read_whatever_two_nodes_hold(mesh: str, world_size: int) -> None:
    """Every way in which two nodes hold four shares, are reached by the other one, and run the ranks."""
    letters = MESHES.get(mesh, "wxyz")
    named = {"listed": LISTS[mesh].digest} if mesh else {}
    lists = (LISTS[mesh].document,) if mesh else ()
    half = world_size // 2
    for (a, b), reach, split in product(TWO_NODES, REACHED, {half, world_size}):
        places = [(a, reach[0], range(split)), (b, reach[1], range(split, world_size))]
        nodes = []
        for here, address, ranks in places:
            one = Holding(cut=cut_at(7), digest=DIGESTS[0], world=4, ranks=tuple(sorted(here)), **named)
            holdings = (one,) if here else ()
            nodes.append(
                NodeFacts(node="n", ranks=tuple(ranks), holdings=holdings, address=address, lists=lists if here else ())
            )
        found = decided(*nodes, world_size=world_size)
        wanted = [
            (own, other if address else set(), [letters[rank] for rank in (ranks if world_size == 4 else range(4))])
            for (own, _, ranks), (other, address, _) in (places, places[::-1])
            if ranks
        ]
        can = {letters[rank] for rank in a | b} == set(letters) and all(
            letter in {letters[rank] for rank in own | other} for own, other, needs in wanted for letter in needs
        )
        assert (found.cut is not None) == can, (a, b, reach, split, found)
        for (here, _, ranks), at_address in zip(places, ({"b:1": b}, {"a:1": a}), strict=True):
            for rank in ranks if can else ():
                _check_reads(found.reads(rank, world_size, here), here, {**at_address, **_own(places)}, letters)


def _own(places: list[tuple[set[int], str, range]]) -> dict[str, set[int]]:
    return {address: here for here, address, _ in places if address}


def _check_reads(reads: Mapping[int, Sequence[Source]], here: set[int], at: dict[str, set[int]], letters: str) -> None:
    for share, places in reads.items():
        assert places
        for one in places:
            assert one.rank in (at[one.address] if one.address else here)
            assert letters[one.rank] == letters[share]
        assert not here & {rank for rank in range(4) if letters[rank] == letters[share]} or not places[0].address
        assert share not in here or places[0] == Source(rank=share)


def test_a_lost_share_is_read_from_a_replica_and_its_owner_is_asked_first() -> None:
    mesh = LISTS["two replicas"]
    one = replace(held(7, 0, 1, 2), listed=mesh.digest)
    found = decided(
        NodeFacts(node="a", ranks=(0, 1), holdings=(one,), address="a:1", lists=(mesh.document,)),
        NodeFacts(node="b", ranks=(2, 3), address="b:1"),
    )
    assert found.reads(2, 4, ()) == {2: (Source(rank=2, address="a:1"),)}
    assert found.reads(3, 4, ()) == {3: (Source(rank=1, address="a:1"),)}


def test_shares_that_one_list_tells_apart_are_different() -> None:
    """One rank had not learned the newer list when it captured the cut."""
    older, newer = LISTS["all alike"], LISTS["two replicas"]
    nodes = [
        NodeFacts(
            node=name,
            ranks=ranks,
            holdings=(replace(held(7, rank), listed=one.digest),),
            address=f"{name}:1",
            lists=(one.document,),
        )
        for name, ranks, rank, one in (("a", (0, 1), 0, older), ("b", (2, 3), 2, newer))
    ]
    assert reason(decided(*nodes)) == "no node holds what ranks 1, 3 captured, and no replica of it is known"


def test_a_share_that_is_lost_and_of_which_nobody_knows_a_replica_is_named() -> None:
    found = decided(NodeFacts(node="a", ranks=(0, 1, 2, 3), holdings=(held(7, 0, 1, 2),), address="a:1"))
    assert reason(found) == "no node holds what rank 3 captured, and no replica of it is known"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[NodeFacts], int]:
    """Nodes with whatever in their memory, and the number of ranks that run there."""
    world_size, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    places = draw(st.lists(st.integers(0, count - 1), min_size=world_size, max_size=world_size))
    nodes = []
    for at in range(count):
        holdings = {}
        for _ in range(draw(st.integers(0, 4))):
            world = draw(st.sampled_from([world_size, world_size, world_size + 1]))
            cut = CutId(attempt=world, step=draw(st.integers(1, 3)))
            ranks = tuple(draw(st.sets(st.integers(0, world - 1), min_size=1)))
            shares = b"".join(draw(st.sampled_from(SHARES)) for _ in ranks)
            digest = draw(st.sampled_from([DIGESTS[0], DIGESTS[0], DIGESTS[1]]))
            holdings[cut] = Holding(cut=cut, digest=digest, world=world, ranks=ranks, shares=shares)
        here = tuple(rank for rank, place in enumerate(places) if place == at)
        nodes.append(NodeFacts(node=f"n{at}", ranks=here, holdings=tuple(holdings.values()), address=f"n{at}:1"))
    return nodes, world_size


def _reads_well(found: Decision, nodes: list[NodeFacts], world_size: int) -> bool:
    """Whether each rank reads shares that the nodes hold where it reads them, all of one digest, and of its own id."""
    every = [one for node in nodes for one in node.holdings if one.cut == found.cut and one.world == found.world]
    for digest in {one.digest for one in every}:
        ids: dict[int, set[bytes]] = {}
        for one in every:
            for rank, share in one.by_rank.items() if one.digest == digest else ():
                ids.setdefault(rank, set()).add(share)
        if ids.keys() != set(range(found.world)):
            continue
        at = {
            node.address: {
                rank: share
                for one in node.holdings
                if one.cut == found.cut and one.digest == digest
                for rank, share in one.by_rank.items()
            }
            for node in nodes
        }
        if all(_reads_what_it_is(found, ids, at, node, rank, world_size) for node in nodes for rank in node.ranks):
            return True
    return False


def _reads_what_it_is(
    found: Decision,
    ids: dict[int, set[bytes]],
    at: dict[str, dict[int, bytes]],
    node: NodeFacts,
    rank: int,
    world_size: int,
) -> bool:
    reads = found.reads(rank, world_size, at[node.address])
    wanted = [rank] if found.world == world_size else range(found.world)
    if any(found.stand_in(one, reads) not in reads for one in wanted) or not all(reads.values()):
        return False
    return all(
        source.rank in at[source.address or node.address]
        and (source.rank == share or at[source.address or node.address][source.rank] in ids[share] - {UNKNOWN})
        for share, places in reads.items()
        for source in places
    )


@given(jobs(), st.integers(0, 3), st.sets(st.integers(1, 3)))
def test_what_is_decided_can_be_read_and_every_newer_cut_has_its_reason(
    job: tuple[list[NodeFacts], int], least: int, unfit: set[int]
) -> None:
    nodes, world_size = job
    takes: Callable[[CutId], bool] = lambda cut: cut.step >= least  # noqa: E731
    every = {one.cut for node in nodes for one in node.holdings}
    tried = {cut: "tried" for cut in every if cut.step in unfit}
    found = decide(nodes, world_size=world_size, takes=takes, unfit=tried)
    assert Decision.from_text(found.to_text()) == found
    assert [NodeFacts.from_text(node.to_text()) for node in nodes] == nodes
    if found.cut is not None:
        assert takes(found.cut) and found.cut not in tried and _reads_well(found, nodes, world_size)
    newer = {cut for cut in every if found.cut is None or cut.age > found.cut.age}
    assert {cut for cut in newer if takes(cut) or cut.step > 0} == {cut for cut, _ in found.passed_over}
    assert all(why for _, why in found.passed_over)
    ages = [cut.age for cut, _ in found.passed_over]
    assert ages == sorted(ages, reverse=True)


@given(jobs(), st.integers(1, 3))
def test_a_cut_that_all_ranks_hold_themselves_is_never_passed_over(job: tuple[list[NodeFacts], int], step: int) -> None:
    nodes, world_size = job
    best = CutId(attempt=99, step=step)
    full = [
        NodeFacts(
            node=node.node,
            ranks=node.ranks,
            holdings=(*node.holdings, Holding(cut=best, digest=DIGESTS[0], world=world_size, ranks=node.ranks)),
            address=node.address,
        )
        for node in nodes
    ]
    found = decide(full, world_size=world_size, takes=lambda cut: True)
    assert found.cut is not None and found.cut.age >= best.age
    assert best not in dict(found.passed_over)


def test_a_rank_that_holds_its_share_knows_where_a_copy_of_it_lies() -> None:
    """Its own one may be damaged. Its own node is not asked by the network."""
    a = replace(node("a", (0, 1), held(7, 0, 1, 2)), address="a:1")
    b = replace(node("b", (2, 3), held(7, 2, 3, 0)), address="b:1")
    found = decided(a, b)
    assert [one.address for one in found.reads(0, 4, {0, 1, 2})[0]] == ["", "b:1"]
    assert [one.address for one in found.reads(2, 4, {2, 3, 0})[2]] == ["", "a:1"]
    assert [one.address for one in found.reads(1, 4, {0, 1, 2})[1]] == [""]
    lost = decided(a, node("c", (2, 3)), world_size=4)
    assert reason(lost) == "no node holds what rank 3 captured, and no replica of it is known"

"""Nodes keep parity of each other's shares: any share of a lost node is computed from the others, leaf by leaf."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from lakeckpt.checkpoint.agent.generations import identity_of
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.contents import GenerationDocuments, TensorPlace, TensorTable, contents_from
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import holdings_in, remove_copies
from lakeckpt.checkpoint.arena.layout import ArenaLayout
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.checkpoint.peers import copies
from lakeckpt.checkpoint.peers.copies import CopySender
from lakeckpt.checkpoint.peers.fetch import PeerShare
from lakeckpt.checkpoint.peers.grouping import Copying, Keeping, keeping_of
from lakeckpt.checkpoint.peers.joining import ParityKeeper
from lakeckpt.checkpoint.peers.next_node import NodeNote
from lakeckpt.checkpoint.peers.parity import pieces_for
from lakeckpt.checkpoint.peers.rebuilt import RebuiltShare
from lakeckpt.checkpoint.peers.serve import ShareServer
from lakeckpt.checkpoint.peers.wire import AskShare, PutShare
from lakeckpt.errors import ArenaDamaged, ArenaError
from lakeckpt.recovery.decide import Decision, Source, decide
from lakeckpt.recovery.facts import CutId, NodeFacts
from lakeckpt.recovery.shares import ShareList
from tests.checkpoint.agent.rig import DIGEST
from tests.checkpoint.peers.nodes import KEY
from tests.checkpoint.peers.test_copies import stated
from tests.patience import PATIENCE_S

SIZES = [5 * LEAF_BYTES + 77, 7 * LEAF_BYTES, 100, 2 * LEAF_BYTES + 1]
"""How much each of four ranks captures."""
COPYING = Copying(mode="3+1", every_s=0.0, capture_every=1)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


class Node:
    """A node of one rank, with its memory, its server and the sender of its agent."""

    def __init__(self, folder: Path, rank: int, job: Job, stack: ExitStack) -> None:
        self.folder, self.rank, self.size = ArenaFolder(folder), rank, job.sizes[rank]
        self.identity = identity_of(DIGEST, rank=rank, world_size=len(job.sizes))
        layout = ArenaLayout(
            identity=self.identity, plan=bytes(16), data_bytes=self.size, documents_bytes=8192, generations=6
        )
        self.arena: Arena = self.folder.create(layout)
        self.server = ShareServer(self.folder, "127.0.0.1")
        self.server.admit(KEY, DIGEST)
        self.now, self.logged = 0.0, list[str]()
        keeping = Keeping(
            keepers=(*range(rank + 1, len(job.sizes)), *range(rank)),
            here=(rank,),
            keeps=(),
            every_s=0.0,
            capture_every=1,
            members=tuple(range(len(job.sizes))),
            parity_of=(*range(rank + 1, len(job.sizes)), *range(rank)),
        )
        self.sender = CopySender(
            self.folder,
            self.identity,
            0,
            keeping,
            note=lambda keeper: NodeNote(node="", address=job.nodes[keeper].server.address, key=KEY),
            agree=lambda own: job.stride if own else None,
            now=lambda: self.now,
            log=self.logged.append,
        )
        for one in (self.server, self.sender, self.arena):
            stack.callback(one.close)

    def capture(self, step: int, shares: ShareList | None) -> None:
        filling = self.arena.begin(common=step)
        assert filling is not None
        filling.data[:] = content(step, self.rank, self.size)
        spec = TensorSpec(key="m/w", dtype="uint8", shape=(self.size,))
        table = TensorTable(places={"m/w": TensorPlace(spec=spec, start=0)})
        listed, document = (b"", b"") if shares is None else (shares.digest, shares.document)
        trees = {RANDOM: b"random of rank %d" % self.rank}
        documents = GenerationDocuments(trees=trees, table=table, shares=document)
        cut = CutId(attempt=0, step=step)
        filling.complete(cut, digest=bytes(16), documents=documents.to_bytes(), shares=listed)

    def facts(self, ranks: tuple[int, ...]) -> NodeFacts:
        holdings = holdings_in(self.folder, DIGEST)
        return NodeFacts(node=f"node {self.rank}", ranks=ranks, holdings=holdings, address=self.server.address)


class Job:
    """A group of nodes that train. ``sizes``: how much each rank captures."""

    def __init__(self, folder: Path, stack: ExitStack, sizes: list[int] = SIZES) -> None:
        self.sizes, self.stride = sizes, 1
        self.nodes = [Node(folder / str(rank), rank, self, stack) for rank in range(len(sizes))]
        self.pool = stack.enter_context(ThreadPoolExecutor(len(sizes)))

    def train(self, *steps: int, shares: ShareList | None = None) -> list[int]:
        """Capture these steps, a second each. Return those that are protected on all ranks."""
        found, shares = [], shares or ShareList.of([b"%d" % rank for rank in range(len(self.sizes))])
        for step in steps:
            for one in self.nodes:
                one.capture(step, shares)
            told = list(self.pool.map(lambda one: one.sender.look(), self.nodes))
            found += [step] if all(one is not None and one.step == step for one in told) else []
            for one in self.nodes:
                one.now += 1
        return found

    def decided(self, *lost: int, alone: bool = False) -> Decision:
        """What a restart decides. Fresh nodes come for those that are ``lost``, unless the others go on ``alone``."""
        left = [one for one in self.nodes if one.rank not in lost]
        count = len(left) if alone else len(self.nodes)
        facts = [one.facts((at,) if alone else (one.rank,)) for at, one in enumerate(left)]
        facts += [] if alone else [NodeFacts(node="fresh", ranks=(rank,)) for rank in lost]
        return decide(facts, world_size=count, takes=lambda cut: True)


def content(step: int, rank: int, size: int) -> bytes:
    return np.roll(_random(rank, size), step).tobytes()


@cache
def _random(rank: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, size, np.uint8)


def computed(source: Source, decision: Decision, stack: ExitStack) -> bytes:
    """The data of a share that is computed, each leaf verified."""
    assert source.members and decision.cut is not None
    cut = decision.cut

    def ask(rank: int, address: str, is_parity: bool) -> PeerShare:
        identity = identity_of(DIGEST, rank=rank, world_size=decision.world)
        which = replace(identity, kind="parity" if is_parity else "own")
        return PeerShare(address, KEY, AskShare(identity=which, cut=cut, digest=decision.digest))

    share = RebuiltShare(source, ask)
    stack.callback(share.close)
    contents = contents_from(share, share.documents(), share.checksums(), "parity")
    assert contents.documents.trees[RANDOM] == b"random of rank %d" % source.rank
    found = bytearray(share.data_bytes)
    contents.fill({"m/w": memoryview(found)})
    return bytes(found)


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:2], [*SIZES, 3 * LEAF_BYTES, 1]], ids=len)
def test_the_share_of_any_lost_node_is_computed_from_the_others(
    tmp_path: Path, stack: ExitStack, sizes: list[int]
) -> None:
    job = Job(tmp_path, stack, sizes)
    protected = job.train(*range(1, 6))
    assert protected[-1] == 5
    for lost, size in enumerate(sizes):
        decision = job.decided(lost)
        assert decision.cut == CutId(attempt=0, step=5) and not decision.passed_over
        (source,) = decision.reads(lost, len(sizes), ())[lost]
        assert computed(source, decision, stack) == content(5, lost, size)


def test_the_others_go_on_alone_and_read_the_share_in_parts(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    decision = job.decided(1, alone=True)
    reads = decision.reads(0, 3, (0,))
    assert sorted(reads) == [0, 1, 2, 3] and decision.cut is not None
    assert computed(reads[1][0], decision, stack) == content(5, 1, SIZES[1])


def test_of_two_lost_nodes_no_share_is_computed_and_it_is_said(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    decision = job.decided(1, 3)
    assert decision.cut is None
    assert decision.passed_over[0][1] == "no node holds what ranks 1, 3 captured, and no replica of it is known"


def test_parity_takes_a_third_of_the_largest_share_in_two_slots(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    for one in job.nodes:
        (name,) = [info.name for info in one.folder.found() if info.identity and info.identity.kind == "parity"]
        with one.folder.open(name) as arena:
            assert arena.layout.generations == 2
            largest = max(size for rank, size in enumerate(SIZES) if rank != one.rank)
            assert arena.layout.data_bytes == -(-largest // (3 * LEAF_BYTES)) * LEAF_BYTES
            assert [record.cut.step for record in arena.complete()] == [5, 4]


def test_every_leaf_of_a_share_goes_to_one_other_member() -> None:
    members = [3, 5, 8, 9, 11]
    for giver in members:
        for count in range(12):
            others = [one for one in members if one != giver]
            found = [piece for other in others for piece, _ in pieces_for(members, giver, other, count * LEAF_BYTES)]
            assert sorted(found) == list(range(count))


def test_a_rank_that_captures_nothing_and_a_keeper_without_room(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, stack, [2 * LEAF_BYTES, 0, LEAF_BYTES, 5])
    assert job.train(*range(1, 6))[-1] == 5
    decision = job.decided(0)
    assert computed(decision.reads(0, 4, ())[0][0], decision, stack) == content(5, 0, 2 * LEAF_BYTES)
    begun = ParityKeeper._begun

    def refused(keeper: ParityKeeper, layout: ArenaLayout, put: PutShare) -> object:
        if put.identity.rank == 3:
            raise ArenaError("there is no room")
        return begun(keeper, layout, put)

    monkeypatch.setattr(ParityKeeper, "_begun", refused)
    monkeypatch.setattr("lakeckpt.checkpoint.peers.joining.JOIN_S", 0.3)
    assert job.train(6, 7, 8) == []
    for lost in range(4):
        assert job.decided(lost).cut == CutId(attempt=0, step=5)


def test_a_flipped_byte_of_parity_or_of_another_share_is_noticed(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    decision = job.decided(1)
    (source,) = decision.reads(1, 4, ())[1]
    for name in ("parity", "own"):
        (info,) = [one for one in job.nodes[0].folder.found() if one.identity and one.identity.kind == name]
        with job.nodes[0].folder.open(info.name) as arena, arena.hold(step=5) as held:
            assert held is not None
            at = arena.layout.data_at(held.number)
        with (Path(job.nodes[0].folder.path) / info.name).open("r+b") as file:
            at += LEAF_BYTES if name == "own" else 0  # its first piece is in the stripe that rank 1 keeps
            _flip(file, at)
            with pytest.raises(ArenaDamaged, match=r"leaf \d of what rank 1 captured is not what was written"):
                computed(source, decision, stack)
            _flip(file, at)
    assert computed(source, decision, stack) == content(5, 1, SIZES[1])


def _flip(file: BinaryIO, at: int) -> None:
    (before,) = os.pread(file.fileno(), 1, at)
    os.pwrite(file.fileno(), bytes([before ^ 1]), at)


def test_a_share_that_another_node_captures_too_counts_as_empty(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    shares = ShareList.of([b"a", b"b", b"a", b"d"])
    job.train(*range(1, 6), shares=shares)
    decision = job.decided(1)
    (source,) = decision.reads(1, 4, ())[1]
    assert computed(source, decision, stack) == content(5, 1, SIZES[1])
    with pytest.raises(ArenaDamaged, match="gave nothing"):
        computed(
            replace(source, rank=2, addresses=tuple(job.nodes[at].server.address for at in range(4))), decision, stack
        )


def test_a_member_that_gives_nothing_leaves_the_parity_before(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    monkeypatch.setattr("lakeckpt.checkpoint.peers.joining.JOIN_S", 0.2)
    for one in job.nodes:
        one.capture(6, None)
    told = list(job.pool.map(lambda one: one.sender.look(), job.nodes[:3]))
    assert told == [None] * 3 and "ranks [3] gave nothing of step 6" in job.nodes[0].logged[-1]
    assert job.decided(1).cut == CutId(attempt=0, step=5)
    for one in job.nodes:
        one.now += 5
    assert job.train(7) == [7] and job.decided(1).cut == CutId(attempt=0, step=7)


def test_a_member_that_ends_while_it_gives_leaves_the_parity_before(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    for one in job.nodes:
        one.capture(6, None)
    monkeypatch.setattr("lakeckpt.checkpoint.peers.joining.JOIN_S", 0.5)
    begun, original = threading.Event(), CopySender._offer

    def offer(sender: CopySender, connection: object, *args: object, **options: object) -> None:
        original(sender, connection, *args, **options)  # type: ignore[arg-type]
        if sender is job.nodes[3].sender:
            begun.set()
            raise EOFError("it ends")

    monkeypatch.setattr(CopySender, "_offer", offer)
    told = list(job.pool.map(lambda one: one.sender.look(), job.nodes))
    assert begun.is_set() and told == [None] * 4
    monkeypatch.setattr(CopySender, "_offer", original)
    assert job.decided(1).cut == CutId(attempt=0, step=5)
    for one in job.nodes:
        one.now += 5
    assert job.train(7) == [7]


def test_a_byte_that_flips_on_its_way_to_the_keeper_is_noticed(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    original = copies.send_data

    def send_flipped(connection: Any, held: Any, start: int, count: int) -> None:
        view, other = socket.socketpair()
        with view, other, ThreadPoolExecutor(1) as pool:
            pool.submit(original, other, held, start, count)
            came = view.recv(min(count, held.data_bytes - start), socket.MSG_WAITALL)
            connection.sendall(bytes([came[0] ^ 1]) + came[1:])

    monkeypatch.setattr(copies, "send_data", send_flipped)
    assert job.train(6) == []
    assert "its parity was not made: " in job.nodes[0].logged[-1]
    assert any("is not what rank" in line for one in job.nodes for line in one.logged)
    assert job.decided(1).cut == CutId(attempt=0, step=5)


def test_a_member_that_comes_again_before_its_broken_connection_is_noticed_is_joined_once(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeckpt.checkpoint.peers.copies._MEASURED", 0)
    job, shares, kept = Job(tmp_path, stack), ShareList.of([b"%d" % rank for rank in range(len(SIZES))]), list[Any]()
    original, late = copies.send_data, job.nodes[1]  # of several pieces for a keeper
    for one in job.nodes:
        one.capture(1, shares)

    offered = threading.Event()

    def send_some(*args: Any) -> None:
        original(*args)
        if not kept:
            kept.append(late.sender._connections)
            late.sender._connections = {}
            raise EOFError("its connection breaks")
        offered.set()

    monkeypatch.setattr(copies, "send_data", send_some)
    assert late.sender.look() is None and kept
    late.now += 60
    again = job.pool.submit(late.sender.look)
    assert offered.wait(PATIENCE_S)
    others = [job.pool.submit(one.sender.look) for one in job.nodes if one is not late]
    assert all(one.result() == CutId(attempt=0, step=1) for one in (again, *others))
    for lost, size in enumerate(SIZES):
        decision = job.decided(lost)
        assert computed(decision.reads(lost, 4, ())[lost][0], decision, stack) == content(1, lost, size)
    for connection in kept[0].values():
        connection.close()


def test_parity_grows_if_larger_shares_come_later(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeckpt.checkpoint.peers.copies._MEASURED", 0)
    sizes = [100, 5 * LEAF_BYTES, 3 * LEAF_BYTES, 7]
    job, shares = Job(tmp_path, stack, sizes), ShareList.of([b"a", b"b", b"c", b"d"])
    for one in job.nodes:
        one.capture(1, shares)
    small = [job.pool.submit(job.nodes[rank].sender.look) for rank in (0, 3)]
    time.sleep(0.5)
    large = [job.pool.submit(job.nodes[rank].sender.look) for rank in (1, 2)]
    assert all(one.result() == CutId(attempt=0, step=1) for one in (*small, *large))
    for lost, size in enumerate(sizes):
        decision = job.decided(lost)
        assert computed(decision.reads(lost, 4, ())[lost][0], decision, stack) == content(1, lost, size)


def test_rank_0_measures_alone_and_all_give_the_cuts_of_one_stride(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    job.stride = 4
    assert job.train(*range(1, 18)) == [4, 8, 12, 16]
    assert not any(one.logged for one in job.nodes)


def test_members_that_look_at_moments_of_their_own_make_parity_again_and_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    """A cut each 20 ms, of which every 30th falls due; a member comes late now and then."""
    job, over = Job(tmp_path, stack, [100, 50, 70, 10]), threading.Event()
    job.stride, told = 30, [Counter[int]() for _ in job.nodes]
    shares = ShareList.of([b"a", b"b", b"c", b"d"])

    def look(node: Node) -> None:
        chance = random.Random(node.rank)
        while not over.is_set():
            node.now = time.monotonic()
            if (cut := node.sender.look()) is not None:
                told[node.rank][cut.step] += 1
            time.sleep(0.7 if chance.random() < 0.02 else chance.uniform(0.0, 0.02))

    looking = [job.pool.submit(look, one) for one in job.nodes]
    step, end = 0, time.monotonic() + PATIENCE_S
    while len(set.intersection(*map(set, told))) < 3 and time.monotonic() < end:
        step += 1
        for one in job.nodes:
            one.capture(step, shares)
        time.sleep(0.02)
    over.set()
    for one in looking:
        one.result()
    assert len(set.intersection(*map(set, told))) >= 3
    assert all(step % job.stride == 0 for counts in told for step in counts)


def test_parity_of_a_group_that_is_no_more_is_removed(tmp_path: Path, stack: ExitStack) -> None:
    job = Job(tmp_path, stack)
    job.train(*range(1, 6))
    folder = job.nodes[0].folder
    remove_copies(folder, DIGEST, but={"parity": [0]})
    assert len(folder.found()) == 2
    remove_copies(folder, DIGEST, but={"copy": [0]})
    assert [one.identity.kind for one in folder.found() if one.identity] == ["own"]


# --- who gives to whom


def test_ranks_of_one_place_on_their_nodes_have_parity_together() -> None:
    tally = stated(("a", "left", [0, 1]), ("b", "left", [2, 3]), ("c", "right", [4, 5]), ("d", "right", [6]))
    found, warning = keeping_of(tally, [0, 1], 0, COPYING)
    assert found is not None and "left" in warning
    assert (found.keepers, found.members, found.parity_of) == ((2, 4, 6), (0, 2, 4, 6), (2, 4, 6))
    found, _ = keeping_of(tally, [4, 5], 5, COPYING)
    assert found is not None
    assert (found.keepers, found.members, found.parity_of) == ((0, 2), (1, 3, 5), (1, 3))
    assert keeping_of(stated(("a", "", [0, 1]), ("b", "", [2])), [0, 1], 1, COPYING) == (
        None,
        "rank 1 is unprotected: no other node of its group has 2 ranks",
    )

"""Agents copy what only one node holds to another node, whose slots hold whole copies only."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt.checkpoint.agent.generations import identity_of
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.checksums import checked
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import held_share, holdings_in, remove_copies
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.checkpoint.peers.copies import CopySender
from lakeckpt.checkpoint.peers.grouping import Copying, Keeping, keeping_of, node_facts
from lakeckpt.checkpoint.peers.next_node import NodeNote, agreed_stride, connected_to
from lakeckpt.checkpoint.peers.serve import ShareServer, sizes_of
from lakeckpt.checkpoint.peers.wire import NoShare, PutShare, ShareTaken, receive, send
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.shares import ShareList
from lakeckpt.tracking.tally import Tally
from tests.checkpoint.agent.rig import DIGEST, content, fill, make_arena
from tests.checkpoint.peers.nodes import KEY

KEEPING = Keeping(keepers=(2,), here=(0, 1), keeps=(), every_s=0.0, capture_every=1)
COPYING = Copying(mode="copy", every_s=5.0, capture_every=1)
IDENTITY = identity_of(DIGEST, rank=1, world_size=4)
COPY = replace(IDENTITY, kind="copy")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


class Keeper:
    """A node with its server, to which ``sender`` gives the share of rank 1. ``now`` is the time in seconds."""

    def __init__(self, tmp_path: Path, stack: ExitStack, keeping: Keeping = KEEPING, stride: int = 1) -> None:
        tmp_path.mkdir(exist_ok=True)
        self.folder, self.own = ArenaFolder(tmp_path / "keeper"), tmp_path / "own"
        self.server = self._serving(stack)
        self.arena = make_arena(self.own, 1, 4, generations=6)
        stack.callback(self.arena.close)
        self.now, self.logged = 0.0, list[str]()
        self.stride: int | None = stride
        self.sender = CopySender(
            ArenaFolder(self.own),
            IDENTITY,
            0,
            keeping,
            note=lambda keeper: NodeNote(node="keeper", address=self.server.address, key=KEY),
            agree=lambda own: self.stride,
            now=lambda: self.now,
            log=self.logged.append,
        )
        stack.callback(self.sender.close)

    def _serving(self, stack: ExitStack) -> ShareServer:
        server = ShareServer(self.folder, "127.0.0.1")
        stack.callback(server.close)
        server.admit(KEY, DIGEST)
        return server

    def train(self, *steps: int) -> list[int]:
        """Capture these steps, a second each. Return those that are protected."""
        found = []
        for step in steps:
            fill(self.arena, step, common=step)
            found += [cut.step for cut in [self.sender.look()] if cut is not None]
            self.now += 1
        return found

    def kept(self) -> list[int]:
        return [one.cut.step for one in holdings_in(self.folder, DIGEST) if one.ranks == (1,) and not one.documents]


def test_the_newest_cuts_lie_on_the_keeper_as_they_were_captured(tmp_path: Path, stack: ExitStack) -> None:
    keeper = Keeper(tmp_path, stack)
    assert keeper.train(*range(1, 13)) == [9, 10, 11, 12]
    assert keeper.kept() == [12, 11]
    with held_share(keeper.folder, IDENTITY, CutId(attempt=0, step=12), bytes(16)) as held:
        assert held is not None and held.checksums() is not None
        contents = contents_of(held)
        contents.verify()
        own = bytearray(len(content(12)))
        contents.fill({"m/w": memoryview(own)})
    assert own == content(12)
    assert keeper.folder.found()[0].name.endswith("1-of-4.copy.arena")


def test_ranks_copy_the_cuts_of_the_stride_that_rank_0_has_published(tmp_path: Path, stack: ExitStack) -> None:
    keeper = Keeper(tmp_path, stack)
    keeper.stride = None
    assert keeper.train(*range(1, 14)) == []
    keeper.stride = 4
    assert keeper.train(*range(14, 40)) == [16, 20, 24, 28, 32, 36]


def test_rank_0_publishes_a_stride_that_is_as_long_as_it_is_told_and_as_two_transfers(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert agreed_stride(storage, 3, 1, 99) is None
    assert agreed_stride(storage, 3, 0, 5) == 5
    assert agreed_stride(storage, 3, 1, 99) == 5
    assert agreed_stride(storage, 4, 1, 99) is None


@pytest.mark.parametrize(("every_s", "took_s", "stride"), [(0.0, 0.0, 1), (2.5, 0.0, 3), (2.5, 2.0, 4)])
def test_the_stride_of_rank_0_is_measured_in_its_first_transfers(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, every_s: float, took_s: float, stride: int
) -> None:
    keeper = Keeper(tmp_path, stack, replace(KEEPING, every_s=every_s))
    sender, published = keeper.sender, list[int]()

    def agree(own: int) -> int | None:
        published.extend([own] if own else [])
        return own or None

    monkeypatch.setattr(sender, "_agree", agree)
    monkeypatch.setattr(sender, "_identity", replace(IDENTITY, rank=0))
    keeper.train(*range(1, 10))
    monkeypatch.setattr(sender, "_took_s", took_s)
    monkeypatch.setattr(sender, "_sent", 2)
    found = keeper.train(*range(10, 30))
    assert published == [stride] and all(step % stride == 0 for step in found) and len(found) >= 20 // stride - 1


def test_the_cuts_that_were_copied_stay_in_the_arena_however_many_come_later(tmp_path: Path, stack: ExitStack) -> None:
    keeper = Keeper(tmp_path, stack, stride=8)
    keeper.train(*range(1, 24))
    assert {16, 23, 22} <= {cut.step for cut in keeper.arena.cuts()}
    keeper.train(*range(24, 32))
    assert {16, 24} <= {cut.step for cut in keeper.arena.cuts()}


def test_a_share_that_another_node_captures_too_is_not_copied(tmp_path: Path, stack: ExitStack) -> None:
    keeper = Keeper(tmp_path, stack)
    shares = ShareList.of([b"a", b"b", b"a", b"b"])
    assert _named(keeper, shares) == [1, 2] and keeper.kept() == []
    assert _named(keeper, ShareList.of([b"a", b"b", b"b", b"b"]), 3) == [3, 4] and keeper.kept() == []
    assert _named(keeper, ShareList.of([b"b", b"b", b"a", b"a"]), 5) == [5, 6] and keeper.kept() == [6, 5]


def _named(keeper: Keeper, shares: ShareList, first: int = 1) -> list[int]:
    """Capture two cuts that name the list of shares. Return those that are protected."""
    found = []
    for step in (first, first + 1):
        fill(keeper.arena, step, common=step, shares=shares)
        found += [cut.step for cut in [keeper.sender.look()] if cut is not None]
        keeper.now += 1
    return found


def test_only_the_documents_of_a_share_that_another_node_captures_are_sent_at_each_cut(
    tmp_path: Path, stack: ExitStack
) -> None:
    keeper = Keeper(tmp_path, stack, replace(KEEPING, every_s=100.0))
    _named(keeper, ShareList.of([b"a", b"b", b"a", b"b"]))
    own = CutId(attempt=0, step=2)
    with held_share(keeper.folder, replace(IDENTITY, kind="documents"), own, bytes(16)) as held:
        assert held is not None and contents_of(held).documents.trees[RANDOM] == b"random of rank 1"
        assert held.data_bytes == 0
    with held_share(keeper.folder, IDENTITY, own, bytes(16)) as held:
        assert held is None  # nobody takes it for the share


def test_an_unreachable_keeper_is_tried_again_ever_later(tmp_path: Path, stack: ExitStack) -> None:
    keeper = Keeper(tmp_path, stack)
    keeper.server.close()
    assert keeper.train(*range(1, 13)) == []
    assert len(keeper.logged) == 1 and "is unprotected, as its copy was not taken" in keeper.logged[0]
    keeper.server = keeper._serving(stack)
    assert keeper.train(*range(13, 20))


def put_of(arena: Arena, step: int, stack: ExitStack) -> tuple[PutShare, bytes, bytes, bytes]:
    """What an agent sends of a step: the message, the documents, the checksums, and the data."""
    held = stack.enter_context(arena.hold(step=step))
    assert held is not None
    leaves, documents = checked(contents_of(held)).checksums or b"", held.documents()
    put = PutShare(
        identity=COPY,
        cut=held.record.cut,
        digest=held.record.digest,
        plan=arena.layout.plan,
        sizes=sizes_of(held, documents, leaves),
        shares=b"",
        divided=False,
    )
    return put, documents, leaves, bytes(held.data)


@pytest.fixture
def put(tmp_path: Path, stack: ExitStack) -> tuple[Keeper, Callable[[int], tuple[PutShare, bytes, bytes, bytes]]]:
    keeper = Keeper(tmp_path, stack)
    keeper.train(*range(1, 11))
    return keeper, lambda step: put_of(keeper.arena, step, stack)


def client(keeper: Keeper, stack: ExitStack) -> socket.socket:
    note = NodeNote(node="keeper", address=keeper.server.address, key=KEY)
    return stack.enter_context(connected_to(note, 20.0))


def test_a_copy_that_is_cut_short_is_never_found_and_the_one_before_stays(put: object, stack: ExitStack) -> None:
    keeper, parts = put  # type: ignore[misc]
    fill(keeper.arena, 11, common=11)
    message, documents, leaves, data = parts(11)
    connection = client(keeper, stack)
    send(connection, message)
    assert isinstance(receive(connection), ShareTaken)
    connection.sendall(documents + leaves + data[:-1])
    assert keeper.kept() == [10]  # the slot of step 9 is under way
    connection.close()
    keeper.server.close()  # its thread has ended
    assert keeper.kept() == [10]


@pytest.mark.parametrize("wrong", ["documents", "leaves", "data"])
def test_a_copy_with_one_flipped_byte_is_refused(put: object, stack: ExitStack, wrong: str) -> None:
    keeper, parts = put  # type: ignore[misc]
    fill(keeper.arena, 11, common=11)
    message, *sent = parts(11)
    at = ["documents", "leaves", "data"].index(wrong)
    sent[at] = bytes([sent[at][0] ^ 1]) + sent[at][1:]
    connection = client(keeper, stack)
    send(connection, message)
    assert isinstance(receive(connection), ShareTaken)
    connection.sendall(b"".join(sent))
    answer = receive(connection)
    assert (isinstance(answer, NoShare) and "is not what was captured" in answer.why) or "are not" in answer.why
    assert keeper.kept() == [10]
    fill(keeper.arena, 12, common=12)
    assert keeper.train(13) == [13]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda put: replace(put, identity=replace(put.identity, run=bytes(16))), "another run"),
        (lambda put: replace(put, sizes=replace(put.sizes, documents_bytes=2**40)), "bytes of documents"),
        (lambda put: replace(put, sizes=replace(put.sizes, data_bytes=2**30)), "of checksums"),
        (
            lambda put: replace(put, sizes=replace(put.sizes, data_bytes=2**50, checksums_bytes=16 * 2**30)),
            "GiB are free in",
        ),
    ],
)
def test_a_copy_is_refused_in_words_if_it_makes_no_sense_or_there_is_no_room(
    put: object, stack: ExitStack, change: Callable[[PutShare], PutShare], why: str
) -> None:
    keeper, parts = put  # type: ignore[misc]
    connection = client(keeper, stack)
    send(connection, change(parts(10)[0]))
    answer = receive(connection)
    assert isinstance(answer, NoShare) and why in answer.why


def test_copies_of_a_history_that_no_longer_holds_are_discarded(put: object, stack: ExitStack) -> None:
    keeper, parts = put  # type: ignore[misc]
    message, *sent = parts(10)
    connection = client(keeper, stack)
    for attempt, step in ((1, 7), (1, 8)):
        send(connection, replace(message, cut=CutId(attempt=attempt, step=step)))
        assert isinstance(receive(connection), ShareTaken)
        connection.sendall(b"".join(sent))
        assert isinstance(receive(connection), ShareTaken)
    assert keeper.kept() == [8, 7]


def test_copies_of_ranks_that_another_node_keeps_now_are_removed(put: object) -> None:
    keeper, _ = put  # type: ignore[misc]
    remove_copies(keeper.folder, DIGEST, but={"copy": [1]})
    assert keeper.kept()
    remove_copies(keeper.folder, DIGEST, but={"copy": [0]})
    assert keeper.folder.found() == []


def test_a_copy_is_served_in_the_place_of_the_share_of_a_node_that_is_lost(put: object) -> None:
    keeper, _ = put  # type: ignore[misc]
    (own,) = [one for one in holdings_in(ArenaFolder(keeper.own), DIGEST) if one.cut.step == 10]
    (copy,) = [one for one in holdings_in(keeper.folder, DIGEST) if one.cut.step == 10]
    assert copy == own
    assert [one.kind for one in [keeper.folder.found()[0].identity] if one] == ["copy"]


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_a_node_leaves_a_cut_of_which_all_shares_are_held_whenever_it_comes(
    tmp_path: Path, stack: ExitStack, seed: int
) -> None:
    """Two ranks look at their arenas at moments of their own."""
    chance, stride = random.Random(seed), 8
    pair = [Keeper(tmp_path / name, stack, stride=stride) for name in "ab"]
    for step in range(1, 120):
        for one in pair:
            fill(one.arena, step, common=step - 1)
            one.now += chance.uniform(0.9, 1.1)
        for one in chance.sample(pair, 2):
            if chance.random() < 0.7:
                one.sender.look()
            one_kept, other_kept = (set(each.kept()) for each in pair)
            own, other = ({cut.step for cut in each.arena.cuts()} for each in pair)
            if step > 40:
                assert min(max(own & other_kept), max(other & one_kept)) > step - 3 * stride


# --- who keeps what


def stated(*several: tuple[str, str, list[int]]) -> Tally:
    facts: dict[int, dict[str, str]] = {}
    for address, domain, ranks in several:
        for rank in ranks:
            facts[rank] = {}
        environment = {"LAKECKPT_ADDRESS": address, "LAKECKPT_DOMAIN": domain}
        facts[ranks[0]] = node_facts(ranks, environment)
    return Tally.of([facts[rank] for rank in sorted(facts)])


def test_the_keeper_lies_in_another_domain_and_is_the_same_however_ranks_are_dealt() -> None:
    for ranks in ([[0, 1], [2, 3], [4, 5], [6, 7]], [[4, 5], [6, 7], [0, 1], [2, 3]]):
        a, b, c, d = ranks
        tally = stated(("a", "left", a), ("b", "left", b), ("c", "right", c), ("d", "right", d))
        for own, keeper, keeps in ((a, c, c), (b, d, d), (c, a, a), (d, b, b)):
            found, warning = keeping_of(tally, own, own[1], COPYING)
            assert found is not None and not warning
            assert (found.keepers, list(found.keeps)) == ((keeper[0],), keeps)


def test_a_node_that_is_alone_is_unprotected_and_is_told_so() -> None:
    found, warning = keeping_of(stated(("a", "", [0, 1])), [0, 1], 0, COPYING)
    assert found is None and warning.startswith("unprotected: the node ")
    found, warning = keeping_of(Tally.of([{}, {}]), [0, 1], 0, COPYING)
    assert found is None and warning.startswith("unprotected: ")


def test_nodes_of_one_domain_keep_copies_and_are_told_what_they_do_not_outlive() -> None:
    tally = stated(("a", "left", [0]), ("b", "left", [1]))
    found, warning = keeping_of(tally, [0], 0, COPYING)
    assert found is not None and "are not protected against the loss of all of left" in warning

"""A share is read from another node as it was captured, or not at all: then its next source is read."""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.peers.fetch import PeerShare
from lakeckpt.checkpoint.peers.serve import ShareServer, own_address
from lakeckpt.checkpoint.peers.sources import HeldShare, ShareSource
from lakeckpt.checkpoint.peers.wire import FoundShare, limit_waits, prove, send, verify
from lakeckpt.errors import ArenaDamaged
from tests.checkpoint.peers.nodes import BYTES, CUT, KEY, RUN, asked, captured, read_all, serving, source
from tests.patience import PATIENCE_S


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as every:
        yield every


def share_of(sources: Sequence[ShareSource], stack: ExitStack) -> HeldShare:
    share = HeldShare(sources, nowhere, missing="gone")
    stack.callback(share.close)
    return share


def nowhere(tier: str, size_bytes: int) -> None:
    """Count nothing."""


def test_a_share_is_read_as_it_was_captured(tmp_path: Path, stack: ExitStack) -> None:
    captured(tmp_path, rank=1)
    counted: Counter[str] = Counter()
    share = HeldShare(
        [source(serving(tmp_path, stack).address, rank=1, name="b")],
        lambda tier, size: counted.update({tier: size}),
        missing="gone",
    )
    assert read_all(share) == BYTES and share.is_checked and share.rank == 1
    assert counted == {"b": sum(map(len, BYTES.values()))}
    part = bytearray(1000)
    share.fill_range("m/large", 2**20 - 500, memoryview(part))
    assert part == BYTES["m/large"][2**20 - 500 : 2**20 + 500]
    share.verify()
    assert share.leaves().keys() == BYTES.keys()
    share.close()


def test_one_byte_is_flipped_in_each_of_50_copies_and_the_next_source_is_read(tmp_path: Path, stack: ExitStack) -> None:
    arena = captured(tmp_path / "a")
    captured(tmp_path / "b")
    nodes = {serving(tmp_path / name, stack).address: name for name in ("a", "b")}
    sources = [source(address, name=name) for address, name in nodes.items()]
    (path,) = (tmp_path / "a").glob("*.arena")
    rng, found = random.Random(7), 0
    places = [*_places_of_data(arena, rng, 40), *_places_of_documents(arena, rng, 10)]
    assert len(places) == 50
    for place in places:
        counted: Counter[str] = Counter()
        with flipped(path, place):
            share = HeldShare(sources, lambda tier, size, into=counted: into.update({tier: size}), missing="gone")
            assert read_all(share) == BYTES
            share.close()
        found += counted.keys() == {"b"}
    assert found == 50


def _places_of_data(arena: Arena, rng: random.Random, count: int) -> list[int]:
    with arena.hold(CUT) as held:
        assert held is not None
        return [arena.layout.data_at(held.number) + rng.randrange(held.data_bytes) for _ in range(count)]


def _places_of_documents(arena: Arena, rng: random.Random, count: int) -> list[int]:
    with arena.hold(CUT) as held:
        assert held is not None
        size = held.record.documents_bytes
        return [arena.layout.documents_at(held.number) + rng.randrange(size) for _ in range(count)]


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    flip()
    try:
        yield
    finally:
        flip()


def test_if_no_source_is_left_the_error_says_what_was_wrong_with_each(tmp_path: Path, stack: ExitStack) -> None:
    arena = captured(tmp_path)
    server = serving(tmp_path, stack)
    (path,) = tmp_path.glob("*.arena")
    (place,) = _places_of_data(arena, random.Random(0), 1)
    with flipped(path, place), pytest.raises(ArenaDamaged) as caught:
        read_all(share_of([source(server.address), source("127.0.0.1:1")], stack))
    text = str(caught.value)
    assert "rank 0 captured of step 7 is not what was written" in text and "127.0.0.1:1: " in text
    with pytest.raises(ArenaDamaged, match="gone"):
        share_of([], stack)


def test_a_share_that_nobody_has_hashed_is_hashed_before_it_is_sent(tmp_path: Path, stack: ExitStack) -> None:
    arena = captured(tmp_path, hashed=False)
    share = share_of([source(serving(tmp_path, stack).address)], stack)
    with arena.hold(CUT) as held:
        assert held is not None and held.checksums() is not None
    assert share.is_checked and read_all(share) == BYTES
    share.close()


def test_a_generation_is_locked_while_it_is_read(tmp_path: Path, stack: ExitStack) -> None:
    arena = captured(tmp_path)
    share = PeerShare(serving(tmp_path, stack).address, KEY, asked())
    arena.empty()
    assert list(arena.cuts()) == [CUT]
    share.close()


@pytest.mark.parametrize(
    ("which", "why"),
    [(asked(1), "not in the memory of this node any more"), (asked(run=bytes(16)), "this node serves another run")],
)
def test_what_a_node_does_not_have_is_refused(tmp_path: Path, stack: ExitStack, which: object, why: str) -> None:
    captured(tmp_path)
    with pytest.raises(ArenaDamaged, match=why):
        PeerShare(serving(tmp_path, stack).address, KEY, which)  # type: ignore[arg-type]


def test_arenas_that_others_could_read_are_not_served(tmp_path: Path, stack: ExitStack) -> None:
    captured(tmp_path)
    tmp_path.chmod(0o755)
    with pytest.raises(ArenaDamaged, match="must be this user's alone"):
        PeerShare(serving(tmp_path, stack).address, KEY, asked())


def test_a_client_with_another_key_gets_nothing(tmp_path: Path, stack: ExitStack) -> None:
    captured(tmp_path)
    server = serving(tmp_path, stack)
    with pytest.raises(ArenaDamaged, match="it does not take the key of this job"):
        PeerShare(server.address, b"x" * 32, asked())
    assert read_all(share_of([source(server.address)], stack)) == BYTES


def test_a_server_without_a_key_answers_nobody(tmp_path: Path) -> None:
    captured(tmp_path)
    server = ShareServer(ArenaFolder(tmp_path), "127.0.0.1")
    with pytest.raises(AssertionError):
        server.admit(b"", RUN)
    assert server._thread is None
    server.close()


def fake(answers: Callable[[socket.socket], object], stack: ExitStack) -> str:
    """Return the address of a server that does as ``answers`` says with its first connection, and hangs up."""
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            limit_waits(connection, PATIENCE_S)
            answers(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    stack.callback(thread.join)
    return f"127.0.0.1:{listening.getsockname()[1]}"


def _cut_short(connection: socket.socket) -> None:
    assert verify(connection, KEY)
    connection.recv(2**16)
    connection.sendall(struct.pack(">I", 500) + b"x" * 100)


def _too_long(connection: socket.socket) -> None:
    assert verify(connection, KEY)
    connection.recv(2**16)
    connection.sendall(struct.pack(">I", 2**31))


def _garbage(connection: socket.socket) -> None:
    assert verify(connection, KEY)
    connection.recv(2**16)
    connection.sendall(struct.pack(">I", 50) + b"x" * 50)


def _huge(connection: socket.socket) -> None:
    assert verify(connection, KEY)
    connection.recv(2**16)
    sizes = {"data_bytes": 1, "documents_bytes": 2**40, "checksums_bytes": 16}
    send(connection, FoundShare(**sizes, documents_checksum=bytes(16), checksums_checksum=bytes(16)))


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (lambda one: one.close(), "closed after 0 of 32 bytes|reset"),
        (lambda one: verify(one, b"other" * 7), "it does not take the key"),
        (lambda one: one.sendall(bytes(64)), "it does not have the key"),
        (_cut_short, "closed after 100 of 500 bytes"),
        (_too_long, "at most 4096 bytes, and 2147483648 are announced"),
        (_garbage, "127.0.0.1"),
        (_huge, "the size of the documents, 1099511627776 bytes, .* is not what was written"),
    ],
)
def test_a_server_that_is_none_is_passed_over(
    tmp_path: Path, stack: ExitStack, answers: Callable[[socket.socket], object], why: str
) -> None:
    captured(tmp_path)
    bad, good = fake(answers, stack), serving(tmp_path, stack).address
    share = share_of([source(bad), source(good)], stack)
    assert read_all(share) == BYTES
    (wrong,) = share._wrong
    assert bad in wrong and re.search(why, wrong), wrong
    share.close()


@pytest.mark.parametrize(
    "says", [b"", b"x" * 10, b"x" * 64, struct.pack(">I", 2**31)], ids=["nothing", "little", "no proof", "a length"]
)
def test_a_client_that_is_none_is_hung_up_and_others_are_served(tmp_path: Path, stack: ExitStack, says: bytes) -> None:
    captured(tmp_path)
    server = serving(tmp_path, stack)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
        stranger.sendall(says)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(2**16):
            pass
    with socket.create_connection((host, int(port)), PATIENCE_S) as member:
        prove(member, KEY)
        member.sendall(struct.pack(">I", 2**31))
        assert member.recv(1) == b""
    assert read_all(share_of([source(server.address)], stack)) == BYTES


def test_a_server_that_closes_leaves_no_thread_and_its_readers_take_the_next_source(
    tmp_path: Path, stack: ExitStack
) -> None:
    captured(tmp_path / "a")
    captured(tmp_path / "b")
    first, second = serving(tmp_path / "a", stack), serving(tmp_path / "b", stack)
    share = share_of([source(first.address), source(second.address, name="b")], stack)
    served = list(first._connections.values())
    first.close()
    assert served and not any(one.is_alive() for one in served)
    assert read_all(share) == BYTES and share._source.tier == "b"
    share.close()


def test_the_address_of_a_node_is_the_one_that_reaches_the_store() -> None:
    assert own_address({"LAKECKPT_ADDRESS": "10.1.2.3", "MASTER_ADDR": "127.0.0.1"}) == "10.1.2.3"
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"MASTER_ADDR": "localhost"}) in ("127.0.0.1", "::1")
    assert own_address({})

"""A trainer is killed if the next node is gone and it stands still: one of these alone kills nobody."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.agent import lost_nodes
from lakeckpt.checkpoint.agent.lost_nodes import Ring, watch_next_node
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.mates import Seen
from lakeckpt.checkpoint.faults.notes import note_at
from lakeckpt.checkpoint.opening import _next_node
from lakeckpt.checkpoint.peers import next_node
from lakeckpt.checkpoint.peers.next_node import Contact, NextNode, NodeNote, node_note, put_node_note, why_gone
from lakeckpt.checkpoint.peers.serve import ShareServer
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.faults import first_cause
from tests.checkpoint.peers.nodes import KEY, RUN
from tests.checkpoint.test_stuck_ranks import Rank
from tests.patience import PATIENCE_S


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShareServer]:
    found = ShareServer(ArenaFolder(tmp_path / "theirs"), "127.0.0.1")
    found.admit(KEY, RUN)
    yield found
    found.close()


def note_of(address: str) -> NodeNote:
    return NodeNote(node="next", address=address, key=KEY)


def test_a_node_is_gone_if_its_machine_cannot_be_reached_or_its_agent_is_silent() -> None:
    for lost_s, silent_s, ended in product((0.0, 4.9, 5.1), (0.0, 29.0, 31.0), (False, True)):
        contact = Contact(lost_s=lost_s, silent_s=silent_s, ended=ended)
        assert bool(why_gone(contact)) == (not ended and (lost_s > 5 or silent_s > 30)), contact


def test_a_machine_that_refuses_is_there_and_only_its_agent_has_ended(server: ShareServer) -> None:
    node = NextNode(note_of(server.address))
    assert node.look().silent_s < 30 and not node.look().ended
    server.close()
    while not (contact := node.look()).ended:
        assert contact.lost_s == 0
    assert why_gone(contact) == ""


def test_an_agent_with_another_key_is_not_the_agent_of_the_note(server: ShareServer) -> None:
    node = NextNode(NodeNote(node="next", address=server.address, key=bytes(31) + b"x"))
    assert node.look().ended


def test_a_machine_that_does_not_answer_is_lost_until_it_is_reached_again(
    server: ShareServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NextNode(note_of(server.address))
    assert node.look().lost_s == 0
    node.close()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", _times_out)
        assert 0 <= node.look().lost_s < node.look().lost_s
    assert node.look().lost_s == 0
    node.close()


def test_an_agent_that_says_nothing_is_silent_and_its_machine_is_there(
    server: ShareServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_node, "_ANSWER_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, and nobody answers
        node = NextNode(note_of(server.address))
        assert node.look().lost_s == 0
        node.close()
        node.note = note_of(f"127.0.0.1:{silent.getsockname()[1]}")
        first, second = node.look(), node.look()
        assert first.silent_s < second.silent_s and first.lost_s == second.lost_s == 0


def _times_out(*_: object, **__: object) -> Any:
    raise TimeoutError("timed out")


class Watched:
    """A trainer of a job of two nodes, whose agent watches the next node; what it sees can be set."""

    def __init__(self, folder: Path, server: ShareServer, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "arenas").mkdir(mode=0o700)
        self.storage, self.logged, self.looks = LocalStorage(folder / "run"), list[str](), 0
        self.gone, self.stuck = "", ""
        self.looked = threading.Condition()
        self.rank = Rank(folder / "arenas", 0)
        monkeypatch.setattr(lost_nodes, "_LOOK_S", 0.01)
        monkeypatch.setattr(lost_nodes, "_RETRY_S", 0.01)
        monkeypatch.setattr(lost_nodes, "why_gone", self._why_gone)
        monkeypatch.setattr(lost_nodes, "why_stuck", self._why_stuck)
        monkeypatch.setenv("LAKECKPT_ADDRESS", "127.0.0.1")
        put_node_note(self.storage, 3, 1, note_of(server.address))
        self._pidfd = os.pidfd_open(self.rank.process.pid)
        ring = Ring(storage=self.storage, attempt=3, rank=0, next_rank=1, run=RUN, arenas=str(folder / "arenas"))
        before = set(threading.enumerate())
        watch_next_node(ring, self.rank.page, self._pidfd, log=self.logged.append)
        (self.thread,) = {one for one in set(threading.enumerate()) - before if one.name == "lakeckpt-next-node"}

    def _why_gone(self, contact: Contact) -> str:
        assert why_gone(contact) == ""
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
        return self.gone

    def _why_stuck(self, seen: Seen) -> str:
        return self.stuck

    def look(self, times: int = 5) -> None:
        """Wait until the agent has looked so many times more."""
        with self.looked:
            until = self.looks + times
            while self.looks < until:
                assert self.thread.is_alive(), self.logged
                self.looked.wait(0.1)

    def end(self) -> str:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return " ".join(self.logged)

    def close(self) -> None:
        self.rank.process.kill()
        self.rank.process.wait(PATIENCE_S)
        self.end()
        os.close(self._pidfd)
        for pipe in (self.rank.process.stdin, self.rank.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def watched(tmp_path: Path, server: ShareServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Watched]]:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with ExitStack() as stack:

        def begun() -> Watched:
            found = Watched(tmp_path, server, monkeypatch)
            stack.callback(found.close)
            return found

        yield begun


def test_only_a_trainer_that_stands_still_after_the_loss_of_a_node_is_killed(
    watched: Callable[[], Watched],
) -> None:
    one = watched()
    one.look()
    one.stuck = "it had stood still"  # an evaluation, say
    one.look()
    one.gone, one.stuck = "it could not be reached", ""  # a link that is broken, and a job that trains
    one.look()
    assert one.rank.process.poll() is None
    one.stuck = "it had stood still"
    assert one.rank.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert "the node next at 127.0.0.1" in one.end()
    note = note_at(one.rank.page)
    assert note is not None and (note.cause, note.what, note.is_own) == ("lost node", "next", False)
    assert first_cause([note], missing=[1]).rank == 1


def test_where_nobody_starts_the_job_again_the_loss_of_a_node_is_only_logged(
    watched: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    one = watched()
    one.gone = one.stuck = "so it is"
    assert "Nobody starts the job again" in one.end()
    assert one.rank.process.poll() is None and note_at(one.rank.page) is None


def test_an_agent_that_was_itself_stopped_begins_to_count_anew(
    watched: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_nodes, "_LATE_S", -1.0)  # each look comes too late
    seen: list[float] = []
    monkeypatch.setattr(NextNode, "begin_anew", lambda self: seen.append(self.look().lost_s))
    monkeypatch.setattr(NextNode, "look", lambda self: Contact(lost_s=99.0))
    one = watched()
    one.look()
    assert len(seen) >= 5 and one.rank.process.poll() is None


def test_another_agent_of_the_next_node_is_asked_when_the_first_one_has_ended(
    watched: Callable[[], Watched], server: ShareServer, tmp_path: Path
) -> None:
    one = watched()
    one.look()
    server.close()
    other = ShareServer(ArenaFolder(tmp_path / "theirs"), "127.0.0.1")
    try:
        other.admit(KEY, RUN)
        put_node_note(one.storage, 3, 1, note_of(other.address))
        one.look()
        assert other.address in " ".join(one.logged) and one.rank.process.poll() is None
    finally:
        other.close()


def test_notes_of_earlier_attempts_are_removed_and_a_note_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for attempt, rank in ((2, 0), (2, 4), (3, 4), (3, 0)):
        put_node_note(storage, attempt, rank, note_of(f"a:{attempt}"))
    assert [node_note(storage, *place) for place in ((2, 0), (2, 4))] == [None, None]
    assert node_note(storage, 3, 4) == node_note(storage, 3, 0) == note_of("a:3")
    storage.put("nodes/0000000003.00004", [b"damaged"])
    assert node_note(storage, 3, 4) is None


@pytest.mark.parametrize(
    ("rank", "here", "following"),
    [
        (0, [0, 1], 2),
        (1, [0, 1], -1),
        (2, [2, 3], 4),
        (4, [4, 5], 0),
        (0, [0, 1, 2, 3, 4, 5], -1),
        (0, [0, 3], -1),
    ],
)
def test_the_first_rank_of_each_node_watches_the_node_that_follows(rank: int, here: list[int], following: int) -> None:
    class Talk:
        neighbours, world_size = here, 6

    talk: Any = Talk()
    talk.rank = rank
    assert _next_node(talk) == following

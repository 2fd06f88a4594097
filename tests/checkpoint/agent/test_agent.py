"""The agent as a process of its own: it outlives trainers, does their last will, and never stays when all is done."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.agent.environment import take_over, told
from lakeckpt.checkpoint.agent.link import AgentLink
from lakeckpt.checkpoint.agent.orders import Hello, Order, Outcome
from lakeckpt.checkpoint.agent.place import AgentPlace
from lakeckpt.checkpoint.agent.server import STILL_ENDS, Agent
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.keep import Keep
from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.checkpoint.verify import verify
from lakeckpt.checkpoint.waiting import SystemWaiter, poll
from lakeckpt.errors import AgentError, ConfigError
from lakeckpt.lake.local import LocalStorage
from lakeckpt.lake.storage import Storage, open_storage
from tests.checkpoint.agent.rig import DIGEST, RUN, begin, fill, make_arena
from tests.patience import PATIENCE_S


class Node:
    """A node of a run: the folder of its arenas, and the agent that serves it."""

    def __init__(self, root: str | Path) -> None:
        self.arenas, self.storage = Path(root) / "arenas", LocalStorage(Path(root) / "run")
        self.arenas.mkdir(mode=0o700, exist_ok=True)

    def hello(self, rank: int = 0, world_size: int = 1, *, attempt: int = 0) -> Hello:
        return Hello(
            uri=self.storage.name,
            storage_options={},
            environment=told(),
            run=RUN,
            digest=DIGEST,
            attempt=attempt,
            last=attempt,
            parent=None,
            recorded=0,
            seed=1,
            rank=rank,
            world_size=world_size,
            arenas=str(self.arenas),
            keep=Keep(last=3),
            verify="sizes",
            timeout_s=PATIENCE_S,
        )

    def link(self, rank: int = 0, world_size: int = 1, *, linger_s: float = 0.0) -> AgentLink:
        return AgentLink(self.hello(rank, world_size), linger_s=linger_s)

    @property
    def place(self) -> AgentPlace:
        return AgentPlace(str(self.arenas), DIGEST.hex())

    @property
    def pid(self) -> int:
        """The agent's process."""
        return int(Path(self.place.lock).read_text())

    @property
    def log(self) -> str:
        return Path(self.place.log).read_text()

    def committed(self) -> list[int]:
        """The steps of the history; all of it is whole."""
        assert verify(self.storage).every_damage == ()
        return [one.step for one in read_history(self.storage).chain]


def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], PATIENCE_S)[0])
    finally:
        os.close(watched)


def turned_away(node: Node) -> bool:
    """Whether nobody can connect to the agent any more: it was told to end."""
    connection = node.place.connected()
    if connection is not None:
        connection.close()
    return connection is None


def answer(link: AgentLink) -> Outcome:
    """What came of the next order."""
    while not (found := link.outcomes()):
        assert link.wait(PATIENCE_S), "the agent says nothing"
    (outcome,) = found
    return outcome


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    with contextlib.suppress(FileNotFoundError, ValueError):
        if b"checkpoint.agent" in Path(f"/proc/{made.pid}/cmdline").read_bytes():
            os.kill(made.pid, signal.SIGKILL)


def test_it_commits_what_is_ordered_and_ends_with_its_trainer_leaving_nothing(node: Node) -> None:
    begin(node.storage)
    arena = make_arena(node.arenas)
    fill(arena, 3)
    link = node.link()
    link.order(Order(step=3, number=0, documents={"index/a.lkc": b"an index"}))
    found = answer(link)
    assert (found.step, found.slot, found.kind) == (3, 1, "")
    pid = node.pid
    arena.close()
    link.close(well=True)
    assert ended(pid) and node.committed() == [3]
    assert node.storage.read("index/a.lkc") == b"an index"
    assert ArenaFolder(node.arenas).found() == [] and not os.path.exists(node.place.socket)


def test_what_was_ordered_is_persisted_though_the_trainer_has_said_goodbye(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        link.order(Order(step=3, number=0))
        pid = node.pid
        link.close(well=True)
        assert ended(pid) and node.committed() == [3]


def test_two_ranks_on_a_node_have_one_agent(node: Node) -> None:
    begin(node.storage, world_size=2)
    arenas = [make_arena(node.arenas, rank, 2) for rank in range(2)]
    links = [node.link(rank, 2) for rank in range(2)]
    pid = node.pid
    for arena, link in zip(arenas, links, strict=True):
        fill(arena, 8)
        link.order(Order(step=8, number=0))
    assert [answer(link).slot for link in links] == [1, 1] and node.pid == pid
    for link in links:
        link.close(well=True)
    assert ended(pid) and node.committed() == [8]


TRAINER = """
    import os, signal, sys
    from lakeckpt.checkpoint.agent.orders import Order
    from tests.checkpoint.agent.rig import fill, make_arena
    from tests.checkpoint.agent.test_agent import Node, answer
    rank, world_size, newest = map(int, sys.argv[2:])
    node = Node(sys.argv[1])
    arena = make_arena(node.arenas, rank, world_size)
    link = node.link(rank, world_size)
    fill(arena, 1)
    link.order(Order(step=1, number=0))
    assert answer(link).slot == 1
    for step in range(2, newest + 1):
        fill(arena, step, common=step - 1)
    arena.begin(common=newest)  # a capture is under way
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_trainers_that_are_killed_lose_nothing_that_was_captured_on_all_ranks(node: Node, tmp_path: Path) -> None:
    begin(node.storage, world_size=2)
    keeper = node.link(0, 2)  # the agent's process, whose number is wanted
    pid = node.pid
    script = textwrap.dedent(TRAINER)
    command = [sys.executable, "-c", script, str(tmp_path)]
    trainers = [
        subprocess.Popen([*command, str(rank), "2", str(newest)], stderr=subprocess.PIPE)
        for rank, newest in ((0, 6), (1, 5))
    ]
    for trainer in trainers:
        _, said = trainer.communicate(timeout=PATIENCE_S)
        assert trainer.returncode == -signal.SIGKILL, said
    keeper.close(well=True)
    assert ended(pid), node.log
    assert node.committed() == [1, 5]


def test_an_agent_that_is_killed_is_replaced_and_its_order_done_by_the_next(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        link.order(Order(step=3, number=0))
        assert answer(link).slot == 1
        first = node.pid
        os.kill(first, signal.SIGSTOP)  # it takes an order, and comes no further
        fill(arena, 4)
        link.order(Order(step=4, number=1))
        os.kill(first, signal.SIGKILL)
        assert ended(first)
        found = answer(link)
        assert (found.step, found.number, found.slot, found.kind) == (4, 1, 2, "") and node.pid != first
        second = node.pid
        link.close(well=True)
        assert ended(second) and node.committed() == [3, 4]


def test_a_trainer_that_comes_back_finds_the_agent_that_waits_for_it(node: Node) -> None:
    begin(node.storage)
    arena = make_arena(node.arenas)
    fill(arena, 3)
    link = node.link(linger_s=PATIENCE_S)
    pid = node.pid
    link.close(well=False)
    arena.close()
    again = node.link(linger_s=PATIENCE_S)
    assert node.pid == pid
    again.close(well=True)
    assert ended(pid)


def test_sigterm_ends_it_when_what_was_ordered_is_persisted(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        link.order(Order(step=3, number=0))
        assert answer(link).slot == 1
        pid = node.pid
        fill(arena, 4)
        link.order(Order(step=4, number=1))
        os.kill(pid, signal.SIGTERM)
        assert ended(pid) and set(node.committed()) <= {3, 4}
        link.close(well=True)


def test_where_an_agent_died_and_none_can_be_started_saves_fail_and_training_goes_on(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        os.kill(node.pid, signal.SIGKILL)
        assert ended(node.pid)
        link._python = "/nowhere/python"
        link.order(Order(step=3, number=0))
        (found,) = link.outcomes()
        assert (found.step, found.kind) == (3, "save_failed") and "cannot be started" in found.text
        link._python = sys.executable
        link.order(Order(step=3, number=1))
        assert answer(link).slot == 1
        assert "step 3: committed in slot 1" in node.log
        pid = node.pid
        link.close(well=True)
        assert ended(pid)


def test_an_agent_that_takes_no_messages_does_not_hold_training_up(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link, index = node.link(), os.urandom(2**23)
        os.kill(node.pid, signal.SIGSTOP)
        link.order(Order(step=3, number=0, documents={"index/a.lkc": index}))  # more than a socket holds
        assert link.outcomes() == []
        os.kill(node.pid, signal.SIGCONT)
        assert answer(link).slot == 1 and node.storage.read("index/a.lkc") == index
        pid = node.pid
        link.close(well=True)
        assert ended(pid) and node.committed() == [3]


def test_a_trainer_that_had_a_thousand_files_open_hears_of_its_saves(node: Node) -> None:
    begin(node.storage)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with make_arena(node.arenas) as arena, contextlib.ExitStack() as many:
        fill(arena, 3)
        while many.enter_context(open(os.devnull, "rb")).fileno() < 1024:
            pass
        link = node.link()
        many.close()
        link.order(Order(step=3, number=0))
        assert answer(link).slot == 1
        pid = node.pid
        link.close(well=True)
        assert ended(pid) and node.committed() == [3]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_where_the_folder_was_removed_the_next_agent_makes_it_and_the_last_one_leaves_it_alone(node: Node) -> None:
    begin(node.storage)
    first, agent = node.link(), node.pid
    shutil.rmtree(node.arenas)
    link = node.link()
    another = node.pid
    assert another != agent
    first.close(well=True)
    assert ended(agent)
    with node.place.connected() or pytest.fail("the socket was that of the other one"):
        pass
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link.order(Order(step=3, number=0))
        assert answer(link).slot == 1
    link.close(well=True)
    assert ended(another) and node.committed() == [3]


def test_an_agent_whose_log_takes_no_more_persists_all_the_same(node: Node) -> None:
    """As where memory is full, in which arenas and logs lie."""
    begin(node.storage)
    command = [sys.executable, "-m", "lakeckpt.checkpoint.agent", str(node.arenas), DIGEST.hex(), "0"]
    with open("/dev/full", "wb") as full:
        subprocess.run(command, stderr=full, check=True, timeout=PATIENCE_S, start_new_session=True)
    link, pid = node.link(), node.pid
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link.order(Order(step=3, number=0))
        assert answer(link).slot == 1
    link.close(well=True)
    assert ended(pid) and node.committed() == [3]
    assert not os.path.exists(node.place.log), "another agent took its place"


def test_an_agent_that_has_nowhere_to_be_is_told_as_that(node: Node) -> None:
    shutil.rmtree(node.arenas)
    node.arenas.write_text("no folder")
    with pytest.raises(AgentError, match=r"an agent cannot be started, as its log cannot be written: .*arenas"):
        node.link()
    node.arenas.unlink()


def test_what_is_to_be_kept_is_kept_by_the_agent_that_takes_the_place_of_another(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        link = node.link()
        link.keep({"index/a.lkc": b"an index"})
        fill(arena, 3)
        first = node.pid
        os.kill(first, signal.SIGKILL)
        assert ended(first)
        assert link.outcomes() == []
        second = node.pid
        assert second != first
    link.close(well=False)  # it dies, and has ordered nothing
    assert ended(second) and node.committed() == [3] and node.storage.read("index/a.lkc") == b"an index"


def test_a_job_that_is_started_while_the_last_agent_ends_waits_for_its_end(node: Node) -> None:
    begin(node.storage)
    first = node.link(linger_s=PATIENCE_S)
    agent = node.pid
    first.order(Order(step=0, number=0))
    assert answer(first).kind, "it is served, and has captured nothing"
    os.kill(agent, signal.SIGTERM)
    assert poll(lambda: True if turned_away(node) else None, waiter=SystemWaiter(), timeout_s=PATIENCE_S)
    came: list[AgentLink] = []
    coming = threading.Thread(target=lambda: came.append(node.link(linger_s=0.0)))
    coming.start()
    coming.join(1.0)
    assert coming.is_alive(), "the one before serves its trainer"
    first.close(well=True)
    coming.join(PATIENCE_S)
    assert came and ended(agent)
    another = node.pid
    came[0].close(well=True)
    assert another != agent and ended(another)


def test_an_agent_that_does_not_end_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = node.place.take()
    assert lock is not None
    os.write(lock, b"4711")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **_: (_ for _ in ()).throw(subprocess.CalledProcessError(STILL_ENDS, command)),
    )
    with pytest.raises(AgentError, match="the agent before, which was told to end, still works: process 4711"):
        node.link()
    os.close(lock)


def test_what_a_later_attempt_has_captured_is_not_removed_by_the_agent_of_an_earlier_one(node: Node) -> None:
    begin(node.storage)
    within = Within(node, linger_s=0.0)
    arena = make_arena(node.arenas)
    link = node.link()
    fill(arena, 1, attempt=3)
    link.close(well=True)
    arena.close()
    within.end()
    assert [info.steps for info in ArenaFolder(node.arenas).found()] == [(1,)], within.said


ELSEWHERE = """
    import os, sys
    from tests.checkpoint.agent.test_agent import Node
    node = Node(sys.argv[1])
    os.chdir("/")
    node.link().close(well=True)
"""


def test_it_is_started_wherever_the_trainer_has_gone_and_whatever_its_path_says(node: Node, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [sys.executable, "-c", textwrap.dedent(ELSEWHERE), str(tmp_path)]
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=PATIENCE_S)
    assert ended(node.pid)


def test_it_is_started_where_the_folder_that_the_trainer_was_in_is_gone(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as an interactive Python has it
    begin(node.storage)
    link = node.link()
    pid = node.pid
    link.close(well=True)
    assert ended(pid)


def test_it_loads_no_torch() -> None:
    modules = "lakeckpt.checkpoint.agent.server, lakeckpt.checkpoint.agent.link"
    script = f"import sys; sys.modules['torch'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


def test_memory_that_an_earlier_attempt_left_stays_where_the_next_one_dies_before_it_captures(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        for step in range(1, 5):
            fill(arena, step, common=step - 1)
    begin(node.storage, slot=1)
    link = AgentLink(node.hello(attempt=1), linger_s=0.2)
    agent = node.pid
    link.close(well=False)
    assert ended(agent) and [info.steps for info in ArenaFolder(node.arenas).found()]


@pytest.mark.parametrize("says_bye", [True, False])
def test_what_was_captured_when_the_agent_has_to_end_is_in_storage_or_stays_in_memory(
    node: Node, says_bye: bool
) -> None:
    begin(node.storage)
    arena = make_arena(node.arenas)
    fill(arena, 1)
    link = node.link()
    link.order(Order(step=1, number=0))
    assert answer(link).slot == 1
    agent = node.pid
    fill(arena, 2)
    fill(arena, 3)
    os.kill(agent, signal.SIGTERM)
    link.order(Order(step=3, number=1))
    arena.close()
    link.close(well=says_bye)
    assert ended(agent)
    in_memory = [max(info.steps) for info in ArenaFolder(node.arenas).found()]
    assert node.committed() == [1, 3] or (node.committed() == [1] and in_memory == [3])


@pytest.mark.parametrize("says_bye", [True, False])
def test_a_job_that_is_told_to_end_with_its_agent_loses_nothing(node: Node, *, says_bye: bool) -> None:
    """Slurm and systemd signal all processes of a job: its trainers save once more, or just die."""
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 1)
        link = node.link(linger_s=PATIENCE_S)
        agent = node.pid
        link.order(Order(step=1, number=0))
        assert answer(link).slot == 1, "it is served"
        os.kill(agent, signal.SIGTERM)
        assert poll(lambda: True if turned_away(node) else None, waiter=SystemWaiter(), timeout_s=PATIENCE_S)
        fill(arena, 2)
        if says_bye:
            link.order(Order(step=2, number=1))
            assert answer(link).slot == 2
    link.close(well=says_bye)
    assert ended(agent) and node.committed() == [1, 2] and ArenaFolder(node.arenas).found() == []


class Within:
    """An agent in a thread of the test."""

    def __init__(self, node: Node, **options: Any) -> None:
        lock = node.place.take()
        assert lock is not None
        self.lock, self.said = lock, list[str]()
        self.agent = Agent(node.place.listener(), log=self.said.append, **options)
        self.thread = threading.Thread(target=self.agent.serve, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), self.said
        os.close(self.lock)


def test_an_agent_that_was_told_to_end_does_not_wait_for_ever_for_a_trainer_that_lives_on(node: Node) -> None:
    begin(node.storage)
    within = Within(node, grace_s=0.5, linger_s=PATIENCE_S)
    with make_arena(node.arenas) as arena:
        fill(arena, 1)
        link = node.link()
        link.order(Order(step=1, number=0))
        assert answer(link).slot == 1
        within.agent.drain()
        within.end()
    link.close(well=False)
    assert node.committed() == [1]


def test_an_agent_opens_storage_in_the_environment_of_the_trainer_that_came_last(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is started again has new credentials; the agent that waits for it had those of the last one."""
    begin(node.storage)
    monkeypatch.setenv("LAKECKPT_TOKEN", "old")
    monkeypatch.setenv("LAKECKPT_PROXY", "gone by now")
    found: list[tuple[str | None, str | None]] = []

    def opened(hello: Hello) -> Storage:
        found.append((os.environ.get("LAKECKPT_TOKEN"), os.environ.get("LAKECKPT_PROXY")))
        return open_storage(hello.uri)

    within = Within(node, open_place=opened, linger_s=0.2)
    others = dict(os.environb)
    del others[b"LAKECKPT_PROXY"]
    others[b"LAKECKPT_TOKEN"] = b"new=\xff"
    new = b"\0".join(b"%s=%s" % one for one in others.items())
    for one in (node.hello(), replace(node.hello(), environment=new)):
        link = AgentLink(one, linger_s=0.2)
        link.order(Order(step=0, number=0))
        answer(link)
        link.close(well=False)
    within.end()
    assert found == [("old", "gone by now"), ("new=\udcff", None)] and dict(os.environb) == others
    take_over(told())
    assert dict(os.environb) == others


def test_a_variable_that_cannot_be_set_keeps_no_other_one_from_being_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKECKPT_TOKEN", "old")
    before = told()
    assert take_over(before + b"\0=odd\0LAKECKPT_TOKEN=new") == [""]
    assert os.environ["LAKECKPT_TOKEN"] == "new"
    take_over(before)


def test_an_agent_that_cannot_open_the_place_says_why_when_it_begins_and_fails_saves_later(node: Node) -> None:
    begin(node.storage)
    broken = threading.Event()

    def opened(hello: Hello) -> Storage:
        if broken.is_set():
            raise ConfigError("no such store")
        return open_storage(hello.uri)

    within = Within(node, open_place=opened, linger_s=PATIENCE_S)
    with make_arena(node.arenas) as arena:
        fill(arena, 1)
        link = node.link()
        link.order(Order(step=1, number=0))
        assert answer(link).slot == 1
        broken.set()
        link._hang_up()
        link.order(Order(step=2, number=1))  # it connects anew
        found = answer(link)
        assert (found.step, found.kind) == (2, "save_failed") and "no such store" in found.text
        another = node.link()
        with pytest.raises(AgentError, match="cannot work for this trainer: no such store"):
            answer(another)
        broken.clear()
        link.close(well=True)
        another.close(well=False)
    within.agent.drain()
    within.end()


def test_a_save_that_fails_before_the_first_step_is_told_as_one(node: Node) -> None:
    begin(node.storage)
    link = node.link()
    link.order(Order(step=0, number=0))  # nobody captured it
    found = answer(link)
    assert (found.step, found.number, found.slot) == (0, 0, None) and found.kind
    link.close(well=True)


def test_a_fork_does_not_hide_from_the_agent_that_the_trainer_is_gone(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 1)
    link = AgentLink(node.hello(), linger_s=0.2)
    agent = node.pid
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the test is over
        os._exit(0)
    try:
        link.close(well=False)
        assert ended(agent) and node.committed() == [1]
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_an_agent_that_is_told_to_end_while_a_trainer_comes_ends(node: Node) -> None:
    begin(node.storage)
    comes, may_come = threading.Event(), threading.Event()

    def opened(hello: Hello) -> Storage:
        comes.set()
        may_come.wait(PATIENCE_S)
        return open_storage(hello.uri)

    within = Within(node, open_place=opened, linger_s=0.0)
    link = AgentLink(node.hello())
    assert comes.wait(PATIENCE_S)
    within.agent.drain()
    may_come.set()
    within.end()
    link.close(well=False)


def test_an_agent_that_ends_before_a_trainer_has_reached_it_is_started_again_soon(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks' agent is there as this rank starts one, and ends with them before it connects."""
    begin(node.storage)
    start, starts = AgentLink._start, []

    def there_at_first(link: AgentLink, place: AgentPlace) -> None:
        starts.append(SystemWaiter().now())
        if len(starts) > 1:
            start(link, place)

    monkeypatch.setattr(AgentLink, "_start", there_at_first)
    link = node.link()
    agent = node.pid
    link.close(well=True)
    assert ended(agent) and len(starts) == 2 and starts[1] - starts[0] < 30

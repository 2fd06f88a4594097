"""The agent is a process of its own: it outlives its trainer, makes the final save, and ends when all is done."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.agent import link as link_module
from lakeckpt.checkpoint.agent import orders as orders_module
from lakeckpt.checkpoint.agent.link import AgentLink
from lakeckpt.checkpoint.agent.logs import agents_of, log_path
from lakeckpt.checkpoint.agent.orders import Hello, Order, Outcome, TableDocuments
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.errors import AgentError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.tracking.waiting import SystemWaiter, poll
from tests.checkpoint.agent.rig import DIGEST, RUN, begin, fill, make_arena
from tests.patience import PATIENCE_S


class Node:
    """A node of a run: the folder of its arenas, and the run's storage."""

    def __init__(self, root: str | Path) -> None:
        self.arenas, self.storage = Path(root) / "arenas", LocalStorage(Path(root) / "run")
        self.arenas.mkdir(mode=0o700, exist_ok=True)

    def begin(self, rank: int = 0, world_size: int = 1, *, attempt: int = 0, linger_s: float = 0.0) -> Hello:
        return Hello(
            uri=self.storage.name,
            storage_options={},
            attempt=Attempt(run=RUN, number=attempt, last=attempt, parent=None, seed=1),
            settings=Settings(keep=Keep(last=3), timeout_s=float(PATIENCE_S)),
            digest=DIGEST,
            rank=rank,
            world_size=world_size,
            arenas=str(self.arenas),
            linger_s=linger_s,
        )

    def link(self, rank: int = 0, world_size: int = 1) -> AgentLink:
        return AgentLink(self.begin(rank, world_size))

    def log(self, rank: int = 0) -> str:
        return Path(log_path(str(self.arenas), DIGEST.hex(), rank)).read_text()

    def agents(self) -> list[int]:
        """The agents of all ranks that live."""
        return [one for path in sorted(self.arenas.glob("*.log")) for one in agents_of(str(path))]

    def committed(self) -> list[int]:
        """The steps of the history; all of it is whole."""
        assert verify(self.storage).every_damage == ()
        return [one.step for one in read_history(self.storage).chain]


def ended(pid: int | None) -> bool:
    """Wait until a process has ended."""
    assert pid is not None
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], PATIENCE_S)[0])
    finally:
        os.close(watched)


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
    for pid in made.agents() if made.arenas.is_dir() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_it_commits_what_is_ordered_and_ends_with_its_trainer_leaving_no_memory(node: Node) -> None:
    begin(node.storage)
    arena = make_arena(node.arenas)
    fill(arena, 3)
    link = node.link()
    pid = link.pid
    link.order(Order(step=3, number=0))
    found = answer(link)
    assert (found.step, found.info.slot, found.kind) == (3, 1, "")
    arena.close()
    link.close(well=True)
    assert ended(pid) and node.committed() == [3]
    assert ArenaFolder(node.arenas).found() == [] and "step 3: committed in slot 1" in node.log()


def test_what_was_ordered_is_persisted_though_the_trainer_has_said_goodbye(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        pid = link.pid
        link.order(Order(step=3, number=0))
        link.close(well=True)
        assert ended(pid) and node.committed() == [3]


def test_two_ranks_on_a_node_have_an_agent_each_and_commit_together(node: Node) -> None:
    begin(node.storage, world_size=2)
    arenas = [make_arena(node.arenas, rank, 2) for rank in range(2)]
    links = [node.link(rank, 2) for rank in range(2)]
    pids = [link.pid for link in links]
    assert len(set(pids)) == 2
    for arena, link in zip(arenas, links, strict=True):
        fill(arena, 8)
        link.order(Order(step=8, number=0))
    assert [answer(link).info.slot for link in links] == [1, 1]
    for link in links:
        link.close(well=True)
    assert all(map(ended, pids)) and node.committed() == [8]


TRAINER = """
    import os, signal, sys
    from lakeckpt.checkpoint.agent.orders import Order
    from tests.checkpoint.agent.rig import fill, make_arena
    from tests.checkpoint.agent.test_agent import Node, answer
    rank, world_size, newest = map(int, sys.argv[2:])
    node = Node(sys.argv[1])
    arena = make_arena(node.arenas, rank, world_size)
    link = node.link(rank, world_size)
    print(link.pid, flush=True)
    fill(arena, 1)
    link.order(Order(step=1, number=0))
    assert answer(link).info.slot == 1
    for step in range(2, newest + 1):
        fill(arena, step, common=step - 1)
    arena.begin(common=newest)  # a capture is under way
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_trainers_that_are_killed_lose_nothing_that_was_captured_on_all_ranks(node: Node, tmp_path: Path) -> None:
    begin(node.storage, world_size=2)
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(tmp_path)]
    trainers = [
        subprocess.Popen(
            [*command, str(rank), "2", str(newest)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank, newest in ((0, 6), (1, 5))
    ]
    for trainer in trainers:
        told, said = trainer.communicate(timeout=PATIENCE_S)
        assert trainer.returncode == -signal.SIGKILL, said
        assert ended(int(told)), node.log()
    assert node.committed() == [1, 5], node.log()


STUCK = """
    import os, sys, time
    import torch
    from tests.checkpoint.agent.rig import fill, make_arena
    from tests.checkpoint.agent.test_agent import Node

    class Stuck(torch.utils.data.Dataset):
        def __len__(self):
            return 2
        def __getitem__(self, index):
            print(os.getpid(), flush=True)
            time.sleep(60)

    node = Node(sys.argv[1])
    arena = make_arena(node.arenas)
    fill(arena, 4)
    link = node.link()
    print(link.pid, flush=True)
    os.posix_spawn("/bin/sleep", ["sleep", "60"], {})  # keeps the pipe open, as a fork in C does
    next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1, multiprocessing_context="fork")))
"""


def test_a_trainer_that_is_killed_is_missed_at_once_though_a_worker_of_it_is_stuck(node: Node, tmp_path: Path) -> None:
    begin(node.storage)
    command = [sys.executable, "-c", textwrap.dedent(STUCK), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        agent, worker = int(trainer.stdout.readline()), int(trainer.stdout.readline())
        try:
            trainer.kill()
            assert ended(agent) and node.committed() == [4], node.log()
            assert "the trainer is gone without a goodbye" in node.log()
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
            assert state not in "XZ", "the worker, which sleeps for 60 s, ended first"
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)


TORN_DOWN = """
    import signal, sys
    from lakeckpt.checkpoint.agent.orders import Order
    from tests.checkpoint.agent.rig import fill, make_arena
    from tests.checkpoint.agent.test_agent import Node
    node = Node(sys.argv[1])
    arena = make_arena(node.arenas)
    fill(arena, 4)
    link = node.link()
    link.order(Order(step=4, number=0))
    print(link.pid, flush=True)
    signal.pause()
"""


def test_a_launcher_that_ends_the_whole_process_group_does_not_end_a_save(node: Node, tmp_path: Path) -> None:
    begin(node.storage)
    command = [sys.executable, "-c", textwrap.dedent(TORN_DOWN), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        agent = int(trainer.stdout.readline())
        os.killpg(trainer.pid, signal.SIGTERM)
        os.killpg(trainer.pid, signal.SIGKILL)
    assert ended(agent) and node.committed() == [4], node.log()


def test_signals_for_its_job_do_not_end_it(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        link = node.link()
        assert link.pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(link.pid, number)
        fill(arena, 3)
        link.order(Order(step=3, number=0))
        assert answer(link).info.slot == 1
        link.close(well=True)


def test_an_agent_that_is_killed_is_reported_and_another_one_does_the_next_order(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        first = link.pid
        assert first is not None
        link.order(Order(step=3, number=0))
        assert answer(link).info.slot == 1
        os.kill(first, signal.SIGSTOP)  # it takes an order, and comes no further
        fill(arena, 4)
        link.order(Order(step=4, number=1))
        os.kill(first, signal.SIGKILL)
        assert ended(first)
        found = answer(link)
        assert (found.step, found.number, found.kind) == (4, 1, "save_failed")
        assert f"process {first}) was killed by signal 9: see '{node.arenas}" in found.text
        link.order(Order(step=4, number=2))
        second = link.pid
        assert answer(link).info.slot == 2 and second != first
        link.close(well=True)
        assert ended(second) and node.committed() == [3, 4]


def test_another_agent_goes_on_behind_the_commits_that_it_is_told_and_has_the_documents_of_tables(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read the log of the attempt anew, however long it is."""
    begin(node.storage)
    begins, send = list[tuple[int, int | None, int]](), AgentLink._send

    def sending(self: AgentLink, message: Any) -> None:
        if isinstance(message, Hello):
            begins.append((message.attempt.last, message.attempt.parent, message.attempt.recorded))
        send(self, message)

    monkeypatch.setattr(AgentLink, "_send", sending)
    with make_arena(node.arenas) as arena:
        link = node.link()
        link.keep(TableDocuments(data={"index/one.lkc": b"the index"}))
        for number, step in enumerate((3, 4)):
            fill(arena, step)
            link.order(Order(step=step, number=number))
            info = answer(link).info
            assert info is not None and info.slot == number + 1
            attempt = link._begin.attempt  # the trainer's own
            attempt.last, attempt.parent, attempt.recorded = info.slot, info.slot, info.step
            assert node.storage.read("index/one.lkc") == b"the index"
            node.storage.delete("index/one.lkc")
            os.kill(link.pid or 0, signal.SIGKILL)
            assert ended(link.pid)
        link.close(well=True)
        assert node.committed() == [3, 4]
    assert begins == [(0, None, 0), (1, 1, 3), (2, 2, 4)]


def test_an_agent_that_is_killed_while_idle_is_replaced_at_the_next_order(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        first = link.pid
        os.kill(first or 0, signal.SIGKILL)
        assert ended(first) and link.outcomes() == []
        link.order(Order(step=3, number=0))
        second = link.pid
        assert second not in (None, first) and answer(link).info.slot == 1
        link.close(well=True)
        assert ended(second) and node.committed() == [3]


def test_where_an_agent_died_and_none_can_be_started_saves_fail_and_training_goes_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        first = link.pid
        with monkeypatch.context() as patch:
            patch.setattr(link, "_python", "/nowhere/python")
            os.kill(first or 0, signal.SIGKILL)
            assert ended(first)
            for number in range(2):
                link.order(Order(step=3, number=number))
                (found,) = link.outcomes()
                assert (found.step, found.kind) == (3, "save_failed") and "cannot be started" in found.text
        link.order(Order(step=3, number=2))
        assert answer(link).info.slot == 1
        pid = link.pid
        link.close(well=True)
        assert ended(pid)


def test_an_agent_that_takes_no_messages_does_not_hold_training_up(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link = node.link()
        pid = link.pid
        os.kill(pid or 0, signal.SIGSTOP)
        for number in range(300):  # more than a pipe holds
            link.order(Order(step=2, number=number, failure="save_failed\n" + 1000 * "x"))
        link.order(Order(step=3, number=300))
        assert link.outcomes() == []
        os.kill(pid or 0, signal.SIGCONT)
        while not (found := link.outcomes()) or found[-1].step != 3:
            assert link.wait(PATIENCE_S), "the agent says nothing"
        assert found[-1].info.slot == 1
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
        pid = link.pid
        many.close()
        link.order(Order(step=3, number=0))
        assert answer(link).info.slot == 1
        link.close(well=True)
        assert ended(pid) and node.committed() == [3]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_agent_whose_log_takes_no_more_persists_all_the_same(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory is full, in which arenas and logs lie."""
    begin(node.storage)
    monkeypatch.setattr(link_module, "open_log", lambda path: os.open("/dev/full", os.O_WRONLY))
    link = node.link()
    pid = link.pid
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
        link.order(Order(step=3, number=0))
        assert answer(link).info.slot == 1
    link.close(well=True)
    assert ended(pid) and node.committed() == [3]


def test_an_agent_that_has_nowhere_to_write_its_log_is_an_error(node: Node) -> None:
    shutil.rmtree(node.arenas)
    node.arenas.write_text("no folder")
    with pytest.raises(AgentError, match=r"an agent cannot be started, as its log cannot be written: .*arenas"):
        node.link()
    node.arenas.unlink()


ELSEWHERE = """
    import os, sys
    from tests.checkpoint.agent.test_agent import Node
    node = Node(sys.argv[1])
    os.chdir("/")
    link = node.link()
    print(link.pid)
    link.close(well=True)
"""


def test_it_is_started_wherever_the_trainer_has_gone_and_whatever_its_path_says(node: Node, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [sys.executable, "-c", textwrap.dedent(ELSEWHERE), str(tmp_path)]
    told = subprocess.run(command, cwd=root, env=environment, check=True, timeout=PATIENCE_S, stdout=subprocess.PIPE)
    assert ended(int(told.stdout))


def test_it_is_started_where_the_folder_that_the_trainer_was_in_is_gone(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as an interactive Python has it
    begin(node.storage)
    link = node.link()
    pid = link.pid
    link.close(well=True)
    assert ended(pid)


def test_it_loads_no_torch() -> None:
    modules = "lakeckpt.checkpoint.agent.process, lakeckpt.checkpoint.agent.link"
    script = f"import sys; sys.modules['torch'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


def test_memory_that_an_earlier_attempt_left_stays_where_the_next_one_dies_before_it_captures(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        for step in range(1, 5):
            fill(arena, step, common=step - 1)
    begin(node.storage, slot=1)
    link = AgentLink(node.begin(attempt=1))
    agent = link.pid
    link.close(well=False)
    assert ended(agent) and [info.steps for info in ArenaFolder(node.arenas).found()]


def test_an_agent_that_is_superseded_makes_no_final_save_and_leaves_the_memory_to_the_next_attempt(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 3)
    link = node.link()
    agent = link.pid
    begin(node.storage, slot=1)
    link.close(well=False)
    assert ended(agent) and node.committed() == []
    assert [info.steps for info in ArenaFolder(node.arenas).found()] == [(3,)]


def test_an_agent_that_cannot_serve_its_trainer_says_why_at_the_next_step_after_it_has_begun(node: Node) -> None:
    link = AgentLink(replace(node.begin(), uri="s3://"))
    pid = link.pid
    assert ended(pid)
    link.order(Order(step=1, number=0))
    for _ in range(2):
        with pytest.raises(AgentError, match=r"cannot work for this trainer: .*a URL of a store looks like"):
            link.outcomes()
    link.close(well=True)
    assert link.pid is None
    assert "a URL of a store looks like" in node.log()


def test_an_agent_of_another_release_is_refused_by_both_sides(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "__version__", "9.9")
    link = node.link()
    assert ended(link.pid)
    with pytest.raises(AgentError, match=r"lakeckpt 9\.9 got a message of lakeckpt .*Start the job again"):
        link.outcomes()
    assert "got a message of lakeckpt 9.9: another release was installed" in node.log()


def test_a_save_that_fails_before_the_first_step_is_told_as_one(node: Node) -> None:
    begin(node.storage)
    link = node.link()
    link.order(Order(step=0, number=0))  # nobody captured it
    found = answer(link)
    assert (found.step, found.number, found.info) == (0, 0, None) and found.kind
    link.close(well=True)


def test_an_agent_learns_of_the_end_though_a_fork_of_the_trainer_keeps_its_pipes(node: Node) -> None:
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 1)
    link = node.link()
    agent = link.pid
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
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


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_the_pipe_is_a_death_where_there_is_no_pidfd(
    node: Node, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        monkeypatch.setattr(link_module, "_own_pidfd", lambda: -1)
    begin(node.storage)
    with make_arena(node.arenas) as arena:
        fill(arena, 2)
    link = node.link()
    agent = link.pid
    link.close(well=False)
    assert ended(agent) and node.committed() == [2]
    assert "gone without a goodbye" in node.log()


def test_agents_that_end_are_reaped_by_the_next_start(node: Node) -> None:
    begin(node.storage)
    first = node.link()
    pid = first.pid
    first.close(well=True)
    assert ended(pid)
    node.link().close(well=True)
    assert poll(lambda: None if Path(f"/proc/{pid}").exists() else True, waiter=SystemWaiter(), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(("watch", "allowed"), [("report", [os.getppid()]), ("", [])])
def test_a_trainer_that_is_watched_lets_the_launcher_and_its_descendants_look_under_yama(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: str, allowed: list[int]
) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def prctl(self, option: int, pid: ctypes.c_ulong, *_: int) -> int:
            calls.append((option, pid.value))
            return -1  # an error is ignored

    (tmp_path / "ptrace_scope").write_text("1\n")
    monkeypatch.setattr(link_module, "_YAMA", str(tmp_path / "ptrace_scope"))
    monkeypatch.setattr(link_module.ctypes, "CDLL", lambda name: Library())
    AgentLink(replace(node.begin(), watch=watch)).close(well=True)
    assert calls == [(0x59616D61, pid) for pid in allowed]
    (tmp_path / "ptrace_scope").unlink()
    AgentLink(replace(node.begin(), watch=watch)).close(well=True)
    assert len(calls) == len(allowed), "without Yama nothing is asked"

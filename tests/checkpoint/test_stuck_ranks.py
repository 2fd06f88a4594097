"""A rank that is stuck after another one of its node has died is killed by its agent; one that trains never is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from lakeckpt.checkpoint.faults import mates
from lakeckpt.checkpoint.faults.mates import Seen, watch_mates, why_stuck
from lakeckpt.checkpoint.faults.notes import note_at, page_path
from lakeckpt.recovery.faults import BY_AGENT, first_cause
from lakeckpt.watch.beat import Phase
from tests.patience import PATIENCE_S

RUN = b"r" * 16
SCRIPT = """
import sys, time
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.notes import begin_page
beat = begin_page(ArenaFolder(sys.argv[1]), b"r" * 16, 3, int(sys.argv[2]), 2)
beat.begins(10, {})
print("begun", flush=True)
for line in sys.stdin:
    match line.strip():
        case "step":
            beat.phase("compute")
        case "end":
            beat.close(well=True)
            sys.exit(0)
        case "leave":
            sys.exit(0)
    print("done", flush=True)
"""


class Rank:
    """A process with a page."""

    def __init__(self, folder: Path, rank: int) -> None:
        command = [sys.executable, "-c", SCRIPT, str(folder), str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.page = page_path(str(folder), RUN, 3, rank)
        self.read()

    def read(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        self.read()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Rank, Rank]]]:
    """Two ranks of a node whose launcher starts the job again."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(mates, "_LOOK_S", 0.02)
    ranks: list[Rank] = []

    def begun() -> tuple[Rank, Rank]:
        (tmp_path / "arenas").mkdir(mode=0o700)
        ranks.extend(Rank(tmp_path / "arenas", rank) for rank in (0, 1))
        return ranks[0], ranks[1]

    yield begun
    for one in ranks:
        one.process.kill()
        one.process.wait(PATIENCE_S)
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


class Watching:
    """The thread of the agent of ``rank``, and what it logs."""

    def __init__(self, rank: Rank) -> None:
        self.logged: list[str] = []
        self._pidfd = os.pidfd_open(rank.process.pid)
        before = set(threading.enumerate())
        watch_mates(rank.page, 3, self._pidfd, log=self.logged.append)
        (self.thread,) = set(threading.enumerate()) - before

    def end(self) -> str:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        os.close(self._pidfd)
        return " ".join(self.logged)


def test_a_stopped_rank_is_killed_after_another_one_has_died_and_is_the_first_cause(
    node: Callable[[], tuple[Rank, Rank]],
) -> None:
    stopped, mate = node()
    watching = Watching(stopped)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    mate.process.kill()
    mate.process.wait(PATIENCE_S)
    assert stopped.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert "rank 1 of this node had died, and it was stopped" in watching.end()
    note = note_at(stopped.page)
    assert note is not None and (note.cause, note.what, note.rank, note.is_own) == ("hang", "SIGSTOP", 0, True)
    assert first_cause([note]) is note


def test_a_rank_that_stands_still_is_killed_and_is_a_symptom_and_one_that_moves_is_not(
    node: Callable[[], tuple[Rank, Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    still, mate = node()
    looks, stuck = [0], threading.Event()

    def seen(one: Seen) -> str:
        looks[0] += 1
        assert why_stuck(one) == ""
        return "it had stood still" if stuck.is_set() else ""

    monkeypatch.setattr(mates, "why_stuck", seen)
    watching = Watching(still)
    mate.process.kill()
    mate.process.wait(PATIENCE_S)
    while looks[0] < 20:
        still.do("step")
    assert still.process.poll() is None
    stuck.set()
    assert still.process.wait(PATIENCE_S) == -signal.SIGKILL
    watching.end()
    note = note_at(still.page)
    assert note is not None and (note.cause, note.what, note.is_own) == ("signal", BY_AGENT, False)


@pytest.mark.parametrize("way", ["end", "leave"])
def test_nobody_is_killed_after_a_rank_that_has_ended(node: Callable[[], tuple[Rank, Rank]], way: str) -> None:
    stopped, mate = node()
    watching = Watching(stopped)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    mate.do(way)
    mate.process.wait(PATIENCE_S)
    assert watching.end() == "" and stopped.process.poll() is None


def test_where_nobody_starts_the_job_again_it_is_only_logged(
    node: Callable[[], tuple[Rank, Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    stopped, mate = node()
    watching = Watching(stopped)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    mate.process.kill()
    mate.process.wait(PATIENCE_S)
    assert "Nobody starts the job again" in watching.end()
    assert stopped.process.poll() is None and note_at(stopped.page) is None


def test_the_rule_in_each_case() -> None:
    phases = get_args(Phase)
    stills = (0.0, 4.9, 5.1, 11.9, 12.1, 59.0, 61.0, 89.0, 91.0)
    for phase, fails, step_s, still_s, stopped in product(phases, (False, True), (0.1, 4.0, 30.0), stills, (0, 1, 2)):
        spared = fails or phase in ("start", "restore", "save", "closing", "ended")
        expected = stopped == 2 or (still_s > 3 * step_s and still_s > (60 if spared else 5))
        seen = Seen(phase=phase, step_s=step_s, still_s=still_s, stopped=stopped, fails=fails)
        assert bool(why_stuck(seen)) == expected, seen

"""Let the kernel fail or end an agent at every system call of a commit: no commit is lost, and none is a mixture.

strace makes the n-th call of a kind fail (EIO, ENOSPC) or kills the process there, for every n.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.tracking.waiting import SystemWaiter
from tests.checkpoint.agent.rig import Desk, begin, content, fill, make_arena
from tests.patience import PATIENCE_S
from tests.system.persist_cuts import STEPS

REPOSITORY = Path(__file__).parents[2]
CALLS = ["fsync", "rename", "link", "mkdir", "write", "unlink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How an agent ended, which steps it said were committed, what errors it told, and which calls it made."""

    status: int
    committed: list[int]
    errors: list[str]
    calls: list[str]


@pytest.fixture
def arenas(tmp_path: Path) -> Path:
    with make_arena(tmp_path / "arenas") as arena:
        for step in STEPS:
            fill(arena, step)
    return tmp_path / "arenas"


def agent_under_strace(root: Path, arenas: Path, *inject: str) -> Run:
    begin(LocalStorage(root))
    trace = root.with_name(f"{root.name}.strace")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={','.join(CALLS)}"]
    for what in inject:
        command += ["-e", f"inject={what}"]
    command += [sys.executable, "-B", "-m", "tests.system.persist_cuts", str(root), str(arenas), str(theirs.fileno())]
    with ours, theirs:
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY
        )
        theirs.close()
        said = []
        while message := ours.recv(65536):
            said.append(json.loads(message))
    assert "Traceback" not in done.stderr, done.stderr
    calls = [match.group(1) for line in trace.read_text().splitlines() if (match := re.match(r"\d+ +(\w+)\(", line))]
    committed = [one["step"] for one in said if not one["error"]]
    return Run(status=done.returncode, committed=committed, errors=[one["error"] for one in said], calls=calls)


def what_is_wrong(root: Path, arenas: Path, run: Run) -> list[str]:
    """The history after a run, and after another agent has made the final save."""
    storage = LocalStorage(root)
    wrong = [f"damage: {one}" for one in verify(storage).every_damage]
    steps = [one.step for one in read_history(storage).chain]
    wrong += [f"step {step} was committed and is not there" for step in run.committed if step not in steps]
    desk = Desk(storage, arenas, SystemWaiter())
    desk.persister.die()
    desk.persister.start()
    desk.persister.join()
    after = read_history(storage).tip
    wrong += [f"damage after the will: {one}" for one in verify(storage).every_damage]
    if after is None or after.step != STEPS[-1]:
        wrong.append(f"the newest cut did not come to storage: {after and after.step}")
    files = b"".join(storage.read(info.path) for info in storage.list("objects"))
    return wrong + ([] if content(STEPS[-1]) in files else ["its content is another"])


def test_without_faults_all_is_committed_and_synced_before_it_is_said(tmp_path: Path, arenas: Path) -> None:
    run = agent_under_strace(tmp_path / "run", arenas)
    assert (run.status, run.committed) == (0, list(STEPS)) and what_is_wrong(tmp_path / "run", arenas, run) == []


@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC", "signal=SIGKILL"])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_at_any_call_loses_no_commit_and_leaves_no_mixture(
    tmp_path: Path, arenas: Path, call: str, fault: str
) -> None:
    times = agent_under_strace(tmp_path / "sound", arenas).calls.count(call)
    for n in range(1, times + 1):
        root = tmp_path / f"run-{n}"
        run = agent_under_strace(root, arenas, f"{call}:{fault}:when={n}")
        assert what_is_wrong(root, arenas, run) == [], (n, run)
        if fault == "signal=SIGKILL":
            assert run.status in (0, -signal.SIGKILL, 128 + signal.SIGKILL), (n, run)

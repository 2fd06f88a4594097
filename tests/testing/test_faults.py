"""Faults happen on the rank, at the step and at the moment that are named, once, and a node is lost as a whole."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.data.position.deliveries import Deliveries
from lakeckpt.errors import ConfigError
from lakeckpt.testing import fail_at, faults, lose_node
from tests.checkpoint.rig import Counter
from tests.frameworks.harness import write_table
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fault replaces in lakeckpt is put back."""
    for owner, name in ((CheckpointManager, "restore"), (CheckpointManager, "step"), (Deliveries, "delivered")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(faults, "_armed", faults._Armed())


def trained(folder: Path) -> list[str]:
    """Train five steps; return what was done, up to the fault."""
    done: list[str] = []
    if not (folder / "table").exists():
        write_table(folder / "table", rows=20)
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(folder / "table", batch_size=4))
    try:
        with CheckpointManager(folder / "run", {"n": Counter(), "reader": loader}, persist_every=99) as manager:
            done.append(f"begun {manager.restore()}")
            for batch in loader:
                done.append("batch")
                manager.step(batch)
                done.append(f"step {manager.steps_done}")
    except ZeroDivisionError:
        done.append("fault")
    return done


@pytest.mark.parametrize(
    ("moment", "last"),
    [("restore", []), ("batch", ["step 2"]), ("step", ["batch"]), ("after step", ["batch"])],
)
def test_a_fault_happens_at_its_moment(tmp_path: Path, moment: Any, last: list[str]) -> None:
    fail_at(0, 3, moment, by=ZeroDivisionError("now"))
    done = trained(tmp_path)
    assert done[-1] == "fault" and done[-2:-1] == last
    assert trained(tmp_path)[-1] == "step 5", "it happens once"


@pytest.mark.parametrize(("rank", "attempt"), [(1, 0), (0, 1)])
def test_a_fault_of_another_rank_or_start_does_not_happen(tmp_path: Path, rank: int, attempt: int) -> None:
    fail_at(rank, 3, by=ZeroDivisionError("now"), attempt=attempt)
    assert trained(tmp_path)[-1] == "step 5"


def test_a_fault_may_be_a_signal_or_a_function(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        fail_at(0, 2, by="SIGUSR1", attempt=None)
        fail_at(0, 4, by=lambda: seen.append(4))
        assert trained(tmp_path)[-1] == "step 5" and seen == [signal.SIGUSR1, 4]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("moment", "by"), [("never", "SIGKILL"), ("step", "SIGNONE"), ("step", 9)])
def test_what_is_no_fault_is_refused(moment: Any, by: Any) -> None:
    with pytest.raises(ConfigError, match="got "):
        fail_at(0, 1, moment, by=by)


def test_a_lost_node_loses_all_its_processes_and_its_memory(tmp_path: Path) -> None:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    (arenas / "x.arena").write_bytes(b"x")
    child = "import subprocess, sys; c = subprocess.Popen(['cat'], stdin=subprocess.PIPE, start_new_session=True); "
    child += "print(c.pid, flush=True); c.wait()"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        watched = os.pidfd_open(other)
        assert lose_node(process.pid, arenas=arenas) == 2
        assert select.select([watched], [], [], PATIENCE_S)[0], "what a child has started ends, too"
        os.close(watched)
    assert process.returncode == -signal.SIGKILL and not arenas.exists()

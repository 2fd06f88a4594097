"""Two launchers `lakeckpt run --nnodes=1:2` on the loopback device: a node is lost and comes back, or a bad one leaves.

Each node has a host name of its own (a namespace of names, for which root is needed) and a folder of arenas.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing import lose_node
from tests.frameworks.harness import free_port, write_table
from tests.system.cluster_job import ClusterJob, wait
from tests.system.elastic_train import GLOBAL_BATCH

ROWS = 4_000
"""More than are read until the test has done what it has to do; then the job hurries."""


class Launchers:
    """The launchers of a job, by the names of their nodes."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.job = ClusterJob(folder)
        shutil.rmtree(folder / "table")
        write_table(folder / "table", rows=ROWS)
        shutil.copy(Path(__file__).with_name("elastic_train.py"), self.job.script)
        self.port, self.environment = free_port(), environment
        self.of: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, memory: str = "") -> None:
        """Start the launcher of ``node``; node-0 has the rendezvous."""
        is_host = str(node == "node-0").lower()
        command = [sys.executable, "-m", "lakeckpt", "run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=job"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1"]
        command += [f"--rdzv-conf=is_host={is_host},last_call_timeout=5,keep_alive_interval=1", self.job.script.name]
        own = {"ARENAS": str(self.job.folder / f"memory-{memory or node}"), "GLOO_SOCKET_IFNAME": "lo"}
        with (self.job.folder / f"{node}.log").open("ab") as out:
            self.of[node] = subprocess.Popen(
                ["unshare", "--uts", "sh", "-c", f'hostname {node}; exec "$@"', "sh", *command],
                env={**self.job.environment, **self.environment, **own},
                cwd=self.job.folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def lose(self, node: str) -> None:
        """End all processes of ``node`` at once, and remove its memory."""
        lose_node(self.of[node].pid, arenas=self.job.folder / f"memory-{node}")
        self.of.pop(node).wait()

    def restored(self) -> list[dict[str, Any]]:
        path = self.job.folder / "restored.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def worlds(self) -> list[int]:
        """How many ranks each attempt had that has restored, in their order."""
        return list({one["attempt"]: one["world"] for one in self.restored()}.values())

    def finished(self, attempt: int) -> int:
        """The furthest step that ``attempt`` has finished."""
        lines = (self.job.folder / "finished.jsonl").read_text().splitlines()
        return max((one["step"] for one in map(json.loads, lines) if one["attempt"] == attempt), default=0)

    def close(self) -> None:
        for one in self.of.values():
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    found = Launchers(tmp_path / "job")
    yield found
    found.close()


def check_rows(job: ClusterJob) -> None:
    """Each row counts once, and each step has used a global batch, on one rank as on two."""
    assert job.counts() == Counter(range(ROWS)), job.text()
    assert audit(LocalStorage(job.folder / "run")).verdict == "proved"
    newest = {one["step"]: one["attempt"] for one in sorted(job.lines(), key=lambda one: int(one["attempt"]))}
    rows = Counter(
        {
            step: sum(len(one["ids"]) for one in job.lines() if (one["step"], one["attempt"]) == (step, attempt))
            for step, attempt in newest.items()
        }
    )
    assert set(rows.values()) == {GLOBAL_BATCH}, rows


def test_a_node_is_lost_and_the_job_goes_on_with_one_and_then_with_two_again(launchers: Launchers) -> None:
    job = launchers.job
    for node in ("node-0", "node-1"):
        launchers.start(node)
    job.wait_for_steps(16)  # by then, replicas are known
    launchers.lose("node-1")
    job.wait_for_steps(2, after=1)
    launchers.start("node-1", "fresh")
    job.wait_for_steps(2, after=2)
    job.hurry()
    wait(lambda: all(one.poll() is not None for one in launchers.of.values()), job.text)
    assert [one.returncode for one in launchers.of.values()] == [0, 0], job.text()
    check_rows(job)
    first, second, third = (
        [one for one in launchers.restored() if one["attempt"] == attempt]
        for attempt in sorted({one["attempt"] for one in launchers.restored()})
    )
    assert [one["world"] for one in (*first, *second, *third)] == [2, 2, 1, 2, 2]
    for before, after in ((first, second), (second, third)):
        again = launchers.finished(before[0]["attempt"]) - after[0]["step"]
        assert 0 <= again <= 1, launchers.restored()
    # Agents may have persisted the newest cut when the node came back, but not without the lost node's share.
    assert second[0]["captured"] == second[0]["step"] and "storage" not in second[0]["read"], launchers.restored()


def test_three_lost_nodes_in_a_row_roll_back_nothing(launchers: Launchers) -> None:
    """The second and third one are lost before the job has come on by a step."""
    job, hold = launchers.job, launchers.job.folder / "hold"
    launchers.start("node-0")
    launchers.start("node-1")
    job.wait_for_steps(16)  # by then, replicas are known
    hold.touch()
    worlds = [2]
    for number in range(3):
        if number:
            launchers.start("node-1")
            worlds.append(2)
            wait(lambda: launchers.worlds() == worlds, job.text)
        launchers.lose("node-1")
        worlds.append(1)
        wait(lambda: launchers.worlds() == worlds, job.text)
    hold.unlink()
    job.hurry()
    wait(lambda: launchers.of["node-0"].poll() is not None, job.text)
    assert launchers.of["node-0"].returncode == 0, job.text()
    check_rows(job)
    steps = {one["attempt"]: one["step"] for one in launchers.restored()}
    first = min(steps)
    assert len({step for attempt, step in steps.items() if attempt > first}) == 1, launchers.restored()
    assert 0 <= launchers.finished(first) - steps[max(steps)] <= 1, launchers.restored()


def test_a_node_on_which_all_deaths_lie_leaves_with_94_and_the_other_one_ends_the_job(launchers: Launchers) -> None:
    job = launchers.job
    launchers.environment = {"FAILS_ON": "node-1"}
    for node in ("node-0", "node-1"):
        launchers.start(node)
    job.hurry()
    wait(lambda: all(one.poll() is not None for one in launchers.of.values()), job.text)
    assert [one.returncode for one in launchers.of.values()] == [0, 94], job.text()
    check_rows(job)

"""The job of docs/how-to/slurm.md on a Slurm of three nodes: it loses one, or is preempted, and is requeued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster_job import ClusterJob, block_of, wait
from tests.system.slurm import NODES, Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as one:
        yield one


ON_SIGNAL = {"save_on": ["SIGTERM"], "requeue": "slurm"}
"""The arguments of the page."""


def submitted(slurm: Slurm, folder: Path, manager: Mapping[str, Any] = ON_SIGNAL) -> tuple[ClusterJob, str]:
    """Submit the page's script, with ``manager`` as arguments of the manager; the job in ``folder``, and its number."""
    job = ClusterJob(folder / "job")
    script = job.folder / "job.sh"
    script.write_text(block_of("slurm.md", "bash"))
    return job, slurm.submit(script, environment={**job.environment, "MANAGER": json.dumps(manager)})


def test_a_job_that_lost_a_node_is_requeued_and_every_row_counts_once(slurm: Slurm, tmp_path: Path) -> None:
    job, number = submitted(slurm, tmp_path)
    job.wait_for_steps(9)
    slurm.kill_node("n2")
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    job.hurry()
    slurm.wait_for(number, "PENDING")
    slurm.wait_for(number, "COMPLETED")
    job.check_every_row_counted_once(attempts=2)


def test_a_job_that_is_preempted_and_then_warned_is_requeued_and_repeats_no_step(slurm: Slurm, tmp_path: Path) -> None:
    job, number = submitted(slurm, tmp_path)
    job.wait_for_steps(8)
    slurm.ask("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true")
    slurm.wait_for(number, "PENDING")
    job.wait_for_steps(8, after=1)
    slurm.ask("scancel", "--signal=TERM", number)  # what --signal=TERM@60 sends
    job.hurry()
    slurm.wait_for(number, "PENDING")
    slurm.wait_for(number, "COMPLETED")
    job.check_every_row_counted_once(attempts=3)
    steps = [(line["attempt"], line["step"]) for line in job.lines()]
    assert len({step for _, step in steps}) == len(set(steps)), f"steps ran twice: {sorted(steps)}"


def test_a_job_whose_run_is_away_when_it_is_requeued_waits_for_it_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job, number = submitted(slurm, tmp_path, {"arenas": str(tmp_path / "arenas")})
    job.wait_for_steps(8)
    run, kept = job.folder / "run", job.folder / "kept"
    run.rename(kept)
    slurm.ask("scontrol", "requeue", number)
    wait(lambda: "lists no run, but this job has begun a run there before" in job.text(), job.text)
    assert not run.exists()
    kept.rename(run)
    job.hurry()
    slurm.wait_for(number, "COMPLETED")
    job.check_every_row_counted_once(attempts=2)
    assert min(line["step"] for line in job.lines() if line["attempt"]) > 5, job.text()


def test_a_job_that_is_cancelled_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job, number = submitted(slurm, tmp_path)
    job.wait_for_steps(2)
    slurm.ask("scancel", number)
    slurm.wait_for(number, "CANCELLED")
    assert slurm.fields(number)["Restarts"] == "0"
    assert job.newest() == max(job.history()), job.text()


def test_with_proctrack_pgid_agents_outlive_a_killed_step_and_persist_its_newest_cut(tmp_path: Path) -> None:
    captures = {"capture_every": 1, "persist_every": 10_000, "arenas": "arenas"}
    with Slurm(tmp_path / "slurm", proctrack="pgid") as slurm:
        job, number = submitted(slurm, tmp_path, captures)
        job.wait_for_steps(8)
        slurm.ask("scancel", "--signal=KILL", f"{number}.0")
        slurm.wait_for(number, "FAILED")
        wait(lambda: not any(map(slurm.processes_of, NODES)), job.text)
    assert job.newest(), job.text()

"""A rank stands still at its fault, and nowhere else; it is killed from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakeckpt.demo.scenario import DemoConfig, Phase, PlannedFault
from lakeckpt.demo.trip import Trip, armed_path


def config(folder: Path, fault: PlannedFault | None) -> DemoConfig:
    phase = Phase(world_size=2, workers=0, fault=fault)
    made = DemoConfig(lake="", folder=str(folder), steps=8, save_every=4, phases=(phase,))
    made.records.mkdir()
    return made


@pytest.mark.parametrize(
    ("rank", "step", "point"), [(1, 3, "before-update"), (0, 2, "before-update"), (0, 3, "before-cut")]
)
def test_other_ranks_steps_and_points_pass(rank: int, step: int, point: str, tmp_path: Path) -> None:
    made = config(tmp_path, PlannedFault(rank=0, step=3, point="before-update"))
    Trip(made, 0, rank).reach(point, step)
    assert list(made.records.iterdir()) == []


def test_without_a_fault_every_point_passes(tmp_path: Path) -> None:
    made = config(tmp_path, None)
    trip = Trip(made, 0, 0)
    trip.reach("before-update", 3)
    assert list(made.records.iterdir()) == []


def test_at_its_fault_a_rank_says_who_it_is_and_waits_to_be_killed(tmp_path: Path) -> None:
    made = config(tmp_path, PlannedFault(rank=0, step=3, point="before-update"))
    script = (
        "import sys; from lakeckpt.demo.trip import Trip\n"
        "from lakeckpt.demo.scenario import DemoConfig\n"
        "Trip(DemoConfig.from_json(sys.argv[1]), 0, 0).reach('before-update', 3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script, made.to_json()], env=environment) as process:
        try:
            path = armed_path(made.records, 0)
            while not path.exists():
                assert process.poll() is None, "it ended instead of waiting"
            assert int(path.read_text()) == process.pid
            assert process.poll() is None
        finally:
            process.kill()

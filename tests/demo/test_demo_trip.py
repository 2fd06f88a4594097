"""A rank stands still at its fault, and nowhere else; it is killed from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lakeckpt.demo.scenario import DemoConfig, Fault, Phase
from lakeckpt.demo.trip import Trip, armed_path

SCRIPT = """
import os, sys
from pathlib import Path
from lakeckpt.demo.scenario import DemoConfig, Fault, Phase
from lakeckpt.demo.trip import Trip

class Stood(Exception):
    pass

def stop(self):
    raise Stood

Trip._stop = stop
root = Path(sys.argv[1])
run = root / "checkpoints"
for folder in ("log", "parts"):
    (run / folder).mkdir(parents=True)
phase = Phase(world_size=1, workers=0, fault=Fault(rank=0, step=3, point=sys.argv[2]))
config = DemoConfig(lake="", folder=str(root), steps=8, save_every=4, phases=(phase,))
trip = Trip(config, 0, 0)
root = run
met = []

def rename(folder):
    with open(root / folder / "new", "w"): pass
    descriptor = os.open(root / folder, os.O_RDONLY)
    os.rename("new", "old", src_dir_fd=descriptor, dst_dir_fd=descriptor)

def link(folder):
    with open(root / folder / "new", "w"): pass
    os.link(root / folder / "new", root / folder / "linked")
    os.unlink(root / folder / "linked")

calls = [(action, folder) for folder in (".", "log", "parts") for action in (rename, link)]
for step in (2, 3):
    for action, folder in calls:
        trip.save_begins(step)
        try:
            action(folder)
        except Stood:
            met.append((step, action.__name__, folder))
        trip.save_ends()
        action(folder)
print(met)
"""


@pytest.mark.parametrize(
    ("point", "expected"),
    [("before-part", [(3, "rename", "parts")]), ("before-commit", [(3, "link", "log")]), ("before-cut", [])],
)
def test_points_in_a_save_are_met_only_in_the_save_of_their_step(point: str, expected: object, tmp_path: Path) -> None:
    # An audit hook cannot be taken away again, so it lives in a process of its own.
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "run"), point],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == repr(expected)


def config(folder: Path, fault: Fault | None) -> DemoConfig:
    phase = Phase(world_size=2, workers=0, fault=fault)
    made = DemoConfig(lake="", folder=str(folder), steps=8, save_every=4, phases=(phase,))
    made.records.mkdir()
    return made


@pytest.mark.parametrize(
    ("rank", "step", "point"), [(1, 3, "before-update"), (0, 2, "before-update"), (0, 3, "before-cut")]
)
def test_other_ranks_steps_and_points_pass(rank: int, step: int, point: str, tmp_path: Path) -> None:
    made = config(tmp_path, Fault(rank=0, step=3, point="before-update"))
    Trip(made, 0, rank).reach(point, step)
    assert list(made.records.iterdir()) == []


def test_without_a_fault_every_point_passes(tmp_path: Path) -> None:
    made = config(tmp_path, None)
    trip = Trip(made, 0, 0)
    trip.save_begins(3)
    trip.save_ends()
    trip.reach("before-update", 3)
    assert list(made.records.iterdir()) == []


def test_at_its_fault_a_rank_says_who_it_is_and_waits_to_be_killed(tmp_path: Path) -> None:
    made = config(tmp_path, Fault(rank=0, step=3, point="before-update"))
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

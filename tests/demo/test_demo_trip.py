"""A rank stands still at its fault, and nowhere else; it is killed from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lakeckpt.cli.demo.scenario import Fault
from lakeckpt.cli.demo.trip import Trip, armed_path

SCRIPT = """
import os, sys
from pathlib import Path
from lakeckpt.cli.demo.scenario import Fault
from lakeckpt.cli.demo.trip import Trip

class Stood(Exception):
    pass

def stand(self):
    raise Stood

Trip._stand = stand
root = Path(sys.argv[1])
(root / "log").mkdir(parents=True)
(root / "parts").mkdir()
trip = Trip(Fault(rank=0, step=3, point=sys.argv[2]), rank=0, folder=root, launch=0, checkpoints=root)
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
        trip.enter_cut(step)
        try:
            action(folder)
        except Stood:
            met.append((step, action.__name__, folder))
        trip.leave_cut()
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


@pytest.mark.parametrize(
    ("rank", "step", "point"), [(1, 3, "before-update"), (0, 2, "before-update"), (0, 3, "before-cut")]
)
def test_other_ranks_steps_and_points_pass(rank: int, step: int, point: str, tmp_path: Path) -> None:
    fault = Fault(rank=0, step=3, point="before-update")
    trip = Trip(fault, rank=rank, folder=tmp_path, launch=0, checkpoints=tmp_path / "run")
    trip.reach(point, step)
    assert not armed_path(tmp_path, 0).exists()


def test_without_a_fault_every_point_passes(tmp_path: Path) -> None:
    trip = Trip(None, rank=0, folder=tmp_path, launch=0, checkpoints=tmp_path / "run")
    trip.enter_cut(3)
    trip.leave_cut()
    trip.reach("before-update", 3)
    assert list(tmp_path.iterdir()) == []


def test_at_its_fault_a_rank_says_who_it_is_and_waits_to_be_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from lakeckpt.cli.demo.trip import Trip\n"
        "from lakeckpt.cli.demo.scenario import Fault\n"
        "folder = Path(sys.argv[1])\n"
        "fault = Fault(rank=0, step=3, point='before-update')\n"
        "Trip(fault, rank=0, folder=folder, launch=4, checkpoints=folder / 'run').reach('before-update', 3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment) as process:
        try:
            path = armed_path(tmp_path, 4)
            while not path.exists():
                assert process.poll() is None, "it ended instead of waiting"
            assert json.loads(path.read_text())["pid"] == process.pid
            assert process.poll() is None
        finally:
            process.kill()

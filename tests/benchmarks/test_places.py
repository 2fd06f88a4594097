"""Folders of benchmarks go with the run that made them, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.places import place_for_a_run
from tests.patience import PATIENCE_S

RUN = """
import os, signal, sys
from benchmarks.places import place_for_a_run
with place_for_a_run("trial", under=sys.argv[1]) as made:
    (made / "arena").write_bytes(b"gigabytes")
    os.kill(os.getpid(), int(sys.argv[2]))
    signal.pause()
"""


def run_to(end: signal.Signals, place: Path) -> int:
    command = [sys.executable, "-c", RUN, str(place), str(int(end))]
    root = Path(__file__).parents[2]
    return subprocess.run(command, timeout=PATIENCE_S, cwd=root, stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_leaves_nothing(tmp_path: Path, end: signal.Signals) -> None:
    assert run_to(end, tmp_path) != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_that_was_killed_has_left_goes_with_the_next_one_and_nothing_else_does(tmp_path: Path) -> None:
    assert run_to(signal.SIGKILL, tmp_path) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / "lakeckpt-trial-notes").mkdir()
    with place_for_a_run("trial", under=tmp_path) as mine, place_for_a_run("trial", under=tmp_path) as other:
        assert not left.exists() and mine.exists() and other.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["lakeckpt-trial-notes"]

"""Trainers end with the same exit codes with torch's flight recorder and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.exits import WAYS
from tests.patience import PATIENCE_S


@pytest.mark.soak
def test_trainers_end_the_same_with_the_recorder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.exits", "--times", "1", "--json", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["times"] == 1
    assert {one["way"]: (one["without"], one["with"]) for one in found["found"]} == {
        way: ({codes: 1}, {codes: 1}) for way, codes in WAYS.items()
    }

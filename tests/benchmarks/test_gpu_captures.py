"""The benchmark of captures on a GPU runs where there is none: all but what needs CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_it_takes_turns_accounts_for_every_cut_and_writes_what_it_printed(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    options = ["--device", "cpu", "--quick", "--iterations", "2", "--batch", "2", "--others", "1", "--json", str(told)]
    command = [sys.executable, "-m", "benchmarks.gpu_captures", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert found["captured"] + found["skipped"] == 1 + 3 * 2  # one before the first turn
    turns = {name: len(blocks) for name, blocks in found["blocks_s"].items()}
    assert turns["no saving"] == turns["lakeckpt, every iteration"] == 2 and turns["torch.save"] == 1
    assert "cuts captured" in done.stdout and "cannot do it" not in done.stdout

"""Random damage to pinned files never ends in a crash, a hang, or wrong rows where pages have checksums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
KINDS = ("pages", "pinned")


def fuzz(kind: str, first: int, count: int) -> dict[str, int]:
    """Run cases in a process of their own; how many ended how."""
    command = [sys.executable, "-m", "tests.reading.fuzz_files", kind, str(first), str(count)]
    try:
        child = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        last = (error.stdout or b"").split()[-1:]
        pytest.fail(f"{' '.join(command[1:])} hangs in case {last}")
    lines = child.stdout.splitlines()
    assert child.returncode == 0, (
        f"{' '.join(command[1:])} ended with {child.returncode} after {lines[-1:]}: {child.stderr}"
    )
    found = json.loads(lines[-1])
    assert sum(found["ends"].values()) == count
    assert "damaged, nobody knows where" not in found["ends"]
    return dict(found["ends"])


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_ends_in_right_rows_or_an_error_of_ours(kind: str) -> None:
    ends = fuzz(kind, 0, 60)
    assert ends["damaged"] > 10


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_for_long_ends_in_right_rows_or_an_error_of_ours(kind: str) -> None:
    fuzz(kind, 10_000, 400)

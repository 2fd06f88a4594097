"""The exactly-once law holds under `python -O`, where asserts do not run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.scripts import write_table
from tests.patience import PATIENCE_S

SCRIPT = Path(__file__).with_name("law_script.py")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lake"), files=((12, 9), (20,)))


def run(action: str, table: Path, folder: Path) -> None:
    """Run one action of the script. It must end as the action says: killed, or with status 0."""
    command = [sys.executable, "-O", str(SCRIPT), action, str(table), str(folder / "run"), str(folder / "book")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    expected = -signal.SIGKILL if action == "killed" else 0
    assert ran.returncode == expected, ran.stderr + ran.stdout


def test_the_law_of_readers_holds(table: Path, tmp_path: Path) -> None:
    run("law", table, tmp_path)


@pytest.mark.soak
def test_a_killed_run_goes_on_and_its_ledger_has_the_rows_that_were_read_again(table: Path, tmp_path: Path) -> None:
    run("killed", table, tmp_path)
    run("again", table, tmp_path)

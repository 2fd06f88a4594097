"""What the pytest plugin gives to other suites, and that it costs those nothing that do not use it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import lakeckpt

HEAVY = ("torch", "pyarrow", "numpy", "hypothesis", "fsspec")


def run_suite(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_user.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -W error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not any(point.name == "lakeckpt" for point in entry_points(group="pytest11")):
        command += ["-p", "lakeckpt.testing.pytest_plugin"]  # read from the source, not installed
    path = os.pathsep.join([str(Path(lakeckpt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_suite_gets_tables_markers_and_an_option(tmp_path: Path) -> None:
    ran = run_suite(
        tmp_path,
        """
import pytest
from lakeckpt.testing.offsets import wanted

def test_tables(lakeckpt_table):
    table = lakeckpt_table(files=((3, 0), (2,)), columns=("string", "fixed"))
    assert table.num_rows == 5 and table.schema.names == ["id", "string", "fixed"]
    assert lakeckpt_table().num_rows == 12

def test_the_option():
    assert wanted(None) == 3 and wanted(7) == 7

@pytest.mark.lakeckpt_offsets("all")
def test_the_marker():
    assert wanted(None) == "all"

def test_after_the_marker():
    assert wanted(None) == 3
""",
        "--lakeckpt-offsets=3",
    )
    assert "4 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.soak
def test_the_law_restores_at_as_many_offsets_as_the_marker_says(tmp_path: Path) -> None:
    ran = run_suite(
        tmp_path,
        """
import pytest
from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.testing import assert_exactly_once

def count(table):
    made = []
    def make_loader(rank, world_size, num_workers):
        made.append(rank)
        return LakeLoader(LakeDataset(table, batch_size=1, rank=rank, world_size=world_size))
    assert_exactly_once(make_loader, topologies=[(1, 0)], chains=0)
    return len(made)

@pytest.mark.lakeckpt_offsets("all")
def test_all(lakeckpt_table):
    assert count(lakeckpt_table()) == 2 + 13

@pytest.mark.lakeckpt_offsets(4)
def test_some(lakeckpt_table):
    assert count(lakeckpt_table()) == 2 + 4
""",
    )
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize("wrong", ["some", "-1", "0", ""])
def test_a_wrong_option_is_refused(tmp_path: Path, wrong: str) -> None:
    ran = run_suite(tmp_path, "def test(): pass", f"--lakeckpt-offsets={wrong}")
    assert ran.returncode == 4 and "--lakeckpt-offsets" in ran.stderr


def test_a_suite_that_does_not_use_it_loads_nothing_heavy(tmp_path: Path) -> None:
    ran = run_suite(
        tmp_path,
        f"""
import sys

def test_nothing_is_loaded():
    assert [name for name in {HEAVY!r} if name in sys.modules] == []
    assert "LAKECKPT_TEST_OFFSETS" not in __import__("os").environ
""",
        "-p",
        "no:hypothesispytest",
    )
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr

"""A lake and runs on disk, made once: what the commands are tried on, and must never change."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.cli.main import main
from lakeckpt.lake.storage.open import open_storage
from tests.checkpoint.scripts import Script, write_table


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("cli") / "lake")


@pytest.fixture(scope="session")
def good_run(lake: Path) -> Script:
    """Four attempts on 1, 2, 3 and 1 ranks, with a branch that was rolled back; ``uri`` is its place."""
    script = script_at(lake, lake.parent / "good")
    script.attempt(12)
    script.attempt(10, world_size=2)
    script.attempt(8, world_size=3)
    newest = sorted((lake.parent / "good" / "parts").rglob("*.lkc"))[-1]
    newest.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script.attempt(20)
    return script


@pytest.fixture(scope="session")
def bad_run(lake: Path) -> Script:
    """A run whose second attempt lost the reader state."""
    script = script_at(lake, lake.parent / "bad")
    script.attempt(12)
    script.attempt(8, lose_state=True)
    return script


def script_at(lake: Path, place: Path) -> Script:
    script = Script(lake)
    script.storage = open_storage(place)  # type: ignore[assignment]
    return script


@pytest.fixture
def run_copy(good_run: Script, lake: Path, tmp_path: Path) -> Path:
    """The good run, to be damaged."""
    return Path(shutil.copytree(lake.parent / "good", tmp_path / "run"))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Run a command with --json; (exit status, what it printed)."""

    def run(*words: object) -> tuple[int, Any]:
        status = main([*map(str, words), "--json"])
        told = capsys.readouterr()
        assert told.err == ""
        return status, json.loads(told.out)

    return run


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command for people; (exit status, what it printed to both streams)."""

    def run(*words: object) -> tuple[int, str]:
        status = main([*map(str, words)])
        told = capsys.readouterr()
        return status, told.out + told.err

    return run

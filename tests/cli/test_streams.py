"""An output that cannot take what is written is told from an answer: exit status 2 and one line, or escapes."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lakeckpt.cli.main import main
from tests.checkpoint.scripts import Script
from tests.patience import PATIENCE_S


def words(command: str, lake: Path) -> list[str]:
    run = [command, str(lake.parent / "good")]
    return [*run, "--step", "3"] if command == "explain" else run


@pytest.mark.parametrize("json_too", [[], ["--json"]])
@pytest.mark.parametrize("command", ["audit", "verify", "inspect", "explain"])
def test_a_full_disk_is_no_verdict(
    command: str, json_too: list[str], lake: Path, good_run: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = io.StringIO()
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        patch.setattr(sys, "stderr", err)
        assert main([*words(command, lake), *json_too]) == 2
    assert err.getvalue() == "lakeckpt: [Errno 28] No space left on device\n"


def test_the_process_ends_with_the_same_status(lake: Path, good_run: Script) -> None:
    """Python writes what is left at its exit, and has a status of its own where that fails."""
    script = (
        "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'lakeckpt.cli.main', *sys.argv[1:]])"
    )
    given = [sys.executable, "-c", script, *words("audit", lake)]
    ran = subprocess.run(given, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (2, "lakeckpt: [Errno 28] No space left on device\n")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_an_error_that_can_be_told_nowhere_is_still_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_too: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    assert main(["audit", str(tmp_path), *json_too]) == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["audit", "verify", "inspect", "explain"])
def test_an_encoding_without_the_characters_gets_them_escaped(
    command: str, encoding: str, lake: Path, good_run: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for json_too in ([], ["--json"]):
        told = io.BytesIO()
        out = io.TextIOWrapper(told, encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert main([*words(command, lake), *json_too]) == 0
        text = told.getvalue().decode(encoding)
        assert text
        if json_too:
            json.loads(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_rich", [True, False])
@pytest.mark.parametrize("command", ["audit", "verify", "inspect", "explain", "plan"])
def test_commands_that_take_long_show_progress_on_a_terminal_and_nothing_elsewhere(
    command: str, has_rich: bool, lake: Path, good_run: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"plan": [command, str(lake)], "explain": [*words(command, lake), "--table", str(lake)]}
    for stream, json_too in ((Terminal(), []), (io.StringIO(), []), (Terminal(), ["--json"])):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            patch.setenv("TERM", "xterm")
            if not has_rich:
                patch.setitem(sys.modules, "rich.progress", None)
            main([*line.get(command, words(command, lake)), *json_too])
        assert ("100%" in stream.getvalue()) == (stream.isatty() and not json_too), stream.getvalue()


def test_json_holds_what_an_encoding_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.BytesIO()
    out = io.TextIOWrapper(told, encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert main(["audit", str(tmp_path / "ü😀"), "--json"]) == 2
    assert "ü😀" in json.loads(told.getvalue())["error"]["message"]


def test_what_the_operating_system_refuses_is_one_message(show: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, told = show("demo", "--out", tmp_path / "file" / "x")
    assert status == 2 and told.startswith("lakeckpt: [Errno") and told.count("\n") == 1
    with pytest.raises(OSError):
        main(["demo", "--out", str(tmp_path / "file" / "x"), "--debug"])

"""The commands start fast, fail with one message, and speak JSON when asked to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.cli.main import main
from lakeckpt.errors import CheckpointNotFound
from tests.checkpoint.scripts import Script
from tests.patience import PATIENCE_S

COMMANDS = ("plan", "inspect", "verify", "explain", "doctor", "audit")


def arguments(command: str, lake: Path) -> list[str]:
    if command == "plan":
        return [command, str(lake)]
    if command == "doctor":
        return [command, "--arenas", str(lake.parent)]
    run = [command, str(lake.parent / "good")]
    return [*run, "--step", "3"] if command == "explain" else run


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lakeckpt {lakeckpt.__version__}\n"


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n    {command} " in told for command in (*COMMANDS, "rollback", "demo"))


@pytest.mark.parametrize("command", [*COMMANDS, "rollback", "demo"])
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: lakeckpt {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["fly"], ["audit"], ["explain", "run"], ["plan", "x", "--tail", "long"]])
def test_words_that_are_not_understood_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "usage: lakeckpt" in capsys.readouterr().err


MANY = """
import contextlib, io, json, sys
sys.modules[sys.argv[1]] = None
from lakeckpt.cli.main import main

told = []
for words in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(words)
    told.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(told))
"""


def run_without(module: str, commands: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Run ``commands``, one after the other, in a process that cannot load ``module``: status, output and errors."""
    words = [sys.executable, "-c", MANY, module, json.dumps(commands)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")
    return [(status, out, err) for status, out, err in json.loads(ran.stdout)]


def test_no_command_loads_torch(lake: Path, good_run: Script) -> None:
    told = run_without("torch", [arguments(command, lake) for command in COMMANDS])
    for command, (status, out, err) in zip(COMMANDS, told, strict=True):
        assert (command, status, err) == (command, 0, "")
        assert out, command


def test_nothing_heavy_is_loaded_for_the_list_of_commands() -> None:
    script = (
        "import sys; from lakeckpt.cli.main import main; main(['--help'])\n"
        "print(sorted({'torch', 'pyarrow', 'numpy', 'rich', 's3fs', 'fsspec'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_every_command_prints_plain_text_without_rich(lake: Path, good_run: Script) -> None:
    commands = [arguments(command, lake) for command in COMMANDS]
    told = run_without("rich", [*commands, *([*words, "--json"] for words in commands)])
    for command, (status, out, err) in zip(COMMANDS, told[: len(commands)], strict=True):
        assert (status, err) == (0, "") and out and "[bold" not in out and "\x1b" not in out, command
    for command, (status, out, _) in zip(COMMANDS, told[len(commands) :], strict=True):
        assert status == 0 and json.loads(out), command


@pytest.mark.parametrize("command", ["inspect", "verify", "explain", "audit"])
def test_an_error_is_one_message_and_exit_status_2(
    command: str, tmp_path: Path, show: Callable[..., tuple[int, str]], ask: Callable[..., tuple[int, Any]]
) -> None:
    words = [command, tmp_path / "nothing", *(["--step", "1"] if command == "explain" else [])]
    status, told = show(*words)
    assert status == 2
    assert told.startswith("lakeckpt: there is no run at") and told.count("\n") == 1
    status, plain = ask(*words)
    assert status == 2 and plain["error"]["kind"] == "checkpoint_not_found"
    assert not (tmp_path / "nothing").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        main(["audit", str(tmp_path), "--debug"])


@pytest.mark.parametrize("options", ["{", "[1]", "7"])
def test_storage_options_must_be_a_json_object(options: str, show: Callable[..., tuple[int, str]]) -> None:
    status, told = show("audit", "memory://run", "--storage-options", options)
    assert status == 2 and "must be a JSON object" in told


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lakeckpt.cli.audit.audit", broken)
    with pytest.raises(ZeroDivisionError):
        main(["audit", str(tmp_path)])


def test_an_interrupt_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, show: Callable[..., tuple[int, str]]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lakeckpt.cli.audit.audit", interrupted)
    assert show("audit", tmp_path) == (130, "interrupted\n")


def test_a_reader_of_the_output_may_leave(lake: Path, good_run: Script) -> None:
    words = ["explain", str(lake.parent / "good"), "--step", "3", "--rows", "--json"]
    script = (
        "import os, sys; from lakeckpt.cli.main import main\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); sys.exit(main(sys.argv[1:]))"
    )
    ran = subprocess.run([sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (2, "")

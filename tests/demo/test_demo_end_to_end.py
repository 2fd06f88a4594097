"""The demo, small: red when a restore drops the reader's state. `make demo` shows the green one, or fails."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.demo.demo import run_demo
from lakeckpt.demo.scenario import DemoConfig, Phase
from lakeckpt.demo.supervise import DemoFailed, run_job
from lakeckpt.errors import ConfigError

pytestmark = pytest.mark.soak

SMALL: dict[str, Any] = {"sequences": {"prose": 160, "code": 192}, "steps": 32, "save_every": 2}


def processes_about(folder: Path) -> list[str]:
    """The command lines of living processes that name ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found.append(line)
    return found


def verdict_in(out: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((out / "verdict.json").read_text())
    return verdict


def test_a_restore_that_drops_the_reader_state_turns_the_verdict_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert not run_demo(out, kills=1, sabotage=True, **SMALL)
    printed = capsys.readouterr().out
    verdict = verdict_in(out)
    failed = [check["claim"] for check in verdict["checks"] if not check["holds"]]
    assert any(claim.startswith("By the loop's records") for claim in failed), failed
    assert any(claim.startswith("The audit") for claim in failed), failed
    assert sum(count["repeated"] for count in verdict["tokens"]) > 0
    assert "RED" in printed


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no earlier demo made"):
        run_demo(tmp_path, kills=2, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def config(folder: Path) -> DemoConfig:
    return DemoConfig(
        lake=str(folder / "no-lake-here"),
        folder=str(folder),
        steps=8,
        save_every=4,
        phases=(Phase(world_size=1, workers=0),),
    )


def test_a_launch_that_fails_by_itself_is_told_with_what_its_rank_said(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"(?s)launch 0 .* before a fault was due; its log is .*no-lake-here"):
        run_job(config(tmp_path), on_start=lambda phase: None)


def test_a_demo_whose_run_fails_is_red_and_quotes_the_log_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **named: object) -> None:
        raise DemoFailed("launch 0 ended: [rank0]: [bold]no such thing[/bold]")

    monkeypatch.setattr("lakeckpt.demo.demo.run_job", fail)
    assert not run_demo(tmp_path / "out", kills=2, **SMALL)
    assert "RED launch 0 ended: [rank0]: [bold]no such thing[/bold]" in " ".join(capsys.readouterr().out.split())


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    def interrupt(phase: Phase) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(config(tmp_path), on_start=interrupt)
    assert processes_about(tmp_path) == []

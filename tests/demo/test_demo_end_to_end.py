"""The demo, small: green when lakeckpt keeps its promise, red when a restore drops the reader's state."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import demo
from lakeckpt.demo.scenario import DemoConfig, Phase
from lakeckpt.demo.supervise import DemoFailed, run_job
from lakeckpt.errors import ConfigError

pytestmark = pytest.mark.soak

SMALL = ["--rows", "256", "--save-every", "2"]


def run_demo(out: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args(["--out", str(out), *SMALL, *options]))


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


def test_killed_in_a_step_and_in_a_save_and_resumed_on_other_ranks_every_row_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = run_demo(out, "--kills", "2")
    printed = capsys.readouterr().out
    assert status == 0, printed
    verdict = verdict_in(out)
    assert verdict["green"] and len(verdict["faults"]) == 2
    assert [(count["counted"], count["lost"], count["repeated"]) for count in verdict["rows"]] == [(256, 0, 0)] * 2
    assert verdict["faults"][-1]["after"] == "3 ranks × 0 workers"
    assert "GREEN" in printed and printed.count("SIGKILL") == 2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert processes_about(out) == []


def test_a_restore_that_drops_the_reader_state_turns_the_verdict_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = run_demo(out, "--kills", "1", "--sabotage", "drop-reader-state")
    printed = capsys.readouterr().out
    assert status == 1, printed
    verdict = verdict_in(out)
    failed = [check["claim"] for check in verdict["checks"] if not check["holds"]]
    assert any(claim.startswith("By the ids") for claim in failed), failed
    assert any(claim.startswith("By the audit") for claim in failed), failed
    repeated = sum(count["repeated"] for count in verdict["rows"])
    assert repeated == verdict["audit"]["repeated"] > 0
    assert "RED" in printed


def test_the_switch_that_sabotages_is_not_for_users() -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert "sabotage" not in parser.format_help()


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no earlier demo made"):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def config(folder: Path) -> DemoConfig:
    return DemoConfig(
        lake=str(folder / "no-lake-here"),
        folder=str(folder),
        steps_per_epoch=8,
        save_every=4,
        seed=7,
        phases=(Phase(world_size=1, workers=0),),
    )


def test_a_launch_that_fails_by_itself_is_told_with_what_its_rank_said(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"(?s)launch 0 .* before a fault was due; its log is .*no-lake-here"):
        run_job(config(tmp_path), on_poll=lambda launch: None)


def test_a_demo_whose_run_fails_is_red_and_quotes_the_log_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **named: object) -> None:
        raise DemoFailed("launch 0 ended: [rank0]: [bold]no such thing[/bold]")

    monkeypatch.setattr("lakeckpt.demo.demo.run_job", fail)
    assert run_demo(tmp_path / "out") == 1
    assert "RED launch 0 ended: [rank0]: [bold]no such thing[/bold]" in " ".join(capsys.readouterr().out.split())


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    def interrupt(launch: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(config(tmp_path), on_poll=interrupt)
    assert processes_about(tmp_path) == []

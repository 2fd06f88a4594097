"""``lakeckpt faults`` says the cause and the remedy of each fault, and lists the texts that no row explains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt.checkpoint.faults.records import put_slow
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.cli.main import main
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.watch.slow import SlowRank
from tests.checkpoint.test_crash_loops import Job

ROW = """
[[fault]]
id = "licence"
match.text = ['licence server \\d+ is busy']
role = "root"
cause = "licences"
remedy = "Ask for more licences."
restart = "in place"
"""


class LicenceError(RuntimeError):
    """An exception of a script."""


def dies(step: int, ids: list[int]) -> None:
    if step == 5:
        raise LicenceError(f"licence server {ids[0]} is busy")
    if step == 8:
        raise OSError(28, "No space left on device", "/scratch/x")


def test_faults_are_explained_and_unknown_texts_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, monkeypatch)
    own = tmp_path / "own.toml"
    own.write_text(ROW)

    def faults(*options: str) -> str:
        assert main(["faults", str(tmp_path / "run"), *options]) == 0
        return capsys.readouterr().out

    assert [job.attempt(dies) for _ in range(2)] == ["LicenceError"] * 2
    assert job.attempt(lambda step, ids: dies(step, ids) if step > 5 else None) == "OSError"
    job.attempt()
    found = json.loads(faults("--json"))
    causes = [one["explicit"]["cause"] for one in found["faults"]]
    assert causes == ["code", "code", "storage full"]
    assert found["account"]["causes"] == {"code": 2, "storage full": 1}
    assert found["faults"][2]["explicit"]["restart"] == "stop" and "Make room" in faults()
    (unknown,) = json.loads(faults("--unknown", "--json"))["unknown"]
    assert unknown["count"] == 2 and unknown["text"].endswith("LicenceError: licence server <n> is busy")
    assert unknown["id"] in faults("--unknown")
    assert "Ask for more licences." in faults("--watch-faults", str(own))
    assert "Each fault with a text is explained" in faults("--watch-faults", str(own), "--unknown")


def test_rows_of_a_user_are_read_when_the_manager_is_made_and_used_by_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, monkeypatch)
    job.options = {"watch_faults": tmp_path / "own.toml"}
    assert job.attempt() == "ConfigError" and job.begun == []
    (tmp_path / "own.toml").write_text(ROW)
    assert [job.attempt(dies), job.attempt()] == ["LicenceError", ""]
    assert [one["explicit"]["id"] for one in job.faults()] == ["licence"]


def test_watch_shows_the_slow_ranks_of_the_newest_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, monkeypatch)
    assert [job.attempt(), job.attempt()] == ["", ""]
    storage = LocalStorage(tmp_path / "run")
    newest = read_run(storage).begins[-1].attempt
    slow = SlowRank(
        attempt=newest, rank=2, node="node-7", step=90, phase="data", own_s=0.62, peers_s=0.42, trend="grows", at_s=50.0
    )
    for one in (slow, replace(slow, attempt=0, rank=1)):
        put_slow(storage, one)
    assert main(["watch", str(tmp_path / "run")]) == 1, "none trains here"
    told = capsys.readouterr().out
    assert "Slow: rank 2 on node-7 is slow, most in data: 0.620 s" in told and "rank 1" not in told
    assert main(["watch", str(tmp_path / "run"), "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)["slow"]
    assert (found["rank"], found["phase"], found["trend"], found["over"]) == (2, "data", "grows", False)

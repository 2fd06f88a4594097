"""Faults in a real job of four ranks: the watch names the rank and the kind, and with "restart" the job goes on.

`python -m benchmarks.stalls` runs all kinds on two ranks, and prints what was found and how fast.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.jobs.stall_kinds import FAULTS
from tests.jobs.stalls import run


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["two locks", "silent socket", "dead child", "swapped collective", "leaves", "skips"])
def test_the_rank_and_the_kind_of_a_fault_that_holds_up_a_job_are_named(tmp_path: Path, fault: str) -> None:
    found = run(tmp_path, fault, on=2)
    assert found["stalls"], found["said"]
    first = found["stalls"][0]
    assert first["ranks"] == [2] and first["kind"] in FAULTS[fault][1], first
    assert not first["acted"] and first["perceived"] >= first["began"]


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["stopped", "leaves", "silent socket"])
def test_a_job_that_cannot_go_on_is_ended_and_goes_on_from_its_newest_cut(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKECKPT_WATCH_ACT_S", "5")
    found = run(tmp_path / "job", fault, on=2, watch="restart", until="end")
    assert found["status"] == 0, found["said"]
    assert [one["ranks"] for one in found["stalls"] if one["acted"]] == [[2]]
    [ended] = found["faults"]
    assert (ended["cause"], ended["rank"]) == ("hang", 2) and ended["steps_again"] <= 1
    assert audit(open_storage(tmp_path / "job" / "run")).exactly_once
    run(tmp_path / "other", "none", watch="none", until="end")
    assert (tmp_path / "job" / "weights.json").read_text() == (tmp_path / "other" / "weights.json").read_text()

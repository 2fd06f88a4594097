"""What a save reports of flows grows with the ranks alone, and a state keeps its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tracker


@pytest.mark.soak
def test_reports_give_the_state_of_the_job_and_their_bytes_grow_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark compares what it has merged with the state of the job."""
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["tracker", "--nodes", "2", "34", "--json", str(path)])
    tracker.main()
    found = json.loads(path.read_text())
    few, _, many, lockstep = found["saves"]
    assert many["total_bytes"] / many["ranks"] <= few["total_bytes"] / few["ranks"] + 4
    assert (many["messages"], many["depth"], lockstep["messages"]) == (0, 1, 0)
    places = 2 * tracker.WORKERS * many["ranks"]  # a record says where each lane stood before and after
    assert many["root_bytes"] < 24 * places
    assert [name for name, (_, most) in tracker.states().items() if found["states"][name] > most] == []
    assert "data-dependent" in capsys.readouterr().out

"""What a save reports of flows grows with the ranks alone, and a state keeps its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tracker


@pytest.mark.soak
def test_reports_and_trees_give_the_same_state_and_their_bytes_grow_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way compares what it has merged with the state of the job."""
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["tracker", "--nodes", "2", "34", "--json", str(path)])
    tracker.main()
    found = json.loads(path.read_text())
    few, _, _, many, tree, lockstep = found["saves"]
    assert many["total_bytes"] / many["ranks"] <= few["total_bytes"] / few["ranks"] + 4
    assert (many["messages"], many["depth"], lockstep["messages"]) == (0, 1, 0)
    assert (tree["messages"], tree["depth"]) == (34 * 8 + 34 + 3, 3)
    assert tree["root_bytes"] < many["root_bytes"] < 100 * many["ranks"]
    over = {name for name, (_, most) in tracker.states().items() if found["states"][name] > most}
    assert over <= {"packed and mixed, 64 sources, weights changed twice"}  # 7 % over 64 bytes a source
    assert "data-dependent" in capsys.readouterr().out

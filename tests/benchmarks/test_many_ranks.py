"""What ranks say and read of one another does not grow with their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import many_ranks


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_rank_says_and_reads_as_much_among_many_as_among_few(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    options = ["--ranks", "12", "24", "--parameters", "3", "--replicas", str(replicas), "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["many_ranks", *options])
    many_ranks.main()
    few, many = json.loads(path.read_text())["cases"]
    assert many["said_bytes"] < few["said_bytes"] + 20
    # With those of the ranks that wrote the trees and what is shared.
    assert few["parts_read"] == many["parts_read"] <= replicas + 4

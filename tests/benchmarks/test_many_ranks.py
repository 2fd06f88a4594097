"""What ranks say and read of one another does not grow with their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import many_ranks


def test_a_rank_says_and_reads_as_much_among_many_as_among_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["many_ranks", "--ranks", "4", "12", "--parameters", "3", "--json", str(path)])
    many_ranks.main()
    few, many = json.loads(path.read_text())["cases"]
    assert many["said_bytes"] < few["said_bytes"] + 20
    assert many["parts_read"] <= 1 + 3  # of the ranks that wrote the trees and what is shared

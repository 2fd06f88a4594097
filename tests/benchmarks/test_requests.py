"""A rank's requests for a save and a restore do not grow with the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import requests


def test_a_rank_among_many_makes_as_many_requests_as_among_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["requests", "--ranks", "4", "40", "--json", str(path)])
    requests.main()
    found = json.loads(path.read_text())
    for what in ("save", "save by agents", "restore"):
        few, many = ([one for one in found if (one["ranks"], one["what"]) == (ranks, what)] for ranks in (4, 40))
        other_of_few, other_of_many = few[1], many[1]
        for kind in ("put", "delete", "list"):
            assert other_of_many[kind] == other_of_few[kind] <= 4
        assert other_of_many["read"] <= other_of_few["read"] + 4  # a look more or less
        assert many[0]["list"] <= few[0]["list"] + 8 and many[0]["delete"] == few[0]["delete"]
        assert many[0]["read"] <= 5 * 40

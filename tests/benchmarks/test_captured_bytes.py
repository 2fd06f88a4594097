"""The benchmark of captured bytes runs, and its bar holds: what never changes is not copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.captured_bytes import measured, replicas
from lakeckpt.checkpoint.arena.folder import ArenaFolder


def test_a_state_of_which_95_percent_never_change_is_copied_to_5_percent(tmp_path: Path) -> None:
    found = measured(8, ArenaFolder(tmp_path / "arenas"))
    assert found["copied"] <= 0.07
    assert found["copied_if_saved"] == pytest.approx(1.0)


def test_four_replicas_take_the_memory_of_one_and_copy_a_quarter_each(tmp_path: Path) -> None:
    found = replicas(120, 4, tmp_path)
    assert found["arenas"] <= 1.15
    assert found["copied"] <= 0.35

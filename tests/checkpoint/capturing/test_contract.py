"""What a training loop is told that changes its state between a cut and the fence, and what it does instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.errors import UnannouncedChange
from tests.checkpoint.capturing.test_kinds import job_of, step
from tests.checkpoint.rig import MemoryStorage
from tests.checkpoint.seams import manager_with
from tests.patience import PATIENCE_S


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied before the fence."""

    def admit(gate: Gate, size_bytes: int, urgent: Any, /) -> bool:
        assert urgent.wait(PATIENCE_S)
        return False

    monkeypatch.setattr(Gate, "admit", admit)


def swap(objects: dict[str, Any]) -> None:
    with torch.no_grad():
        objects["model"].weight.mul_(2)


@pytest.mark.usefixtures("shut")
def test_a_change_before_the_fence_is_raised_though_failed_saves_are_warnings(tmp_path: Path) -> None:
    objects = job_of("one element")
    manager = manager_with(MemoryStorage(), objects, persist_every=100, capture_every=1, arenas=tmp_path)
    manager.restore()
    step(objects)
    manager.step()
    manager.save()
    for announced in (True, False):
        step(objects)
        manager.step()
        if announced:
            manager.fence()
        swap(objects)
        step(objects)
        if announced:
            manager.wait()
        else:
            with pytest.raises(UnannouncedChange, match=r"'model/weight'.*manager\.fence\(\)"):
                manager.wait()
    manager.step()
    assert manager.save() is not None, "training may go on"
    manager.close()


@pytest.mark.usefixtures("shut")
def test_a_save_of_a_cut_under_which_the_state_changed_is_refused(tmp_path: Path) -> None:
    objects = job_of("one element")
    manager = manager_with(MemoryStorage(), objects, persist_every=1, capture_every=1, arenas=tmp_path)
    manager.restore()
    step(objects)
    manager.step()
    swap(objects)
    with pytest.raises(UnannouncedChange, match=r"'model/weight'"):
        manager.wait()
    manager.close()


def test_a_fence_without_captures_does_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(MemoryStorage(), job_of("one element"))
    manager.restore()
    manager.fence()
    manager.close()


def test_the_first_capture_says_how_much_memory_captures_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    objects = job_of("one element")
    with caplog.at_level(logging.INFO, logger="lakeckpt"):
        manager = manager_with(MemoryStorage(), objects, capture_every=1, arenas=tmp_path)
        manager.restore()
        for _ in range(2):
            step(objects)
            manager.step()
            manager.wait()
        manager.close()
    said = [one.getMessage() for one in caplog.records if "captures" in one.getMessage()]
    (of_rank,) = [one for one in said if one.startswith("captures of rank 0 take 0")]
    assert str(tmp_path) in of_rank and len(said) == 2  # restore() has said what all ranks of the node take

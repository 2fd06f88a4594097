"""A manager that nobody closes is collected with its model, and its fence, copier, arena and agent end."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

import lakeckpt
from lakeckpt.checkpoint.capture import fence
from lakeckpt.errors import CaptureWarning
from tests.checkpoint.agent.test_agent import ended
from tests.checkpoint.rig import MemoryStorage, manager, train_step, training


def copiers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "lakeckpt-copier"]


def test_a_manager_that_is_never_closed_keeps_nothing_alive(tmp_path: Path) -> None:
    objects, others, before = training(), copiers(), fence._fences
    saver = lakeckpt.CheckpointManager(
        tmp_path / "run", objects, capture_every=1, persist_every=100, arenas=tmp_path / "arenas"
    )
    saver.restore()
    engine = saver._saves._engine
    while engine.completed is None:  # the first cuts have no arena yet
        train_step(objects)
        saver.step()
        engine.finish()
    step = engine.completed
    model, agent = weakref.ref(objects["model"]), saver._saves._agent.pid
    [copier] = set(copiers()) - set(others)
    del saver, engine, objects
    gc.collect()
    assert model() is None and set(fence._fences) <= set(before)
    copier.join()
    assert ended(agent)
    again = lakeckpt.CheckpointManager(tmp_path / "run", training(), capture_every=1, arenas=tmp_path / "arenas")
    with again:
        assert again.restore() == step, "the agent persists the newest cut that was complete"


def test_a_manager_that_captures_what_another_one_captures_warns_of_it(tmp_path: Path) -> None:
    objects, options = training(), {"capture_every": 1, "arenas": tmp_path}
    first = manager(MemoryStorage(), objects, **options)
    first.restore()
    second = manager(MemoryStorage(), {**objects, "model": torch.nn.Linear(1, 1)}, **options)
    with pytest.warns(CaptureWarning, match="which was not closed, captures 'optimizer', 'scheduler', too: .* Close"):
        second.restore()
    first.close()
    second.close()
    with manager(MemoryStorage(), objects, **options) as third:  # both are closed
        third.restore()

"""Runs that released versions wrote stay readable, restore to the values they were made of, and tell their history."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.intervals import Intervals
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.golden.checkpoint.make import FOLDER, filled, objects_of

RUNS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0].isdigit())


def test_there_is_a_golden_run() -> None:
    assert RUNS


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(value, other[key]) for key, value in one.items())
    return repr(one) == repr(other)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("run", RUNS)
def test_a_golden_run_restores_on_any_number_of_ranks(run: str, world_size: int, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / run, tmp_path / "run")
    storage = LocalStorage(tmp_path / "run")

    def body(rank: int, exchange: HubExchange) -> None:
        objects, values = objects_of(rank, world_size), filled(rank % 2)
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(MemoryStorage()))
        assert saver.restore() == 2
        assert alike(objects["model"].weight.detach(), values["weight"])
        assert str(objects["model"].bias.tolist()) == "[0.5, -0.0]"
        assert alike(objects["own"].value, values["own"]) and alike(objects["note"].value, values["note"])
        assert saver.restore_report.damaged == ()

    good(run_ranks(world_size, body))


@pytest.mark.parametrize("run", RUNS)
def test_a_golden_run_tells_its_history(run: str) -> None:
    history = read_history(LocalStorage(FOLDER / run))
    assert [one.step for one in history.chain] == [1, 2] and history.damaged == ()
    rows = [one.readers["reader"].consumed()[0] for one in history.chain]
    assert [one.size for one in rows] == [20, 20] and not rows[0].intersection(rows[1])
    assert isinstance(rows[0], Intervals) and history.chain[1].readers["reader"].steps.frontier(2).step == 2

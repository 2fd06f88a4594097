"""The demo asks more of the ledger than that nothing is wrong: all of its epochs must be there, too."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

import lakeckpt
from lakeckpt.demo.lake import build_lake
from lakeckpt.demo.scenario import DemoConfig
from lakeckpt.demo.verdict import audited


@pytest.fixture
def config(tmp_path: Path) -> DemoConfig:
    build_lake(tmp_path / "lake", block=64, max_rows=96)
    return DemoConfig(lake=str(tmp_path / "lake"), folder=str(tmp_path), steps_per_epoch=12, save_every=4)


def train(config: DemoConfig, *, epochs: int, steps_of_last: int = 12) -> None:
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(config.lake, batch_size=8, columns=["id"], shuffle=True))
    with lakeckpt.CheckpointManager(str(config.checkpoints), {"reader": loader}, persist_every=4) as manager:
        manager.restore()
        for epoch in range(loader.epoch, epochs):
            for batch in islice(loader, steps_of_last if epoch == epochs - 1 else None):
                manager.step(batch)


def test_all_epochs_complete_is_exactly_once(config: DemoConfig) -> None:
    train(config, epochs=2)
    found = audited(config)
    assert found.holds, found.seen


@pytest.mark.parametrize(("epochs", "steps"), [(1, 12), (2, 7)])
def test_an_epoch_that_is_not_complete_is_not(config: DemoConfig, epochs: int, steps: int) -> None:
    train(config, epochs=epochs, steps_of_last=steps)
    found = audited(config)
    assert not found.holds
    assert "does not have all rows of epoch 1" in found.seen


def test_a_job_without_a_ledger_is_not(config: DemoConfig) -> None:
    assert not audited(config).holds

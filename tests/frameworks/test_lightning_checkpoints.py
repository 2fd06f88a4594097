"""A `LakeLoader` under Lightning's own checkpoints: what the loader sees on the stack is the real Lightning.

`lakeckpt.data.dataset.frameworks` knows Lightning by the name of the module that saves and loads loaders.
tests/data/test_frameworks.py has doubles of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lakeckpt.errors import StateUnavailable
from tests.frameworks.harness import write_table
from tests.frameworks.lightning_fits import ROWS, Module, loader_of

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),
]  # Lightning warns of what the tests need not


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lightning") / "table", rows=ROWS)


def fit(folder: Path, loader: Any, ckpt_path: Path | None = None, **options: Any) -> list[list[int]]:
    """Run `fit`; return the rows of each batch. Lightning saves ``step=N.ckpt`` at each step, and at the end of each
    epoch ``epoch=N.ckpt``."""
    rows: list[list[int]] = []

    class Note(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            rows.append(batch["id"].tolist())

    steps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    epochs = ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(callbacks=[steps, epochs, Note()], **{"max_epochs": 2, **quiet, **options})
    trainer.fit(Module(), loader, ckpt_path=ckpt_path)
    return rows


@pytest.fixture(scope="module")
def whole(table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("lightning") / "whole"
    return folder, fit(folder, loader_of(table))


@pytest.mark.parametrize("step", [4, 9, 13])
def test_lightnings_checkpoint_goes_on_at_its_step(table: Path, tmp_path: Path, whole: Any, step: int) -> None:
    """At step 9 nothing is left of the epoch: the loop has counted its steps, and must not be shown the end again."""
    folder, batches = whole
    assert fit(tmp_path, loader_of(table), folder / f"step={step}.ckpt") == batches[step:]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_lightnings_checkpoint_goes_on_with_other_ranks_between_epochs_only(
    table: Path, tmp_path: Path, before: int, after: int
) -> None:
    def rank(world_size: int) -> Any:
        return loader_of(table, rank=0, world_size=world_size)

    fit(tmp_path / "before", rank(before), max_epochs=1)
    for step in (2, len(rank(before))):
        with pytest.raises(StateUnavailable, match=rf"step {step} of epoch 0 with {after} ranks.*{before}.*LakeCheck"):
            fit(tmp_path / "after", rank(after), tmp_path / "before" / f"step={step}.ckpt")
    expected = fit(tmp_path / "expected", rank(after))
    second = fit(tmp_path / "after", rank(after), tmp_path / "before" / "epoch=0.ckpt")
    assert second == expected[len(rank(after)) :] and len(second) == len(rank(after))


def test_lightnings_checkpoint_of_an_endless_loader_is_refused(table: Path, tmp_path: Path) -> None:
    """Lightning has fetched a batch that no step has used."""
    with pytest.raises(StateUnavailable, match=r"fetches a batch ahead of a loader without a length.*LakeCheckpoint"):
        fit(tmp_path, loader_of(table, endless=True), max_epochs=-1, max_steps=3)

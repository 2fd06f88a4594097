"""`LakeCheckpoint` beside Lightning's callbacks that have weights, files or a place in the order of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.lightning import LakeCheckpoint
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import write_table
from tests.frameworks.lightning_fits import ROWS, fit, loader_of, times, used

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),
]  # Lightning warns of what the tests need not

ONCE = [{1: ROWS}, {1: ROWS}]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lightning") / "table", rows=ROWS)


def proved(run: Path) -> bool:
    return audit(open_storage(str(run))).verdict == "proved"


# --- the files of a ModelCheckpoint


@pytest.mark.parametrize("place", ["before", "callbacks"])
def test_the_best_model_is_that_of_the_model_checkpoint_wherever_it_stands(
    table: Path, tmp_path: Path, place: str
) -> None:
    own = ModelCheckpoint(tmp_path / "own", filename="{step}", monitor="loss", save_weights_only=True)
    validation = loader_of(table, restart=True)
    one = fit(tmp_path / "run", loader_of(table), validation=validation, max_epochs=1, **{place: [own]})
    assert one.trainer.checkpoint_callback is own and one.trainer.checkpoint_callbacks == [own, one.checkpoint]
    best = torch.load(tmp_path / "own" / "step=9.ckpt", weights_only=True)["state_dict"]
    with torch.no_grad():
        one.module.line.weight.zero_()
    one.trainer.validate(dataloaders=loader_of(table, restart=True), ckpt_path="best", verbose=False)
    assert torch.equal(one.module.line.weight, best["line.weight"]) and best["line.weight"] != 0
    again = fit(tmp_path / "run", loader_of(table), validation=loader_of(table, restart=True), **{place: [own]})
    assert times(one, again) == ONCE and proved(tmp_path / "run")


# --- averages of weights

AVERAGES: dict[str, Any] = {
    "each step": lambda: callbacks.WeightAveraging(),
    "every other step": lambda: callbacks.EMAWeightAveraging(decay=0.9, update_every_n_steps=2),
    "each epoch": lambda: callbacks.EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=0),
    "parameters only": lambda: callbacks.EMAWeightAveraging(decay=0.5, use_buffers=False),
}


class Weights(pl.Callback):
    """Notes the module's weights and their average when a batch begins, by the steps that were done before it."""

    def __init__(self, average: Any) -> None:
        self.average, self.found = average, dict[int, list[float]]()

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        both = (*module.state_dict().values(), *self.average._average_model.state_dict().values())
        self.found[trainer.global_step] = [float(one) for one in both]


def averaged(table: Path, run: Path, kind: str, interrupt: tuple[str, int] = ("", -1), **options: Any) -> Any:
    """A `fit` with an average of weights, and what `Weights` has found."""
    average = AVERAGES[kind]()
    noted = Weights(average)
    validation = loader_of(table, restart=True)
    captured = {"capture_every": 1, "arenas": run.parent / "arenas"} if options.pop("captures", False) else {}
    both = {"validation": validation, "val_check_interval": 3, "interrupt": interrupt, **options}
    checkpoint = LakeCheckpoint(run, persist_every=1, **captured)
    return fit(run, loader_of(table), callbacks=[average, noted], checkpoint=checkpoint, **both), noted.found


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="lightning 2.5 has no averages")
@pytest.mark.parametrize(
    ("kind", "hook", "step"),
    [
        ("each step", "batch end", 5),
        ("each step", "validation", 6),
        ("every other step", "batch start", 5),
        ("every other step", "epoch end", 9),
        ("each epoch", "batch start", 9),
        ("each epoch", "batch end", 13),
        ("parameters only", "batch start", 14),
    ],
)
def test_weights_and_their_average_are_those_of_a_fit_that_was_not_interrupted(
    table: Path, tmp_path: Path, kind: str, hook: str, step: int
) -> None:
    whole, expected = averaged(table, tmp_path / "whole", kind)
    first, before = averaged(table, tmp_path / "run", kind, (hook, step))
    second, after = averaged(table, tmp_path / "run", kind)
    assert before | after == expected and min(after) <= max(before) + 1
    assert second.weights == whole.weights and used(first, second) == used(whole) and proved(tmp_path / "run")


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="lightning 2.5 has no averages")
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"captures": True}], ids=str)
def test_a_fit_that_ended_goes_on_with_the_weights_and_not_with_their_average(
    table: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """When training ends, Lightning copies the average over the weights."""
    whole, expected = averaged(table, tmp_path / "whole", "each step", max_epochs=3, **options)
    _, before = averaged(table, tmp_path / "run", "each step", max_epochs=2, **options)
    second, after = averaged(table, tmp_path / "run", "each step", max_epochs=3, **options)
    assert before | after == expected and second.weights == whole.weights and not set(before) & set(after)


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="lightning 2.5 has no averages")
def test_an_average_that_saves_more_by_a_hook_is_refused(table: Path, tmp_path: Path) -> None:
    class Adds(callbacks.WeightAveraging):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["more"] = 1

    with pytest.raises(ConfigError, match=r"Adds.on_save_checkpoint adds.*state="):
        fit(tmp_path / "run", loader_of(table), callbacks=[Adds()])

"""What a `LakeTrainer` saves of callbacks, and how many samples it says that it has trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from lakeckpt import LakeDataset, LakeLoader
from tests.frameworks.test_transformers import ROWS, Attempts, Rows, some_rows

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Plateau(Rows):
    """Its evaluations have a best loss at step 6, and no better one after it."""

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        found = super().evaluation_loop(*args, **options)
        found.metrics["eval_loss"] = abs(self.state.global_step - 6.0)
        return found


class Counts(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback of one's own: it counts steps from ``start`` on."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.count = start, start

    def on_step_end(self, *args: Any, **others: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


def attempt(attempts: Attempts, stop: int, patience: int = 4, callbacks: Any = (), **options: Any) -> Rows:
    """Train with an evaluation at each other step, until ``patience`` evaluations brought nothing better."""
    held_out = LakeLoader(LakeDataset(attempts.tokens, batch_size=50), restart=True)
    evaluates = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
        "save_strategy": "best",
    }
    both = [EarlyStoppingCallback(patience), *callbacks]
    return attempts.run(stop, eval_dataset=held_out, callbacks=both, num_train_epochs=2, **evaluates, **options)


def patience_of(trainer: Rows) -> int:
    (found,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback))
    return int(found.early_stopping_patience_counter)


@pytest.mark.parametrize("stops", [[], [9], [4, 11, 13], [14]], ids=str)
def test_early_stopping_waits_as_long_as_in_a_run_that_was_not_stopped(tmp_path: Path, stops: list[int]) -> None:
    """The fourth evaluation after step 6 is that of step 14. Checkpoints are of each third step."""
    attempts = Attempts(tmp_path, Plateau)
    for stop in stops:
        attempt(attempts, stop)
    trainer = attempt(attempts, -1)
    assert (trainer.state.global_step, patience_of(trainer)) == (14, 4)
    again = attempt(attempts, -1)
    assert again.history == {} and again.state.global_step == 14
    assert attempt(attempts, -1, patience=6).state.global_step == 18


def test_callbacks_keep_their_arguments_and_get_their_attributes_back(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, Plateau)
    attempt(attempts, 8, callbacks=[Counts(100), Counts(200)])
    both = [Counts(7), Counts(8)]
    trainer = attempt(attempts, -1, callbacks=both)
    steps = trainer.state.global_step
    assert [(one.start, one.count) for one in both] == [(7, 100 + steps), (8, 200 + steps)] and steps == 14
    assert attempt(attempts, -1, patience=6, callbacks=[]).state.global_step == 18  # without them


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3}, {"loads": some_rows, "max_steps": 40}], ids=list
)
def test_samples_per_second_count_the_rows_that_this_call_has_trained_on(
    attempts: Attempts, options: dict[str, Any]
) -> None:
    """An epoch has 101 rows in batches of 4, and per_device_train_batch_size, which is not used, is 8."""
    attempts.run(8, num_train_epochs=2, **options)
    trainer = attempts.run(num_train_epochs=2, **options)
    (logged,) = (one for one in trainer.state.log_history if "train_runtime" in one)
    samples = logged["train_samples_per_second"] * logged["train_runtime"]
    trained = sum(len(ids) for ids in trainer.history.values())
    assert samples == pytest.approx(trained, rel=0.05) and trained > ROWS
    steps = logged["train_steps_per_second"] * logged["train_runtime"]
    assert steps == pytest.approx(len(trainer.history), rel=0.05)


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path)

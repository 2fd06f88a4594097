"""The script of docs/how-to/trainer.md, killed and resumed, and `LakeTrainer` in each kind of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lakeckpt import LakeDataset, LakeLoader, load, mix
from lakeckpt.cli.main import main
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.integrations.transformers import LakeTrainer
from tests.frameworks import watched
from tests.frameworks.harness import Job

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROWS = watched.ROWS


def write_tokens(folder: Path) -> str:
    folder.mkdir()
    rows = [[row // 64, row % 64, *(row * factor % 251 for factor in range(1, 7))] for row in range(ROWS)]
    for part in range(4):
        tokens = pa.array(rows[part * 26 : part * 26 + 26], pa.list_(pa.int64(), 8))
        table = pa.table({"input_ids": tokens, "labels": tokens})
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=16)
    return str(folder)


def job_of(folder: Path) -> Job:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(watched.page_script("trainer", batch_size="4", persist_every="4"))
    write_tokens(folder / "tokens")
    return Job(folder, Path(watched.__file__), [str(script)])


def test_the_script_of_the_page_is_killed_and_goes_on_with_the_same_and_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job")
    watched.run_killed_on_other_ranks(job)
    assert main(["audit", str(job.folder / "run")]) == 0
    assert "PROVED" in capsys.readouterr().out


def test_the_page_adds_five_lines_at_most() -> None:
    ours = [line for line in watched.page_script("trainer").splitlines() if "lake" in line.lower()]
    assert len(ours) <= 5


# --- in this process


class Stopped(Exception):
    pass


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends training by an exception after a step, and before its cut."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            raise Stopped


class Rows(LakeTrainer):
    """Notes the rows that each step trained on. Made anew, it is another attempt."""

    history: dict[int, list[int]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if model.training:
            ids = watched.ids_of(inputs["input_ids"])
            self.history.setdefault(self.state.global_step + 1, []).extend(ids)
        return super().compute_loss(model, inputs, *args, **options)


class Attempts:
    """Attempts at a run in a folder: what each trains on takes the place of what earlier ones did at these steps."""

    def __init__(self, folder: Path, kind: type[Rows] = Rows) -> None:
        self.folder, self.kind, self.history = folder, kind, dict[int, list[int]]()
        folder.mkdir(exist_ok=True)
        self.tokens = write_tokens(folder / "tokens")

    def trainer(self, stop: int = -1, *, loads: Callable[[LakeDataset], Any] = lambda one: one, **options: Any) -> Rows:
        lake = {name: options.pop(name) for name in ("endless", "rank", "world_size") if name in options}
        dataset = LakeDataset(self.tokens, batch_size=4, shuffle=True, seed=7, **lake)
        others = {name: options.pop(name) for name in ("eval_dataset", "callbacks") if name in options}
        every = options.pop("persist_every", 3)
        others["callbacks"] = [*others.get("callbacks", []), Stop(stop)]
        settings = {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none", **options}
        arguments = TrainingArguments(output_dir=str(self.folder / "out"), **settings)
        torch.manual_seed(1)
        small = {"vocab_size": 256, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 1}
        made = self.kind(
            GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0)),
            arguments,
            train_dataset=loads(dataset),
            run=self.folder / "run",
            run_options={"persist_every": every},
            **others,
        )
        made.history = {}
        return made

    def run(self, stop: int = -1, **options: Any) -> Rows:
        """Train to the end, or to an exception after step ``stop``."""
        trainer = self.trainer(stop, **options)
        if stop < 0:
            trainer.train()
        else:
            with pytest.raises(Stopped):
                trainer.train()
        self.history.update(trainer.history)
        return trainer

    @property
    def counts(self) -> dict[int, int]:
        return dict(Counter(row for step in self.history.values() for row in step))


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path)


TWICE = dict.fromkeys(range(ROWS), 2)


@pytest.mark.parametrize("stop", [2, 10, 12, 17])
def test_epochs_go_on_from_the_newest_checkpoint_and_end_with_their_last_group(attempts: Attempts, stop: int) -> None:
    """An epoch has 26 batches: eight groups of three, and one of two. Checkpoints are of every third step."""
    attempts.run(stop, num_train_epochs=2, gradient_accumulation_steps=3, logging_steps=1)
    trainer = attempts.run(num_train_epochs=2, gradient_accumulation_steps=3, logging_steps=1)
    assert attempts.counts == TWICE and sorted(attempts.history) == list(range(1, 19))
    assert [len(attempts.history[step]) for step in (8, 9, 17, 18)] == [12, 5, 12, 5]
    logged = {entry["step"]: entry["epoch"] for entry in trainer.state.log_history if "loss" in entry}
    assert logged[9 + 3] == pytest.approx(1 + 9 / 26) and logged[18] == 2
    assert trainer.state.global_step == trainer.state.max_steps == 18 and trainer.optimizer.param_groups[0]["lr"] == 0


def test_steps_and_their_schedule_are_counted_anew_where_an_epoch_has_others(attempts: Attempts) -> None:
    rates: dict[int, float] = {}

    class Rates(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **others: Any) -> None:
            rates[state.global_step + 1] = optimizer.param_groups[0]["lr"]

    attempts.run(8, num_train_epochs=2, gradient_accumulation_steps=2)
    trainer = attempts.run(num_train_epochs=2, gradient_accumulation_steps=1, callbacks=[Rates()])
    assert attempts.counts == TWICE
    assert trainer.state.max_steps == trainer.state.global_step == 6 + (26 - 12) + 26
    assert rates[7] == pytest.approx(5e-5 * (1 - 6 / 26)) and rates[8] == pytest.approx(5e-5 * (1 - 7 / 46))
    assert trainer.optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("endless", [False, True])
def test_max_steps_ends_a_run_whatever_was_done_before(attempts: Attempts, endless: bool) -> None:
    attempts.run(16, max_steps=40, endless=endless)
    trainer = attempts.run(max_steps=40, endless=endless, logging_steps=40)
    assert sorted(attempts.history) == list(range(1, 41)) and trainer.state.global_step == 40
    first = [row for step in range(1, 26 if endless else 27) for row in attempts.history[step]]
    assert len(set(first)) == len(first) == (100 if endless else ROWS)
    assert trainer.state.log_history[-2]["epoch"] == pytest.approx(1 if endless else 1 + 14 / 26)
    again = attempts.run(max_steps=40, endless=endless)
    assert again.history == {} and again.state.global_step == 40


def test_max_steps_is_reached_where_an_epoch_had_fewer_steps_before(attempts: Attempts) -> None:
    attempts.run(4, max_steps=52, gradient_accumulation_steps=13)
    assert attempts.run(max_steps=52).state.global_step == 52


def test_an_evaluation_that_draws_random_numbers_is_before_the_cut(tmp_path: Path) -> None:
    """The model has dropout, and each evaluation of a torch DataLoader draws a seed."""
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
    options = {"num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 3, "eval_dataset": rows}
    weights = []
    for stops in ([8, -1], [-1]):
        attempts = Attempts(tmp_path / str(len(stops)))
        for stop in stops:
            model = attempts.run(stop, **options).model
        weights.append(model.transformer.wte.weight)
    assert torch.equal(*weights)


class StopAtEpochEnd(TrainerCallback):  # type: ignore[misc]
    """Ends training by an exception after the last step of an epoch, and before its evaluation."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        raise Stopped


def test_an_evaluation_at_the_end_of_an_epoch_is_made_up_for(tmp_path: Path) -> None:
    logs = []
    for name in ("whole", "stopped"):
        attempts = Attempts(tmp_path / name)
        options = {"num_train_epochs": 2, "eval_strategy": "epoch", "persist_every": 1}
        held_out = LakeDataset(attempts.tokens, batch_size=50)
        if name == "stopped":
            with pytest.raises(Stopped):
                attempts.trainer(eval_dataset=held_out, callbacks=[StopAtEpochEnd()], **options).train()
        trainer = attempts.run(eval_dataset=LakeDataset(attempts.tokens, batch_size=50), **options)
        logs.append([(one["epoch"], one["eval_loss"]) for one in trainer.state.log_history if "eval_loss" in one])
    assert [epoch for epoch, _ in logs[0]] == [1.0, 2.0]
    assert logs[0] == logs[1]


def test_an_evaluation_that_would_move_the_place_of_the_training_is_refused(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    loader = LakeLoader(LakeDataset(attempts.tokens, batch_size=50))
    options: dict[str, Any] = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ConfigError, match="goes on where it stopped, so evaluations would read other rows each time"):
        attempts.trainer(eval_dataset=loader, **options).train()
    trainer = attempts.trainer(**options, eval_dataset=loader)
    with pytest.raises(ConfigError, match="read by another LakeLoader already"):
        trainer.evaluate(trainer.train_dataset.dataset)


def repeated(row: Any) -> list[Any]:
    return [row] * (int(row["input_ids"][1]) % 3)


def some_rows(dataset: LakeDataset) -> LakeDataset:
    return LakeDataset(dataset.table, batch_size=4, shuffle=True, seed=7, transform=repeated, rows="many")


def mixed(dataset: LakeDataset) -> Any:
    other = LakeDataset(dataset.table, batch_size=4, seed=8)
    return mix({"one": (dataset, 2.0), "other": (other, 1.0)}, batch_size=4)


@pytest.mark.parametrize("loads", [some_rows, mixed])
def test_flows_and_mixtures_go_on_in_any_step(tmp_path: Path, loads: Any) -> None:
    """Some rows: 99 of an epoch, in 25 batches, of which the last has no other to make a step with."""
    options = {"loads": loads, "max_steps": 40, "gradient_accumulation_steps": 2}
    whole, killed = Attempts(tmp_path / "whole"), Attempts(tmp_path / "killed")
    whole.run(**options)
    for stop in (8, 14, 26, -1):
        killed.run(stop, **options)
    assert len(whole.history) == 40 and killed.history == whole.history


def test_a_run_that_is_done_trains_nothing(attempts: Attempts) -> None:
    attempts.run(num_train_epochs=1)
    assert attempts.run(num_train_epochs=1).history == {}
    assert attempts.run(num_train_epochs=1.5).state.global_step == 26 + 13


def test_train_may_be_called_again(attempts: Attempts) -> None:
    trainer = attempts.trainer(8, num_train_epochs=2)
    with pytest.raises(Stopped):
        trainer.train()
    trainer.train()
    attempts.history = trainer.history
    assert attempts.counts == {**TWICE, **dict.fromkeys(trainer.history[7][4:] + trainer.history[8][4:], 3)}


class ReadsAhead(Rows):
    """Takes the batches of an optimizer step when the step before is trained on."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        kept: list[Any] = self.__dict__.setdefault("kept", [])
        if not kept:
            kept.append(super().get_batch_samples(epoch_iterator, num_batches, device))
        kept.append(super().get_batch_samples(epoch_iterator, num_batches, device))
        return kept.pop(0)


def test_batches_that_were_taken_and_not_trained_on_come_again(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, ReadsAhead)
    attempts.run(8, num_train_epochs=1, gradient_accumulation_steps=2)
    attempts.run(num_train_epochs=1, gradient_accumulation_steps=2)
    assert attempts.counts == dict.fromkeys(range(ROWS), 1)


class Rebuilds(Rows):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, items = super().get_batch_samples(*args)
        return [dict(batch) for batch in batches], items


def test_batches_without_receipts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given a dict without a receipt"):
        Attempts(tmp_path, Rebuilds).run(num_train_epochs=1)


class Twisted(Rows):
    """Its evaluations get worse, so that its best model is the first."""

    losses = 0.0

    def evaluate(self, *args: Any, **options: Any) -> Any:
        self.losses += 1
        metrics = super().evaluate(*args, **options)
        metrics["eval_loss"] = self.losses
        return metrics


def test_the_last_checkpoint_is_of_the_last_step_and_not_of_the_best(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, Twisted)
    loader = LakeLoader(LakeDataset(attempts.tokens, batch_size=4), restart=True)
    last: list[torch.Tensor] = []

    class Weights(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, model: Any, **others: Any) -> None:
            last[:] = [model.transformer.wte.weight.detach().clone()]

    evaluates = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
    }
    trainer = attempts.run(
        **evaluates,
        load_best_model_at_end=True,
        greater_is_better=False,
        num_train_epochs=1,
        eval_dataset=loader,
        callbacks=[Weights(), EarlyStoppingCallback(3)],
    )
    assert trainer.state.best_global_step == 4 and trainer.state.global_step == 16
    model = attempts.trainer().model
    assert load(tmp_path / "run", {"model": model}).step == 16
    assert torch.equal(model.transformer.wte.weight, last[0])
    assert not torch.equal(trainer.model.transformer.wte.weight, last[0])


def test_logs_and_the_best_metric_come_back(attempts: Attempts) -> None:
    attempts.run(8, num_train_epochs=1, logging_steps=2)
    trainer = attempts.run(num_train_epochs=1, logging_steps=2)
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == list(range(2, 27, 2))
    assert attempts.trainer(max_steps=1).state.log_history == []


def test_what_would_lose_rows_is_refused(attempts: Attempts) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            attempts.trainer(**{"num_train_epochs": 1, **options})

    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='out'\) would load other weights"):
        attempts.trainer(num_train_epochs=1).train(resume_from_checkpoint="out")
    with pytest.raises(ConfigError, match="a run of its own"):
        attempts.trainer(num_train_epochs=1).train(trial=object())
    refused("got list", loads=lambda _: [1, 2])
    refused("without a batch_size", loads=lambda _: LakeDataset(attempts.tokens, batch_size=None))
    refused("auto_find_batch_size", auto_find_batch_size=True)
    refused(r"2 ranks.*apart.*use_cpu=True", rank=0, world_size=2)


def test_the_loader_has_the_settings_of_the_arguments(attempts: Attempts) -> None:
    trainer = attempts.trainer(num_train_epochs=1, dataloader_num_workers=1, dataloader_prefetch_factor=3)
    assert trainer.train_dataset.num_workers == 1 and trainer.get_train_dataloader() is trainer.train_dataset
    mine = attempts.trainer(num_train_epochs=1, dataloader_num_workers=1, loads=LakeLoader)
    assert mine.train_dataset.num_workers == 0


# --- what lakeckpt.data.dataset.frameworks recognises in the Trainer, by the Trainer itself


class ByHand(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.train_dataset)


def test_a_trainer_of_your_own_may_not_skip_batches(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")

    def made(steps: int) -> ByHand:
        settings = {"max_steps": steps, "save_steps": 3, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=1))
        arguments = TrainingArguments(output_dir=str(tmp_path / "out"), **settings)
        return ByHand(model, arguments, train_dataset=LakeLoader(LakeDataset(tokens, batch_size=4)))

    made(3).train()
    with pytest.raises(StateUnavailable, match=r"would read 3 batches.*ignore_data_skip=True"):
        made(6).train(resume_from_checkpoint=True)

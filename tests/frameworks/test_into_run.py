"""Real checkpoints of transformers' Trainer and of Lightning become runs: the state in a run is what they had saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import TrainerCallback

import lakeckpt
from lakeckpt.cli.main import main
from lakeckpt.convert import convert_checkpoint

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # the frameworks' imports warn


class _Seen(TrainerCallback):
    """Notes the steps that were done before each step, and the weights then."""

    def __init__(self, steps: list[tuple[int, torch.Tensor]], model: torch.nn.Module) -> None:
        self._steps, self._model = steps, model

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._steps.append((state.global_step, next(self._model.parameters()).detach().clone()))


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return list(states[0]) == list(states[1]) and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def test_a_checkpoint_of_transformers_trainer(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config)
    rows = [{"input_ids": [number % 16] * 8, "labels": [number % 16] * 8} for number in range(32)]
    arguments = TrainingArguments(str(tmp_path / "out"), max_steps=3, save_steps=3, report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    done = convert_checkpoint(tmp_path / "out" / "checkpoint-3", tmp_path / "run", to="run")
    assert (done.steps_done, done.objects) == (3, ("model", "optimizer", "scheduler"))
    fresh = GPT2LMHeadModel(config)
    again = Trainer(model=fresh, args=arguments, train_dataset=rows)
    again.create_optimizer_and_scheduler(3)
    state = {"model": fresh, "optimizer": again.optimizer, "scheduler": again.lr_scheduler}
    with lakeckpt.CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.restore() == 3
    assert equal(fresh, model)
    old, new = (one.optimizer.state_dict()["state"] for one in (trainer, again))
    assert all(torch.equal(old[key]["exp_avg"], new[key]["exp_avg"]) for key in old) and len(old) == len(new) > 0


def test_a_lake_trainer_goes_on_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from lakeckpt.integrations.transformers import LakeTrainer

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    ids = [[number % 16] * 8 for number in range(32)]
    rows = [{"input_ids": one, "labels": one} for one in ids]
    out, common = str(tmp_path / "out"), {"report_to": [], "use_cpu": True}
    Trainer(model=model, args=TrainingArguments(out, max_steps=3, save_steps=3, **common), train_dataset=rows).train()
    convert_checkpoint(tmp_path / "out" / "checkpoint-3", tmp_path / "run", to="run")
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"input_ids": ids, "labels": ids}), tmp_path / "lake" / "part-0.parquet")

    def transform(batch: lakeckpt.Batch) -> dict[str, torch.Tensor]:
        return {name: batch[name].to_padded(0) for name in ("input_ids", "labels")}

    dataset = lakeckpt.LakeDataset(tmp_path / "lake", batch_size=8, transform=transform)
    arguments = TrainingArguments(out, max_steps=6, save_strategy="no", **common)
    trainer = LakeTrainer(model=model, args=arguments, train_dataset=dataset, run=tmp_path / "run")
    before = model.transformer.wte.weight.detach().clone()
    model.transformer.wte.weight.data.zero_()
    steps = []
    trainer.add_callback(_Seen(steps, model))
    trainer.train()
    assert [step for step, _ in steps] == [3, 4, 5] and torch.equal(steps[0][1], before)
    assert main(["audit", str(tmp_path / "run")]) == 3  # PROVED FROM STEP 3: the Trainer recorded no rows


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> object:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=2)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=3, enable_checkpointing=False, default_root_dir=tmp_path, **options)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    done = convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "run", to="run")
    assert (done.source, done.steps_done, done.objects) == ("lightning", 3, ("model", "optimizer", "scheduler"))
    fresh = Module()
    made = fresh.configure_optimizers()
    state = {"model": fresh, "optimizer": made["optimizer"], "scheduler": made["lr_scheduler"]}
    with lakeckpt.CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.restore() == 3
    assert equal(fresh, module)
    assert made["lr_scheduler"].state_dict() == trainer.lr_scheduler_configs[0].scheduler.state_dict()

"""A run goes on from what something else saved: weights, moments and schedules, and the next steps are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.cli.main import main
from lakeckpt.convert import convert_checkpoint
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError
from lakeckpt.lake.storage.open import open_storage
from tests.checkpoint.interop.test_run_reader import same
from tests.checkpoint.scripts import write_table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Training:
    """A model with dropout-free layers, AdamW with two groups, and a schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        weights = [one for name, one in self.model.named_parameters() if "weight" in name]
        others = [one for name, one in self.model.named_parameters() if "weight" not in name]
        self.optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": weights}], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((2, 3), 0.1 * number)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def states(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.objects().items()}


@pytest.fixture
def trained() -> Training:
    one = Training(1)
    for number in range(1, 6):
        one.step(number)
    return one


def goes_on(run: Path, trained: Training, steps_done: int = 5) -> None:
    """The run has the state of ``trained``, and both go on alike."""
    fresh = Training(2)
    with lakeckpt.CheckpointManager(run, fresh.objects()) as manager:
        assert manager.restore() == steps_done
        assert same(fresh.states(), trained.states())
        for number in range(6, 9):
            fresh.step(number)
            trained.step(number)
            manager.step()
    assert same(fresh.states(), trained.states())
    again = Training(3)
    assert lakeckpt.load(run, again.objects()).step == steps_done + 3
    assert same(again.states(), trained.states())


def test_a_file_of_torch(trained: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({**trained.states(), "epoch": 2}, tmp_path / "old.pt")
    assert main(["convert", f"{tmp_path}/old.pt", f"{tmp_path}/run", "--to", "run", "--steps-done", "5"]) == 0
    printed = capsys.readouterr().out
    assert "are a run at step 5" in printed and "its objects: model, optimizer, scheduler." in printed
    goes_on(tmp_path / "run", trained)


def test_names_that_differ_and_wrappers(trained: Training, tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": one for name, one in trained.model.state_dict().items()}
    states = {"net": wrapped, "opt": {"adam": trained.optimizer.state_dict()}, "sched": trained.scheduler.state_dict()}
    torch.save(states, tmp_path / "old.pt")
    names = ["--object", "model=net", "--object", "optimizer=opt.adam", "--object", "scheduler=sched"]
    assert main(["convert", f"{tmp_path}/old.pt", f"{tmp_path}/run", "--to", "run", "--steps-done", "5", *names]) == 0
    goes_on(tmp_path / "run", trained)


def test_a_folder_of_transformers_trainer(trained: Training, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(trained.model.state_dict(), folder / "model.safetensors")
    torch.save(trained.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(trained.scheduler.state_dict(), folder / "scheduler.pt")
    torch.save({"anything": 1}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 0.3}))
    done = convert_checkpoint(folder, tmp_path / "run", to="run")
    assert (done.source, done.steps_done, done.objects) == ("transformers", 5, ("model", "optimizer", "scheduler"))
    goes_on(tmp_path / "run", trained)
    (folder / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointDamaged, match="no global_step"):
        convert_checkpoint(folder, tmp_path / "other", to="run")


def test_a_file_of_lightning(trained: Training, tmp_path: Path) -> None:
    states = trained.states()
    saved = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 5, "callbacks": {}, "loops": {}}
    saved |= {"state_dict": states["model"], "optimizer_states": [states["optimizer"]]}
    saved |= {"lr_schedulers": [states["scheduler"]]}
    torch.save(saved, tmp_path / "last.ckpt")
    assert convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "run", to="run").source == "lightning"
    goes_on(tmp_path / "run", trained)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_folder_of_dcp_by_way_of_torchs_own_command(trained: Training, tmp_path: Path, by_name: bool) -> None:
    states = trained.states()
    if by_name:
        states["optimizer"] = get_optimizer_state_dict(trained.model, trained.optimizer)
    dcp.save(states, checkpoint_id=tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "old.pt")
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "run", to="run", steps_done=5)
    goes_on(tmp_path / "run", trained)


def test_weights_alone_and_tied_ones(tmp_path: Path) -> None:
    tied = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 3, bias=False), "head": torch.nn.Linear(3, 3, bias=False)})
    tied["head"].weight = tied["embed"].weight
    save_file({"embed.weight": tied["embed"].weight.detach()}, tmp_path / "model.safetensors")
    convert_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", to="run", steps_done=0)
    before = tied["embed"].weight.detach().clone()
    with torch.no_grad():
        tied["embed"].weight.zero_()
    lakeckpt.load(tmp_path / "run", {"model": tied})
    assert torch.equal(tied["embed"].weight, before) and tied["head"].weight is tied["embed"].weight
    apart = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 3, bias=False), "head": torch.nn.Linear(3, 3, bias=False)})
    with pytest.raises(CheckpointMismatch, match=r"head\.weight is missing"):
        lakeckpt.load(tmp_path / "run", {"model": apart})


def test_a_loader_joins_the_run_and_the_audit_proves_it(trained: Training, tmp_path: Path) -> None:
    write_table(tmp_path / "lake")
    torch.save(trained.states(), tmp_path / "old.pt")
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "run", to="run", steps_done=5)
    fresh = Training(2)
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(tmp_path / "lake", batch_size=40, columns=["id"]))
    with lakeckpt.CheckpointManager(tmp_path / "run", {**fresh.objects(), "reader": loader}) as manager:
        manager.restore(allow_missing=("reader",))
        for batch in loader:
            fresh.step(0)
            manager.step(batch)
    report = audit(open_storage(tmp_path / "run"))
    assert report.verdict == "from step" and report.step == 10  # the rows of the steps before it are in no record
    assert report.readers[0].epochs[0].once == 200


def test_what_cannot_be_a_run_is_refused_and_nothing_is_written(trained: Training, tmp_path: Path) -> None:
    torch.save(trained.states(), tmp_path / "old.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")

    def refused(error: type[Exception], match: str, source: str = "old.pt", **options: Any) -> None:
        with pytest.raises(error, match=match):
            convert_checkpoint(tmp_path / source, tmp_path / "run", to="run", **options)
        assert not list((tmp_path / "run").rglob("*"))

    refused(ConfigError, "does not say how many optimizer steps")
    refused(ConfigError, "0 or more, got -1", steps_done=-1)
    refused(ConfigError, "there is no 'net'", objects={"model": "net"}, steps_done=1)
    refused(ConfigError, "holds no state of an object", source="none.pt", steps_done=1)
    refused(ConfigError, "without '/'", objects={"a/b": "model"}, steps_done=1)
    refused(CheckpointNotFound, "no checkpoint in", source="nowhere", steps_done=1)
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "run", to="run", steps_done=5)
    with pytest.raises(ConfigError, match="is a run already"):
        convert_checkpoint(tmp_path / "run", tmp_path / "other", to="run")
    with pytest.raises(ConfigError, match="not empty"):
        convert_checkpoint(tmp_path / "old.pt", tmp_path / "run", to="run", steps_done=5)
    with pytest.raises(ConfigError, match="are for to='run'"):
        convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.pt", to="torch", steps_done=5)
    sgd = torch.optim.SGD(Training(2).model.parameters())
    with pytest.raises(CheckpointMismatch, match="parameter groups of"):
        lakeckpt.load(tmp_path / "run", {"optimizer": sgd})


def test_the_random_states_of_the_caller_stay(trained: Training, tmp_path: Path) -> None:
    torch.save(trained.states(), tmp_path / "old.pt")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "run", to="run", steps_done=5)
    assert torch.equal(torch.rand(3), expected)

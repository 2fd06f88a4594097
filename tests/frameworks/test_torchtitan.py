"""The config of docs/how-to/torchtitan.md in torchtitan's own Trainer, killed and resumed on other ranks; its seams."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager

from lakeckpt import LakeDataset
from lakeckpt.cli.main import main
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.torchtitan import LakeCheckpoint, LakeDataLoader
from tests.frameworks import titan_on_processors
from tests.frameworks.harness import ROOT, Job, free_port

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

TOKENS = titan_on_processors.VOCABULARY
PAGE = ROOT / "docs" / "how-to" / "torchtitan.md"


def page_script() -> str:
    (text,) = re.findall(r"```python no-run\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return text


def write_texts(folder: Path) -> Path:
    """Write documents of 1 to 15 tokens: each token of the vocabulary once, as a text and as a list."""
    lengths, documents, at = [7, 1, 15, 4, 9, 12, 3], [], 0
    while at < TOKENS:
        documents.append(list(range(at, min(TOKENS, at + lengths[len(documents) % 7]))))
        at += len(documents[-1])
    texts = [" ".join(map(str, one)) for one in documents]
    folder.mkdir(parents=True)
    table = pa.table({"text": texts, "tokens": pa.array(documents, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "0.parquet", row_group_size=8)
    return folder


def test_the_config_of_the_page_is_killed_and_goes_on_on_the_same_and_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--module", "my_configs", "--config", "llama3_on_a_lake", "--checkpoint.interval", "3"]
    options += ["--dataloader.tokenized", "--dataloader.column", "tokens"]
    options += ["--dataloader.num_lanes", "4"]  # 16 sequences each: all lanes end with the 16th step
    job = Job(tmp_path / "job", Path(titan_on_processors.__file__), options)
    write_texts(job.folder / "texts")
    (job.folder / "my_configs.py").write_text(page_script())
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{job.folder}"}
    job.run(ranks=2, kill_after=6, environment=environment)
    job.run(ranks=2, kill_after=7, environment=environment)
    job.run(ranks=1, environment=environment)
    assert job.counts() == Counter(range(TOKENS))  # one epoch of 16 steps
    lines = job.lines()
    for attempt in (1, 2):
        (start,) = {
            (line["restored"], line["weights"]) for line in lines if line["attempt"] == attempt and "restored" in line
        }
        before = {line["weights"] for line in lines if line["attempt"] < attempt and line["step"] == start[0]}
        assert start[0] > 0 and before == {start[1]}
    assert main(["audit", str(job.folder / "outputs" / "checkpoint")]) == 0
    assert "PROVED" in capsys.readouterr().out


def test_the_page_adds_five_lines_at_most() -> None:
    assert len([line for line in page_script().splitlines() if "Lake" in line or "lakeckpt" in line]) <= 5


# --- in this process: the loader and the checkpointer as a Trainer calls them


class Parts:
    """What a Trainer gives to its checkpointer: a small model, its optimizer, and itself."""

    gradient_accumulation_steps = 1
    num_pipeline_parallel_microbatches = 1

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.step = torch.nn.Linear(1, 1), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def given(self, loader: Any, folder: Path) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        return {
            "dataloader": loader,
            "model_parts": [self.model],
            "optimizers": [self.optimizer],
            "lr_schedulers": scheduler,
            "states": {"train_state": self},
            "sd_adapter": None,
            "base_folder": str(folder),
        }


def loader_of(folder: Path, *, rank: int = 0, ranks: int = 1, **options: Any) -> LakeDataLoader:
    path = folder / "texts"
    if not path.exists():
        write_texts(path)
    given = {"dataset_path": str(path), "column": "tokens", "tokenized": True, "num_lanes": 2, "shuffle": False}
    config = LakeDataLoader.Config(**{**given, **options})
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=Words(),
        seq_len=8,
        local_batch_size=2,
        snapshot_every_n_steps=None,
    )


class Words:
    """A tokenizer with torchtitan's arguments."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [1] * add_bos + [int(word) for word in text.split()] + [2] * add_eos


def test_batches_are_what_a_model_of_torchtitan_takes(tmp_path: Path) -> None:
    inputs, labels = next(iter(loader_of(tmp_path)))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 8)
    assert {inputs["input"].dtype, inputs["positions"].dtype, labels.dtype} == {torch.int64}
    assert inputs["input"][0].tolist() == [*range(8)]
    assert inputs["positions"][0].tolist() == [*range(7), 0]
    assert labels[0].tolist() == [1, 2, 3, 4, 5, 6, -100, -100]


def test_texts_are_tokenized_with_the_tokens_of_beginning_and_end(tmp_path: Path) -> None:
    inputs, labels = next(iter(loader_of(tmp_path, column="text", tokenized=False)))
    assert inputs["input"][0].tolist() == [1, *range(7)]
    assert labels[0].tolist() == [*range(7), 2]


def test_a_loader_goes_on_on_other_ranks_by_torchtitans_own_checkpoint(tmp_path: Path) -> None:
    rank = loader_of(tmp_path, rank=1, ranks=2, endless=False)
    batches = iter(rank)
    first = loader_of(tmp_path, rank=0, ranks=2, endless=False)
    others = iter(first)
    seen = [next(one)[0]["input"] for _ in range(5) for one in (batches, others)]
    assert rank.state_dict() == first.state_dict()
    dcp.save({"dataloader": rank}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    alone = loader_of(tmp_path, endless=False)
    dcp.load({"dataloader": alone}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    seen += [inputs["input"] for inputs, _ in alone]
    assert Counter(torch.cat(seen).flatten().tolist()) == Counter(range(TOKENS))


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_torchtitans_own_checkpointer_brings_the_loader_back(tmp_path: Path) -> None:
    config = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False)
    config.initial_load_model_only = False
    rows = []
    for goes_on in (False, True):
        trainer, loader = Parts(), loader_of(tmp_path, num_lanes=1)
        checkpointer = config.build(**trainer.given(loader, tmp_path))
        assert checkpointer.load() is goes_on
        batches = iter(loader)
        rows += [next(batches)[0]["input"] for _ in range(3)]
        if not goes_on:
            trainer.step = 3
            checkpointer.save(3)
            next(batches)  # is lost with the process
        checkpointer.close()
    assert torch.cat(rows).flatten().tolist() == [*range(96)]


def test_the_checkpointer_saves_by_interval_and_the_last_step_and_goes_back(tmp_path: Path) -> None:
    config = LakeCheckpoint.Config(interval=2, keep_latest_k=0)
    trainer, loader = Parts(), loader_of(tmp_path, num_lanes=1)
    checkpointer = config.build(**trainer.given(loader, tmp_path))
    assert not checkpointer.load(-1)
    batches = iter(loader)
    for step in range(1, 6):
        trainer.step = step
        next(batches)
        checkpointer.maybe_wait_for_staging()
        trainer.model.weight.data.fill_(step)
        assert checkpointer.save(step, last_step=step == 5)
    checkpointer.maybe_wait_for_saving()
    checkpointer.close()
    for asked, step in ((-1, 5), (2, 2)):
        again, loader = Parts(), loader_of(tmp_path, num_lanes=1)
        checkpointer = config.build(**again.given(loader, tmp_path))
        assert checkpointer.load(asked)
        assert (again.step, again.model.weight.item()) == (step, step)
        assert next(iter(loader))[0]["input"][0, 0] == step * 16
        checkpointer.close()


def test_the_parts_of_a_pipeline_come_back(tmp_path: Path) -> None:
    found = []
    for value in (5.0, 0.0):
        trainer, loader = Parts(), loader_of(tmp_path)
        other = torch.nn.Linear(2, 1)
        other.weight.data.fill_(value)
        parts = {
            "model_parts": [trainer.model, other],
            "optimizers": [trainer.optimizer, torch.optim.SGD([other.weight])],
        }
        checkpointer = LakeCheckpoint.Config().build(**{**trainer.given(loader, tmp_path), **parts})
        if not checkpointer.load():
            next(iter(loader))
            checkpointer.save(1, last_step=True)
        found.append(other.weight.flatten().tolist())
        checkpointer.close()
    assert found == [[5.0, 5.0]] * 2


def make(*, rank: int, world_size: int, batch_size: int, length: int, tokenizer: Any) -> LakeDataset:
    def first(batch: Any) -> dict[str, Any]:
        tokens = torch.stack([torch.arange(length) + one[0] for one in batch["tokens"]])
        return {"tokens": tokens, "labels": tokens}

    path = Path(os.environ["TEXTS"])
    return LakeDataset(
        str(path), batch_size=batch_size, columns=["tokens"], transform=first, rank=rank, world_size=world_size
    )


def test_a_dataset_of_ones_own_takes_the_place_of_packed_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXTS", str(tmp_path / "texts"))
    inputs, labels = next(iter(loader_of(tmp_path, make=make)))
    assert set(inputs) == {"input"} and torch.equal(inputs["input"], labels)
    assert labels[:, 0].tolist() == [0, 7]


def test_a_trainer_that_takes_batches_ahead_is_refused(tmp_path: Path) -> None:
    trainer, loader = Parts(), loader_of(tmp_path)
    checkpointer = LakeCheckpoint.Config().build(**trainer.given(loader, tmp_path))
    checkpointer.load()
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ConfigError, match="2 batches were taken for a step that uses 1"):
        checkpointer.save(1)
    checkpointer.close()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    trainer = Parts()
    with pytest.raises(ConfigError, match=r"LakeDataLoader\.Config"):
        LakeCheckpoint.Config().build(**trainer.given(None, tmp_path))
    loader = loader_of(tmp_path)
    with pytest.raises(ConfigError, match="no initial_load_path"):
        LakeCheckpoint.Config(initial_load_path="/weights").build(**trainer.given(loader, tmp_path))
    with pytest.raises(ConfigError, match="dataset_path"):
        loader_of(tmp_path, dataset_path=None)
    checkpointer = LakeCheckpoint.Config().build(**trainer.given(loader, tmp_path))
    checkpointer.load()
    with pytest.raises(ConfigError, match=r"has done step 7"):
        checkpointer.save(7)
    checkpointer.close()
    off = LakeCheckpoint.Config(enable=False).build(**trainer.given(None, tmp_path))
    assert not off.load() and not off.save(1)
    off.close()

"""The script of docs/how-to/accelerate.md, killed and resumed, and what accelerate itself does with our loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator, DistributedType, data_loader, skip_first_batches
from torch.utils.data import DataLoader

from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.cli.main import main
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.integrations.accelerate import LakeCheckpoint
from tests.frameworks import watched
from tests.frameworks.harness import Job

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROWS = watched.ROWS


def write_events(folder: Path) -> str:
    folder.mkdir()
    columns = {"user": [row // 64 for row in range(ROWS)], "item": [row % 64 for row in range(ROWS)]}
    table = pa.table({**columns, "label": pa.array([row / ROWS for row in range(ROWS)], pa.float32())})
    for part in range(4):
        pq.write_table(table.slice(part * 26, 26), folder / f"{part}.parquet", row_group_size=16)
    return str(folder)


def job_of(folder: Path) -> Job:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(watched.page_script("accelerate", batch_size="4", persist_every="4"))
    write_events(folder / "events")
    return Job(folder, Path(watched.__file__), [str(script)])


def test_the_script_of_the_page_is_killed_and_goes_on_with_the_same_and_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job")
    watched.run_killed_on_other_ranks(job)
    assert main(["audit", str(job.folder / "run")]) == 0
    assert "PROVED" in capsys.readouterr().out


def test_the_page_adds_five_lines_at_most() -> None:
    ours = [line for line in watched.page_script("accelerate").splitlines() if "lake" in line.lower() or "run." in line]
    assert len(ours) <= 5


# --- in this process


@pytest.fixture
def events(tmp_path: Path) -> str:
    return write_events(tmp_path / "events")


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def dataset_of(events: str, **options: Any) -> LakeDataset:
    return LakeDataset(events, **{"batch_size": 4, "columns": ["item"], **options})


def prepared(accelerator: Accelerator, events: str) -> tuple[Any, ...]:
    model = torch.nn.Linear(1, 1)
    found: tuple[Any, ...] = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), LakeLoader(dataset_of(events))
    )
    return found


def train(run: LakeCheckpoint, accelerator: Accelerator, objects: tuple[Any, ...], batches: int) -> None:
    model, optimizer, loader = objects
    for _, batch in zip(range(batches), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["item"][:, None].float()).mean())
            optimizer.step()
            optimizer.zero_grad()
        run.step(batch)


def test_steps_are_those_of_the_optimizer_and_the_last_group_of_an_epoch_is_one(
    tmp_path: Path, events: str, accelerator: Accelerator
) -> None:
    objects = prepared(accelerator, events)
    with LakeCheckpoint(accelerator, tmp_path / "run", *objects) as run:
        train(run, accelerator, objects, 5)
        assert run.steps_done == 2
        train(run, accelerator, objects, 1_000)
        assert run.steps_done == 13
    with LakeCheckpoint(accelerator, tmp_path / "run", *prepared(accelerator, events)) as run:
        assert run.steps_done == 13 and run.manager.latest() is not None


def test_load_state_is_refused_while_the_run_is_open_and_save_state_is_not(
    tmp_path: Path, events: str, accelerator: Accelerator
) -> None:
    objects = prepared(accelerator, events)
    folder = str(tmp_path / "theirs")
    accelerator.save_state(folder)
    with LakeCheckpoint(accelerator, tmp_path / "run", *objects) as run:
        train(run, accelerator, objects, 4)
        with pytest.raises(ConfigError, match=r"load_state\(.*at step 2"):
            accelerator.load_state(folder)
        accelerator.save_state(str(tmp_path / "other"))
    accelerator.load_state(folder)


def test_an_exception_saves_nothing(tmp_path: Path, events: str, accelerator: Accelerator) -> None:
    objects = prepared(accelerator, events)
    run = LakeCheckpoint(accelerator, tmp_path / "run", *objects)

    def fails() -> None:
        with run:
            train(run, accelerator, objects, 4)
            raise RuntimeError("while training")

    with pytest.raises(RuntimeError, match="while training"):
        fails()
    assert run.manager.latest() is None


def test_what_cannot_be_restored_is_refused(tmp_path: Path, events: str, accelerator: Accelerator) -> None:
    def refused(match: str, *objects: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            LakeCheckpoint(accelerator, tmp_path / "run", *objects)

    model, optimizer, loader = prepared(accelerator, events)
    refused("needs the LakeLoader", model, optimizer)
    refused("was not prepared", model, LakeLoader(dataset_of(events)))
    refused("place of a DataLoader", model, DataLoader([1, 2]))
    refused("lacks state_dict", model, loader, object())
    with pytest.raises(ConfigError, match="accelerator first, got str"):
        LakeCheckpoint("run", accelerator, model, loader)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="last, or its receipt"):
        LakeCheckpoint(accelerator, tmp_path / "run", model, loader).step(None)


def test_ranks_that_would_train_apart_or_hold_parts_are_refused(
    tmp_path: Path, events: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = accelerator.prepare(LakeLoader(dataset_of(events, rank=0, world_size=2)))
    assert accelerator.distributed_type == DistributedType.NO
    with pytest.raises(ConfigError, match=r"2 ranks.*apart.*cpu=True"):
        LakeCheckpoint(accelerator, tmp_path / "run", loader)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ConfigError, match=r"divided over ranks \(FSDP\)"):
        LakeCheckpoint(accelerator, tmp_path / "run", loader)


# --- what lakeckpt.data.dataset.frameworks recognises in accelerate, by accelerate itself


def test_accelerate_takes_a_loader_as_it_is_and_reads_nothing_ahead(events: str, accelerator: Accelerator) -> None:
    loader = LakeLoader(dataset_of(events))
    assert accelerator.prepare(loader) is loader
    whole = [batch["item"].tolist() for batch in LakeLoader(dataset_of(events))]
    for number, batch in enumerate(loader):
        assert batch["item"].tolist() == whole[number] and loader.last_receipt == batch.receipt
        assert accelerator.gradient_state.end_of_dataloader == (number == 25)


@pytest.mark.parametrize("dispatches", [True, False])
def test_accelerate_may_not_deal_rows_that_are_dealt(events: str, accelerator: Accelerator, dispatches: bool) -> None:
    rows = DataLoader(dataset_of(events, batch_size=None, rank=0, world_size=2), batch_size=4)
    wrapped = data_loader.prepare_data_loader(
        rows, accelerator.device, num_processes=2, process_index=0, put_on_device=True, dispatch_batches=dispatches
    )
    dealer = "DataLoaderDispatcher" if dispatches else "IterableDatasetShard"
    with pytest.raises(ConfigError, match=rf"rank 0 of 2.*{dealer} would deal"):
        next(iter(wrapped))


def test_batches_are_not_skipped(events: str, accelerator: Accelerator) -> None:
    loader = accelerator.prepare(LakeLoader(dataset_of(events)))
    next(iter(loader))
    with pytest.raises(StateUnavailable, match=r"would read 3 batches.*ignore_data_skip=True"):
        next(iter(skip_first_batches(loader, 3)))


def test_a_dataset_that_accelerate_reads_ahead_gives_no_state(events: str, accelerator: Accelerator) -> None:
    dataset = dataset_of(events, batch_size=None)
    reading = iter(accelerator.prepare(DataLoader(dataset, batch_size=4)))
    next(reading)
    with pytest.raises(StateUnavailable, match="which is a batch ahead"):
        dataset.state_dict()

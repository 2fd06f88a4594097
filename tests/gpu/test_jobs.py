"""Whole jobs on a GPU, killed and gone on with: the rows and, bit by bit, the weights of a job that nobody killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.local import LocalStorage
from tests.gpu.device import DEVICE, MARKS, arenas
from tests.gpu.job import MANNERS

__all__ = ["arenas"]
pytestmark = MARKS
ROWS = 400
STEPS = 40  # more than an epoch
JOB = Path(__file__).with_name("job.py")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lake")
    ids = np.arange(ROWS)
    columns = {"id": ids, "x": (ids / ROWS).astype(np.float32)}
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=50)
    return folder


def attempt(table: Path, folder: Path, *, ends: int = 0, **options: Any) -> dict[str, Any]:
    """Run the job once: what it noted, its last line last."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(JOB), "--table", str(table), "--run", str(folder / "run"), "--notes", str(notes)]
    for name, value in {"device": DEVICE, "steps": STEPS, **options}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    before = set(notes.glob("*.jsonl"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == ends, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    (made,) = set(notes.glob("*.jsonl")) - before
    lines = [json.loads(line) for line in made.read_text().splitlines()]
    return {"restored": lines[0]["restored"], "steps": lines[1:], "last": lines[-1], "said": done.stderr}


def counted(*attempts: dict[str, Any]) -> Counter[tuple[int, int]]:
    """How often each row of each epoch counted in the history that survived."""
    surviving: dict[int, list[list[int]]] = {}
    for one in attempts:
        surviving = {step: ids for step, ids in surviving.items() if step <= one["restored"]}
        surviving |= {line["step"]: line["ids"] for line in one["steps"] if "step" in line}
    return Counter((epoch, row) for ids in surviving.values() for epoch, row in ids)


@pytest.mark.parametrize("manner", MANNERS)
def test_jobs_that_were_killed_end_bit_by_bit_like_one_that_was_not(
    table: Path, tmp_path: Path, arenas: str, manner: str
) -> None:
    """Once from a checkpoint, once from what the node's memory still held."""
    whole = attempt(table, tmp_path / "whole", manner=manner)
    assert whole["last"]["finished"] == STEPS
    for name, how in (("stored", {}), ("captured", {"arenas": arenas})):
        folder = tmp_path / name
        first = attempt(table, folder, die_at=33, ends=-signal.SIGKILL, manner=manner, **how)
        second = attempt(table, folder, manner=manner, workers=2, **how)
        assert second["restored"] in ((32, 33) if how else (30,)), second["said"]
        assert second["last"] == whole["last"], name
        rows = counted(first, second)
        assert rows == counted(whole) and max(rows.values()) == 1
        assert sum(epoch == 0 for epoch, _ in rows) == ROWS
        assert "CaptureWarning" not in first["said"] + second["said"]
        assert audit(LocalStorage(folder / "run")).exactly_once


def test_a_run_of_the_gpu_goes_on_on_the_cpu_and_back(table: Path, tmp_path: Path) -> None:
    attempt(table, tmp_path, die_at=12, ends=-signal.SIGKILL)
    there = attempt(table, tmp_path, device="cpu", steps=20)
    back = attempt(table, tmp_path)
    assert there["restored"] == 10 and back["restored"] == 20 and back["last"]["finished"] == STEPS


def test_the_first_lines_of_the_readme_hold_on_a_gpu(table: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(table, batch_size=50, shuffle=True, seed=7), pin_memory=True)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    with lakeckpt.CheckpointManager(tmp_path / "run", state, persist_every=3) as manager:
        manager.restore()
        for batch in loader:
            model(batch["x"].to(DEVICE, non_blocking=True)[:, None]).mean().backward()
            optimizer.step(), optimizer.zero_grad()
            manager.step(batch)
    weights = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    other = lakeckpt.LakeLoader(lakeckpt.LakeDataset(table, batch_size=50, shuffle=True, seed=7))
    again = lakeckpt.CheckpointManager(tmp_path / "run", {**state, "reader": other})
    assert again.restore() == 8 and torch.equal(model.weight, weights) and other.epoch == 1

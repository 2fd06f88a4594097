"""Rows that a transform yields, over real processes that die: none is lost or repeated, and no rank waits for ever."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lakeckpt import merge_states
from tests.data.flow_jobs import items, loader_of, whole
from tests.data.reading import ROWS
from tests.tracking.processes import run_processes


def read(rank: int, world_size: int, lake: Path, folder: Path, state: Any, options: dict[str, Any]) -> None:
    """Read an epoch in lockstep, and write what each step got, and the state after it. Rank 1 may be killed."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size
    )
    dies_at = options.pop("dies_at", None)
    loader = loader_of(lake, **options)
    if state is not None:
        loader.load_state_dict(state)
    with (folder / f"{rank}.jsonl").open("w") as file:
        for step, batch in enumerate(loader):
            if rank == 1 and step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            rows = torch.tensor([batch.receipt.rows])
            dist.all_reduce(rows)  # as DistributedDataParallel does in each step
            assert rows.item() > 0, "no step is without rows on all ranks"
            print(json.dumps([items(batch), loader.state_dict()]), file=file, flush=True)
        print(json.dumps([[], loader.state_dict()]), file=file, flush=True)
    dist.destroy_process_group()


def steps_of(folder: Path, world_size: int) -> list[list[Any]]:
    """For each step that all ranks have written: of each rank, what it got and its state."""
    lines = [(folder / f"{rank}.jsonl").read_text().splitlines() for rank in range(world_size)]
    return [[json.loads(line) for line in step] for step in zip(*lines, strict=False)]


def run(lake: Path, folder: Path, world_size: int, state: Any, *, ends: list[int] | None = None, **options: Any) -> Any:
    folder.mkdir()
    run_processes(world_size, read, world_size, lake, folder, state, options, ends=ends)
    return steps_of(folder, world_size)


@pytest.mark.parametrize(("dies_at", "num_workers"), [(0, 0), pytest.param(5, 2, marks=pytest.mark.soak)])
def test_a_job_whose_rank_is_killed_goes_on_with_other_ranks(
    lake: Path, tmp_path: Path, dies_at: int, num_workers: int
) -> None:
    first = run(lake, tmp_path / "first", 2, None, num_lanes=4, num_workers=num_workers, dies_at=dies_at, ends=[1, -9])
    state = merge_states([one for _, one in first[-1]]) if first else None
    second = run(lake, tmp_path / "second", 3, state, num_lanes=3, batch_size=3)
    found = [tuple(item) for step in [*first, *second] for got, _ in step for item in got]
    assert sorted(found) == whole(ROWS)
    assert merge_states([one for _, one in second[-1]])["epoch"] == 1

"""Micro-batches in pinned memory: real ones, that stay as they were while the device still copies from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import LakeLoader
from tests.data.reading import dataset_of
from tests.gpu.device import DEVICE, MARKS

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE != "cuda", reason="only what a device copies is pinned")]
ROWS = 6000


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lake")
    ids = np.arange(ROWS)
    wide = {f"x{number}": (ids * (number + 1)).astype(np.float32) for number in range(20)}
    tokens = pa.array([np.arange(one, one + one % 7, dtype=np.int32) for one in ids], pa.list_(pa.int32()))
    pq.write_table(pa.table({"id": ids, **wide, "tokens": tokens}), folder / "part-0.parquet", row_group_size=700)
    return folder


def loader_of(table: Path, workers: int, start: str | None = None, **how: Any) -> LakeLoader:
    dataset = dataset_of(table, batch_size=64, shuffle=True, seed=3, **how)
    return LakeLoader(dataset, num_workers=workers, pin_memory=True, multiprocessing_context=start)


@pytest.mark.parametrize(
    ("workers", "start"), [(0, None), (2, "fork"), (2, "spawn"), (2, "forkserver")], ids=str
)  # CUDA is in use by then: what is forked must not touch it
def test_what_the_device_copies_is_what_was_read(table: Path, workers: int, start: str | None) -> None:
    torch.zeros(1, device=DEVICE)
    seen, kept = [], []
    for batch in loader_of(table, workers, start):
        assert batch["id"].is_pinned() and batch["x3"].is_pinned()
        torch.cuda._sleep(2 * 10**6)  # the copies come late: the host is batches ahead
        there = {name: batch[name].to(DEVICE, non_blocking=True) for name in ("id", "x0", "x3", "x19")}
        kept.append(there)
        seen.append(batch["id"].clone())
    torch.cuda.synchronize()
    ids = torch.cat([one["id"] for one in kept]).cpu()
    assert torch.equal(ids, torch.cat(seen)) and torch.equal(ids.sort().values, torch.arange(ROWS))
    for one in kept:
        for number in (0, 3, 19):
            assert torch.equal(one[f"x{number}"], (one["id"] * (number + 1)).float())


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_columns_are_pinned_whole(table: Path, workers: int) -> None:
    count = 0
    for batch in loader_of(table, workers, columns=["id", "tokens"]):
        tokens = batch["tokens"]
        parts = [tokens.values, tokens.offsets] if hasattr(tokens, "offsets") else [tokens[0], tokens[1]]
        assert all(one.is_pinned() for one in parts if one.numel())
        count += len(batch["id"])
    assert count == ROWS

"""Two ranks that share one GPU: DDP over gloo, killed, and gone on with on one rank and on two."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lakeckpt
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.intervals import Intervals
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Reader
from tests.gpu.device import DEVICE, MARKS, arenas
from tests.tracking.processes import run_processes

__all__ = ["arenas"]
pytestmark = MARKS
PATIENCE_S = 120


def job(rank: int, world_size: int, folder: str, arenas: str, steps: int, dies: bool) -> None:
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet{steps}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    torch.manual_seed(rank)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).to(DEVICE)
    model = torch.nn.parallel.DistributedDataParallel(inner) if world_size > 1 else inner
    optimizer = torch.optim.AdamW(model.parameters())
    reader = Reader(rank=rank, world_size=world_size)
    objects = {"model": model, "optimizer": optimizer, "reader": reader}
    with lakeckpt.CheckpointManager(
        f"{folder}/run", objects, capture_every=1, persist_every=4, arenas=arenas, timeout_s=PATIENCE_S
    ) as manager:
        done = manager.restore()
        weights = [one.detach().cpu().tolist() for one in inner.parameters()]
        Path(folder, f"first{steps}.{rank}").write_text(f"{done} {weights}")
        for receipt in reader:
            data = torch.full((4, 8), receipt.spans[0].start / 1000, device=DEVICE)
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step()
            done += 1
            if done == steps:
                break
        if dies:
            manager._saves._engine.wait()  # type: ignore[union-attr]
            if world_size > 1:
                dist.barrier()
            weights = [one.detach().cpu().tolist() for one in inner.parameters()]
            Path(folder, f"last{steps}.{rank}").write_text(f"{done} {weights}")
            if world_size > 1:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    if world_size > 1:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_on_one_gpu_go_on_from_memory_and_one_rank_from_them(tmp_path: Path, arenas: str) -> None:
    folder = str(tmp_path)
    run_processes(2, job, 2, folder, arenas, 6, True, ends=[-9, -9], patience_s=PATIENCE_S)
    run_processes(2, job, 2, folder, arenas, 11, False, patience_s=PATIENCE_S)
    for rank in range(2):
        assert (tmp_path / f"first11.{rank}").read_text() == (tmp_path / f"last6.{rank}").read_text()
    run_processes(1, job, 1, folder, arenas, 15, False, patience_s=PATIENCE_S)
    assert (tmp_path / "first15.0").read_text().startswith("11 ")
    history = read_history(LocalStorage(tmp_path / "run"))
    assert history.chain[-1].step == 15
    rows = [one.readers["reader"].consumed()[0] for one in history.chain]
    assert Intervals.empty().union(*rows).size == sum(one.size for one in rows) == 10 * (2 * 11 + 4)

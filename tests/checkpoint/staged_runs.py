"""This module saves runs of two stages, each sharded over two ranks, for tests of pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lakeckpt import CheckpointManager
from tests.tracking.processes import run_processes


def stages(
    rank: int,
    world_size: int,
    *,
    alike: bool,
    value: float,
    sizes: tuple[int, int] = (2, 2),
    order: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """The stage of ``rank`` and its optimizer, all of which hold numbers made of ``value`` and the stage; alike in
    shapes and names, or in neither. Stages are of the ranks in their order, or in another ``order``."""
    ranks = torch.arange(world_size) if order is None else torch.tensor(order)
    mesh = DeviceMesh("cpu", ranks.reshape(sizes), mesh_dim_names=("stage", "shard"))
    stage = ranks.tolist().index(rank) // sizes[1]
    layer = torch.nn.Linear(2 if alike else 2 + stage, 3)
    fully_shard(layer, mesh=mesh["shard"])
    model = torch.nn.Module()
    model.add_module("layer" if alike else f"layer{stage}", layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=False)
    for at, parameter in enumerate(layer.parameters()):
        with torch.no_grad():
            parameter.to_local().fill_(value + 10 * stage + rank % sizes[1] + at / 8)
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(rank: int, place: str, alike: bool) -> None:
    """One rank of four saves step 1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}.meet", rank=rank, world_size=4)
    with CheckpointManager(place, stages(rank, 4, alike=alike, value=1.0), persist_every=1) as manager:
        manager.restore()
        manager.step()
    dist.destroy_process_group()


def save_both(folder: Path) -> None:
    """Save a run of stages with the same names and shapes, ``alike``, and one of stages with others, ``unlike``."""
    for name, alike in (("alike", True), ("unlike", False)):
        run_processes(4, save, str(folder / name), alike)

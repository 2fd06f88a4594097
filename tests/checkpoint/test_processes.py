"""Real processes over torch.distributed: DDP replicas, a killed rank, and restores on other numbers of ranks."""

from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing.faulty_storage import FaultyStorage
from tests.checkpoint.rig import Reader, training
from tests.checkpoint.seams import manager_with
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes


def meet(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet{world_size}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )


def weights_of(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def job(rank: int, world_size: int, folder: str, steps: int, compile_it: bool) -> None:
    meet(rank, world_size, folder)
    objects: dict[str, Any] = training(seed=world_size)
    bare = objects["model"]
    if compile_it:
        objects["model"] = torch.compile(bare, backend="eager")
    if world_size > 1:
        objects["model"] = DistributedDataParallel(objects["model"])
    objects["reader"] = reader = Reader(rank=rank, world_size=world_size)
    with CheckpointManager(f"{folder}/run", objects, persist_every=2, timeout_s=PATIENCE_S, keep=2) as manager:
        done = manager.restore()
        Path(folder, f"first{world_size}.{rank}").write_text(repr(weights_of(bare)))
        for receipt in reader:
            data = torch.full((4, 8), receipt.spans[0].start / 1000) + torch.arange(8) + torch.rand(4, 8) * rank
            loss = objects["model"](data).square().mean()
            objects["optimizer"].zero_grad()
            loss.backward()
            objects["optimizer"].step()
            objects["scheduler"].step()
            manager.step()
            done += 1
            if done == steps:
                break
    Path(folder, f"last{world_size}.{rank}").write_text(repr(weights_of(bare)))
    Path(folder, f"mean{world_size}.{rank}").write_text(repr(bare[1].running_mean.tolist()))
    if world_size > 1:
        dist.destroy_process_group()


def test_a_job_goes_on_from_two_ranks_to_one_to_three_with_wrappers_or_without(tmp_path: Path) -> None:
    run_processes(2, job, 2, str(tmp_path), 5, False)
    run_processes(1, job, 1, str(tmp_path), 9, True)
    run_processes(3, job, 3, str(tmp_path), 13, False)
    for before, after in ((2, 1), (1, 3)):
        for rank in range(after):
            assert (tmp_path / f"first{after}.{rank}").read_text() == (tmp_path / f"last{before}.0").read_text()
    assert (tmp_path / "mean2.0").read_text() != (tmp_path / "mean2.1").read_text()  # of its own batches
    history = read_history(LocalStorage(tmp_path / "run"))
    assert [one.step for one in history.chain] == [2, 4, 5, 6, 8, 9, 10, 12, 13]
    rows = [one.readers["reader"].consumed()[0] for one in history.chain]
    assert Intervals.empty().union(*rows).size == sum(one.size for one in rows) == 10 * (2 * 5 + 4 + 3 * 4)


def by_the_clock(rank: int, world_size: int, folder: str) -> None:
    meet(rank, world_size, folder)
    with CheckpointManager(
        f"{folder}/run", training(), persist_every=timedelta(microseconds=1), timeout_s=PATIENCE_S
    ) as manager:
        manager.restore()
        saved = [(manager.step(), manager.wait() is not None)[1] for _ in range(4)]
    Path(folder, f"saved.{rank}").write_text(repr(saved))
    dist.destroy_process_group()


def test_ranks_hear_of_saves_by_the_clock_through_the_store(tmp_path: Path) -> None:
    run_processes(2, by_the_clock, 2, str(tmp_path))
    told = {(tmp_path / f"saved.{rank}").read_text() for rank in range(2)}
    assert told == {repr([False, True, True, True])}


def some_ranks(rank: int, world_size: int, folder: str) -> None:
    """Two data-parallel groups of two ranks each keep two runs."""
    meet(rank, world_size, folder)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    with CheckpointManager(f"{folder}/run{rank % 2}", training(), group=mine, timeout_s=PATIENCE_S) as manager:
        manager.restore()
        manager.step()
    dist.destroy_process_group()


@pytest.mark.soak
def test_a_group_of_some_ranks_keeps_a_run_of_its_own(tmp_path: Path) -> None:
    run_processes(4, some_ranks, 4, str(tmp_path))
    for run in ("run0", "run1"):
        tip = read_history(LocalStorage(tmp_path / run)).tip
        assert tip is not None and tip.world_size == 2 and tip.step == 1


def one_fails(rank: int, world_size: int, folder: str, failing: int, way: str, capture_every: int | None) -> None:
    """Its storage is full from the second save on, for the note of the failure, too; or its state cannot be built."""
    meet(rank, world_size, folder)
    fails = False

    def refuse(method: str, path: str) -> None:
        if fails and way == "full" and method.startswith("put"):
            raise StorageError(errno.ENOSPC, "the cause")

    class Own:
        def state_dict(self) -> dict[str, Any]:
            if fails and way == "state":
                raise RuntimeError("the cause")
            return {"own": torch.full((4,), float(rank))}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    beside = {} if capture_every is None else {"capture_every": capture_every, "arenas": f"{folder}/arenas"}
    storage = FaultyStorage(LocalStorage(f"{folder}/run"), before=refuse)
    options = {"persist_every": 2, "timeout_s": 10_000.0, "fail_after": 0, **beside}
    try:
        with manager_with(storage, {**training(), "own": Own()}, **options) as manager:
            manager.restore()
            for step in range(1, 5):
                manager.step()
                if step == 2:
                    manager.wait()
                    dist.barrier()
                    fails = rank == failing
            manager.wait()
    except Exception as error:
        Path(folder, f"said.{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.parametrize("capture_every", [None, 1])
@pytest.mark.parametrize("way", ["full", "state"])
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_process_whose_save_fails_tells_the_other_one_why(
    failing: int, way: str, capture_every: int | None, tmp_path: Path
) -> None:
    run_processes(2, one_fails, 2, str(tmp_path), failing, way, capture_every)
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert all("the cause" in one for one in said), said
    assert f"rank {failing}" in said[1 - failing]
    assert [one.step for one in read_history(LocalStorage(tmp_path / "run")).chain] == [2]

"""One of two ranks leaves its manager early, or its process is killed: the other one learns why, and waits for nobody.

`TIMEOUT_S` is far longer than a test may take: a rank that waits for the other one hangs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import LakeckptError, SaveRefused
from lakeckpt.tracking.exchange import StoreExchange
from lakeckpt.tracking.obstacles import own_node
from tests.checkpoint.rig import HubExchange, MemoryStorage, Reader, manager, run_ranks, train_step, training

TIMEOUT_S = 10_000.0


def results_of(storage: MemoryStorage, steps: tuple[int, int], dies: int | None = None, **options: Any) -> list[Any]:
    """What both ranks raised. They make so many ``steps``, of which every second is saved; the process of rank ``dies``
    then ends."""
    store = dist.HashStore()
    processes = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    stated = {rank: f"{own_node()} {one.pid}" for rank, one in enumerate(processes)}

    def body(rank: int, _: HubExchange) -> Any:
        exchange = StoreExchange(store, rank=rank, world_size=2, timeout_s=TIMEOUT_S)
        exchange.obstacles._watched.clear()
        exchange.obstacles.watch(stated)
        objects = {**training(), "reader": Reader(rank=rank, world_size=2)}
        saver = manager(storage, objects, exchange=exchange, persist_every=2, timeout_s=TIMEOUT_S, **options)
        try:
            saver.restore()
            for _ in zip(range(steps[rank]), objects["reader"], strict=False):
                train_step(objects)
                saver.step()
            saver.wait()
            if rank == dies:
                processes[rank].kill()
                return saver  # nothing closes it
            saver.__exit__(None, None, None)
        except LakeckptError as error:
            saver.__exit__(type(error), error, None)
            return error
        return None

    try:
        return run_ranks(2, body)
    finally:
        for one in processes:
            one.kill()
            one.communicate()


WAYS = [pytest.param({}, id="synchronous"), pytest.param({"capture_every": 1}, id="captured")]


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {**request.param, "arenas": tmp_path} if request.param else {}


@pytest.mark.parametrize("options", WAYS, indirect=True)
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_leaves_early_says_so_to_the_rank_that_trains_on(options: dict[str, Any], leaves: int) -> None:
    storage = MemoryStorage()
    results = results_of(storage, (9, 2) if leaves else (2, 9), **options)
    other = results[1 - leaves]
    assert results[leaves] is None and isinstance(other, SaveRefused), results
    said = f"rank {leaves} has stopped: it closed its manager after step 2. Let the loops of all ranks end at one step"
    assert said in str(other)
    assert [one.step for one in read_history(storage).chain] == [2]


@pytest.mark.parametrize("steps", [0, 2, 3])
@pytest.mark.parametrize("options", WAYS, indirect=True)
def test_ranks_that_leave_at_one_step_are_no_failure(options: dict[str, Any], steps: int) -> None:
    storage = MemoryStorage()
    assert results_of(storage, (steps, steps), **options) == [None, None]
    assert sorted(one.step for one in read_history(storage).chain) == [step for step in (2, 3) if step <= steps]


@pytest.mark.parametrize("options", WAYS, indirect=True)
@pytest.mark.parametrize("dies", [0, 1])
def test_nobody_waits_for_a_rank_of_the_node_that_was_killed(options: dict[str, Any], dies: int) -> None:
    storage = MemoryStorage()
    results = results_of(storage, (9, 3) if dies else (3, 9), dies, **options)
    other = results[1 - dies]
    assert isinstance(other, SaveRefused), results
    assert f"rank {dies} has stopped: the process of rank {dies} has ended: see its log" in str(other)
    assert [one.step for one in read_history(storage).chain] == [2]
    results[dies].close()

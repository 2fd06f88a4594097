"""What was on a GPU comes back onto one, bit by bit, by any way, and without a second copy of it there."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lakeckpt import CheckpointManager
from lakeckpt.dcp import RunReader
from tests.checkpoint.capturing.reading import assert_same, state_of
from tests.gpu.device import DEVICE, MARKS, arenas

__all__ = ["arenas"]
pytestmark = MARKS
WIDTH = 2048


class Failed(Exception):
    """What ends a job."""


def made(device: str = DEVICE, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(WIDTH)).to(device, dtype)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def step(objects: dict[str, Any]) -> None:
    parameter = next(objects["model"].parameters())
    inputs = torch.randn(16, WIDTH, device=parameter.device, dtype=parameter.dtype)
    objects["model"](inputs).square().mean().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def trained(device: str = DEVICE, **how: Any) -> dict[str, Any]:
    objects = made(device, **how)
    for _ in range(3):
        step(objects)
    return objects


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_gives_back_what_was_on_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    objects = trained(dtype=dtype)
    with CheckpointManager(tmp_path, objects) as manager:
        manager.restore()
        step(objects)
        manager.step()
        manager.save()
    again = made(seed=9, dtype=dtype)
    assert CheckpointManager(tmp_path, again).restore() == 1
    assert_same(state_of(again), state_of(objects))
    assert {one.device.type for one in again["model"].state_dict().values()} == {torch.device(DEVICE).type}
    moments = [state["exp_avg"] for state in again["optimizer"].state.values()]
    assert {one.device.type for one in moments} == {torch.device(DEVICE).type} and moments
    coming = torch.rand(4, device=DEVICE)
    CheckpointManager(tmp_path, again).restore()
    assert torch.equal(torch.rand(4, device=DEVICE), coming), "the device's random numbers go on where they were"


@pytest.mark.parametrize(("there", "here"), [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_what_was_saved_on_one_kind_of_device_is_restored_on_another(tmp_path: Path, there: str, here: str) -> None:
    objects = trained(there)
    with CheckpointManager(tmp_path, objects) as manager:
        manager.restore()
        step(objects)
        manager.step()
        manager.save()
    again = made(here, seed=9)
    assert CheckpointManager(tmp_path, again).restore() == 1
    assert_same(state_of(again), state_of(objects))
    step(again)


def test_memory_gives_back_what_was_on_the_device(tmp_path: Path, arenas: str) -> None:
    objects = made()
    with suppress(Failed), CheckpointManager(tmp_path, objects, capture_every=1, arenas=arenas) as manager:
        manager.restore()
        for _ in range(4):
            step(objects)
            manager.step()
            manager._saves._engine.wait()  # type: ignore[union-attr]
        raise Failed
    expected = state_of(objects)
    again = made(seed=9)
    with CheckpointManager(tmp_path, again, capture_every=1, arenas=arenas) as other:
        assert other.restore() == 4 and other.restore_report is not None and other.restore_report.captured == 4
        assert_same(state_of(again), expected)
        step(again)
        other.step()
    assert torch.isfinite(torch.cat([one.flatten() for one in again["model"].parameters()])).all()


@pytest.mark.skipif(DEVICE != "cuda", reason="counts the memory of a CUDA device")
@pytest.mark.parametrize("captures", [False, True])
def test_restoring_takes_no_second_copy_on_the_device(tmp_path: Path, arenas: str, captures: bool) -> None:
    how: dict[str, Any] = {"capture_every": 1, "arenas": arenas} if captures else {}
    objects = made()
    with suppress(Failed), CheckpointManager(tmp_path, objects, **how) as manager:
        manager.restore()
        for _ in range(3):  # the first one has the arena made
            step(objects)
            manager.step()
            if captures:
                manager._saves._engine.wait()  # type: ignore[union-attr]
        if not captures:
            manager.save()
        raise Failed
    again = made(seed=9)
    with CheckpointManager(tmp_path, again, **how) as other:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert other.restore() == 3
        grown, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    moments = 2 * 4 * sum(one.numel() for one in again["model"].parameters())
    assert abs(grown - moments) < 0.05 * moments, "the moments came; the parameters were there"
    assert most - grown < 0.2 * moments, f"{most} bytes of the device at most, of which {grown} stay"


def test_captures_take_no_more_memory_of_the_device_as_they_go_on(tmp_path: Path, arenas: str) -> None:
    objects = made()
    held = []
    with CheckpointManager(tmp_path, objects, capture_every=1, arenas=arenas) as manager:
        manager.restore()
        for number in range(60):
            step(objects)
            manager.step()
            if number >= 20 and DEVICE == "cuda":
                held.append(torch.cuda.memory_reserved())
    assert len(set(held)) <= 1 or held[-1] == held[len(held) // 2], held


def test_torchs_own_loading_reads_a_run(tmp_path: Path) -> None:
    objects = trained()
    with CheckpointManager(tmp_path, objects) as manager:
        manager.restore()
        manager.step()
    again = {"model": made(seed=9)["model"].state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(again, storage_reader=RunReader(tmp_path), no_dist=True)
    for key, one in objects["model"].state_dict().items():
        assert torch.equal(one, again["model"][key]) and one.device == again["model"][key].device, key

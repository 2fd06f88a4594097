"""Cut the power at every system call of a series of saves: what is restored is whole, and no committed save is lost."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import CheckpointManager
from lakeckpt.errors import LakeckptError
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.seams import manager_with
from tests.lake.traced import os_of_the_storage
from tests.patience import PATIENCE_S
from tests.system.cutting import CuttingCalls, PowerCut
from tests.system.disks import Disk

STEPS = 2
CUTS = 100
"""Right after a save returned, where a single one loses what was not synced."""


def objects() -> dict[str, Any]:
    model = torch.nn.Linear(40, 30)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train_step(state: dict[str, Any], step: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    optimizer.zero_grad()
    model(torch.full((2, 40), float(step))).square().sum().backward()
    optimizer.step()


def weights(state: dict[str, Any]) -> bytes:
    moments = state["optimizer"].state_dict()["state"]
    tensors = [*state["model"].parameters(), *(moments[i][name] for i in moments for name in sorted(moments[i]))]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def train(storage: LocalStorage, made: dict[int, bytes]) -> int:
    """Save every step, note the weights that each had, and return the last whose save returned."""
    torch.manual_seed(1)
    state = objects()
    saved = 0
    with contextlib.suppress(PowerCut, LakeckptError):
        manager = CheckpointManager(storage, state, persist_every=1, keep=1, fail_after=0)
        assert manager.restore() == 0
        for step in range(1, STEPS + 1):
            train_step(state, step)
            made[step] = weights(state)
            manager.step()
            saved = step
    return saved


class Unnamed:
    """A storage that no other process can open: what is captured is persisted in this one, through its calls."""

    def __init__(self, inner: LocalStorage) -> None:
        self.list, self.read, self.delete = inner.list, inner.read, inner.delete
        self.put, self.put_new = inner.put, inner.put_new


def train_behind(storage: Any, made: dict[int, bytes], arenas: Path) -> int:
    """As `train`, with saves that are captured beside training and persisted behind it."""
    torch.manual_seed(1)
    state = objects()
    saved = 0
    with contextlib.suppress(PowerCut, LakeckptError):
        manager = manager_with(Unnamed(storage), state, capture_every=1, arenas=arenas, keep=1, timeout_s=PATIENCE_S)
        manager.restore()
        for step in range(1, STEPS + 1):
            train_step(state, step)
            made[step] = weights(state)
            manager.step()
            manager.save()
            saved = step
        manager.close()
    return saved


def cut_and_restore(disk: Disk, cut_at: int, *, arenas: Path | None = None, **calls: Any) -> tuple[str, int]:
    """What is wrong after a cut at the n-th call ("" if nothing), and the last step whose save had returned.

    ``arenas``: save behind training, with captures in that folder.
    """
    root = disk.path / f"run-{disk.cuts}"
    cutting = CuttingCalls(disk, cut_at, **calls)
    made: dict[int, bytes] = {}
    with os_of_the_storage(cutting):
        storage = LocalStorage(root)
        saved = train(storage, made) if arenas is None else train_behind(storage, made, arenas)
    if not cutting.dark:
        with contextlib.suppress(PowerCut):
            cutting.cut()
    disk.restart()
    state = objects()
    try:
        with CheckpointManager(LocalStorage(root), state, persist_every=1) as manager:
            done = manager.restore()
    except LakeckptError as error:
        return f"cut at {cut_at}: nothing can be restored after {saved} saves: {error}", saved
    if done < saved:
        return f"cut at {cut_at}: step {saved} was committed, and step {done} came back", saved
    if done and weights(state) != made[done]:
        return f"cut at {cut_at}: step {done} came back with other weights", saved
    return "", saved


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore:checkpoints that are not to be kept")  # the store fails then, too
def test_a_cut_at_every_system_call_leaves_a_whole_checkpoint_and_none_committed_is_lost(disk: Disk) -> None:
    counting = CuttingCalls(disk, cut_at=0)
    with os_of_the_storage(counting):
        assert train(LocalStorage(disk.path / "counted"), {}) == STEPS
    outcomes = [cut_and_restore(disk, cut_at) for cut_at in range(1, counting.made + 2)]
    assert [wrong for wrong, _ in outcomes if wrong] == []
    assert {saved for _, saved in outcomes} == set(range(STEPS + 1))
    print(f"{disk.kind}: {len(outcomes)} cuts during {STEPS} saves: every committed checkpoint came back whole")


def test_a_hundred_cuts_right_after_a_save_returned_lose_no_checkpoint(disk: Disk) -> None:
    assert [cut_and_restore(disk, cut_at=0) for _ in range(CUTS)] == [("", STEPS)] * CUTS


@pytest.mark.filterwarnings("ignore::lakeckpt.errors.DamageWarning")
@pytest.mark.parametrize("leave_out", ["files", "folders"])
def test_the_same_with_fsync_left_out_loses_checkpoints(disk: Disk, leave_out: str) -> None:
    kind: Callable[[int], bool] = stat.S_ISREG if leave_out == "files" else stat.S_ISDIR
    lost = [cut_and_restore(disk, cut_at=0, leave_out=lambda fd: kind(os.fstat(fd).st_mode))[0] for _ in range(5)]
    assert all(lost)


def test_a_hundred_cuts_right_after_a_save_behind_training_returned_lose_no_checkpoint(
    disk: Disk, tmp_path: Path
) -> None:
    outcomes = [cut_and_restore(disk, cut_at=0, arenas=tmp_path / f"arenas-{n}") for n in range(CUTS)]
    assert outcomes == [("", STEPS)] * CUTS


@pytest.mark.filterwarnings("ignore::lakeckpt.errors.DamageWarning")
@pytest.mark.parametrize("leave_out", ["files", "folders"])
def test_the_same_behind_training_with_fsync_left_out_loses_checkpoints(
    disk: Disk, tmp_path: Path, leave_out: str
) -> None:
    kind: Callable[[int], bool] = stat.S_ISREG if leave_out == "files" else stat.S_ISDIR
    left = {"leave_out": lambda fd: kind(os.fstat(fd).st_mode)}
    lost = [cut_and_restore(disk, cut_at=0, arenas=tmp_path / f"arenas-{n}", **left)[0] for n in range(5)]
    assert all(lost)

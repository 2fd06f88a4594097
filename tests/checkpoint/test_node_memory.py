"""The memory of a node: what captures of all its ranks take is said at the restore, and refused if it is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.state_watch import estimated_bytes
from lakeckpt.checkpoint.opening import _say_memory
from lakeckpt.errors import ArenaError
from lakeckpt.recovery.facts import CutId
from lakeckpt.tracking.exchange import Exchange

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: list[Make] = [
    lambda ps: torch.optim.SGD(ps, lr=0.1),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    torch.optim.Adam,
    lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
]
NAMES = ["SGD", "momentum", "Adam", "amsgrad", "centered", "RMSprop", "Adagrad", "Adadelta", "NAdam", "Rprop", "ASGD"]


def state_bytes(objects: dict[str, Any]) -> int:
    found = {}
    for one in objects.values():
        states = one.state.values() if isinstance(one, torch.optim.Optimizer) else [one.state_dict()]
        found |= {value.data_ptr(): value.nbytes for state in states for value in state.values() if value is not None}
    return sum(found.values())


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_the_state_that_an_optimizer_will_make_is_estimated(make: Make) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50))
    model[0].bias.requires_grad_(False)
    objects = {"model": model, "optimizer": make(list(model.parameters()))}
    before = estimated_bytes(objects.values())
    model(torch.rand(4, 50)).sum().backward()
    objects["optimizer"].step()
    assert estimated_bytes(objects.values()) == state_bytes(objects)
    assert before == pytest.approx(state_bytes(objects), rel=0.02)  # numbers of steps are not counted


def test_a_restore_says_how_much_memory_of_the_node_captures_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(1000, 1000)
    objects = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    with (
        caplog.at_level(logging.INFO, "lakeckpt"),
        CheckpointManager(tmp_path / "run", objects, capture_every=1, arenas=tmp_path / "arenas") as manager,
    ):
        manager.restore()
    (text,) = [one.getMessage() for one in caplog.records if "of this node's memory" in one.getMessage()]
    assert text.startswith(
        "captures of rank 0 take about 0.03 GiB of this node's memory, 3 generations of 0.01 GiB for"
    )


class Node(Exchange):
    """Four ranks on one node."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank=rank, world_size=4)
        self.neighbours = (0, 1, 2, 3)


def test_one_rank_of_a_node_says_it_and_warns_if_it_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArenaFolder, "_free_bytes", lambda *_: 2**24)
    folder, model = ArenaFolder(tmp_path / "arenas"), nn.Linear(1024, 1024)
    for rank in range(4):
        identity = ArenaIdentity(run=b"r" * 16, rank=rank, world=4)
        _say_memory(estimated_bytes([model]), folder, identity, Node(rank))
    (found,) = caplog.records
    assert found.levelno == logging.WARNING
    assert found.getMessage().startswith(
        "captures of ranks 0-3 take about 0.06 GiB of this node's memory, 4 generations"
    )


def engine_of(folder: ArenaFolder, rank: int) -> CaptureEngine:
    identity = ArenaIdentity(run=b"r" * 16, rank=rank, world=3)
    return CaptureEngine({"model": nn.Linear(512, 512)}, identity, folder=folder, ranks_here=3)


def capture(engine: CaptureEngine, step: int) -> None:
    assert engine.cut(CutId(attempt=0, step=step), digest=bytes(16), must=True)
    engine.wait()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The room that is there, which arenas take."""
    found = {"bytes": 0}

    def free_bytes(folder: ArenaFolder, _: int) -> int:
        return found["bytes"] - sum(info.size_bytes for info in folder.found())

    monkeypatch.setattr(ArenaFolder, "_free_bytes", free_bytes)
    return found


def test_all_ranks_of_a_node_refuse_if_there_is_room_for_some_of_them_only(
    tmp_path: Path, free: dict[str, int]
) -> None:
    folder = ArenaFolder(tmp_path / "arenas")
    free["bytes"] = 9 * 2**20  # two arenas of four
    engines = [engine_of(folder, rank) for rank in range(3)]
    for engine in engines:
        with pytest.raises(ArenaError, match=r"arenas of the 3 ranks of this node take .* and 0.01 GiB are free"):
            capture(engine, 1)
        engine.close()
    assert folder.found() == []


def test_the_arenas_of_a_job_that_died_count_as_room(tmp_path: Path, free: dict[str, int]) -> None:
    folder = ArenaFolder(tmp_path / "arenas")
    free["bytes"] = 14 * 2**20
    for steps in ((1, 2), (3, 4)):
        engines = [engine_of(folder, rank) for rank in range(3)]
        for step in steps:
            for engine in engines:
                capture(engine, step)
        for engine in engines:
            engine.close()
    assert [4 in info.steps for info in folder.found()] == [True] * 3

"""Whatever a synchronous save takes is captured, with the same bits, though training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.reading import CUT, IDENTITY, assert_same, kept_state, state_of
from tests.checkpoint.rig import MemoryStorage
from tests.checkpoint.seams import manager_with
from tests.patience import PATIENCE_S

# No category: torch says it by a DeprecationWarning before 2.14, by a FutureWarning since.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")


class OwnState(nn.Linear):
    """A module whose state dict takes no arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.weight.data, "module.b": self.bias.data, "text": "mine"}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state["w"])
            self.bias.copy_(state["module.b"])


class KeyedState(nn.Linear):
    """A module whose own state dict passes on what it is given."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


class Thin(nn.Linear):
    """A module with tensors of one element that lie strided, which torch calls contiguous."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(4, 3)[1:2, 2])
        self.register_buffer("seen", torch.zeros(3, 4).t()[:1, :1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) * self.scale


class ShutGate(Gate):
    """Admits nothing before the fence: what was not taken at the cut is as somebody left it who did not announce it."""

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        assert urgent.wait(PATIENCE_S), "the fence has not come"


KINDS: dict[str, Callable[[], nn.Module]] = {
    "own state": lambda: OwnState(3, 3),
    "own state that passes on": lambda: KeyedState(3, 3),
    "one element": Thin,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    "traced": lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)),
    "around scripted": lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3)),
    "around traced": lambda: nn.Sequential(torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)), nn.Linear(3, 3)),
}


def job_of(kind: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = KINDS[kind]()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def step(objects: dict[str, Any]) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.randn(8, 3)).square().mean().backward()
    objects["optimizer"].step()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_is_captured_as_it_was_at_its_cut(kind: str, tmp_path: Path) -> None:
    objects, folder = job_of(kind), ArenaFolder(tmp_path)
    other = copy.deepcopy(objects["model"].state_dict())
    engine = CaptureEngine(objects, identity=IDENTITY, folder=folder, slice_bytes=4096, gate=ShutGate())
    expected = {}
    for number in range(1, 4):
        step(objects)
        expected[number] = state_of(objects)
        assert engine.cut(CutId(attempt=0, step=number), digest=CUT, must=True)
        if number == 2:
            engine.fence()
            objects["model"].load_state_dict(other)
        else:
            step(objects)
    engine.wait()
    engine.close()
    for number, state in expected.items():
        assert_same(kept_state(folder, number), state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_captures_restores_every_kind_of_module(kind: str, tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), job_of(kind)
    with manager_with(storage, objects, persist_every=1, capture_every=1, arenas=str(tmp_path)) as saver:
        saver.restore()
        step(objects)
        saver.step()
    expected, found = state_of(objects)[1], job_of(kind)
    assert CheckpointManager(storage, found).restore() == 1
    assert {key: one for key, one in state_of(found)[1].items() if "random" not in key} == {
        key: one for key, one in expected.items() if "random" not in key
    }

"""Whatever a training script puts in the place of something else is what is captured from then on."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.reading import CUT, IDENTITY, assert_same, kept_state, state_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class Renamed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(x))  # type: ignore[no-any-return]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.step()
        self.backup = copy.deepcopy(self.optimizer.state_dict())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.optimizer.step()

    def drop_head(self) -> list[nn.Parameter]:
        """Forget the head: what the optimizer has left."""
        dropped = set(map(id, self.model.head.parameters()))
        for one in list(self.model.head.parameters()):
            del self.optimizer.state[one]
        group = self.optimizer.param_groups[0]
        group["params"] = [one for one in group["params"] if id(one) not in dropped]
        del self.model.head
        return group["params"]  # type: ignore[no-any-return]


def _state_loaded(job: Job) -> None:
    job.optimizer.load_state_dict(job.backup)


def _state_cleared(job: Job) -> None:
    job.optimizer.state.clear()


def _state_anew(job: Job) -> None:
    job.optimizer.state = defaultdict(dict)


def _one_state_anew(job: Job) -> None:
    job.optimizer.state[job.model.body.weight] = {}


def _module_anew(job: Job) -> None:
    left = job.drop_head()
    job.model.head = nn.Linear(16, 4)  # it may lie where the old one lay
    left.extend(job.model.head.parameters())


def _module_without_parameters_anew(job: Job) -> None:
    left = job.drop_head()
    job.model.head = nn.Sequential(nn.Linear(16, 4))
    left.extend(job.model.head.parameters())


def _module_renamed(job: Job) -> None:
    """The optimizer has the same parameters, which have other names."""
    job.model.tail = job.model.head
    del job.model.head
    job.model.__class__ = Renamed


def _hook_registered(job: Job) -> None:
    job.model.head.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({f"{prefix}bias": module.bias.detach() * 2})
    )


def _scaled(call: Callable[..., Any], by: float) -> Callable[..., Any]:
    return lambda *args, **kwargs: {key: value.detach() * by for key, value in call().items()}


@pytest.mark.parametrize(
    "change",
    [
        _state_loaded,
        _state_cleared,
        _state_anew,
        _one_state_anew,
        _module_anew,
        _module_without_parameters_anew,
        _module_renamed,
        _hook_registered,
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_replaced_is_captured_as_it_is_now(
    folder: ArenaFolder, change: Callable[[Job], None], steps: int
) -> None:
    job = Job()
    engine = CaptureEngine(job.objects, IDENTITY, folder=folder, slice_bytes=4096)
    try:
        for number in range(1, 4):  # the first ones of a place are captured by what was found before them
            job.step()
            assert engine.cut(CutId(attempt=0, step=number), digest=CUT, must=True)
            engine.wait()
        change(job)
        for _ in range(steps):
            job.step()
        expected = state_of(job.objects)
        assert engine.cut(CutId(attempt=0, step=4), digest=CUT, must=True)
        engine.wait()
        assert_same(kept_state(folder, 4), expected)
        job.step()
        expected = state_of(job.objects)
        assert engine.cut(CutId(attempt=0, step=5), digest=CUT, must=True)
        engine.wait()
        assert_same(kept_state(folder, 5), expected)
    finally:
        engine.close()


def test_a_module_whose_own_state_dict_was_replaced_is_taken_apart_at_every_cut(folder: ArenaFolder) -> None:
    """It gives copies, of which nobody sees that they are old."""
    job = Job()
    job.model.state_dict = _scaled(job.model.state_dict, 2.0)  # type: ignore[method-assign]
    engine = CaptureEngine(job.objects, IDENTITY, folder=folder, slice_bytes=4096)
    try:
        for number in range(1, 4):
            job.step()
            expected = state_of(job.objects)
            assert engine.cut(CutId(attempt=0, step=number), digest=CUT, must=True)
            engine.wait()
            assert_same(kept_state(folder, number), expected)
    finally:
        engine.close()


@pytest.fixture
def folder(tmp_path: Any) -> ArenaFolder:
    return ArenaFolder(tmp_path / "arenas")

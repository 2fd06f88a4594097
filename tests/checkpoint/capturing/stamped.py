"""A state of which every element says the step that it belongs to: a mixture of two steps cannot be overlooked.

Of several ranks, what is each one's own says the rank, too, and a parameter may be divided over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.contents import contents_of
from tests.checkpoint.capturing.reading import tensor_bytes

__all__ = ["Own", "Stamped", "Stamper", "check_stamps", "local"]

_SHARE = 1 / 8
"""What stamps of a rank's own have more than those of the rank before."""


class Stamped(nn.Module):
    """Parameters of several sizes, and a buffer that changes between steps. Those of the sizes ``divided`` are divided
    over the ranks of ``mesh``, if there is one."""

    def __init__(
        self, sizes: tuple[int, ...] = (3, 400, 1, 90), *, divided: tuple[int, ...] = (), mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.every = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        shares = (
            torch.zeros(size) if mesh is None else dtensor.zeros(size, device_mesh=mesh, placements=[Shard(0)])
            for size in divided
        )
        self.divided = nn.ParameterList(map(nn.Parameter, shares))
        self.register_buffer("seen", torch.zeros(7))


class Own:
    """What a rank has for itself alone: a stamp that says whose it is."""

    def __init__(self) -> None:
        self.stamps = torch.zeros(11)

    def stamp(self, step: int, rank: int) -> None:
        self.stamps = self.of(step, rank)

    @staticmethod
    def of(step: int, rank: int) -> torch.Tensor:
        return torch.full((11,), step + rank * _SHARE)

    def state_dict(self) -> dict[str, Any]:
        return {"stamps": self.stamps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stamps = state["stamps"]


class Stamper(torch.optim.Optimizer):
    """Stamps parameters and its own state with a step, in two halves, through ``launch``."""

    def __init__(self, model: Stamped, launch: Callable[[Callable[[], object]], object]) -> None:
        super().__init__(model.parameters(), {})
        self.launch = launch
        self.stamp = 0
        for one in model.parameters():
            moment = torch.zeros_like(one) if isinstance(one, DTensor) else torch.zeros(one.numel())
            self.state[one] = {"moment": moment.detach()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.stamp += 1
        tensors = [local(one) for one in (*self.state, *(state["moment"] for state in self.state.values()))]
        for half in (slice(None, None, 2), slice(1, None, 2)):
            for one in tensors:
                self.launch(_stamping(one.data[half], self.stamp))
        for one in tensors:
            torch.autograd.graph.increment_version(one)  # as the host counts what it gives a device to do


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _stamping(part: torch.Tensor, stamp: int) -> Callable[[], object]:
    return lambda: part.fill_(stamp)


def check_stamps(arena: Arena) -> list[int]:
    """Every complete generation holds one step alone; these are they, the newest first."""
    steps = [record.cut.step for record in arena.complete()]
    for step in steps:
        with arena.hold(step=step) as held:
            if held is None:
                continue  # it was begun again since
            contents = contents_of(held)
            for key in contents.specs:
                found = np.frombuffer(tensor_bytes(contents, key), np.float32)
                stamp = step + (_SHARE * arena.layout.identity.rank if key.startswith("own/") else 0)
                assert (found == stamp).all(), f"{key} of step {step} holds {np.unique(found).tolist()}"
    return steps

"""A state of which every element says the step that it belongs to: a mixture of two steps cannot be overlooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.contents import contents_of

__all__ = ["Stamped", "Stamper", "check_stamps"]


class Stamped(nn.Module):
    """Parameters of several sizes, and a buffer that changes between steps."""

    def __init__(self, sizes: tuple[int, ...] = (3, 400, 1, 90)) -> None:
        super().__init__()
        self.every = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.register_buffer("seen", torch.zeros(7))


class Stamper(torch.optim.Optimizer):
    """Stamps parameters and its own state with a step, in two halves, through ``launch``."""

    def __init__(self, model: Stamped, launch: Callable[[Callable[[], object]], object]) -> None:
        super().__init__(model.parameters(), {})
        self.launch = launch
        self.stamp = 0
        for one in model.parameters():
            self.state[one] = {"moment": torch.zeros(one.numel())}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.stamp += 1
        tensors = list(self.state) + [state["moment"] for state in self.state.values()]
        for half in (slice(None, None, 2), slice(1, None, 2)):
            for one in tensors:
                self.launch(_stamping(one.data[half], self.stamp))
        for one in tensors:
            torch.autograd.graph.increment_version(one)  # as the host counts what it gives a device to do


def _stamping(part: torch.Tensor, stamp: int) -> Callable[[], object]:
    return lambda: part.fill_(stamp)


def check_stamps(arena: Arena) -> list[int]:
    """Every complete generation holds one step alone; these are they, the newest first."""
    steps = [record.step for record in arena.complete()]
    for step in steps:
        with arena.hold(step) as held:
            if held is None:
                continue  # it was begun again since
            contents = contents_of(held)
            for key in contents.specs:
                found = np.frombuffer(contents.tensor(key), np.float32)
                assert (found == step).all(), f"{key} of step {step} holds {np.unique(found).tolist()}"
    return steps

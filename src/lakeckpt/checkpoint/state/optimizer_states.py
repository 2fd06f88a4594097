"""This module finds the place of each tensor of an optimizer's saved state: the live tensor, or a new one like it.

An optimizer that has not stepped yet has no states, so new tensors are made. A state of the shape of its parameter gets
the layout of the parameter, in memory and over ranks, as the optimizer's first step would make it: a fused step walks
through the memory of both side by side, and would give weights the moments of others. A state of another shape, such as
the factored moments of Adafactor, is divided over the mesh of its parameter as it was divided when it was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.state.shards import divided_like, is_sharded
from lakeckpt.checkpoint.state.tensors import spec_of
from lakeckpt.checkpoint.state.tree import alongside
from lakeckpt.checkpoint.state.wholes import Whole
from lakeckpt.wire.envelope import TensorRef

__all__ = ["differences_of_states", "fits", "states_in"]


_SHAPED_AS_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"})


def differences_of_states(
    name: str, optimizer: torch.optim.Optimizer, tree: Any, specs: Mapping[str, TensorSpec]
) -> list[str]:
    """Return a line for each way in which ``tree``, the state of the optimizer ``name``, does not fit its parameters.

    Groups must have as many parameters as they had. Moments must have the shapes of their parameters. Optimizers that
    are not torch's may keep flat or projected moments under the names that torch uses; of these, only moments whose
    shapes come in another order than those of the parameters are refused.
    """
    try:
        saved = [list(group["params"]) for group in tree["param_groups"]]
        states = dict(tree["state"])
    except (KeyError, TypeError, ValueError):
        return [f"{name}: the checkpoint does not hold the state of an optimizer"]
    live = [list(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in saved] != [len(group) for group in live]:
        return [f"{name}: parameter groups of {[*map(len, saved)]} in the checkpoint, of {[*map(len, live)]} here"]
    shapes = {
        (number, key): (specs[ref.key].shape, tuple(parameter.shape))
        for number, parameter in zip(chain(*saved), chain(*live), strict=True)
        for key, ref in states.get(number, {}).items()
        if key in _SHAPED_AS_PARAMETER and isinstance(ref, TensorRef) and ref.key in specs
    }
    are_the_same = Counter(was for was, _ in shapes.values()) == Counter(now for _, now in shapes.values())
    if not (are_the_same or type(optimizer).__module__.startswith("torch.optim.")):
        return []
    return [
        f"{name}: {key} of parameter {number} is {list(was)} in the checkpoint and the parameter is {list(now)}"
        for (number, key), (was, now) in shapes.items()
        if was != now
    ]


def states_in(
    optimizer: torch.optim.Optimizer,
    tree: Any,
    specs: Mapping[str, TensorSpec],
    wholes: Mapping[str, Whole],
    *,
    device: str | None = None,
) -> dict[str, torch.Tensor]:
    """Return key → the live tensor of that place in the state, or a new one, on the parameter's device or ``device``.

    A state that is neither shaped like its parameter nor divided is not among them. `CheckpointMismatch` if a state
    cannot be divided as it was.
    """
    found: dict[str, torch.Tensor] = {}
    for parameter, key, known in _leaves(optimizer, tree):
        spec, sharing = specs[key], wholes[key].sharing if key in wholes else None
        if isinstance(known, torch.Tensor) and fits(known, spec):
            found[key] = known
        elif spec.shape == tuple(parameter.shape):
            found[key] = torch.empty_like(parameter.detach(), dtype=getattr(torch, spec.dtype), device=device)
        elif sharing is not None and is_sharded(parameter):
            found[key] = divided_like(parameter, spec, sharing.dims, device=device)
    return found


def _leaves(optimizer: torch.optim.Optimizer, tree: Any) -> Iterator[tuple[torch.Tensor, str, Any]]:
    """Yield (parameter, the key of a tensor of its saved state, what the live state has in its place)."""
    numbers = chain(*(group["params"] for group in tree["param_groups"]))
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for reference, known in alongside(tree["state"].get(number), optimizer.state.get(parameter)):
            yield parameter, reference.key, known


def fits(live: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether ``live`` is of that shape and dtype."""
    found = spec_of(spec.key, live)
    return (found.dtype, found.shape) == (spec.dtype, spec.shape)

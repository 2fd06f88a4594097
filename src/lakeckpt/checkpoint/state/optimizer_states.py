"""Where does each tensor of an optimizer's saved state go?  To the live one of its place, or to a new one like it.

An optimizer that has not stepped yet has no states: they are made for it, as its first step would make them: one of the
parameter's shape lies in memory as the parameter does now, any other as when it was saved. Where ranks hold
parts of a parameter, they hold parts of its states, too. One of the parameter's shape is divided as the parameter is;
one of another shape (a number for each row, as of factored moments) by those of the parameter's dimensions that it has,
and by those of its own (of what was flattened), by which it was divided when it was saved; whole on all ranks, if by
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.read.loaded import Loaded
from lakeckpt.checkpoint.state.shards import divided_like, is_sharded, local_of
from lakeckpt.checkpoint.state.tensors import spec_of
from lakeckpt.checkpoint.state.tree import alongside
from lakeckpt.wire.envelope import TensorRef

__all__ = ["differences_of_states", "fits", "states_in"]


_SHAPED_AS_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"})


def differences_of_states(
    name: str, optimizer: torch.optim.Optimizer, tree: Any, specs: Mapping[str, TensorSpec]
) -> list[str]:
    """Return a line for each way in which ``tree``, the state of the optimizer ``name``, does not fit its parameters.

    Groups must have as many parameters as they had. Moments must have the shapes of their parameters, wherever the same
    shapes come in another order: parameters in another order would each get the moments of another one.
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
        return []  # others keep flat or projected moments under the names that torch uses
    return [
        f"{name}: {key} of parameter {number} is {list(was)} in the checkpoint and the parameter is {list(now)}"
        for (number, key), (was, now) in shapes.items()
        if was != now
    ]


def states_in(
    optimizer: torch.optim.Optimizer, tree: Any, loaded: Loaded, *, device: str | None = None
) -> dict[str, torch.Tensor]:
    """key → the tensor of that place in the state; where there is none, a new DTensor if ranks hold parts of the
    parameter, on its device or on another (``device``), and a new one laid out as the parameter where
    that or the saved state does not lie row by row. Any other is left out."""
    was_divided = bool(loaded.wholes) or loaded.is_own
    found: dict[str, torch.Tensor] = {}
    for parameter, ref, known in _leaves(optimizer, tree):
        key, spec = ref.key, loaded.specs[ref.key]
        if isinstance(known, torch.Tensor) and fits(known, spec):
            found[key] = known
        elif is_sharded(parameter) and _is_shared(parameter, spec, loaded, was_divided=was_divided):
            if spec.shape != tuple(parameter.shape):
                found[key] = divided_like(parameter, spec, loaded.whole(key), device=device)
            elif device is not None:
                found[key] = divided_like(parameter, spec, device=device)
            else:
                found[key] = _strided_as(parameter, spec)
        elif device is None and spec.shape == tuple(parameter.shape) and not _lie_row_by_row(parameter, ref):
            found[key] = _strided_as(parameter, spec)
    return found


def _lie_row_by_row(parameter: torch.Tensor, saved: TensorRef) -> bool:
    return parameter.is_contiguous() and saved.dim_order is None


def _strided_as(parameter: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A new tensor of ``spec``, laid out as its parameter is (channels last, say): fused steps walk through the memory
    of both side by side, and would give weights the moments of others."""
    return torch.empty_like(parameter.detach(), dtype=getattr(torch, spec.dtype))


def _leaves(optimizer: torch.optim.Optimizer, tree: Any) -> Iterator[tuple[torch.Tensor, TensorRef, Any]]:
    """(parameter, a tensor of its saved state, what the live state has in its place)."""
    numbers = chain(*(group["params"] for group in tree["param_groups"]))
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        saved = tree["state"].get(number)
        for reference, known in alongside(saved, optimizer.state.get(parameter)):
            yield parameter, reference, known


def _is_shared(parameter: torch.Tensor, spec: TensorSpec, loaded: Loaded, *, was_divided: bool) -> bool:
    """Whether a state of a parameter that ranks share is shared by them, too."""
    if spec.key in loaded.wholes or spec.shape == tuple(parameter.shape):
        return True
    # What had its parameters whole says nothing of this. What ranks had of their own is every rank's own; so is what
    # has the shape of its part, and a count of steps.
    own = f"tensor:{spec.key}" in loaded.per_rank or spec.shape == tuple(local_of(parameter).shape)
    return not (was_divided or own) and len(spec.shape) > 0 and spec.size_bytes > 0 and max(spec.shape) > 1


def fits(live: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether ``live`` is of that shape and dtype."""
    found = spec_of(spec.key, live)
    return (found.dtype, found.shape) == (spec.dtype, spec.shape)

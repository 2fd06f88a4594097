"""Where does each tensor of an optimizer's saved state go?  To the live one of its place, or to a new one like it.

An optimizer that has not stepped yet has no states: they are made for it, as its first step would make them: one of the
parameter's shape lies in memory as the parameter does now, any other as it did when it was saved. Where ranks hold
parts of a parameter, they hold parts of its states, too. One of the parameter's shape is divided as the parameter is;
one of another shape (a number for each row, as of factored moments) by those of the parameter's dimensions that it has,
and by those of its own (of what was flattened), by which it was divided when it was saved; whole on all ranks, if by
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.loaded import Loaded
from lakeckpt.checkpoint.shards import divided_like, is_sharded, local_of
from lakeckpt.checkpoint.tensors import overlaps_itself, spec_of
from lakeckpt.checkpoint.tree import alongside
from lakeckpt.wire.codec import TensorRef

__all__ = ["fits", "states_in"]


def states_in(
    optimizer: torch.optim.Optimizer, tree: Any, loaded: Loaded, *, device: str | None = None
) -> dict[str, torch.Tensor]:
    """key → the tensor of that place in the state; where there is none, a new DTensor if ranks hold parts of the
    parameter, on its device or on another (``device``), and a new one laid out as the parameter where one laid out as
    it was saved would not do. What is in no such case is left out."""
    was_divided = bool(loaded.wholes) or loaded.is_own
    found: dict[str, torch.Tensor] = {}
    for parameter, is_fused, ref, known in _leaves(optimizer, tree):
        key, spec = ref.key, loaded.specs[ref.key]
        if isinstance(known, torch.Tensor) and fits(known, spec) and (is_sharded(known) or not overlaps_itself(known)):
            found[key] = known
        elif is_sharded(parameter) and _is_shared(parameter, spec, loaded, was_divided=was_divided):
            if spec.shape != tuple(parameter.shape):
                found[key] = divided_like(parameter, spec, loaded.whole(key), device=device)
            elif device is not None:
                found[key] = divided_like(parameter, spec, device=device)
            else:
                found[key] = _strided_as(parameter, spec)
        elif device is None and _is_to_lie_as(parameter, spec, ref.dim_order, is_fused=is_fused):
            found[key] = _strided_as(parameter, spec)
    return found


def _is_to_lie_as(parameter: torch.Tensor, spec: TensorSpec, saved: tuple[int, ...] | None, *, is_fused: bool) -> bool:
    """Whether it matters that a state lies as its parameter, and it would not: parameters may be laid out in another
    way than when it was saved. A matrix beside a square one may be of any order, but for fused steps."""
    if spec.shape != tuple(parameter.shape):
        return False
    return not parameter.is_contiguous() or (saved is not None and (is_fused or parameter.dim() != 2))


def _strided_as(parameter: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A new tensor of ``spec``, laid out as its parameter is (channels last, say): fused steps walk through the memory
    of both side by side, and would give weights the moments of others."""
    return torch.empty_like(parameter.detach(), dtype=getattr(torch, spec.dtype))


def _leaves(optimizer: torch.optim.Optimizer, tree: Any) -> Iterator[tuple[torch.Tensor, bool, TensorRef, Any]]:
    """(parameter, whether its steps are fused, a tensor of its saved state, what the live state has in its place)."""
    numbers = chain(*(group["params"] for group in tree["param_groups"]))
    parameters = [(one, bool(group.get("fused"))) for group in optimizer.param_groups for one in group["params"]]
    for number, (parameter, is_fused) in zip(numbers, parameters, strict=True):
        saved = tree["state"].get(number)
        for reference, known in alongside(saved, optimizer.state.get(parameter)):
            yield parameter, is_fused, reference, known


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

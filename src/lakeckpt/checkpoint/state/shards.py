"""This module reads what a `DTensor` says of itself: the part that this rank holds, its place, and the mesh.

A `DTensor` (of FSDP2, tensor parallelism and the like) is one tensor that all ranks hold in parts. Its parts are saved
as tensors of their own (`lakeckpt.checkpoint.state.wholes`); the tree of an item refers to the whole.

No function communicates or copies a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import ranges
from lakeckpt.checkpoint.format.sharing import Sharing
from lakeckpt.errors import CheckpointMismatch, UnsupportedValue

__all__ = ["divided_like", "is_sharded", "local_of", "offsets_of", "sharing_of"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether ranks hold parts of a tensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: of a plain tensor all, outside of its mesh no elements."""
    local: torch.Tensor = tensor.detach()
    if is_sharded(tensor):
        local = local._local_tensor  # type: ignore[attr-defined]
        if local.dim() != tensor.dim() and tensor.dim() and not local.numel():
            return local.reshape((0,) * tensor.dim())
    return local


def offsets_of(key: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a tensor begins.

    `UnsupportedValue` if ranks hold sums not yet added up, or if it is a number on a rank outside of its mesh.
    """
    if not is_sharded(tensor):
        return (0,) * tensor.dim()
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise UnsupportedValue(f"{key}: a DTensor with a Partial placement is not added up: redistribute it first")
    if not tensor.dim() and tensor.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        raise UnsupportedValue(
            f"{key}: this rank is not in the mesh of this DTensor, which has no dimensions, so that nothing says what "
            "this rank holds of it: keep it out of the state of the ranks outside of its mesh"
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    is_outside = len(offsets) != tensor.dim()  # of its mesh: what it has lies behind the end
    return tuple(tensor.shape if is_outside else offsets)


def sharing_of(tensor: torch.Tensor) -> Sharing:
    """Return how ranks share a DTensor."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    dims = tuple(-1 if (dim := _dim_of(one)) is None else dim % tensor.dim() for one in placements)
    return Sharing(ranks=ranges(ranks), dims=dims)


def divided_like(
    parameter: torch.Tensor, spec: TensorSpec, dims: Sequence[int], *, device: str | None = None
) -> torch.Tensor:
    """Return a new DTensor of ``spec`` on the mesh of ``parameter``, on its device or on ``device``.

    ``dims`` says for each dimension of the mesh which dimension of the tensor it divides; -1: none.
    `CheckpointMismatch` if the mesh has another number of dimensions.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, live = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if len(dims) != mesh.ndim:
        raise CheckpointMismatch(
            f"it was divided over a mesh of {len(dims)} dimensions, and its parameter is divided over a mesh of "
            f"{mesh.ndim}; only a state of the parameter's shape can be divided anew: use a mesh of {len(dims)} "
            "dimensions"
        )
    placements: tuple[Any, ...] = tuple(
        one if _dim_of(one) == dim else Replicate() if dim < 0 else Shard(dim)
        for one, dim in zip(live, dims, strict=True)
    )
    shape = torch.Size(spec.shape)
    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = torch.empty(sizes, dtype=getattr(torch, spec.dtype), device=device or local_of(parameter).device)
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return made.to(local.device)  # of a parameter that was offloaded from its mesh's device


def _dim_of(placement: Any) -> int | None:
    """Return the dimension that a placement divides. The placements of tensors that FSDP divides once more do not
    answer ``is_shard()``."""
    return getattr(placement, "dim", None)

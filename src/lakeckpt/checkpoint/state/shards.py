"""Which part of a tensor does this rank hold, what is it called, and how do saved parts become those of other ranks?

A `DTensor` (of FSDP2, tensor parallelism and the like) is one tensor, of which every rank holds a part. Its parts are
saved as tensors of their own, whose keys say where they begin and of which shape the whole is; the tree refers to the
whole. When they are loaded, torch's own planner (of ``torch.distributed.checkpoint``) says which regions of which saved
parts make up the part that a rank holds now: any sharding, on any number of ranks, or the plain tensor.

Nothing here communicates, and no tensor is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import ranges
from lakeckpt.checkpoint.format.sharing import Sharing
from lakeckpt.checkpoint.state.wholes import Composed, place_of, whole_of
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, UnsupportedValue

__all__ = [
    "Part",
    "Region",
    "Whole",
    "divided_like",
    "is_sharded",
    "local_of",
    "offsets_of",
    "sharing_of",
    "wholes_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A saved part: its key, and where it begins in the whole."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What of a saved part goes where: ``sizes`` elements from ``source`` on, to ``target`` in the destination."""

    key: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor that was saved in parts (a plain one: in one part, itself)."""

    spec: TensorSpec
    parts: tuple[Part, ...]
    sharing: Sharing | None = None
    """How it was shared, where that is known."""
    several: bool = False
    """Whether other ranks had another tensor of this name."""
    lacking: str = ""
    """Why these are not all of its parts, where that is known."""

    @classmethod
    def of(cls, composed: Composed) -> Whole:
        """What a checkpoint has of a tensor."""
        parts = [Part(key=one.spec.key, offsets=at, sizes=one.spec.shape) for at, one in composed.pieces]
        return cls(
            spec=composed.spec,
            parts=tuple(parts),
            sharing=composed.sharing,
            several=composed.several,
            lacking=composed.lacking,
        )

    @classmethod
    def plain(cls, spec: TensorSpec) -> Whole:
        """A tensor that was saved as one."""
        return cls(spec=spec, parts=(Part(key=spec.key, offsets=(0,) * len(spec.shape), sizes=spec.shape),))

    @property
    def dims(self) -> frozenset[int] | None:
        """The dimensions by which it was divided, one rank or many; None where that is not known."""
        if self.sharing is not None:
            return frozenset(dim for dim in self.sharing.dims if dim >= 0)
        if len(self.parts) < 2:
            return None
        shape = self.spec.shape
        return frozenset(dim for part in self.parts for dim, size in enumerate(part.sizes) if size < shape[dim])

    def has(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Whether that is one of ``parts``, as it is."""
        return any((part.offsets, part.sizes) == (offsets, sizes) for part in self.parts)

    def regions(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Region]:
        """What makes up the part at ``offsets`` of ``sizes``. `CheckpointDamaged` where not all of it was saved;
        `CheckpointMismatch` where that is how it was saved, or where it is not known what of it belongs together."""
        if not prod(sizes):
            return []
        saved = TensorStorageMetadata(
            properties=TensorProperties(),
            size=torch.Size(self.spec.shape),
            chunks=[_chunk(part.offsets, part.sizes) for part in self.parts],
        )
        found = [
            Region(
                key=self.parts[item.storage_index.index or 0].key,
                source=tuple(item.storage_offsets),
                target=tuple(item.dest_offsets),
                sizes=tuple(item.lengths),
            )
            for item in create_read_items_for_chunk_list(self.spec.key, saved, [_chunk(offsets, sizes)])
        ]
        if sum(prod(region.sizes) for region in found) != prod(sizes):
            if self.lacking:
                raise CheckpointMismatch(
                    f"of the tensor {self.spec.key!r}, {sizes} at {offsets} is not to be had: {self.lacking}. Restore "
                    "it on the ranks that saved it, divided as it was"
                )
            raise CheckpointDamaged(f"of the tensor {self.spec.key!r}, not all of {sizes} at {offsets} was saved once")
        return found


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(tuple(offsets)), sizes=torch.Size(tuple(sizes)))


def wholes_of(
    specs: Mapping[str, TensorSpec], shared: Mapping[str, Sharing] = MappingProxyType({})
) -> dict[str, Whole]:
    """The tensors of which there are parts among ``specs``, by their keys: those of one rank, or all; and how they are
    ``shared``, where that is known. `CheckpointDamaged` where parts do not fit one another.
    """
    found: dict[str, tuple[TensorSpec, list[Part]]] = {}
    for key, spec in specs.items():
        place = place_of(key)
        if place is None:
            continue
        whole, parts = found.setdefault(place.name, (whole_of(place, spec), []))
        if whole != whole_of(place, spec):
            raise CheckpointDamaged(f"{key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
        parts.append(Part(key=key, offsets=place.offsets, sizes=spec.shape))
    return {
        name: Whole(spec=spec, parts=tuple(parts), sharing=shared.get(name)) for name, (spec, parts) in found.items()
    }


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that this rank holds, outside of its mesh one without elements; a plain tensor itself."""
    local: torch.Tensor = tensor.detach()
    if is_sharded(tensor):
        local = local._local_tensor  # type: ignore[attr-defined]
        if local.dim() != tensor.dim() and tensor.dim() and not local.numel():
            return local.reshape((0,) * tensor.dim())
    return local


def offsets_of(key: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Where this rank's part of it begins. `UnsupportedValue` where ranks hold sums that are not added up yet."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim()
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise UnsupportedValue(f"{key}: a DTensor with a Partial placement is not added up: redistribute it first")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    is_outside = len(offsets) != tensor.dim()  # of its mesh: what it has lies behind the end
    return tuple(tensor.shape if is_outside else offsets)


def sharing_of(tensor: torch.Tensor) -> Sharing:
    """How ranks share a DTensor."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    dims = tuple(-1 if (dim := _dim_of(one)) is None else dim % tensor.dim() for one in placements)
    return Sharing(ranks=ranges(ranks), dims=dims)


def divided_like(
    parameter: torch.Tensor, spec: TensorSpec, saved: Whole | None = None, *, device: str | None = None
) -> torch.Tensor:
    """A new DTensor of ``spec``, divided as a ``parameter`` is, by those dimensions in which it is as large: of these,
    by those alone by which it was ``saved``, where they are known. By a dimension of its own, in which it is not as
    large, where a mesh of as many dimensions divided it by that and divides the parameter now. Whole on all ranks else.
    On the device of the parameter, or another."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    dims = None if saved is None else saved.dims
    own = saved.sharing.dims if saved is not None and saved.sharing is not None else ()
    own = own if len(own) == mesh.ndim else (-1,) * mesh.ndim
    found = tuple(_placed(one, parameter.shape, spec, dims, dim) for one, dim in zip(placements, own, strict=True))
    sizes, _ = compute_local_shape_and_global_offset(torch.Size(spec.shape), mesh, found)
    local = torch.empty(sizes, dtype=getattr(torch, spec.dtype), device=device or local_of(parameter).device)
    shape = torch.Size(spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(local, mesh, found, run_check=False, shape=shape, stride=stride)
    return made.to(local.device)  # of a parameter that was offloaded from its mesh's device


def _placed(placement: Any, shape: torch.Size, spec: TensorSpec, dims: frozenset[int] | None, own: int) -> Any:
    """How a dimension of the mesh divides a state of a parameter of ``shape``, which it divides by ``placement``."""
    from torch.distributed.tensor import Replicate, Shard

    def is_as_large(dim: int) -> bool:
        return dim < min(len(spec.shape), len(shape)) and spec.shape[dim] == shape[dim]

    dim = _dim_of(placement)
    if dim is not None and is_as_large(dim) and (dims is None or dim in dims):
        return placement
    is_own = 0 <= own < len(spec.shape) and not is_as_large(own)
    return Shard(own) if dim is not None and is_own else Replicate()


def _dim_of(placement: Any) -> int | None:
    """The dimension that a placement divides. Not all of torch's that do say ``is_shard()``: those of tensors that FSDP
    divides which are divided already do not."""
    return getattr(placement, "dim", None)

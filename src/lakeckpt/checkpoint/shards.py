"""Which part of a tensor does this rank hold, what is it called, and how do saved parts become those of other ranks?

A `DTensor` (of FSDP2, tensor parallelism and the like) is one tensor, of which every rank holds a part. Its parts are
saved as tensors of their own, whose keys say where they begin and of which shape the whole is; the tree refers to the
whole. When they are loaded, torch's own planner (of ``torch.distributed.checkpoint``) says which regions of which saved
parts make up the part that a rank holds now: any sharding, on any number of ranks, or the plain tensor.

Nothing here communicates, and no tensor is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.parts import PART_MARK
from lakeckpt.checkpoint.tiling import untiled
from lakeckpt.errors import CheckpointDamaged, UnsupportedValue, WireDamaged

__all__ = ["Part", "Region", "Whole", "is_part_key", "is_sharded", "local_of", "offsets_of", "part_key", "wholes_of"]

_KEY = re.compile(rf"(.*){PART_MARK}([0-9,]*) of ([0-9,]*)", re.ASCII | re.DOTALL)


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

    @classmethod
    def plain(cls, spec: TensorSpec) -> Whole:
        """A tensor that was saved as one."""
        return cls(spec=spec, parts=(Part(key=spec.key, offsets=(0,) * len(spec.shape), sizes=spec.shape),))

    def wrong(self) -> str | None:
        """Why the parts do not make up the whole; None where they do."""
        return untiled(self.spec.shape, [(part.offsets, part.sizes) for part in self.parts])

    def regions(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Region]:
        """What makes up the part at ``offsets`` of ``sizes``. `CheckpointDamaged` where not all of it was saved."""
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
            raise CheckpointDamaged(f"of the tensor {self.spec.key!r}, not all of {sizes} at {offsets} was saved once")
        return found


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(tuple(offsets)), sizes=torch.Size(tuple(sizes)))


def part_key(key: str, offsets: Iterable[int], shape: Iterable[int]) -> str:
    """The key of the part of ``key`` that begins at ``offsets``.

    >>> part_key("model/weight", (4, 0), (7, 10))
    'model/weight::at 4,0 of 7,10'
    """
    return f"{key}{PART_MARK}{','.join(map(str, offsets))} of {','.join(map(str, shape))}"


def is_part_key(key: str) -> bool:
    """Whether a key is that of a part."""
    return _KEY.fullmatch(key) is not None


def wholes_of(specs: Mapping[str, TensorSpec]) -> dict[str, Whole]:
    """The tensors of which there are parts among ``specs``, by their keys. `CheckpointDamaged` where parts do not fit
    one another."""
    found: dict[str, tuple[TensorSpec, list[Part]]] = {}
    for key, spec in specs.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        name, offsets, shape = match[1], _numbers(match[2]), _numbers(match[3])
        try:
            whole, parts = found.setdefault(name, (TensorSpec(key=name, dtype=spec.dtype, shape=shape), []))
        except WireDamaged as error:
            raise CheckpointDamaged(str(error)) from error
        if (whole.dtype, whole.shape) != (spec.dtype, shape) or len(offsets) != len(spec.shape):
            raise CheckpointDamaged(f"{key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
        parts.append(Part(key=key, offsets=offsets, sizes=spec.shape))
    return {name: Whole(spec=spec, parts=tuple(parts)) for name, (spec, parts) in found.items()}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(",")) if text else ()
    except ValueError:
        raise CheckpointDamaged(f"{text!r:.80} are no sizes") from None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that this rank holds; a plain tensor itself."""
    return tensor.detach()._local_tensor if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


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
    return tuple(offsets)

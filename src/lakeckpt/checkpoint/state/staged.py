"""What of a cut is written?  Tensors and trees in host memory, apart from the live objects, each with its digest.

Values only. Imports without torch: whoever persists needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.digests import digest_of_leaves
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING
from lakeckpt.checkpoint.format.sharing import Sharing, sharing_from_bytes
from lakeckpt.checkpoint.format.units import tensor_unit, tree_unit
from lakeckpt.checkpoint.persist.agreement import Unit
from lakeckpt.checkpoint.state.wholes import place_of

__all__ = ["Staged", "StagedCut", "StagedTensor", "StagedTree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensor:
    """A tensor in host memory that stays as it is until it is persisted."""

    spec: TensorSpec
    data: memoryview
    leaves: bytes = field(repr=False)
    """The digests of its leaves: `lakeckpt.checkpoint.format.digests.leaf_digests`."""
    digest: bytes = field(init=False)
    """Of its content: `lakeckpt.checkpoint.format.digests.content_digest`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of_leaves([self.leaves]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTree:
    """The document of an item's tree."""

    item: str
    document: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The state at a cut, apart from the live objects."""

    tensors: Mapping[str, StagedTensor]
    trees: Mapping[str, StagedTree]

    def units(self) -> list[Unit]:
        """What ranks agree on: all but the random states, which are each rank's own."""
        shared = sharing_from_bytes(self.trees[SHARING].document) if SHARING in self.trees else {}
        tensors = [
            Unit(id=tensor_unit(one.spec, one.digest), size_bytes=one.spec.size_bytes, bundle=_bundle(one.spec, shared))
            for key, one in self.tensors.items()
        ]
        trees = [
            Unit(id=tree_unit(item, one.digest), size_bytes=len(one.document))
            for item, one in self.trees.items()
            if item != RANDOM
        ]
        return tensors + trees


def _bundle(spec: TensorSpec, shared: Mapping[str, Sharing]) -> Hashable:
    """With which other parts that one is on the same ranks: those of its item that the same mesh divides alike. None of
    a plain tensor. Parts without elements are many ranks', where there are more ranks than rows: how many ranks these
    are depends on the number of rows, so that only those of one shape go together. (Versions before take a part that
    is there twice for two different ones.)"""
    place = place_of(spec.key) if shared else None
    sharing = None if place is None else shared.get(place.name)
    if place is None or sharing is None:
        return None
    return spec.key.partition("/")[0], sharing, None if spec.size_bytes else (place.offsets, place.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCut:
    """Everything that a rank has to say of a cut."""

    step: int
    """Optimizer steps done."""
    staged: Staged
    readers: Mapping[str, tuple[PendingRecord, ...]] = field(default_factory=dict)
    """reader → its pending records up to the cut, since the newest commit or an earlier one."""
    metric: float | None = None
    """How good the state is, where the training loop said so."""
    intact: Callable[[], None] = lambda: None
    """Raises where the memory of the tensors is not as it was captured. Asked while they are written, on another
    thread; nothing is published before it has returned."""

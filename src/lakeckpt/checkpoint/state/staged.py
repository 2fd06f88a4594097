"""This module holds what is written of a cut: tensors and trees in host memory, each with its digest.

It holds values only, and never imports torch, which persisting does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.digests import digest_of_leaves
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING, SiteWaits
from lakeckpt.checkpoint.format.sharing import Sharing, place_of, sharing_from_bytes
from lakeckpt.checkpoint.format.units import Unit, tensor_unit, tree_unit

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

    @property
    def shared(self) -> dict[str, Sharing]:
        """How each tensor is divided of which ranks have parts."""
        return sharing_from_bytes(self.trees[SHARING].document) if SHARING in self.trees else {}

    def units(self) -> list[Unit]:
        """Return what ranks agree on: all but the random states, which are each rank's own."""
        shared = self.shared
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
    """Return what is equal for the parts that lie on the same ranks: those of one item that one mesh divides alike.

    None for a plain tensor. If there are more ranks than rows, many ranks have a part without elements. How many
    ranks do depends on the number of rows, so that only such parts of one shape go together."""
    place = place_of(spec.key) if shared else None
    sharing = None if place is None else shared.get(place.name)
    if place is None or sharing is None:
        return None
    return spec.key.partition("/")[0], sharing, None if spec.size_bytes else (place.offsets, place.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCut:
    """Everything that a rank persists of a cut."""

    step: int
    """Optimizer steps done."""
    staged: Staged
    readers: Mapping[str, tuple[PendingRecord, ...]] = field(default_factory=dict)
    """reader → its pending records up to the cut, since the newest commit or an earlier one."""
    metric: float | None = None
    """How good the state is, if the training loop gave a metric."""
    waits: tuple[SiteWaits, ...] = ()
    """How long this rank waited, and how much of its captures moved meanwhile."""
    sums: Mapping[str, bytes] = field(default_factory=dict)
    """The sums of tensors that the replicas of a node have divided, as this rank has them: equal on all ranks."""
    intact: Callable[[], None] = lambda: None
    """Raises if the memory of the tensors is not as it was captured. Called while they are written, on another thread;
    nothing is published before it has returned."""

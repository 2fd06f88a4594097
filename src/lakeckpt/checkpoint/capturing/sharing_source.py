"""Which ranks share the tensors of all sources?  One more source, which has no tensors of its own.

What it says changes with the tensors of the others alone: it is looked up at every cut, and its document is made anew
only where it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.parts import SHARING
from lakeckpt.checkpoint.shards import sharing_of
from lakeckpt.checkpoint.sharing import Sharing, sharing_to_bytes

__all__ = ["SharingSource"]


class _Sharded(Protocol):
    @property
    def sharded(self) -> Mapping[str, torch.Tensor]: ...


class SharingSource:
    """How ranks share the tensors of ``others``. A `lakeckpt.checkpoint.capturing.sources.Source`."""

    __slots__ = ("_document", "_known", "_others", "_shared", "changing", "name", "sharded", "tensors")

    def __init__(self, others: Sequence[_Sharded]) -> None:
        self.name = SHARING
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.sharded: Mapping[str, torch.Tensor] = {}
        self.changing: frozenset[str] = frozenset()
        self._others = list(others)
        self._known: dict[tuple[int, Any, int], tuple[object, Sharing]] = {}
        self._shared: dict[str, Sharing] = {}
        self._document = sharing_to_bytes({})

    def known_as(self, key: str) -> torch.Tensor:
        """See `Source`."""
        return self.tensors[key]

    def renew(self) -> bool:
        """See `Source`."""
        return False

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        shared = {key: self._sharing(tensor) for one in self._others for key, tensor in one.sharded.items()}
        if shared != self._shared:
            self._shared, self._document = shared, sharing_to_bytes(shared)
        document = self._document
        return lambda: document

    def _sharing(self, tensor: torch.Tensor) -> Sharing:
        """There are few meshes and placements, and asking a mesh for its ranks takes longer than knowing it again."""
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        which = id(mesh), tensor.placements, tensor.dim()  # type: ignore[attr-defined]
        if which not in self._known:
            self._known[which] = mesh, sharing_of(tensor)  # the mesh is held: no other can get its id
        return self._known[which][1]

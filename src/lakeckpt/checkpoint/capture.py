"""What is the state at this cut?  The first stage of a save: state dicts come apart, nothing is copied yet.

`capture` asks every object for its state, on the training thread, between two optimizer steps. `stage` makes host
copies of what does not lie in host memory, and gives every unit (a tensor, a tree) its digest. The two are apart, as
are persist and commit after them, so that each can be done elsewhere and later without a change for its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.digests import leaves_of_all, short_digest
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.parts import RANDOM, SHARING
from lakeckpt.checkpoint.random_states import capture_random
from lakeckpt.checkpoint.shards import sharing_of
from lakeckpt.checkpoint.sharing import sharing_to_bytes
from lakeckpt.checkpoint.staged import Staged, StagedTensor, StagedTree
from lakeckpt.checkpoint.tensors import host_bytes, on_host, spec_of
from lakeckpt.checkpoint.tree import Flat, flatten, tree_to_bytes

__all__ = ["Captured", "capture", "stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state at a cut, referring to live tensors: valid until the next optimizer step."""

    items: tuple[Flat, ...]
    documents: Mapping[str, bytes]
    """item → the document of its tree; where tensors are shared by ranks, which, as one more (``sharing``)."""
    specs: Mapping[str, TensorSpec]
    """key → the spec of a tensor."""


def capture(objects: Mapping[str, Any]) -> Captured:
    """The states of ``objects`` (name → anything with ``state_dict``) and of the random generators.

    Raises `UnsupportedValue` and `LimitExceeded` naming the path of what cannot be saved.
    """
    items = [
        flatten(name, one.state_dict(), of_module=isinstance(one, torch.nn.Module)) for name, one in objects.items()
    ]
    shared = {key: sharing_of(tensor) for flat in items for key, tensor in flat.sharded.items()}
    documents = {flat.item: tree_to_bytes(flat) for flat in items}
    documents |= {SHARING: sharing_to_bytes(shared)} if shared else {}
    items.append(random := flatten(RANDOM, capture_random()))
    documents[RANDOM] = tree_to_bytes(random)
    return Captured(
        items=tuple(items),
        documents=documents,
        specs={key: spec_of(key, tensor) for flat in items for key, tensor in flat.tensors.items()},
    )


def stage(captured: Captured, *, copy: bool = False) -> Staged:
    """Bring the tensors to host memory and digest them.

    Without ``copy``, tensors that are contiguous in host memory are taken where they lie: enough where they are
    persisted before training goes on.
    """
    tensors = {key: tensor for flat in captured.items for key, tensor in flat.tensors.items()}
    hosts = {key: _own(tensor) if copy else on_host(tensor) for key, tensor in tensors.items()}
    views = {key: host_bytes(tensor) for key, tensor in hosts.items()}
    leaves = leaves_of_all(list(views.values()))
    staged = {
        key: StagedTensor(spec=captured.specs[key], data=view, leaves=one)
        for (key, view), one in zip(views.items(), leaves, strict=True)
    }
    trees = {
        item: StagedTree(item=item, document=document, digest=short_digest(document))
        for item, document in captured.documents.items()
    }
    return Staged(tensors=staged, trees=trees)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    host = on_host(tensor)
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host

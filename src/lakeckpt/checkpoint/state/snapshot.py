"""This module takes the state of live objects apart at a cut, on the training thread, into trees and live tensors.

It copies no tensor, so that a `Snapshot` is valid until the next optimizer step. It starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.format.parts import RANDOM, SHARING
from lakeckpt.checkpoint.format.sharing import sharing_to_bytes
from lakeckpt.checkpoint.state.names import named_state, parameter_names
from lakeckpt.checkpoint.state.random_states import capture_random
from lakeckpt.checkpoint.state.shards import sharing_of
from lakeckpt.checkpoint.state.tensors import refuse_overlaps
from lakeckpt.checkpoint.state.tree import Flat, class_of, flatten, tree_to_bytes

__all__ = ["Snapshot", "flat_of", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state at a cut, referring to live tensors."""

    tensors: Mapping[str, torch.Tensor]
    documents: Mapping[str, bytes]
    """item → the document of its tree; if ranks share tensors, one more says which (``sharing``)."""


def flat_of(name: str, one: Any, names: Mapping[int, str]) -> Flat:
    """Take apart the state of ``one``, which is called ``name``. ``names`` are those of `parameter_names`.

    Raises `UnsupportedValue` naming the path of what cannot be saved.
    """
    if kind := class_of(one):
        return flatten(name, named_state(name, one, names), optimizer=kind)
    return flatten(name, one.state_dict(), of_module=isinstance(one, torch.nn.Module))


def snapshot(objects: Mapping[str, Any]) -> Snapshot:
    """Take apart the states of ``objects`` (name → anything with ``state_dict``) and of the random generators.

    Raises `UnsupportedValue` naming the path of what cannot be saved.
    """
    names = parameter_names(objects)
    items = [flat_of(name, one, names) for name, one in objects.items()]
    shared = {key: sharing_of(tensor) for flat in items for key, tensor in flat.sharded.items()}
    documents = {flat.item: tree_to_bytes(flat) for flat in items}
    documents |= {SHARING: sharing_to_bytes(shared)} if shared else {}
    items.append(random := flatten(RANDOM, capture_random()))
    documents[RANDOM] = tree_to_bytes(random)
    tensors = {key: tensor for flat in items for key, tensor in flat.tensors.items()}
    refuse_overlaps(tensors)
    return Snapshot(tensors=tensors, documents=documents)

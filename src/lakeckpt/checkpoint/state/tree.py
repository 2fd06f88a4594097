"""This module takes a state dict apart into a tree of plain values and its tensors, and puts it together again.

`flatten` walks dicts, lists and tuples, collects each tensor under a key (``item/path``, tied ones once) and puts a
`TensorRef` in its place. Names of tensors, and the names in the state of a module, become canonical (see ``names``).
`rebuild` puts tensors back, and gives every container the type, and names that differ by wrappers' marks alone the
spelling, that the live object's own state has at that place: types come from the live object, never from a file. A name
that the live object does not have stays as it was saved. Leaves of other types are passed to the wire codec, which
takes or refuses them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lakeckpt.checkpoint.format.sharing import is_part_key, part_key
from lakeckpt.checkpoint.format.slabs import is_slab_key
from lakeckpt.checkpoint.state.names import canonical_names
from lakeckpt.checkpoint.state.shards import is_sharded, local_of, offsets_of
from lakeckpt.checkpoint.state.tensors import dim_order_of, spec_of, tied_key
from lakeckpt.errors import CheckpointDamaged, UnsupportedValue
from lakeckpt.wire.envelope import Payload, TensorRef, dumps, dumps_map, loads
from lakeckpt.wire.values import pack

__all__ = [
    "OF_MODULE",
    "Flat",
    "alongside",
    "branch_to_bytes",
    "class_of",
    "flatten",
    "rebuild",
    "references",
    "tree_from_bytes",
    "tree_of_branches",
    "tree_to_bytes",
    "union_of",
]

_KIND = "tree"
_VERSION = (1, 0)
_CLASS = "::class"
"""Beside the state of a module or an optimizer, in its document: `OF_MODULE`, or the class of the optimizer."""
OF_MODULE = "torch.nn.Module"
_DEEPEST = 64
_DICTS = (dict, OrderedDict, Counter, defaultdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The state of an item: its tree with a `TensorRef` for each tensor, and the tensors by key."""

    item: str
    tree: Any
    tensors: dict[str, torch.Tensor]
    sharded: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of which this rank holds a part, by the key that the tree has of the whole; that part, which may be
    empty, is among ``tensors`` under a key of its own (see ``shards``)."""

    kind: str = ""
    """The class of an optimizer, as `class_of` names it; `OF_MODULE`; empty for the state of anything else."""

    def leaf(self, key: str) -> torch.Tensor:
        """Return the tensor that the tree refers to."""
        return self.sharded[key] if key in self.sharded else self.tensors[key]


def class_of(one: object) -> str:
    """Return the full name of the class of an optimizer; the empty text for anything else."""
    kind = type(one)
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(one, torch.optim.Optimizer) else ""


def flatten(item: str, state: object, *, of_module: bool = False, optimizer: str = "") -> Flat:
    """Take the state of ``item`` apart. Tensors are referred to, not copied.

    ``of_module`` says that it is the state of a `torch.nn.Module`, whose names wrappers mark; ``optimizer`` is the
    class of an optimizer whose state it is. Raises `UnsupportedValue` naming a tensor that cannot be stored, or a place
    if containers lie too deep.
    """
    walk = _Walk(item)
    tree = walk.plain(state, item, _DEEPEST, of_module=of_module)
    kind = OF_MODULE if of_module else optimizer
    return Flat(item=item, tree=tree, tensors=walk.tensors, sharded=walk.sharded, kind=kind)


class _Walk:
    __slots__ = ("item", "sharded", "tensors", "tied")

    def __init__(self, item: str) -> None:
        self.item = item
        self.tensors: dict[str, torch.Tensor] = {}
        self.sharded: dict[str, torch.Tensor] = {}
        self.tied: dict[tuple[object, ...], TensorRef] = {}

    def plain(self, value: Any, path: str, depth: int, *, of_module: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            return self.reference(value, path)
        kind = type(value)
        if not depth and kind in (*_DICTS, list, tuple, torch.Size):
            raise UnsupportedValue(
                f"{path}: more than {_DEEPEST} containers lie inside one another: see if it holds itself"
            )
        if kind in _DICTS:
            names = canonical_names(key for key in value if type(key) is str)
            return {
                names.get(key, key) if of_module else key: self.plain(one, f"{path}/{names.get(key, key)}", depth - 1)
                for key, one in value.items()
            }
        if kind is list:
            return [self.plain(one, f"{path}/{at}", depth - 1) for at, one in enumerate(value)]
        if kind is tuple or kind is torch.Size:
            return tuple(self.plain(one, f"{path}/{at}", depth - 1) for at, one in enumerate(value))
        # Training may go on, and change an array in place, before the document of the tree is made.
        return value.copy() if kind is np.ndarray else value

    def reference(self, tensor: torch.Tensor, path: str) -> TensorRef:
        local = local_of(tensor) if is_sharded(tensor) else tensor
        spec_of(path, local)  # refuses what has no memory to look at
        same = tied_key(local)
        if same is None and is_sharded(tensor):  # of a rank without rows: ranks are to have one tree
            same = (local.untyped_storage()._cdata, local.dtype, tuple(tensor.shape))
        if same is not None and same in self.tied:
            return self.tied[same]
        key = path
        # 0 and "0" may both be keys of one dict.
        while key in self.tensors or key in self.sharded or is_part_key(key) or is_slab_key(key):
            key += "~"
        if is_sharded(tensor):
            self.sharded[key] = tensor
            # Also if this rank has none of its elements: the capture must say the shape of the whole.
            # Outside of the mesh of a single number, it has nothing that could say so.
            if local.dim() == tensor.dim():
                self.tensors[part_key(key, offsets_of(path, tensor), tensor.shape)] = local
        else:
            self.tensors[key] = tensor
        found = TensorRef(key=key, dim_order=dim_order_of(tensor))
        if same is not None:
            self.tied[same] = found
        return found


def tree_to_bytes(flat: Flat) -> bytes:
    """Return the document of a tree. Raises `UnsupportedValue` naming the path of a value that cannot be written."""
    tree = {**flat.tree, _CLASS: flat.kind} if flat.kind and type(flat.tree) is dict else flat.tree
    return dumps(tree, kind=_KIND, version=_VERSION, root=flat.item)


def branch_to_bytes(branch: Any, path: str) -> Payload:
    """Return what lies below one name of a tree, for `tree_of_branches`. Raises as `tree_to_bytes` does."""
    return pack(branch, root=path)


def tree_of_branches(branches: Mapping[str, Payload], *, optimizer: str = "") -> bytes:
    """Return the document of a tree from what `branch_to_bytes` made of each of its branches; see `Flat`."""
    of_class = {_CLASS: pack(optimizer)} if optimizer else {}
    return dumps_map({**branches, **of_class}, kind=_KIND, version=_VERSION)


def tree_from_bytes(document: bytes) -> tuple[Any, str]:
    """Return the tree of a document and its ``kind`` (see `Flat`). `WireError` if it is no such document."""
    tree = loads(document, kind=_KIND, supported=_VERSION)
    return tree, tree.pop(_CLASS, "") if type(tree) is dict else ""


def references(tree: Any) -> Iterator[TensorRef]:
    """Yield the tensors that a tree refers to."""
    if isinstance(tree, TensorRef):
        yield tree
    elif type(tree) in (dict, list, tuple):
        for one in tree.values() if type(tree) is dict else tree:
            yield from references(one)


def union_of(one: Any, other: Any) -> Any:
    """Return the union of what two ranks had of a module or an optimizer; what both had is taken from ``one``. The
    groups of an optimizer get the parameters of both."""
    if type(one) is not dict or type(other) is not dict:
        return one
    both = other | one
    both |= {key: union_of(one[key], other[key]) for key in one if key in other}
    groups, others = one.get("param_groups"), other.get("param_groups")
    if type(groups) is list and type(others) is list and len(groups) == len(others):
        both["param_groups"] = [
            {**mine, "params": list(dict.fromkeys([*mine.get("params", ()), *its.get("params", ())]))}
            for mine, its in zip(groups, others, strict=True)
        ]
    return both


def alongside(tree: Any, like: Any) -> Iterator[tuple[TensorRef, Any]]:
    """Yield each tensor that ``tree`` refers to, and what ``like`` has at that place (None if it has nothing there)."""
    if isinstance(tree, TensorRef):
        yield tree, like
    elif type(tree) is dict:
        names = _spelled_as(like, tree) if type(like) in _DICTS else {}
        for key, one in tree.items():
            yield from alongside(one, like.get(names[key]) if names else None)
    elif type(tree) in (list, tuple):
        for at, one in enumerate(tree):
            yield from alongside(one, _at(like, at))


def rebuild(tree: Any, tensors: Mapping[str, torch.Tensor], like: Any = None) -> Any:
    """Put ``tensors`` back into ``tree``, shaped ``like`` the state of the live object if that has the same
    place."""
    if isinstance(tree, TensorRef):
        if tree.key not in tensors:
            raise CheckpointDamaged(f"its tree refers to the tensor {tree.key!r}, which no part holds")
        return tensors[tree.key]
    if type(tree) is dict:
        return _dict(tree, tensors, like)
    if type(tree) is list:
        return [rebuild(one, tensors, _at(like, at)) for at, one in enumerate(tree)]
    if type(tree) is tuple:
        built = tuple(rebuild(one, tensors, _at(like, at)) for at, one in enumerate(tree))
        return torch.Size(built) if type(like) is torch.Size else built
    return tree


def _dict(tree: dict[Any, Any], tensors: Mapping[str, torch.Tensor], like: Any) -> Any:
    if type(like) not in _DICTS:
        return {key: rebuild(one, tensors) for key, one in tree.items()}
    names = _spelled_as(like, tree)
    built = {names[key]: rebuild(one, tensors, like.get(names[key])) for key, one in tree.items()}
    if type(like) is OrderedDict:
        ordered = OrderedDict(built)
        if hasattr(like, "_metadata"):
            ordered._metadata = like._metadata  # type: ignore[attr-defined]
        return ordered
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, built)
    return Counter(built) if type(like) is Counter else built


def _spelled_as(like: Mapping[Any, Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return key of ``tree`` → how ``like`` spells it, one to one. A key in both, or in ``tree`` alone, is itself."""
    live = {short: name for name, short in canonical_names(key for key in like if type(key) is str).items()}
    spelled: dict[Any, Any] = {key: key for key in tree}
    for key, short in canonical_names(key for key in tree if type(key) is str).items():
        if key not in like and short in live and live[short] not in tree:
            spelled[key] = live[short]
    return spelled


def _at(like: Any, at: int) -> Any:
    return like[at] if isinstance(like, (list, tuple)) and at < len(like) else None

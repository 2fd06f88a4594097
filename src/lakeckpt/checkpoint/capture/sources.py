"""This module separates the state of live objects into tensors and trees, and finds at each cut what has changed.

`Sources.renew` looks at every object. Plain modules and optimizers are watched
(`lakeckpt.checkpoint.capture.state_watch`): they are taken apart again only if something in them was replaced. All
other objects are taken apart at every cut.

A tensor is *late*, and may be copied beside training, if its memory belongs to a module's parameter or an optimizer's
state that its object is or holds. All other tensors are *early*. A late tensor is *frozen* if it is a module's
parameter that needs no gradient, and its memory is in no optimizer: captures skip it until it changes.

The module copies nothing and starts no threads. The training thread makes all calls, between two optimizer steps. Any
thread may call the functions that `Sources.documents` returns, at any later time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch

from lakeckpt.checkpoint.capture.state_watch import Memory, address_of, memory_of, watch_of
from lakeckpt.checkpoint.format.parts import SHARING
from lakeckpt.checkpoint.format.sharing import Sharing, sharing_to_bytes
from lakeckpt.checkpoint.state.names import parameter_names
from lakeckpt.checkpoint.state.random_states import RANDOM, capture_random
from lakeckpt.checkpoint.state.shards import sharing_of
from lakeckpt.checkpoint.state.snapshot import flat_of
from lakeckpt.checkpoint.state.tree import Flat, branch_to_bytes, tree_of_branches, tree_to_bytes
from lakeckpt.wire.envelope import Payload

__all__ = ["Renewed", "Sources"]

_PLAIN = (int, float, bool, str, type(None))
_NO_NAMES: Mapping[int, str] = {}

Document = Callable[[], bytes]
"""Makes the document of a tree as it was at a cut. It is called at most once."""
_Options = list[dict[str, Any]]
"""The options of each group of an optimizer."""


class Renewed(IntEnum):
    """The kind of tensors that have changed since the cut before, in their keys or in their memory."""

    NOTHING = 0
    EARLY = 1
    LATE = 2


class Sources:
    """The state of ``objects`` and of the random generators. Raises as `flatten` does."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects, self._names = objects, parameter_names(objects)
        self._every = [_Source(name, one, self._names_for(one)) for name, one in objects.items()]
        # If no tensor is divided at first, none will be. A tensor that is divided later is restored as it was divided.
        self._shares = any(one.sharded for one in self._every)
        self.frozen: Mapping[str, torch.Tensor] = {}
        """key → the parameter, for frozen tensors. torch counts changes of the parameter."""
        self.frozen = self._frozen()
        self._sharing = self._sharing_document()

    @property
    def early(self) -> dict[str, torch.Tensor]:
        """key → tensor, for tensors that may change at any time."""
        return {key: tensor for one in self._every for key, tensor in one.early.items()}

    @property
    def late(self) -> dict[str, torch.Tensor]:
        """key → tensor, for tensors that change in optimizer steps."""
        return {key: tensor for one in self._every for key, tensor in one.late.items()}

    def renew(self) -> Renewed:
        """Look at all objects again, and return which tensors have changed."""
        # Changes of modules are seen before names are used.
        modules = [one.renew(_NO_NAMES) for one in self._every if one.is_module]
        if any(modules):
            self._names = parameter_names(self._objects)
        others = [one.renew(self._names) for one in self._every if not one.is_module]
        found = max([*modules, *others], default=Renewed.NOTHING)
        if found:
            self._sharing = self._sharing_document()
        self.frozen = self._frozen()
        return found

    def _frozen(self) -> Mapping[str, torch.Tensor]:
        """Look for frozen tensors again if an object was taken apart since the last call."""
        if not any(one.is_new for one in self._every):
            return self.frozen
        trained = set[int]().union(*(one.memory.trained for one in self._every))
        frozen: dict[int, torch.Tensor] = {}
        for one in self._every:
            one.is_new = False
            for address, parameter in one.memory.frozen.items():
                if frozen.setdefault(address, parameter) is not parameter:  # changes of each are counted apart
                    trained.add(address)
        pairs = ((key, address_of(tensor)) for one in self._every for key, tensor in one.late.items())
        return {key: frozen[at] for key, at in pairs if at in frozen and at not in trained}

    def documents(self) -> dict[str, Document]:
        """Return for each object a function that makes the document of its present tree."""
        sharing = self._sharing
        shared: dict[str, Document] = {SHARING: lambda: sharing} if self._shares else {}
        return {**{one.name: one.document() for one in self._every}, **shared, RANDOM: _random_document()}

    def _sharing_document(self) -> bytes:
        """Return the document that says how ranks share tensors."""
        return sharing_to_bytes(self.shared)

    @property
    def shared(self) -> dict[str, Sharing]:
        """How ranks share tensors, by their keys in trees."""
        sharded = {key: tensor for one in self._every for key, tensor in one.sharded.items()}
        return {key: sharing_of(tensor) for key, tensor in sharded.items()}

    def _names_for(self, one: object) -> Mapping[int, str]:
        return _NO_NAMES if isinstance(one, torch.nn.Module) else self._names


class _Source:
    """The state of one object as it was taken apart last."""

    def __init__(self, name: str, one: Any, names: Mapping[int, str]) -> None:
        self.name, self._one = name, one
        self._take(names)

    @property
    def is_module(self) -> bool:
        return isinstance(self._one, torch.nn.Module)

    @property
    def sharded(self) -> Mapping[str, torch.Tensor]:
        """key in the tree → tensor, for tensors that are divided over ranks."""
        return self._flat.sharded

    def _take(self, names: Mapping[int, str]) -> None:
        self._names = names
        flat = self._flat = flat_of(self.name, self._one, names)
        self.is_new = True
        is_optimizer = isinstance(self._one, torch.optim.Optimizer)
        self.memory = memory_of(self._one) if flat.tensors or is_optimizer else Memory()
        self.late = {key: one for key, one in flat.tensors.items() if address_of(one) in self.memory.every}
        self.early = {key: one for key, one in flat.tensors.items() if key not in self.late}
        self._places = _places(self.early), _places(self.late)
        # An optimizer's document is made later. Any other object may change what its tree holds.
        self._ready = None if is_optimizer else tree_to_bytes(flat)
        self._known: dict[str, Payload] = {}
        self._options = _options_of(self._one) if is_optimizer else []
        # The memory of a rank's part is looked up at each cut, because no container shows whether it has changed.
        self._watch = None if flat.sharded or self._options is None else watch_of(self._one)

    def renew(self, names: Mapping[int, str]) -> Renewed:
        if self._watch is not None and names is self._names and self._watch.holds() and self._regrouped():
            return Renewed.NOTHING
        early, late = self._places
        self._take(names)
        if self._places[1] != late:
            return Renewed.LATE
        return Renewed.NOTHING if self._places[0] == early else Renewed.EARLY

    def _regrouped(self) -> bool:
        """Take over the present options of the groups. Returns False if this needs the whole state."""
        if not self._options:
            return True
        options = _options_of(self._one)
        if options is None or len(options) != len(self._options):
            return False
        if options != self._options:
            groups = zip(options, self._flat.tree["param_groups"], strict=True)
            tree = {**self._flat.tree, "param_groups": [{**one, "params": old["params"]} for one, old in groups]}
            self._options, self._flat = options, replace(self._flat, tree=tree)
        return True

    def document(self) -> Document:
        if (ready := self._ready) is not None:
            return lambda: ready
        flat, known = self._flat, self._known
        return lambda: _optimizer_document(flat, known)


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    """Return where tensors lie. State dicts may return new tensors of the same memory."""
    return {key: (one.data_ptr(), one.dtype, one.shape, one.stride()) for key, one in tensors.items()}


def _options_of(optimizer: torch.optim.Optimizer) -> _Options | None:
    """Return copies of the options of each group; None if an option is not a plain value."""
    found: _Options = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in options.items():
            if type(value) in (tuple, list):
                options[key] = type(value)(value)  # the optimizer's own list may change
            if not all(type(one) in _PLAIN for one in (value if type(value) in (tuple, list) else (value,))):
                return None
        found.append(options)
    return found


def _optimizer_document(flat: Flat, known: dict[str, Payload]) -> bytes:
    """Return the document of an optimizer. ``known`` keeps the bytes of the parameters' states: they are most of the
    tree, and stay the same until the state is taken apart again."""
    if "param_groups" not in flat.tree:
        return tree_to_bytes(flat)
    for name, branch in flat.tree.items():
        if name != "param_groups" and name not in known:
            known[name] = branch_to_bytes(branch, f"{flat.item}.{name}")
    groups = branch_to_bytes(flat.tree["param_groups"], f"{flat.item}.param_groups")
    branches = {name: groups if name == "param_groups" else known[name] for name in flat.tree}
    return tree_of_branches(branches, optimizer=flat.kind)


def _random_document() -> Document:
    """Copy the states of the random generators, and return a function that makes their document."""
    states = capture_random()

    def make() -> bytes:
        others = {name: one for name, one in states.items() if name != "python"}
        branches = {name: branch_to_bytes(one, f"{RANDOM}.{name}") for name, one in others.items()}
        return tree_of_branches({"python": _python_branch(states["python"]), **branches})

    return make


@lru_cache(maxsize=1)
def _python_branch(state: tuple[Any, ...]) -> Payload:
    """Return the bytes of the state of Python's generator: 625 numbers, which most training loops never use."""
    return branch_to_bytes(state, f"{RANDOM}.python")

"""This module separates the state of live objects into tensors and trees, and finds at each cut what has changed.

A `Source` is the share of one object: its tensors by key, and the document of its tree. To flatten a large state dict
costs milliseconds, and at almost every cut the result is the same as before. So the sources of plain modules and
optimizers remember the result, and `renew` compares containers, tensors and addresses. Objects that are not plain
(hooks on the state dict, a state dict of their own, any other type) are flattened at every cut.

A tensor is *late*, and may be copied beside training, if its memory belongs to a module's parameter or an optimizer's
state, no matter which object holds it (`lakeckpt.checkpoint.capture.identity.memory_of`). All other tensors are
*early*.

The module copies nothing and starts no threads. The training thread makes all calls, between two optimizer steps. Any
thread may call the function that `document` returns, at any later time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.capture.identity import Contents, Held, Places, address_of, are_same, contents_of, memory_of
from lakeckpt.checkpoint.format.parts import PART_MARK, SHARING
from lakeckpt.checkpoint.format.sharing import Sharing, sharing_to_bytes
from lakeckpt.checkpoint.state.names import named_state, parameter_names
from lakeckpt.checkpoint.state.random_states import RANDOM, capture_random
from lakeckpt.checkpoint.state.shards import sharing_of
from lakeckpt.checkpoint.state.tree import Flat, branch_to_bytes, class_of, flatten, tree_of_branches, tree_to_bytes
from lakeckpt.wire.envelope import Payload

__all__ = [
    "ModuleSource",
    "OptimizerSource",
    "OtherSource",
    "RandomSource",
    "Renewed",
    "SharingSource",
    "Source",
    "sources_of",
]

_PLAIN = (int, float, bool, str, type(None))
_NOTHING: Mapping[str, torch.Tensor] = {}


class Renewed(IntEnum):
    """Which tensors have changed since the cut before, in their keys or in their memory."""

    NOTHING = 0
    EARLY = 1
    LATE = 2


class Source(Protocol):
    """One object's share of the state."""

    name: str
    early: Mapping[str, torch.Tensor]
    """key → tensor, for tensors that may change at any time."""
    late: Mapping[str, torch.Tensor]
    """key → tensor, for tensors that change in optimizer steps."""

    @property
    def sharded(self) -> Mapping[str, torch.Tensor]:
        """key in the tree → tensor, for tensors that are divided over ranks."""
        ...

    def renew(self) -> Renewed:
        """Look at the object again, and return which tensors have changed."""
        ...

    def document(self) -> Callable[[], bytes]:
        """Return a function that makes the document of the present tree. It is called at most once."""
        ...


def sources_of(objects: Mapping[str, Any]) -> list[Source]:
    """Return the sources of ``objects`` and of the random states. Raises as `flatten` does."""
    names = _Names(objects)
    found: list[Source] = [_source(name, one, names) for name, one in objects.items()]
    found.sort(key=lambda one: not isinstance(one, ModuleSource))  # their changes are seen before names are used
    names.modules = [one for one in found if isinstance(one, ModuleSource)]
    # If no tensor is divided at first, none will be. A tensor that is divided later is restored as it was divided.
    shared = [SharingSource(found)] if any(one.sharded for one in found) else []
    return [*found, *shared, RandomSource()]


class _Names:
    """The names of parameters. They are looked up again if a module has changed."""

    __slots__ = ("_found", "_objects", "_seen", "modules")

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects, self._found, self._seen = objects, parameter_names(objects), 0
        self.modules: list[ModuleSource] = []

    @property
    def changes(self) -> int:
        """How many times `renew` found that a module had changed."""
        return sum(one.changes for one in self.modules)

    def now(self) -> Mapping[int, str]:
        """Return ``id`` of the parameter → its present name."""
        if self._seen != self.changes:
            self._found, self._seen = parameter_names(self._objects), self.changes
        return self._found


def _source(name: str, one: Any, names: _Names) -> Source:
    if isinstance(one, torch.nn.Module):
        return ModuleSource(name, one)
    if isinstance(one, torch.optim.Optimizer) and hasattr(one, "_optimizer_state_dict_pre_hooks"):
        return OptimizerSource(name, one, names)
    return OtherSource(name, one, names)


class _Tensors:
    """The base of sources with tensors: the early and late tensors of the last state dict, and their memory."""

    __slots__ = ("_early_places", "_late_places", "early", "late", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._found({}, lambda key: False)

    def _found(self, tensors: Mapping[str, torch.Tensor], is_late: Callable[[str], bool]) -> None:
        self.late: Mapping[str, torch.Tensor] = {key: one for key, one in tensors.items() if is_late(key)}
        self.early: Mapping[str, torch.Tensor] = {key: one for key, one in tensors.items() if key not in self.late}
        self._early_places, self._late_places = Places(self.early), Places(self.late)

    def _lie_as_before(self) -> bool:
        return self._early_places.hold() and self._late_places.hold()

    def _renewed(self, take: Callable[[], None]) -> Renewed:
        """Call ``take``, which finds the tensors again, and compare them with the tensors before."""
        early, late = self._early_places, self._late_places
        take()
        if not self._late_places.are(late):
            return Renewed.LATE
        return Renewed.NOTHING if self._early_places.are(early) else Renewed.EARLY


def _leaf(flat: Flat, key: str) -> torch.Tensor:
    """Return the tensor as its owner knows it: for a part of a divided tensor, the whole tensor."""
    return flat.sharded.get(key.partition(PART_MARK)[0], flat.tensors[key])


class ModuleSource(_Tensors):
    """A module: its parameters change in optimizer steps, its buffers at any time."""

    __slots__ = ("_containers", "_document", "_module", "changes", "sharded")

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        self._module = module
        self.changes = 0
        """How many times its tensors were others than before."""
        self.sharded: Mapping[str, torch.Tensor] = {}
        self._take()

    def _take(self) -> None:
        state, has_parameters = _state_of(self._module)
        flat = flatten(self.name, state, of_module=True)
        self._document, self.sharded = tree_to_bytes(flat), flat.sharded
        memory = frozenset[int]() if has_parameters else memory_of(self._module)
        self._found(
            flat.tensors,
            lambda key: isinstance(_leaf(flat, key), torch.nn.Parameter) or address_of(flat.tensors[key]) in memory,
        )
        # The memory of a rank's part is looked up at each cut, because no container shows whether it has changed.
        containers = None if flat.sharded else _containers(self._module)
        self._containers = None if containers is None else Held(containers)

    def renew(self) -> Renewed:
        """See `Source`."""
        if self._containers is not None and self._containers.hold() and self._lie_as_before():
            return Renewed.NOTHING
        found = self._renewed(self._take)
        self.changes += found is not Renewed.NOTHING
        return found

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        document = self._document
        return lambda: document


def _state_of(module: torch.nn.Module) -> tuple[Any, bool]:
    """Return the state of a module, and whether it holds the parameters themselves: a module's own ``state_dict`` may
    detach them."""
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except (TypeError, ValueError):
        return module.state_dict(), False
    return module.state_dict(keep_vars=True), True


_MAKES = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""The methods that make the state dict of a module. If one is overridden, the state may hold more than the dicts."""


def _containers(module: torch.nn.Module) -> list[Contents] | None:
    """Return all dicts that hold the state of ``module``, and the empty dicts of hooks that could change it; None if
    anything else contributes to the state dict."""
    found = []
    for one in module.modules():
        kind, own = type(one), vars(one)
        overridden = any(name in own or getattr(kind, name) is not getattr(torch.nn.Module, name) for name in _MAKES)
        hooks = one._state_dict_hooks, one._state_dict_pre_hooks
        held = one._modules, one._parameters, one._buffers
        if overridden or any(hooks) or not all(isinstance(each, dict) for each in held):  # script modules have views
            return None
        found += [contents_of(each) for each in (*held, *hooks)]
    return found


class OptimizerSource(_Tensors):
    """An optimizer: its state changes in its steps; what its groups hold (learning rates), at any time."""

    __slots__ = (
        "_entries",
        "_flat",
        "_groups",
        "_known",
        "_named_at",
        "_names",
        "_optimizer",
        "_parameters",
        "_states",
    )

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: _Names) -> None:
        super().__init__(name)
        self._optimizer, self._names = optimizer, names
        self._take()

    def _take(self) -> None:
        optimizer = self._optimizer
        state = named_state(self.name, optimizer, self._names.now())
        flat = self._flat = flatten(self.name, state, optimizer=class_of(optimizer))
        self._named_at = self._names.changes
        self._known: dict[str, Payload] = {}
        entries = None if flat.sharded else _entries(optimizer)
        late = {id(value) for state in optimizer.state.values() for value in _values(state)}
        memory = memory_of(optimizer) if entries is None else frozenset[int]()
        self._found(flat.tensors, lambda key: id(_leaf(flat, key)) in late or address_of(flat.tensors[key]) in memory)
        self._states = [] if entries is None else [of for of, _, _ in entries]
        self._entries, self._groups = None if entries is None else Held(entries), _groups(optimizer)
        self._parameters = list(optimizer.state)

    @property
    def sharded(self) -> Mapping[str, torch.Tensor]:
        """See `Source`."""
        return self._flat.sharded

    def renew(self) -> Renewed:
        """See `Source`."""
        optimizer = self._optimizer
        if (
            self._entries is not None
            and self._named_at == self._names.changes
            and self._groups is not None
            and are_same(optimizer.state, self._parameters)
            and are_same(optimizer.state.values(), self._states)
            and self._entries.hold()
            and (groups := _groups(optimizer)) is not None
            and _same_parameters(groups, self._groups)
            and self._lie_as_before()
        ):
            options = [one for _, one in groups]
            if options != [one for _, one in self._groups]:
                self._groups = groups
                self._flat = _regrouped(self._flat, options)
            return Renewed.NOTHING
        return self._renewed(self._take)

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        flat, tree, known = self._flat, self._flat.tree, self._known

        def make() -> bytes:
            # The states of the parameters are most of the tree, and stay the same until the source takes them again.
            for name, branch in tree.items():
                if name != "param_groups" and name not in known:
                    known[name] = branch_to_bytes(branch, f"{self.name}.{name}")
            groups = branch_to_bytes(tree["param_groups"], f"{self.name}.param_groups")
            branches = {name: groups if name == "param_groups" else known[name] for name in tree}
            return tree_of_branches(branches, optimizer=flat.kind)

        return make if "param_groups" in tree else lambda: tree_to_bytes(flat)


def _values(state: object) -> Iterable[object]:
    return state.values() if isinstance(state, dict) else ()


def _entries(optimizer: torch.optim.Optimizer) -> list[Contents] | None:
    """Return the contents of each parameter's state; None if it holds more than tensors, or hooks could change it."""
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    overridden = "state_dict" in vars(optimizer) or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if overridden or any(hooks):
        return None
    found = []
    for state in optimizer.state.values():
        if type(state) is not dict or not all(
            value is None or isinstance(value, torch.Tensor) for value in state.values()
        ):
            return None
        found.append(contents_of(state))
    return found


_Groups = list[tuple[list[Any], dict[str, Any]]]


def _same_parameters(some: _Groups, others: _Groups) -> bool:
    return len(some) == len(others) and all(
        are_same(one, other) for (one, _), (other, _) in zip(some, others, strict=True)
    )


def _groups(optimizer: torch.optim.Optimizer) -> _Groups | None:
    """Return the parameters and the options of each group; None if an option is not a plain value."""
    found = []
    for group in optimizer.param_groups:
        options: dict[str, Any] = {}
        for key, value in group.items():
            if type(value) in (tuple, list) and key != "params":
                value = type(value)(value)  # a copy, because the optimizer's own list may change
            options[key] = value
        params = options.pop("params")
        if not all(map(_is_plain, options.values())):
            return None
        found.append((list(params), options))
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(type(one) in _PLAIN for one in value)
    return type(value) in _PLAIN


def _regrouped(flat: Flat, groups: list[dict[str, Any]]) -> Flat:
    """Return the tree with other options in its groups."""
    tree = dict(flat.tree)
    tree["param_groups"] = [
        {**options, "params": before["params"]} for options, before in zip(groups, tree["param_groups"], strict=True)
    ]
    return replace(flat, tree=tree)


class OtherSource(_Tensors):
    """Any other object with a ``state_dict``. It is flattened at every cut."""

    __slots__ = ("_document", "_names", "_one", "sharded")

    def __init__(self, name: str, one: Any, names: _Names) -> None:
        super().__init__(name)
        self._one, self._names = one, names
        self.sharded: Mapping[str, torch.Tensor] = {}
        self._take()

    def _take(self) -> None:
        kind = class_of(self._one)
        state = named_state(self.name, self._one, self._names.now()) if kind else self._one.state_dict()
        flat = flatten(self.name, state, optimizer=kind)
        self.sharded = flat.sharded
        self._document = tree_to_bytes(flat)  # at once: the object may change what the tree holds
        memory = memory_of(self._one) if flat.tensors else frozenset[int]()
        self._found(flat.tensors, lambda key: address_of(flat.tensors[key]) in memory)

    def renew(self) -> Renewed:
        """See `Source`."""
        return self._renewed(self._take)

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        document = self._document
        return lambda: document


class SharingSource:
    """How ranks share the tensors of ``others``. The document is made again only if it has changed."""

    __slots__ = ("_document", "_known", "_others", "_shared", "early", "late", "name", "sharded")

    def __init__(self, others: Sequence[Source]) -> None:
        self.name = SHARING
        self.early = self.late = self.sharded = _NOTHING
        self._others = list(others)
        self._known: dict[tuple[int, Any, int], tuple[object, Sharing]] = {}
        self._shared: dict[str, Sharing] = {}
        self._document = sharing_to_bytes({})

    def renew(self) -> Renewed:
        """See `Source`."""
        return Renewed.NOTHING

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        shared = {key: self._sharing(tensor) for one in self._others for key, tensor in one.sharded.items()}
        if shared != self._shared:
            self._shared, self._document = shared, sharing_to_bytes(shared)
        document = self._document
        return lambda: document

    def _sharing(self, tensor: torch.Tensor) -> Sharing:
        """Return how ranks share ``tensor``, cached: there are few meshes and placements, and asking a mesh for its
        ranks takes longer than a look-up."""
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        which = id(mesh), tensor.placements, tensor.dim()  # type: ignore[attr-defined]
        if which not in self._known:
            self._known[which] = mesh, sharing_of(tensor)  # the reference to the mesh keeps its id unique
        return self._known[which][1]


class RandomSource:
    """The random generators of this process. `document` copies their states at once."""

    __slots__ = ("_known", "early", "late", "name", "sharded")

    def __init__(self) -> None:
        self.name = RANDOM
        self.early = self.late = self.sharded = _NOTHING
        self._known: dict[str, tuple[Any, Payload]] = {}

    def renew(self) -> Renewed:
        """See `Source`."""
        return Renewed.NOTHING

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        states = capture_random()
        return lambda: tree_of_branches({name: self._branch(name, state) for name, state in states.items()})

    def _branch(self, name: str, state: Any) -> Payload:
        """Return the bytes of a state. They are cached for Python's generator, which has 625 numbers and which most
        training loops never use."""
        known = self._known.get(name)
        if name == "python" and known is not None and known[0] == state:
            return known[1]
        self._known[name] = (state, branch_to_bytes(state, f"{RANDOM}.{name}"))
        return self._known[name][1]

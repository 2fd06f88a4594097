"""Of what does the state of these objects consist, and is that still so?  Taken apart once, looked at again each cut.

A `Source` is one object's share: its tensors by key, and what its tree says at a cut. Taking a large state dict apart
costs milliseconds, and at almost every cut it comes apart as before. So the sources of plain modules and optimizers
remember what they found, and `renew` compares: the same containers, holding the same tensors, at the same addresses.
Whatever is not plain (hooks on its state dict, a state dict of its own, any other type) is taken apart at every cut.

Nothing is copied here. Everything is called by the training thread, between two optimizer steps; what `document`
returns may be called later and elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.capturing.held import Contents, Held, Places, are_same, contents_of
from lakeckpt.checkpoint.capturing.hooks import takes_hooks
from lakeckpt.checkpoint.capturing.sharing_source import SharingSource
from lakeckpt.checkpoint.parts import PART_MARK
from lakeckpt.checkpoint.random_states import RANDOM, capture_random
from lakeckpt.checkpoint.tree import Flat, branch_to_bytes, flatten, tree_of_branches, tree_to_bytes

__all__ = ["ModuleSource", "OptimizerSource", "OtherSource", "RandomSource", "Source", "sources_of"]

_PLAIN = (int, float, bool, str, type(None))


class Source(Protocol):
    """One object's share of the state."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    """key → tensor, as the last `renew` found them: the live ones."""
    changing: frozenset[str]
    """The keys of tensors that may change at any time: in a forward pass, or whenever their owner likes."""

    @property
    def sharded(self) -> Mapping[str, torch.Tensor]:
        """key in the tree → the tensors of which this rank holds a part."""
        ...

    def known_as(self, key: str) -> torch.Tensor:
        """The tensor as optimizers know it: of a rank's part, the whole."""
        ...

    def renew(self) -> bool:
        """Look again. False where ``tensors`` are as they were: the same ones, in the same places."""
        ...

    def document(self) -> Callable[[], bytes]:
        """What makes the document of the tree as it is now; to be called once, at any later time, on any thread."""
        ...


def sources_of(objects: Mapping[str, Any]) -> list[Source]:
    """The sources of ``objects`` and of the random states. Raises as `lakeckpt.checkpoint.tree.flatten` does."""
    found: list[Source] = [_source(name, one) for name, one in objects.items()]
    # Where none is shared at first, none will be; if some should be after all, that is restored as it was divided.
    shared = [SharingSource(found)] if any(one.sharded for one in found) else []
    return [*found, *shared, RandomSource()]


def _source(name: str, one: Any) -> Source:
    if isinstance(one, torch.nn.Module):
        return ModuleSource(name, one)
    if isinstance(one, torch.optim.Optimizer) and hasattr(one, "_optimizer_state_dict_pre_hooks"):
        return OptimizerSource(name, one)
    return OtherSource(name, one)


class ModuleSource:
    """A module: its parameters change in optimizer steps, its buffers at any time."""

    __slots__ = ("_containers", "_document", "_module", "_places", "changing", "name", "sharded", "tensors")

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self._module = name, module
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.sharded: Mapping[str, torch.Tensor] = {}
        self.changing: frozenset[str] = frozenset()
        self._take()

    def _take(self) -> None:
        flat = flatten(self.name, _state_of(self._module), of_module=True)
        self._document = tree_to_bytes(flat)
        self.tensors, self.sharded = flat.tensors, flat.sharded
        self._places = Places(flat.tensors)
        self.changing = frozenset(key for key in flat.tensors if not self._waits(key))
        # The memory of a rank's part is looked up anew at each cut: no container says where it lies.
        containers = None if flat.sharded else _containers(self._module)
        self._containers = None if containers is None else Held(containers)

    def _waits(self, key: str) -> bool:
        """Whether whoever changes it says so before: not what a script module holds, which takes no hooks."""
        return isinstance(self.known_as(key), torch.nn.Parameter) and takes_hooks(self._module)

    def known_as(self, key: str) -> torch.Tensor:
        """See `Source`."""
        return self.sharded.get(key.partition(PART_MARK)[0], self.tensors[key])

    def renew(self) -> bool:
        """See `Source`."""
        if self._containers is not None and self._containers.hold() and self._places.hold():
            return False
        before = self._places
        self._take()
        return not self._places.are(before)

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        document = self._document
        return lambda: document


def _state_of(module: torch.nn.Module) -> Any:
    """Its state, with parameters as they are: one whose ``.data`` was replaced says so, what was detached from it does
    not, and counts as changing at any time. A ``state_dict`` of its own may know nothing of that, and is asked plainly.
    """
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except (TypeError, ValueError):
        return module.state_dict()
    return module.state_dict(keep_vars=True)


_MAKES = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""Methods that make the state dict of a module: where one is not torch's own, more than its containers makes it."""


def _containers(module: torch.nn.Module) -> list[Contents] | None:
    """All dicts in which the state of ``module`` lies, and those of hooks that would change it, which are empty; None
    where more than these makes it."""
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


class OptimizerSource:
    """An optimizer: its state changes in its steps; what its groups hold (learning rates), at any time."""

    __slots__ = (
        "_entries",
        "_flat",
        "_groups",
        "_known",
        "_optimizer",
        "_parameters",
        "_places",
        "_states",
        "changing",
        "name",
        "tensors",
    )

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name, self._optimizer = name, optimizer
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.changing: frozenset[str] = frozenset()
        self._take()

    def _take(self) -> None:
        optimizer = self._optimizer
        flat = self._flat = flatten(self.name, optimizer.state_dict())
        self._known: dict[str, bytes] = {}
        self.tensors = flat.tensors
        self._places = Places(flat.tensors)
        steady = {id(value) for state in optimizer.state.values() for value in _values(state)}
        self.changing = frozenset(key for key in flat.tensors if id(self.known_as(key)) not in steady)
        entries = None if flat.sharded else _entries(optimizer)
        self._states = [] if entries is None else [of for of, _, _ in entries]
        self._entries, self._groups = None if entries is None else Held(entries), _groups(optimizer)
        self._parameters = list(optimizer.state)

    @property
    def sharded(self) -> Mapping[str, torch.Tensor]:
        """See `Source`."""
        return self._flat.sharded

    def known_as(self, key: str) -> torch.Tensor:
        """See `Source`."""
        return self._flat.sharded.get(key.partition(PART_MARK)[0], self.tensors[key])

    def renew(self) -> bool:
        """See `Source`."""
        optimizer = self._optimizer
        if (
            self._entries is not None
            and self._groups is not None
            and are_same(optimizer.state, self._parameters)
            and are_same(optimizer.state.values(), self._states)
            and self._entries.hold()
            and (groups := _groups(optimizer)) is not None
            and _same_parameters(groups, self._groups)
            and self._places.hold()
        ):
            options = [one for _, one in groups]
            if options != [one for _, one in self._groups]:
                self._groups = groups
                self._flat = _regrouped(self._flat, options)
            return False
        before, groups = self._places, self._groups
        self._take()
        same_groups = groups is not None and self._groups is not None and _same_parameters(groups, self._groups)
        return not (same_groups and self._places.are(before))

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        flat, tree, known = self._flat, self._flat.tree, self._known

        def make() -> bytes:
            # The state of all parameters is most of the tree, and the same until it is taken anew.
            for name, branch in tree.items():
                if name != "param_groups" and name not in known:
                    known[name] = branch_to_bytes(branch, f"{self.name}.{name}")
            groups = branch_to_bytes(tree["param_groups"], f"{self.name}.param_groups")
            branches = {name: groups if name == "param_groups" else known[name] for name in tree}
            return tree_of_branches(branches, has_dim_orders=flat.has_dim_orders)

        return make if "param_groups" in tree else lambda: tree_to_bytes(flat)


def _values(state: object) -> Iterable[object]:
    return state.values() if isinstance(state, dict) else ()


def _entries(optimizer: torch.optim.Optimizer) -> list[Contents] | None:
    """The state of each parameter, and what is in it; None where there is more to it than tensors."""
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
    """The parameters and the options of each group; None where an option is no plain value."""
    found = []
    for group in optimizer.param_groups:
        options: dict[str, Any] = {}
        for key, value in group.items():
            if type(value) in (tuple, list) and key != "params":
                value = type(value)(value)  # a list of our own: theirs may change
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
    """The tree with other options in its groups."""
    tree = dict(flat.tree)
    tree["param_groups"] = [
        {**options, "params": before["params"]} for options, before in zip(groups, tree["param_groups"], strict=True)
    ]
    return replace(flat, tree=tree)


class OtherSource:
    """Anything else that has a ``state_dict``: taken apart at every cut, and all of it may change at any time."""

    __slots__ = ("_document", "_one", "_places", "changing", "name", "sharded", "tensors")

    def __init__(self, name: str, one: Any) -> None:
        self.name, self._one = name, one
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.sharded: Mapping[str, torch.Tensor] = {}
        self._places = Places({})
        self.changing: frozenset[str] = frozenset()
        self._document = b""
        self.renew()

    def known_as(self, key: str) -> torch.Tensor:
        """See `Source`."""
        return self.tensors[key]

    def renew(self) -> bool:
        """See `Source`."""
        flat = flatten(self.name, self._one.state_dict())
        before, self.tensors, self._places = self._places, flat.tensors, Places(flat.tensors)
        self.sharded = flat.sharded
        self.changing = frozenset(flat.tensors)
        self._document = tree_to_bytes(flat)  # at once: what it holds may be the object's own
        return not self._places.are(before)

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        document = self._document
        return lambda: document


class RandomSource:
    """The random generators of this process. Their states are values of their own as soon as they are taken."""

    __slots__ = ("_known", "changing", "name", "sharded", "tensors")

    def __init__(self) -> None:
        self.name = RANDOM
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.sharded: Mapping[str, torch.Tensor] = {}
        self.changing: frozenset[str] = frozenset()
        self._known: dict[str, tuple[Any, bytes]] = {}

    def known_as(self, key: str) -> torch.Tensor:
        """See `Source`."""
        return self.tensors[key]

    def renew(self) -> bool:
        """See `Source`."""
        return False

    def document(self) -> Callable[[], bytes]:
        """See `Source`."""
        states = capture_random()
        return lambda: tree_of_branches({name: self._branch(name, state) for name, state in states.items()})

    def _branch(self, name: str, state: Any) -> bytes:
        """Python's generator has 625 numbers, and most training loops never use it."""
        known = self._known.get(name)
        if name == "python" and known is not None and known[0] == state:
            return known[1]
        self._known[name] = (state, branch_to_bytes(state, f"{RANDOM}.{name}"))
        return self._known[name][1]

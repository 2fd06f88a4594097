"""This module watches the state of plain modules and optimizers, and notices whether anything in it was replaced.

To take a large state dict apart costs milliseconds, and at almost every cut the result is the same as before. A
`StateWatch` remembers the containers of a state, the objects in them by identity, and the memory of their tensors. It
holds references to all of them, because a new object could get the address of an old one. torch compares tensors in C.

A module or an optimizer is *plain* if nothing but its dicts contributes to its state dict: no hook, no method of its
own, and in an optimizer's state nothing but tensors. `memory_of` finds the memory that optimizer steps change, and the
parameters that they do not change; `estimated_bytes` estimates it before the first step. The module copies nothing and
starts no threads.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["Memory", "StateWatch", "address_of", "estimated_bytes", "memory_of", "parts_of", "watch_of"]

_MOST = 1000
_NO_HOLDERS = (torch.Tensor, type, str, bytes, int, float, FunctionType, MethodType, ModuleType)
_MOMENTS = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "ASGD": 1, "Lion": 1, "Muon": 1}
"""How many tensors of a parameter's size an optimizer keeps for it, but for those that options ask for."""
_USUAL_MOMENTS = 2
_OPTIONS = ("momentum", "centered", "amsgrad")
"""Each makes one more such tensor, if it is not 0 or False."""
_NO_OPTION = {"Muon": ("momentum",)}
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""The methods of a module that make its state dict."""

_Containers = tuple[Sequence[dict[Any, Any]], Sequence[Sequence[object]]]


class StateWatch:
    """Watches the dicts and lists that ``containers`` returns. Tensors count if they are values of a dict."""

    __slots__ = ("_addresses", "_aliases", "_containers", "_dtypes", "_lengths", "_objects", "_tensors")

    def __init__(self, containers: Callable[[], _Containers]) -> None:
        self._containers = containers
        self._lengths, self._objects, values = self._look()
        self._tensors = [one for one in values if isinstance(one, torch.Tensor)]
        self._aliases = [one.detach() for one in self._tensors]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._dtypes = [one.dtype for one in self._tensors]

    def _look(self) -> tuple[list[int], list[object], list[object]]:
        dicts, lists = self._containers()
        values = list(chain.from_iterable(map(dict.values, dicts)))
        every = [*dicts, *lists]
        return list(map(len, every)), [*chain.from_iterable(every), *values], values

    def holds(self) -> bool:
        """Return whether all containers hold the same objects, and all tensors lie where they lay."""
        lengths, objects, _ = self._look()
        return (
            lengths == self._lengths
            and all(map(operator.is_, objects, self._objects))
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and [one.dtype for one in self._tensors] == self._dtypes
            and all(map(torch.Tensor.is_set_to, self._tensors, self._aliases))
        )


def watch_of(one: object) -> StateWatch | None:
    """Return a watch of the state of ``one``; None if ``one`` is no plain module or optimizer, or if torch cannot
    compare the memory of a tensor in it."""
    if isinstance(one, torch.nn.Module):
        containers = _of_module(one)
    elif isinstance(one, torch.optim.Optimizer):
        containers = _of_optimizer(one)
    else:
        return None
    if containers is None:
        return None
    watch = StateWatch(containers)
    if any(one.is_conj() or one.is_neg() for one in watch._tensors):
        return None
    try:
        return watch if watch.holds() else None
    except Exception:  # a tensor of somebody's own class
        return None


def _of_module(module: torch.nn.Module) -> Callable[[], _Containers] | None:
    """Return the dicts that hold the state of ``module``, and the empty dicts of hooks that could change it; None if
    the module is not plain."""
    found: list[dict[Any, Any]] = []
    for one in module.modules():
        kind, own = type(one), vars(one)
        overridden = any(name in own or getattr(kind, name) is not getattr(torch.nn.Module, name) for name in _METHODS)
        hooks = one._state_dict_hooks, one._state_dict_pre_hooks
        held = one._modules, one._parameters, one._buffers
        if overridden or any(hooks) or not all(isinstance(each, dict) for each in held):  # script modules have views
            return None
        found += [*held, *hooks]
    return lambda: (found, ())


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], _Containers] | None:
    """Return a function that finds the dicts and lists of ``optimizer``; None if the optimizer is not plain."""
    own = "state_dict" in vars(optimizer) or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if own or not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        return None
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    values = chain.from_iterable(one.values() for one in optimizer.state.values() if type(one) is dict)
    all_dicts = all(type(one) is dict for one in optimizer.state.values())
    if any(hooks) or not all_dicts or not all(one is None or isinstance(one, torch.Tensor) for one in values):
        return None

    def containers() -> _Containers:
        state = optimizer.state
        return (state, *state.values(), *hooks), [group["params"] for group in optimizer.param_groups]

    return containers


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory (for a DTensor: of this rank's part); 0 if it has no memory."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The addresses of all parameters of modules and all states of optimizers that an object is or holds.

    ``trained``: those of parameters that need a gradient, that an optimizer has, or that share their memory with
    others. ``frozen``: address → the parameter, for parameters of modules that need no gradient.
    """

    every: frozenset[int] = frozenset()
    trained: frozenset[int] = frozenset()
    frozen: Mapping[int, torch.Tensor] = field(default_factory=dict)


def memory_of(one: object) -> Memory:
    """Return the memory of all parameters of modules and all states of optimizers that ``one`` is or holds.

    Looks for them as `parts_of` does.
    """
    trained: set[int] = {0}
    frozen: dict[int, torch.Tensor] = {}
    for part in parts_of(one):
        if isinstance(part, torch.nn.Module):
            for parameter in part.parameters():
                address = address_of(parameter)
                if parameter.requires_grad or frozen.setdefault(address, parameter) is not parameter:
                    trained.add(address)
        else:
            trained.update(address_of(value) for group in part.param_groups for value in group["params"])
            states = (state for state in part.state.values() if isinstance(state, dict))
            tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
            trained.update(map(address_of, tensors))
    every = frozenset({*trained, *frozen} - {0})
    return Memory(every=every, trained=frozenset(trained), frozen=frozen)


def parts_of(one: object) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
    """Yield all modules and optimizers that ``one`` is or holds.

    It looks into attributes, lists, tuples and dicts, and stops after a thousand objects: wrappers
    hold the objects that they wrap nearby.
    """
    seen: dict[int, object] = {}
    coming = [one]
    while coming and len(seen) < _MOST:
        part = coming.pop()
        if id(part) in seen or isinstance(part, _NO_HOLDERS):
            continue
        seen[id(part)] = part
        if isinstance(part, torch.nn.Module | torch.optim.Optimizer):
            yield part
        if not isinstance(part, torch.nn.Module):
            coming.extend(itertools.islice(_held_by(part), _MOST))


def _held_by(one: object) -> Iterable[object]:
    if isinstance(one, dict):
        return one.values()
    if isinstance(one, list | tuple):
        return one
    own = ("state", "param_groups") if isinstance(one, torch.optim.Optimizer) else ()
    return (value for name, value in getattr(one, "__dict__", {}).items() if name not in own)


def estimated_bytes(objects: Iterable[object]) -> int:
    """Return the bytes of the tensors of all modules and optimizers that ``objects`` are or hold, on this rank."""
    sizes: dict[tuple[int, int], int] = {}
    missing = 0
    parts = {id(part): part for one in objects for part in parts_of(one)}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            _count(chain(part.parameters(), part.buffers()), sizes)
        else:
            states = (state for state in part.state.values() if isinstance(state, dict))
            _count((one for state in states for one in state.values() if isinstance(one, torch.Tensor)), sizes)
            missing += sum(_moments(part, group) * _unmade(part, group) for group in part.param_groups)
    return sum(sizes.values()) + missing


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _count(tensors: Iterable[torch.Tensor], sizes: dict[tuple[int, int], int]) -> None:
    for one in map(_local, tensors):
        if not torch.nn.parameter.is_lazy(one):
            sizes[one.data_ptr(), one.nbytes] = one.nbytes


def _unmade(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """Return the bytes of the parameters of a group that are trained and have no state yet."""
    waits = (one for one in group["params"] if one.requires_grad and not optimizer.state.get(one))
    return sum(_local(one).nbytes for one in waits if not torch.nn.parameter.is_lazy(one))


def _moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    name = type(optimizer).__name__
    options = [one for one in _OPTIONS if group.get(one) and one not in _NO_OPTION.get(name, ())]
    return _MOMENTS.get(name, _USUAL_MOMENTS) + len(options)

"""This module compares live objects with the cut before: tensors by their memory, the contents of dicts by identity.

It copies nothing. It holds references to all objects that it compares; otherwise a new object could get the address of
an old one and be taken for it. The module starts no threads.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["Contents", "Held", "Places", "address_of", "are_same", "contents_of", "memory_of"]

_MOST = 1000
_NO_HOLDERS = (torch.Tensor, type, str, bytes, int, float, FunctionType, MethodType, ModuleType)


class Places:
    """The addresses, dtypes, shapes and strides of some tensors. Any code may change a tensor's memory (``.data``)."""

    __slots__ = ("_addresses", "_aliases", "_dtypes", "_keys", "_places", "_tensors")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._keys, self._tensors = list(tensors), tuple(tensors.values())
        self._places = [_place(one) for one in self._tensors]
        self._aliases: list[torch.Tensor] | None = None
        self._addresses: list[int] = []
        self._dtypes: list[torch.dtype] = []

    def hold(self) -> bool:
        """Return whether all tensors still have the same memory. Every cut asks this for thousands of tensors: from the
        second call on torch compares them in C."""
        if self._aliases is not None:
            return (
                list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and [one.dtype for one in self._tensors] == self._dtypes
                and _are_set_to(self._tensors, self._aliases)
            )
        if [_place(one) for one in self._tensors] != self._places:
            return False
        aliases = [one.detach() for one in self._tensors]
        if not any(one.is_conj() or one.is_neg() for one in self._tensors) and _are_set_to(self._tensors, aliases):
            self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
            self._dtypes = [one.dtype for one in self._tensors]
            self._aliases = aliases
        return True

    def are(self, others: Places) -> bool:
        """Return whether both have the same memory under the same keys. State dicts may return new tensors of the same
        memory."""
        return self._keys == others._keys and self._places == others._places


def _are_set_to(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return whether the tensors have the same storage, offset, shape and strides; False where torch cannot compare
    them, as for some subclasses."""
    try:
        return all(map(torch.Tensor.is_set_to, some, others))
    except Exception:
        return False


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


Contents = tuple[dict[Any, Any], list[Any], list[Any]]
"""A dict, its keys and its values."""


def contents_of(of: dict[Any, Any]) -> Contents:
    """Return the present contents of a dict."""
    return of, list(of), list(of.values())


class Held:
    """The contents of many dicts. Each module has five, most of them empty."""

    __slots__ = ("_empty", "_filled")

    def __init__(self, contents: Collection[Contents]) -> None:
        self._empty = [of for of, names, _ in contents if not names]
        self._filled = [one for one in contents if one[1]]

    def hold(self) -> bool:
        """Return whether all dicts still have these contents."""
        if any(self._empty):
            return False
        for of, names, held in self._filled:
            if len(of) != len(held) or not all(map(operator.is_, of.values(), held)) or list(of) != names:
                return False
        return True


def are_same(some: Collection[object], others: Collection[object]) -> bool:
    """Return whether both collections hold the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory (for a DTensor: of this rank's part); 0 if it has no memory."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def memory_of(one: object) -> frozenset[int]:
    """Return the addresses of all parameters of modules and all states of optimizers that ``one`` holds.

    It looks into attributes, lists, tuples and dicts, and stops after a thousand objects: wrappers
    hold the objects that they wrap nearby.
    """
    found: set[int] = set()
    for part in _modules_and_optimizers(one):
        if isinstance(part, torch.nn.Module):
            found.update(map(address_of, part.parameters()))
        else:
            found.update(address_of(value) for group in part.param_groups for value in group["params"])
            states = (state for state in part.state.values() if isinstance(state, dict))
            tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
            found.update(map(address_of, tensors))
    return frozenset(found - {0})


def _modules_and_optimizers(one: object) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
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

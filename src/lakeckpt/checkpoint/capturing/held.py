"""Is it still the same?  Tensors in the same memory, and dicts with the same things in them, asked at every cut.

Nothing is copied, and what is compared is held: else something new could be made where it lay, and be taken for it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

__all__ = ["Contents", "Held", "Places", "are_same", "contents_of"]


class Places:
    """Where some tensors lay, and as what. Whoever holds a tensor may give it other memory at any time (``.data``)."""

    __slots__ = ("_addresses", "_aliases", "_dtypes", "_keys", "_places", "_tensors")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._keys, self._tensors = list(tensors), tuple(tensors.values())
        self._places = [_place(one) for one in self._tensors]
        self._aliases: list[torch.Tensor] | None = None
        self._addresses: list[int] = []
        self._dtypes: list[torch.dtype] = []

    def hold(self) -> bool:
        """Whether all of them lie where they lay. This is asked at every cut, of thousands of tensors; from the second
        time on in C, wherever torch can tell."""
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
        """Whether these were the same memory under the same keys. State dicts may give other tensors of it."""
        return self._keys == others._keys and self._places == others._places


def _are_set_to(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether they have the same storage, offset, shape and strides. Tensors of somebody's own may not say."""
    try:
        return all(map(torch.Tensor.is_set_to, some, others))
    except Exception:
        return False


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


Contents = tuple[dict[Any, Any], list[Any], list[Any]]
"""A dict, and what was in it, under which names."""


def contents_of(of: dict[Any, Any]) -> Contents:
    """What is in it now."""
    return of, list(of), list(of.values())


class Held:
    """Whether the same is in all of these dicts still. There are five for each module, and nothing in most."""

    __slots__ = ("_empty", "_filled")

    def __init__(self, contents: Collection[Contents]) -> None:
        self._empty = [of for of, names, _ in contents if not names]
        self._filled = [one for one in contents if one[1]]

    def hold(self) -> bool:
        """See above. What is empty is asked in C."""
        if any(self._empty):
            return False
        for of, names, held in self._filled:
            if len(of) != len(held) or not all(map(operator.is_, of.values(), held)) or list(of) != names:
                return False
        return True


def are_same(some: Collection[object], others: Collection[object]) -> bool:
    """Whether they are the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))

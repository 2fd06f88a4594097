"""This module finds the parts of modules that load themselves, so that their own loading judges what fits them.

A submodule *loads itself* if it has an extra state, a ``_load_from_state_dict`` of its own, or hooks that change its
state on loading; a whole module also by a ``load_state_dict`` of its own, and an optimizer by hooks. Its entries may
have other shapes, dtypes or names in a fresh module than in a checkpoint, as a buffer that is built by the first batch.
Such a part is loaded on trial, before anything is read in place: `OwnPart` is what is loaded, and goes back to its old
state if it refuses. Code of torch itself does not count: its modules take the entries that they have. The module starts
no threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.state.names import without_marks

__all__ = ["OwnPart", "loads_itself", "part_of"]

_EXTRA = "_extra_state"


class OwnPart:
    """A submodule, or its ``extra`` state alone, that is loaded by itself. ``name`` is its canonical name."""

    def __init__(self, name: str, module: torch.nn.Module, *, extra: bool = False) -> None:
        self.name, self.is_extra = name, extra
        self._module = module
        self._members = [(dict(one._parameters), dict(one._buffers)) for one in module.modules()]

    def tree(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of this part in the state of the ``whole`` module, under their names in this part."""
        start = f"{self.name}." if self.name else ""
        found = {key.removeprefix(start): one for key, one in whole.items() if key.startswith(start)}
        return {_EXTRA: found[_EXTRA]} if self.is_extra else found

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it is now."""
        return {_EXTRA: self._module.get_extra_state()} if self.is_extra else self._module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state with the parameters and buffers that the part had when this was made: to take back another
        state, the memory that it has replaced must be back first."""
        for one, (parameters, buffers) in zip(list(self._module.modules()), self._members, strict=False):
            one._parameters.clear()
            one._parameters.update(parameters)
            one._buffers.clear()
            one._buffers.update(buffers)
        if self.is_extra:
            self._module.set_extra_state(state[_EXTRA])
        else:
            self._module.load_state_dict(state)


def part_of(module: torch.nn.Module, key: str) -> OwnPart | None:
    """Return the smallest part of ``module`` that loads itself and has the entry ``key`` (a canonical name)."""
    every = {without_marks(name): one for name, one in module.named_modules()}  # of wrappers, the innermost
    owner, _, last = key.rpartition(".")
    if last == _EXTRA and owner in every:
        return OwnPart(owner, every[owner], extra=True)
    while key:
        if owner in every and _loads_part(every[owner]):
            return OwnPart(owner, every[owner])
        key, (owner, _, _) = owner, owner.rpartition(".")
    return OwnPart("", module) if loads_itself(module) or _loads_part(module) else None


def loads_itself(one: Any) -> bool:
    """Return whether a module has a ``load_state_dict`` of its own, or an optimizer has hooks that change its state."""
    if isinstance(one, torch.nn.Module):
        return _is_own(one.load_state_dict)
    return any(map(_is_own, getattr(one, "_optimizer_load_state_dict_pre_hooks", {}).values()))


def _loads_part(module: torch.nn.Module) -> bool:
    hooks = chain(module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values())
    return _is_own(module._load_from_state_dict) or any(_is_own(getattr(one, "hook", one)) for one in hooks)


def _is_own(code: Any) -> bool:
    """Return whether ``code`` is not torch's."""
    code = getattr(code, "func", code)  # of a partial
    return not str(getattr(code, "__module__", "")).startswith("torch.")

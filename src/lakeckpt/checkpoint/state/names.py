"""This module names the tensors of modules and of optimizers, whatever wraps the modules.

DDP adds ``module.`` to every name, ``torch.compile`` adds ``_orig_mod.``, and so on, anywhere in the path. The state
that 4 ranks saved under DDP must load into a bare module, so `canonical_names` removes these marks. Loading maps the
names back by the names of the live object. Names that would become equal keep their marks: a module that calls what it
wraps ``module``, and has a parameter of the same name itself, is restored with the same wrappers inside of it.

torch numbers the parameters of an optimizer in the order of its groups, so that the stages of a pipeline use the same
numbers for different parameters. A checkpoint has names in place of numbers: a parameter of the module that is
registered as ``model`` is ``model/layer.weight``. A parameter of no registered module is ``optimizer/group/index``.
`fitted` gives a saved state the numbers of the live optimizer, so that a state is found by its name on any number of
ranks; `numbered` gives it numbers in the order of its own groups. ``get_optimizer_state_dict`` of torch is never
called: it takes a step with a fresh optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

__all__ = ["canonical_names", "fitted", "named_state", "numbered", "parameter_names", "without_marks"]

_Keys = Sequence[Sequence[Any]]
_MARKS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Return name → canonical name, one to one.

    >>> canonical_names(["module._orig_mod.layer.weight", "step"])
    {'module._orig_mod.layer.weight': 'layer.weight', 'step': 'step'}
    >>> canonical_names(["a.bias", "a.module.bias"])
    {'a.bias': 'a.bias', 'a.module.bias': 'a.module.bias'}
    """
    found = {name: _stripped(name) for name in names}
    times = Counter(found.values())
    return {name: short if times[short] == 1 else name for name, short in found.items()}


def _stripped(name: str) -> str:
    return without_marks(name) if "." in name and without_marks(name) else name


def without_marks(name: str) -> str:
    """Return the name of a submodule without the marks of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _MARKS)


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each parameter of the modules among ``objects``, by its ``id``; of tied ones the first."""
    found: dict[int, str] = {}
    for item, module in objects.items():
        if isinstance(module, torch.nn.Module):
            parameters = dict(module.named_parameters())
            for name, short in canonical_names(parameters).items():
                found.setdefault(id(parameters[name]), f"{item}/{short}")
    return found


def named_state(item: str, optimizer: Any, names: Mapping[int, str]) -> Any:
    """Return the state of ``optimizer``, registered as ``item``, with names in place of numbers.

    A state dict that is not like torch's stays as it is.
    """
    state = optimizer.state_dict()
    saved, live = _keys_in(state), _names_of(item, optimizer, names)
    if saved is None or [len(one) for one in saved] != [len(one) for one in live]:
        return state
    return _renamed(state, live, dict(zip(chain(*saved), chain(*live), strict=True)))


def numbered(tree: Any) -> Any:
    """Return the saved state of an optimizer as torch has it: numbers in the order of its groups."""
    saved = _keys_in(tree)
    if saved is None:
        return tree
    order = {key: number for number, key in enumerate(dict.fromkeys(chain(*saved)))}
    return _renamed(tree, [[order[key] for key in group] for group in saved], order)


def fitted(
    item: str, optimizer: Any, tree: Any, names: Mapping[int, str], *, has_more: bool = False
) -> tuple[Any, list[str]]:
    """Return the saved state with the numbers of ``optimizer``, and a line for each parameter that does not fit.

    With ``has_more``, the state may have parameters that this optimizer does not have: those of other ranks.
    """
    saved = _keys_in(tree)
    if saved is None or not all(type(key) is str for key in chain(*saved)):
        return tree, []
    live = _names_of(item, optimizer, names)
    lines = _misfits(item, saved, live, has_more=has_more)
    numbers = {key: number for number, key in enumerate(chain(*live))}
    count = min(len(saved), len(live))
    at = [[numbers[key] for key in group] for group in live[:count]]
    return (tree, lines) if lines else (_renamed(tree, at, numbers), [])


def _misfits(item: str, saved: _Keys, live: _Keys, *, has_more: bool) -> list[str]:
    if len(saved) != len(live):
        return [f"{item}: {len(saved)} parameter groups in the checkpoint, {len(live)} here"]
    was, now = ({key: at for at, group in enumerate(groups) for key in group} for groups in (saved, live))
    lines = []
    for key, at in now.items():
        if key not in was:
            lines.append(f"{item}: the state of parameter {key!r} is not in the checkpoint")
        elif was[key] != at:
            lines.append(f"{item}: parameter {key!r} was in group {was[key]} and is in group {at}")
    if not has_more:
        lines += [f"{item}: parameter {key!r} is in the checkpoint and not here" for key in was if key not in now]
    return lines


def _names_of(item: str, optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    return [
        [names.get(id(one), f"{item}/{number}/{at}") for at, one in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def _keys_in(state: Any) -> list[list[Any]] | None:
    """Return what stands for the parameters of each group; None if the state is not like torch's."""
    try:
        return [list(group["params"]) for group in state["param_groups"]] if type(state["state"]) is dict else None
    except (KeyError, TypeError, ValueError):
        return None


def _renamed(state: Any, groups: _Keys, keys: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state with other keys, without the states of parameters that have none of ``keys``; states under keys
    that are no parameters stay."""
    known = set(chain(*(_keys_in(state) or ())))
    return {
        **state,
        "state": {keys.get(key, key): one for key, one in state["state"].items() if key in keys or key not in known},
        "param_groups": [
            {**group, "params": list(some)} for group, some in zip(state["param_groups"], groups, strict=False)
        ],
    }

"""Does a loaded state fit an optimizer?  Its groups, the shapes of its states, and what its next step will ask for.

torch's own optimizers take groups as they were saved, and fail, or go on with something else, at a step long after. So
the options and states that one would be left without are asked of a stand-in of its kind, with nothing computed. Of
somebody's own optimizer less is known, and less is refused. Changes nothing.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from inspect import signature
from itertools import chain
from typing import Any, TypeAlias

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.wire.codec import TensorRef

__all__ = ["misfits_of"]

Shape: TypeAlias = tuple[int, ...]
_SHAPED_AS_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"}
)


def misfits_of(name: str, optimizer: torch.optim.Optimizer, tree: Any, specs: Mapping[str, TensorSpec]) -> list[str]:
    """What of ``tree``, the state of the optimizer ``name``, does not fit: a line for each."""
    try:
        saved = [list(group["params"]) for group in tree["param_groups"]]
        states = dict(tree["state"])
    except (KeyError, TypeError, ValueError):
        return [f"{name}: the checkpoint does not hold the state of an optimizer"]
    live = [list(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in saved] != [len(group) for group in live]:
        return [f"{name}: parameter groups of {[*map(len, saved)]} in the checkpoint, of {[*map(len, live)]} here"]
    shapes: dict[str, dict[Any, tuple[Shape, Shape]]] = {}
    for number, parameter in zip(chain(*saved), chain(*live), strict=True):
        for key, leaf in dict(states.get(number, {})).items():
            spec = specs.get(leaf.key) if isinstance(leaf, TensorRef) else None
            if spec is not None and key in _SHAPED_AS_PARAMETER:
                shapes.setdefault(key, {})[number] = spec.shape, tuple(parameter.shape)
    are_torchs = _derives_from_torchs(optimizer)
    lines = [
        f"{name}: {key} of parameter {number} is {list(was)} in the checkpoint and the parameter is {list(now)}"
        for key, every in shapes.items()
        if are_torchs or _have_changed_places(every.values())
        for number, (was, now) in every.items()
        if was != now
    ]
    if _loads_as_torch_does(optimizer):
        lines += _of_options(name, optimizer, tree["param_groups"])
        lines += _of_states(name, optimizer, tree) or _of_kind(name, optimizer, tree)
    return lines


def _loads_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing of its own may make a state fit: a method, a hook, another optimizer inside."""
    loads = getattr(optimizer.load_state_dict, "__func__", None) is torch.optim.Optimizer.load_state_dict
    return loads and "param_groups" in vars(optimizer) and not optimizer._optimizer_load_state_dict_pre_hooks


def _of_options(name: str, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """The options without which loading would leave one of torch's optimizers: it takes groups as they were saved.
    Others may know what to do without an option that they have got since."""
    if not _is_of_torch(optimizer):
        return []
    kind = type(optimizer).__name__
    return [
        f"{name}: group {number} has no {option!r} in the checkpoint, and {kind} needs it"
        for number, (saved, live) in enumerate(zip(_completed(optimizer, groups), optimizer.param_groups, strict=False))
        for option in optimizer.defaults
        if option in live and option not in saved
    ]


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return _is_torchs(type(optimizer))


def _derives_from_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, made of one or around one: others keep flat or projected moments under torch's
    names."""
    inside = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    return any(
        _is_torchs(kind) and kind is not torch.optim.Optimizer
        for one in (optimizer, *inside)
        for kind in type(one).__mro__
    )


def _have_changed_places(shapes: Collection[tuple[Shape, Shape]]) -> bool:
    """Whether the shapes in the checkpoint are those of the parameters in another order."""
    return Counter(was for was, _ in shapes) == Counter(now for _, now in shapes)


def _is_torchs(kind: type) -> bool:
    return f"{kind.__module__}.".startswith("torch.optim.")


def _completed(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with what ``__setstate__`` fills in that older versions did not have; none where it cannot be asked.
    It is asked of a stand-in without parameters."""
    found = [copy.deepcopy({**group, "params": []}) for group in groups]
    try:
        _stand_in(optimizer).__setstate__({"state": defaultdict(dict), "param_groups": found})
    except Exception:  # with parameters it may well do
        return []
    return found


def _stand_in(optimizer: torch.optim.Optimizer) -> Any:
    """Another one of its kind."""
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__ |= vars(optimizer) | {"defaults": dict(optimizer.defaults)}
    return stand_in


def _of_kind(name: str, optimizer: torch.optim.Optimizer, tree: Any) -> list[str]:
    """The states without which the first step of one of torch's optimizers would fail: those of another kind whose
    options do for this one, as Adam's do for Adamax."""
    if not _is_of_torch(optimizer):
        return []
    lines, kind = [], type(optimizer).__name__
    for saved, group in zip(tree["param_groups"], _completed(optimizer, tree["param_groups"]), strict=False):
        found: dict[frozenset[Any], str | None] = {}
        for number in saved["params"]:
            state = _dict(tree["state"].get(number))
            keys = frozenset(state)
            if keys not in found:
                found[keys] = _missed(optimizer, group, state) if state else None
            if found[keys] is not None:
                lines.append(
                    f"{name}: parameter {number} has no {found[keys]!r} in the checkpoint, and {kind} needs it"
                )
    return lines


def _missed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[Any, Any]) -> str | None:
    """What a step looks up first and does not find in ``state``: what a stand-in does before it computes anything,
    with a parameter of one element. None where all is there, or where that cannot be asked."""
    parameter = torch.zeros(1, 1, requires_grad=True)
    parameter.grad = torch.zeros(1, 1)
    values = {key: torch.zeros(()) if isinstance(value, TensorRef) else value for key, value in state.items()}
    stand_in = _stand_in(optimizer)
    stand_in.state = defaultdict(dict, {parameter: values})
    try:
        looks_up = stand_in._init_group
        lists: list[list[Any]] = [[] for _ in list(signature(looks_up).parameters)[1:]]
        looks_up({**group, "params": [parameter]}, *lists)
    except KeyError as error:
        key = error.args[0] if error.args else None
        return key if isinstance(key, str) and key not in {*state, *optimizer.defaults} else None
    except Exception:  # of values that are none of its own
        return None
    return None


def _of_states(name: str, optimizer: torch.optim.Optimizer, tree: Any) -> list[str]:
    """The parameters whose state has nothing in common with the live one, though the same is switched on."""
    lines = []
    for group, live in zip(tree["param_groups"], optimizer.param_groups, strict=True):
        if _switches(group, optimizer) != _switches(live, optimizer):
            continue
        for number, parameter in zip(group["params"], live["params"], strict=True):
            saved = {key: None for key in _dict(tree["state"].get(number)) if key != "step"}
            here = {key: None for key in _dict(optimizer.state.get(parameter)) if key != "step"}
            if saved and here and saved.keys().isdisjoint(here):
                had, has = (", ".join(map(repr, keys)) for keys in (saved, here))
                lines.append(f"{name}: parameter {number} has {had} in the checkpoint, and {has} here")
    return lines


def _dict(state: object) -> dict[Any, Any]:
    return state if isinstance(state, dict) else {}


def _switches(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options that say which state there is."""
    return {key: group[key] for key in optimizer.defaults if isinstance(group.get(key), (bool, str))}

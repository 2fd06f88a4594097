"""Does a loaded state fit the live objects, and how is it put into them?  First all is compared, then all is applied.

`differences` lists every missing, extra and mis-shaped entry before anything is touched, the options and states that an
optimizer would be left without among them, what the memory of a live tensor cannot hold, and parts of tensors that are
not to be had. `apply` then loads readers and small objects, with a copy of their old state to go back to if one refuses
after all, on any rank. Optimizers and modules, whose entries were compared one by one, come last: see ``in_place``. Types
come from the live objects, so that nothing in a file can name code.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.load import Loaded
from lakeckpt.checkpoint.manifest import ReaderRecord
from lakeckpt.checkpoint.optimizer_states import fits, states_in
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.checkpoint.shards import Whole, is_sharded, local_of, offsets_of, sharing_of
from lakeckpt.checkpoint.sharing import say_ranks
from lakeckpt.checkpoint.tensors import holds, overlaps_itself, spec_of, tied_key
from lakeckpt.checkpoint.tree import alongside, flatten, rebuild, references
from lakeckpt.core.skips import SkipList
from lakeckpt.errors import CheckpointError, CheckpointMismatch, StateError, StateMismatch, StorageError
from lakeckpt.tracking.readers import SkippingReader, StartingReader, TrackedReader
from lakeckpt.wire.codec import TensorRef

__all__ = ["apply", "differences", "is_large", "refuse"]

_SHAPED_AS_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"}
)
_MOST_LINES = 40
_STUCK = "{!r} does not take back the state that it had before the restore: {!r}. Make it anew before it is used"


def differences(objects: Mapping[str, Any], loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> list[str]:
    """One line for each thing in which the checkpoint does not fit ``objects``; empty where it fits.

    `CheckpointMismatch` where it is of another number of ranks, which had different parameters or states of optimizers.
    """
    _refuse_unlike(objects, loaded)
    lines = []
    tracked = {name for name, one in objects.items() if isinstance(one, TrackedReader)}
    for name in sorted({*objects, *loaded.trees, *readers}):
        saved_as_reader = name in readers
        if name not in objects:
            lines.append(f"{name!r} is in the checkpoint and not among the objects given")
        elif not saved_as_reader and name not in loaded.trees:
            lines.append(f"{name!r} is among the objects given and not in the checkpoint")
        elif saved_as_reader != (name in tracked):
            lines.append(f"{name!r} was {'' if saved_as_reader else 'not '}a tracked reader when it was saved")
        elif not saved_as_reader:
            lines += _differences(name, objects[name], loaded.trees[name], loaded)
    return lines


def _differences(name: str, one: Any, tree: Any, loaded: Loaded) -> list[str]:
    if isinstance(one, torch.nn.Module):
        return _of_module(name, one, tree, loaded)
    if isinstance(one, torch.optim.Optimizer):
        lines = _of_optimizer(name, one, tree, loaded.specs)
        return lines if lines or not loaded.wholes else _of_states_in_parts(name, one, tree, loaded)
    return []


def _refuse_unlike(objects: Mapping[str, Any], loaded: Loaded) -> None:
    """On another number of ranks, refuse parameters and states of optimizers of which not all ranks had the same.
    Buffers, and what other objects hold, may be every rank's own."""
    if loaded.unlike is None or not loaded.unlike.tensors:
        return
    found: set[str] = set()
    for name, one in objects.items():
        tree = loaded.trees.get(name)
        if isinstance(one, torch.nn.Module):
            own = {tied_key(local_of(parameter)) for parameter in one.parameters()} - {None}
            places = alongside(tree, one.state_dict())
            found |= {ref.key for ref, live in places if isinstance(live, torch.Tensor) and _memory(live) in own}
        elif isinstance(one, torch.optim.Optimizer) and isinstance(tree, dict):
            found |= set(references(tree.get("state")))
    wrong = sorted(found & loaded.unlike.tensors.keys())
    if wrong:
        raise loaded.unlike.refusal(wrong)


def _memory(tensor: torch.Tensor) -> object:
    return tied_key(local_of(tensor))


def _of_module(name: str, module: torch.nn.Module, tree: Any, loaded: Loaded) -> list[str]:
    flat = flatten(name, module.state_dict(), of_module=True)
    if type(tree) is not dict:
        return [f"{name}: the checkpoint holds a {type(tree).__name__}, not the state of a module"]
    lines = [f"{name}: {key} is missing from the checkpoint" for key in flat.tree if key not in tree]
    lines += [f"{name}: {key} is in the checkpoint and not in the module" for key in tree if key not in flat.tree]
    ties: dict[str, tuple[str, str]] = {}
    for key, live in flat.tree.items():
        saved = tree.get(key)
        if key not in tree or not (isinstance(live, TensorRef) or isinstance(saved, TensorRef)):
            continue
        if not (isinstance(live, TensorRef) and isinstance(saved, TensorRef)):
            lines.append(f"{name}: {key} is a tensor on one side only")
            continue
        lines += _of_tensors(f"{name}: {key}", flat.leaf(live.key), saved.key, loaded)
        other, known = ties.setdefault(live.key, (key, saved.key))
        if known in loaded.specs and saved.key in loaded.specs and not _same(known, saved.key, loaded):
            lines.append(f"{name}: {other} and {key} are one tensor in the module, and two different ones were saved")
    return lines


def _same(one: str, other: str, loaded: Loaded) -> bool:
    """Whether two stored tensors hold the same bytes."""
    if one in loaded.wholes or other in loaded.wholes:
        return one == other
    return one == other or loaded.source.same(one, other)


def _of_tensors(what: str, target: torch.Tensor, key: str, loaded: Loaded) -> list[str]:
    live, saved = spec_of(what, target), loaded.specs.get(key)
    if saved is None:
        return [f"{what} is named and not stored"]
    if (live.dtype, live.shape) != (saved.dtype, saved.shape):
        return [
            f"{what} is {saved.dtype} {list(saved.shape)} in the checkpoint and {live.dtype} {list(live.shape)} in the "
            "module"
        ]
    if key in loaded.wholes and (line := _of_parts(what, target, loaded.wholes[key])):
        return [line]
    if is_sharded(target) or not overlaps_itself(target) or holds(target, loaded.read([key])[key]):
        return []
    return [
        f"{what} overlaps itself in the module (strides {list(target.stride())}, as of an expanded tensor), and its "
        "elements differ in the checkpoint: make it contiguous, by clone()"
    ]


def _of_parts(what: str, target: torch.Tensor, whole: Whole) -> str:
    """Why what this rank holds of a tensor cannot be taken from the parts that were saved; empty where it can."""
    if whole.several and whole.sharing is not None and is_sharded(target):
        here = sharing_of(target).ranks
        if here != whole.sharing.ranks:
            return (
                f"{what}: there are several in the checkpoint, each of other ranks; that of this rank was shared by "
                f"{say_ranks(whole.sharing.ranks)}, and is shared by {say_ranks(here)} here"
            )
    try:
        whole.regions(offsets_of(what, target), tuple(local_of(target).shape))
    except CheckpointError as error:
        return f"{what}: {error}"
    return ""


def _of_states_in_parts(name: str, optimizer: torch.optim.Optimizer, tree: Any, loaded: Loaded) -> list[str]:
    places = states_in(optimizer, tree, loaded, device="meta")
    wholes = {key: loaded.wholes[key] for key in references(tree["state"]) if key in loaded.wholes}
    lines = []
    for key, whole in wholes.items():
        target = places[key] if key in places else torch.empty(whole.spec.shape, device="meta")
        lines.append(_of_parts(f"{name}: {key.removeprefix(f'{name}/')}", target, whole))
    return [line for line in lines if line]


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, tree: Any, specs: Mapping[str, TensorSpec]) -> list[str]:
    try:
        saved = [list(group["params"]) for group in tree["param_groups"]]
        states = dict(tree["state"])
    except (KeyError, TypeError, ValueError):
        return [f"{name}: the checkpoint does not hold the state of an optimizer"]
    live = [list(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in saved] != [len(group) for group in live]:
        return [f"{name}: parameter groups of {[*map(len, saved)]} in the checkpoint, of {[*map(len, live)]} here"]
    lines = []
    for number, parameter in zip(chain(*saved), chain(*live), strict=True):
        for key, leaf in dict(states.get(number, {})).items():
            spec = specs.get(leaf.key) if isinstance(leaf, TensorRef) else None
            if spec is not None and key in _SHAPED_AS_PARAMETER and spec.shape != tuple(parameter.shape):
                lines.append(
                    f"{name}: {key} of parameter {number} is {list(spec.shape)} in the checkpoint and the parameter is "
                    f"{list(parameter.shape)}"
                )
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
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


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


def refuse(lines: list[str], *, where: str) -> CheckpointMismatch:
    """The error for a checkpoint that does not fit."""
    shown = "\n  ".join(lines[:_MOST_LINES])
    more = f"\n  … and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return CheckpointMismatch(
        f"the checkpoint {where} does not fit the live objects; nothing was changed:\n  {shown}{more}\n"
        "Build the same objects as when it was saved, or start a run at another place"
    )


def is_large(one: object) -> bool:
    """Whether it is a module or an optimizer, whose tensors are read in place."""
    return isinstance(one, (torch.nn.Module, torch.optim.Optimizer))


def apply(objects: Mapping[str, Any], loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> Callable[[], None]:
    """Load the state into readers and small objects: all but modules and optimizers; returns what undoes it.

    Raises `CheckpointDamaged`, and `CheckpointMismatch` naming the object that refused; all are then as they were (a
    `DamageWarning` names one that refuses to go back).
    """
    small = [name for name, one in objects.items() if name not in readers and not is_large(one)]
    tensors = {key: one for name in small for key, one in _tensors_for(name, objects[name], loaded).items()}
    undo: list[tuple[str, Callable[[], None]]] = []

    def go_back(refused: str | None = None) -> None:
        for name, step in reversed(undo):
            try:
                step()
            except Exception as error:
                if name != refused:  # that one is told already
                    warnings.warn(_STUCK.format(name, error), DamageWarning, stacklevel=4)

    for name in [*small, *readers]:
        one = objects[name]
        try:
            if name in readers:
                undo.append((name, _undo(one, one.state_dict())))
                if isinstance(one, SkippingReader):
                    undo.append((name, partial(one.load_skipped, one.skipped())))
                one.load_state_dict(dict(readers[name].state))
                _load_skipped(one, readers[name].skips)
                _start(one)
            else:
                live = one.state_dict()
                undo.append((name, _undo(one, copy.deepcopy(live, _copies_of_computed(live)))))
                one.load_state_dict(rebuild(loaded.trees[name], tensors, live))
        except StateError:
            go_back(name)
            raise
        except Exception as error:
            go_back(name)
            raise CheckpointMismatch(f"{name!r} refused its state from the checkpoint: {error!r}") from error
    return go_back


def _tensors_for(name: str, one: Any, loaded: Loaded) -> dict[str, torch.Tensor]:
    """The tensors of the state of a small object: of those of which this rank holds a part now, that part."""
    tree = loaded.trees[name]
    keys = list(dict.fromkeys(references(tree)))
    if not keys:
        return {}
    try:
        places = alongside(tree, one.state_dict())
        live = {ref.key: place for ref, place in places if isinstance(place, torch.Tensor) and is_sharded(place)}
    except (CheckpointError, StorageError):
        raise
    except Exception as error:
        raise CheckpointMismatch(f"{name!r} cannot tell its state: {error!r}") from error
    found = loaded.read([key for key in keys if key not in live or not fits(live[key], loaded.specs[key])])
    for key in keys:
        if key not in found:
            found[key] = torch.empty_like(live[key].detach())
            loaded.read_part(key, offsets_of(key, found[key]), local_of(found[key]))
    return found


def _copies_of_computed(state: Any) -> dict[int, Any]:
    """id → a copy, of the tensors in ``state`` that are part of a graph, for ``deepcopy``, which refuses them."""
    copies, seen, todo = {}, set(), [state]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor) and not one.is_leaf:
            copies[id(one)] = one.detach().clone()
        elif isinstance(one, (dict, list, tuple)):
            todo += one.values() if isinstance(one, dict) else one
    return copies


def _load_skipped(one: Any, skips: SkipList) -> None:
    if isinstance(one, SkippingReader):
        one.load_skipped(skips)
    elif skips:
        raise StateMismatch(f"{len(skips)} row groups were skipped, and a {type(one).__name__} cannot skip them again")


def _start(one: Any) -> None:
    """Let a reader read ahead while models and optimizers are loaded. Not with workers, which are to inherit those."""
    if isinstance(one, StartingReader) and not one.num_workers:
        with contextlib.suppress(Exception):  # to be raised when it is iterated
            one.start()


def _undo(one: Any, state: Any) -> Callable[[], None]:
    return lambda: one.load_state_dict(state)

"""This module compares a loaded state with the live objects, and applies it to all objects but large ones.

`differences` lists every missing, extra and mis-shaped entry before anything is touched, optimizers of another class,
and parts of tensors that no rank saved. `apply` then loads readers and small objects. It keeps a copy of their old
state, to which they return if one of them refuses on any rank. Optimizers and modules, whose entries were compared one
by one, come last: see ``in_place``. Types come from the live objects, so that nothing in a file can name code.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lakeckpt.checkpoint.format.manifest import ReaderRecord
from lakeckpt.checkpoint.format.sharing import say_ranks
from lakeckpt.checkpoint.read.loaded import Loaded
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.checkpoint.state.optimizer_states import differences_of_states, fits, states_in
from lakeckpt.checkpoint.state.parameter_names import fitted, parameter_names
from lakeckpt.checkpoint.state.shards import is_sharded, local_of, offsets_of, sharing_of
from lakeckpt.checkpoint.state.tensors import spec_of, tied_key
from lakeckpt.checkpoint.state.tree import alongside, class_of, flatten, rebuild, references
from lakeckpt.errors import CheckpointError, CheckpointMismatch, StateError, StorageError
from lakeckpt.tracking.readers import StartingReader, TrackedReader
from lakeckpt.wire.envelope import TensorRef

__all__ = ["apply", "differences", "fitted_to", "is_large", "is_torchs", "live_tensors", "refuse"]

_MOST_LINES = 40
_LARGE_BYTES = 2**20
"""Tensors of objects that are neither modules nor optimizers are read in place from this size on."""
_STUCK = "{!r} does not take back the state that it had before the restore: {!r}. Make it anew before it is used"


def differences(objects: Mapping[str, Any], loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> list[str]:
    """One line for each thing in which the checkpoint does not fit ``objects``; empty where it fits.

    `CheckpointMismatch` where it is of another number of ranks, which had different parameters or states of optimizers.
    """
    here, misfits = fitted_to(objects, loaded)
    _refuse_unlike(objects, here)
    lines = []
    tracked = {name for name, one in objects.items() if isinstance(one, TrackedReader)}
    for name in sorted({*objects, *loaded.trees, *readers}):
        saved_as_reader = name in readers
        if name not in objects and name in loaded.merged:
            continue  # other ranks have it
        if name not in objects:
            lines.append(f"{name!r} is in the checkpoint and not among the objects given")
        elif not saved_as_reader and name not in loaded.trees:
            lines.append(f"{name!r} is among the objects given and not in the checkpoint")
        elif saved_as_reader != (name in tracked):
            lines.append(f"{name!r} was {'' if saved_as_reader else 'not '}a tracked reader when it was saved")
        elif not saved_as_reader:
            lines += _differences(name, objects[name], here, misfits.get(name, []))
    return lines


def fitted_to(objects: Mapping[str, Any], loaded: Loaded) -> tuple[Loaded, dict[str, list[str]]]:
    """Return the state with the parameters of each optimizer numbered as they are here, and of what was put together of
    several ranks what is here; and for each optimizer the lines that say which parameters do not fit."""
    names = parameter_names(objects)
    trees, misfits = dict(loaded.trees), {}
    for name in loaded.trees.keys() & objects.keys():
        one, tree, has_more = objects[name], loaded.trees[name], name in loaded.merged
        if class_of(one) and is_torchs(one):
            trees[name], misfits[name] = fitted(name, one, tree, names, has_more=has_more)
        elif has_more and isinstance(one, torch.nn.Module):
            here = flatten(name, one.state_dict(), of_module=True).tree
            trees[name] = {key: value for key, value in tree.items() if key in here}
    return replace(loaded, trees=trees), misfits


def _differences(name: str, one: Any, loaded: Loaded, misfits: list[str]) -> list[str]:
    tree = loaded.trees[name]
    if isinstance(one, torch.nn.Module):
        return _of_module(name, one, tree, loaded)
    if is_torchs(one):
        return _of_optimizer(name, one, tree, loaded, misfits)
    return []


def _of_optimizer(name: str, one: torch.optim.Optimizer, tree: Any, loaded: Loaded, misfits: list[str]) -> list[str]:
    was, now = loaded.kinds[name], class_of(one)
    if was != now:
        return [f"{name}: the checkpoint holds the state of {was or 'no optimizer'}, and a {now} is here"]
    lines = misfits or differences_of_states(name, one, tree, loaded.specs)
    return lines if lines or not loaded.wholes else _of_states_in_parts(name, one, tree, loaded)


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
            found |= {ref.key for ref in references(tree.get("state"))}
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
    line = _of_parts(what, target, key, loaded) if key in loaded.wholes else ""
    return [line] if line else []


def _of_parts(what: str, target: torch.Tensor, key: str, loaded: Loaded) -> str:
    """Why what this rank holds of a tensor cannot be taken from the parts that were saved; empty where it can."""
    here = sharing_of(target).ranks if is_sharded(target) else None
    offsets, sizes = offsets_of(what, target), tuple(local_of(target).shape)
    whole = loaded.with_part(key, offsets, sizes, ranks=here).whole(key)  # may find that a part is damaged
    try:
        if whole.several and whole.sharing is not None and here is not None and here != whole.sharing.ranks:
            return (
                f"{what}: there are several in the checkpoint, each of other ranks; that of this rank was shared by "
                f"{say_ranks(whole.sharing.ranks)}, and is shared by {say_ranks(here)} here"
            )
        whole.regions(offsets, sizes)
    except CheckpointError as error:
        return f"{what}: {error}"
    return ""


def _of_states_in_parts(name: str, optimizer: torch.optim.Optimizer, tree: Any, loaded: Loaded) -> list[str]:
    places = states_in(optimizer, tree, loaded, device="meta")
    keys = [ref.key for ref in references(tree["state"])]
    lines = []
    for key in dict.fromkeys(key for key in keys if key in loaded.wholes):
        target = places[key] if key in places else torch.empty(loaded.wholes[key].spec.shape, device="meta")
        lines.append(_of_parts(f"{name}: {key.removeprefix(f'{name}/')}", target, key, loaded))
    return [line for line in lines if line]


_BUILD_ALIKE = "Build the same objects as when it was saved, or start a run at another place"


def refuse(lines: list[str], *, where: str, advice: str = _BUILD_ALIKE) -> CheckpointMismatch:
    """The error for a checkpoint that does not fit; ``advice`` says what to do."""
    shown = "\n  ".join(lines[:_MOST_LINES])
    more = f"\n  … and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return CheckpointMismatch(
        f"the checkpoint {where} does not fit the live objects; nothing was changed:\n  {shown}{more}\n{advice}"
    )


def is_large(one: object) -> bool:
    """Whether its tensors are read in place, after everything else: a module, an optimizer, or an object whose state
    holds large tensors of live memory, such as a wrapper around both. Such an object is not undone."""
    return is_torchs(one) or bool(live_tensors(one)[1])


def is_torchs(one: object) -> bool:
    """Whether it is a module or an optimizer, whose entries are compared one by one. An optimizer whose state dict has
    a form of its own (as of one around another) alone knows what goes where."""
    return isinstance(one, torch.nn.Module) or (isinstance(one, torch.optim.Optimizer) and _is_as_torchs(one))


def live_tensors(one: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """Return the state of an object, and by ``id`` the large tensors in it that are the memory of the live object.

    Two state dicts, both held, have a tensor at one address only where both refer to memory that lives on.
    """
    if isinstance(one, TrackedReader):
        return None, {}
    try:
        state = one.state_dict()
        large = _large_in(state)
        again = {_memory(tensor) for tensor in _large_in(one.state_dict())} if large else set()
    except Exception:
        return None, {}  # `apply` says that it cannot tell its state
    return state, {id(tensor): tensor for tensor in large if _memory(tensor) in again}


def _large_in(state: Any) -> list[torch.Tensor]:
    found, todo, seen = [], [state], set()
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            found += [one] if local_of(one).nbytes >= _LARGE_BYTES and one.layout == torch.strided else []
        elif isinstance(one, (Mapping, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            todo += one.values() if isinstance(one, Mapping) else one
    return found


def _is_as_torchs(optimizer: torch.optim.Optimizer) -> bool:
    if "state_dict" not in vars(optimizer) and type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return True
    state = optimizer.state_dict()
    return isinstance(state, Mapping) and "state" in state and "param_groups" in state


def apply(objects: Mapping[str, Any], loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> Callable[[], None]:
    """Load the state into readers and small objects: all but what `is_large`; return what undoes it.

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
                one.load_state_dict(dict(readers[name].state))
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
    keys = list(dict.fromkeys(ref.key for ref in references(tree)))
    try:
        # Also of a tree without tensors: others may have some, and telling a state may be collective.
        places = alongside(tree, one.state_dict())
        live = {ref.key: place for ref, place in places if isinstance(place, torch.Tensor) and is_sharded(place)}
    except (CheckpointError, StorageError):
        raise
    except Exception as error:
        raise CheckpointMismatch(f"{name!r} cannot tell its state: {error!r}") from error
    found = loaded.read_as_saved([key for key in keys if key not in live or not fits(live[key], loaded.specs[key])])
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


def _start(one: Any) -> None:
    """Let a reader read ahead while models and optimizers are loaded. Not with workers, which are to inherit those."""
    if isinstance(one, StartingReader) and not one.num_workers:
        with contextlib.suppress(Exception):  # to be raised when it is iterated
            one.start()


def _undo(one: Any, state: Any) -> Callable[[], None]:
    return lambda: one.load_state_dict(state)

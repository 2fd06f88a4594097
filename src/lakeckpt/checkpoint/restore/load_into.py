"""This module loads a state into the live objects: small objects so that it can be undone, large ones in place.

`load_small` loads readers and small objects, and on trial the parts of modules that load themselves and do not fit as
they are. It keeps a copy of their old state, to which they return if one of them refuses on any rank. `load_in_place`
loads modules, optimizers, and wrappers that refer to large live tensors in their state dict (the application state of
torch's DCP tutorial, a container of optimizers), without a second copy of the tensors. What the state holds decides,
not the class of its holder. Tensors are read straight into the memory of the live parameters, buffers and optimizer
states, wherever that is contiguous in host memory. Other memory (a GPU's, strided) is filled by way of a buffer, for a
bounded number of bytes at a time. Then every object loads its state in the ordinary way, so that hooks run and plain
values are set: it is given its own tensors.

The caller has compared every entry (`lakeckpt.checkpoint.restore.compare.compare`). If bytes are found to be
damaged while they are read in place, the objects hold a mixture: the caller must load another checkpoint into all of
them, or say so. Types come from the live objects, so that nothing in a file can name code.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.manifest import ReaderRecord
from lakeckpt.checkpoint.restore.compare import has_torchs_state, on_trial
from lakeckpt.checkpoint.state.loaded import Loaded
from lakeckpt.checkpoint.state.optimizer_states import fits, states_in
from lakeckpt.checkpoint.state.shards import is_sharded, local_of, offsets_of
from lakeckpt.checkpoint.state.tensors import batches_of, empty_for, host_bytes, in_dim_order, tied_key
from lakeckpt.checkpoint.state.tree import alongside, flatten, rebuild, references
from lakeckpt.errors import CheckpointError, CheckpointMismatch, DamageWarning, StateError, StorageError
from lakeckpt.tracking.readers import StartingReader, TrackedReader
from lakeckpt.wire.envelope import TensorRef

__all__ = ["is_large", "load_in_place", "load_small"]

_LARGE_BYTES = 2**20
"""Tensors of objects that are neither modules nor optimizers are read in place from this size on."""
_BUFFER_BYTES = 256 * 2**20
_STUCK = "{!r} does not take back the state that it had before the restore: {!r}. Make it anew before it is used"


def is_large(one: object) -> bool:
    """Return whether the tensors of an object are read in place, after everything else, and cannot be undone."""
    return has_torchs_state(one) or bool(_live_tensors(one)[1])


def _live_tensors(one: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """Return the state of an object, and by ``id`` the large tensors in it that are the memory of the live object.

    Two state dicts, both held, have a tensor at one address only if both refer to memory that lives on.
    """
    if isinstance(one, TrackedReader):
        return None, {}
    try:
        state = one.state_dict()
        large = [tensor for tensor in _tensors_in(state) if _is_large(tensor)]
        again = {tied_key(local_of(tensor)) for tensor in _tensors_in(one.state_dict())} if large else set()
    except Exception:
        return None, {}  # `load_small` says that it cannot tell its state
    return state, {id(tensor): tensor for tensor in large if tied_key(local_of(tensor)) in again}


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and local_of(tensor).nbytes >= _LARGE_BYTES


def _tensors_in(state: Any) -> list[torch.Tensor]:
    found, todo, seen = [], [state], set()
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (Mapping, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            todo += one.values() if isinstance(one, Mapping) else one
    return found


def load_small(objects: Mapping[str, Any], loaded: Loaded, readers: Mapping[str, ReaderRecord]) -> Callable[[], None]:
    """Load the state into readers and small objects: all but what `is_large`. Of large ones, load what is `on_trial`.
    Return what undoes it.

    Raises `CheckpointDamaged`, and `CheckpointMismatch` naming the object that refused; all are then as they were (a
    `DamageWarning` names one that refuses to go back).
    """
    small = [name for name, one in objects.items() if name not in readers and not is_large(one)]
    trial = on_trial(objects, loaded)
    objects = {**objects, **{name: one for name, (one, _) in trial.items()}}
    loaded = replace(loaded, trees={**loaded.trees, **{name: tree for name, (_, tree) in trial.items()}})
    small += trial
    tensors = {key: one for name in small for key, one in _tensors_for(name, objects[name], loaded).items()}
    undo: list[tuple[str, Callable[[], None]]] = []

    def go_back(refused: str | None = None) -> None:
        for name, step in reversed(undo):
            try:
                step()
            except Exception as error:
                if name != refused:  # the error that is raised names it
                    warnings.warn(_STUCK.format(name, error), DamageWarning, stacklevel=4)

    for name in [*small, *readers]:
        one = objects[name]
        try:
            if name in readers:
                undo.append((name, partial(one.load_state_dict, one.state_dict())))
                one.load_state_dict(dict(readers[name].state))
                _start(one)
            else:
                live = one.state_dict()
                undo.append((name, partial(one.load_state_dict, _copy(live))))
                one.load_state_dict(rebuild(loaded.trees[name], tensors, live))
        except StateError:
            go_back(name)
            raise
        except Exception as error:
            go_back(name)
            raise CheckpointMismatch(f"{name!r} refused its state from the checkpoint: {error!r}") from error
    return go_back


def _tensors_for(name: str, one: Any, loaded: Loaded) -> dict[str, torch.Tensor]:
    """Return the tensors of the state of a small object: of a tensor in parts, the part that this rank holds now."""
    tree = loaded.trees[name]
    keys = list(dict.fromkeys(ref.key for ref in references(tree)))
    try:
        # Also of a tree without tensors: on other ranks it may have some, and ``state_dict`` may be collective.
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


def _copy(state: Any) -> Any:
    """Return a deep copy of a state. ``deepcopy`` itself refuses tensors that are part of a graph, and DTensors whose
    local part begins inside of a larger memory."""
    copied = [one for one in _tensors_in(state) if not one.is_leaf or is_sharded(one)]
    return copy.deepcopy(state, {id(one): one.detach().clone() for one in copied})


def _start(one: Any) -> None:
    """Let a reader read ahead while models and optimizers are loaded. Not with workers, which are to inherit those."""
    if isinstance(one, StartingReader) and not one.num_workers:
        with contextlib.suppress(Exception):  # to be raised when it is iterated
            one.start()


def load_in_place(objects: Mapping[str, Any], loaded: Loaded) -> None:
    """Load the state of all objects that are large (`is_large`).

    Raises `CheckpointDamaged`, `StorageError`, and `CheckpointMismatch` naming an object that refused its state.
    """
    large = {name: one for name, one in objects.items() if is_large(one)}
    targets: dict[str, torch.Tensor] = {}
    for name, one in large.items():
        targets |= _targets(name, one, loaded)
    _read(targets, loaded)
    for name in sorted(large, key=lambda name: isinstance(large[name], torch.nn.Module)):  # optimizers first
        try:
            _load(large[name], loaded.trees[name], targets)
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            raise CheckpointMismatch(f"{name!r} refused its state from the checkpoint: {error!r}") from error


def _read(targets: Mapping[str, torch.Tensor], loaded: Loaded) -> None:
    direct = _direct(targets, loaded)
    loaded.source.fill({saved: host_bytes(local_of(targets[key])) for key, saved in direct.items()})
    rest = [key for key in targets if key not in direct]
    divided = {key for key in rest if is_sharded(targets[key]) or key in loaded.wholes}
    for key in divided:
        loaded.read_part(key, offsets_of(key, targets[key]), local_of(targets[key]))
    whole = [key for key in rest if key not in divided]
    for keys in batches_of(whole, lambda key: loaded.specs[key].size_bytes, _BUFFER_BYTES):
        for key, tensor in loaded.read(keys).items():
            with torch.no_grad():
                targets[key].copy_(tensor)


def _targets(name: str, one: Any, loaded: Loaded) -> dict[str, torch.Tensor]:
    """Return key → where that tensor of the state of ``one`` goes: the live one of its place, else a new one."""
    tree, specs = loaded.trees[name], loaded.specs
    live: dict[str, torch.Tensor] = {}
    new = torch.device("cpu")
    if isinstance(one, torch.nn.Module):
        flat = flatten(name, one.state_dict(), of_module=True)
        for key, saved in tree.items():
            found = flat.tree.get(key)
            if isinstance(saved, TensorRef) and isinstance(found, TensorRef):
                live.setdefault(saved.key, flat.leaf(found.key))
    elif has_torchs_state(one):
        live, new = states_in(one, tree, specs, loaded.wholes), _device_of(one)
    else:
        live = _places_in(one, tree)
    return {
        ref.key: live[ref.key] if ref.key in live and fits(live[ref.key], specs[ref.key]) else _new(ref, specs, new)
        for ref in references(tree)
    }


def _places_in(one: Any, tree: Any) -> dict[str, torch.Tensor]:
    """Return where the tensors of any other object go: to its live memory, or to new memory that is divided alike."""
    state, shared = _live_tensors(one)
    found = {}
    for ref, place in alongside(tree, state):
        if isinstance(place, torch.Tensor) and (id(place) in shared or is_sharded(place)):
            found[ref.key] = place.detach() if id(place) in shared else torch.empty_like(place.detach())
    return found


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _new(ref: TensorRef, specs: Mapping[str, TensorSpec], device: torch.device) -> torch.Tensor:
    spec = specs[ref.key]
    tensor = in_dim_order(empty_for(spec)[0], ref.dim_order)
    if device.type == "cpu" or not spec.shape:  # counts of steps stay with the host: the optimizer moves what it must
        return tensor
    return torch.empty_like(tensor, device=device)


def _direct(targets: Mapping[str, torch.Tensor], loaded: Loaded) -> dict[str, str]:
    """Return key → the key under which it was saved, of the targets whose memory can be written as it lies: in the
    host, contiguous, and saved as the very part that this rank holds."""
    found = {}
    for key, target in targets.items():
        tensor = local_of(target)
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            continue
        saved = loaded.whole(key).part_at(offsets_of(key, target), tuple(tensor.shape))
        if saved is not None:
            found[key] = saved.key
    return found


def _load(one: Any, tree: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    if isinstance(one, torch.nn.Module):
        tensors = _as_they_are(one, tensors)
    state = rebuild(tree, tensors, one.state_dict())
    with torch.no_grad():
        one.load_state_dict(state)
    if isinstance(one, torch.optim.Optimizer) and has_torchs_state(one):
        _keep_as_saved(one, state)


def _as_they_are(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``tensors``, with the parameters and buffers of ``module`` themselves among them: torch would copy any
    other view of their memory onto itself, byte by byte."""
    own = {_memory_of(one): one for one in chain(module.parameters(), module.buffers())}
    own.pop(None, None)  # of what has no memory, all are alike
    return {key: own.get(_memory_of(one), one) for key, one in tensors.items()}


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    same = tied_key(local_of(tensor))
    return None if same is None else (*same, is_sharded(tensor), tuple(tensor.shape))


def _keep_as_saved(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Undo what torch does to the ``state`` of parameters on loading, however deep it lies: a float32 moment of a
    bfloat16 parameter is cast, a text becomes another one."""
    saved = chain(*(group["params"] for group in state["param_groups"]))
    live = chain(*(group["params"] for group in optimizer.param_groups))
    for number, parameter in zip(saved, live, strict=True):
        if parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(state["state"].get(number), optimizer.state[parameter])


def _as_saved(saved: Any, now: Any, *, key: object = None) -> Any:
    """Return ``now``, which torch made of ``saved``, with dtypes and texts as they were. The count of steps stays as it
    is: torch chooses its dtype."""
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        return now if key == "step" or now.dtype == saved.dtype else saved.to(now.device)
    if isinstance(saved, str):
        return saved
    if isinstance(saved, dict) and isinstance(now, dict):
        now |= {key: _as_saved(one, now[key], key=key) for key, one in saved.items() if key in now}
    elif type(saved) is type(now) and isinstance(saved, (list, tuple)) and len(saved) == len(now):
        return type(now)(_as_saved(*pair) for pair in zip(saved, now, strict=True))
    return now

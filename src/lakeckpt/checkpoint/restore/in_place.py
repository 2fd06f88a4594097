"""This module reads the tensors of a checkpoint into modules, optimizers and wrappers, without a second copy of them.

They are read straight into the memory of the live parameters, buffers and optimizer states, wherever that is contiguous
in host memory and nobody else's; what an optimizer does not have yet becomes its own. Other memory (a GPU's, strided)
is filled by way of a buffer, for a bounded number of bytes at a time. Then every object loads its state in the ordinary
way, so that hooks run and plain values are set: it is given its own tensors. A wrapper that refers to live tensors in
its state dict (the application state of torch's DCP tutorial, a container of optimizers) is loaded in the same way.

The caller has compared every entry (`lakeckpt.checkpoint.restore.apply.differences`). Where bytes are found to be
damaged, it is too late to leave the objects as they were: they hold a mixture, and the caller must load another
checkpoint into all of them, or say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.read.loaded import Loaded
from lakeckpt.checkpoint.restore.apply import fitted_to, is_large, is_torchs, live_tensors
from lakeckpt.checkpoint.state.optimizer_states import fits, states_in
from lakeckpt.checkpoint.state.shards import is_sharded, local_of, offsets_of
from lakeckpt.checkpoint.state.tensors import empty_for, host_bytes, in_dim_order, tied_key
from lakeckpt.checkpoint.state.tree import alongside, flatten, rebuild, references
from lakeckpt.errors import CheckpointError, CheckpointMismatch, StorageError
from lakeckpt.wire.envelope import TensorRef

__all__ = ["load_in_place"]

_BUFFER_BYTES = 256 * 2**20


def load_in_place(objects: Mapping[str, Any], loaded: Loaded) -> None:
    """Load the state of all large ones among ``objects``: see `is_large`.

    Raises `CheckpointDamaged`, `StorageError`, and `CheckpointMismatch` naming an object that refused its state.
    """
    loaded, _ = fitted_to(objects, loaded)
    large = {name: one for name, one in objects.items() if is_large(one)}
    targets: dict[str, torch.Tensor] = {}
    for name, one in large.items():
        targets |= _targets(name, one, loaded)
    direct = _direct(targets, loaded)
    loaded.source.fill({saved: host_bytes(local_of(targets[key])) for key, saved in direct.items()})
    rest = {key: targets[key] for key in targets if key not in direct}
    divided = [key for key, target in rest.items() if is_sharded(target) or key in loaded.wholes]
    for key in divided:
        loaded.read_part(key, offsets_of(key, rest[key]), local_of(rest[key]))
    for keys in _batches([key for key in rest if key not in divided], loaded.specs):
        for key, tensor in loaded.read(keys).items():
            with torch.no_grad():
                targets[key].copy_(tensor)
    for name in sorted(large, key=lambda name: isinstance(large[name], torch.nn.Module)):  # optimizers first
        try:
            _load(large[name], loaded.trees[name], targets)
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            raise CheckpointMismatch(f"{name!r} refused its state from the checkpoint: {error!r}") from error


def _targets(name: str, one: Any, loaded: Loaded) -> dict[str, torch.Tensor]:
    """key → where that tensor of the state of ``one`` goes: the live one of its place, else a new one."""
    tree, specs = loaded.trees[name], loaded.specs
    live: dict[str, torch.Tensor] = {}
    new = torch.device("cpu")
    if isinstance(one, torch.nn.Module):
        flat = flatten(name, one.state_dict(), of_module=True)
        for key, saved in tree.items():
            found = flat.tree.get(key)
            if isinstance(saved, TensorRef) and isinstance(found, TensorRef):
                live.setdefault(saved.key, flat.leaf(found.key))
    elif is_torchs(one):
        live, new = states_in(one, tree, loaded), _device_of(one)
    else:
        live = _places_in(one, tree)
    return {
        ref.key: live[ref.key] if ref.key in live and fits(live[ref.key], specs[ref.key]) else _new(ref, specs, new)
        for ref in references(tree)
    }


def _places_in(one: Any, tree: Any) -> dict[str, torch.Tensor]:
    """Where the tensors of any other object go: to its live memory, or to new memory that is divided alike."""
    state, shared = live_tensors(one)
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
    """key → the key under which it was saved, of the targets whose memory can be written as it lies: in the host,
    contiguous, overlapped by none, and saved as the very part that this rank holds."""
    spans = []
    for key, target in targets.items():
        tensor = local_of(target)
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            continue
        offsets = offsets_of(key, target)
        saved = [one for one in loaded.whole(key).parts if (one.offsets, one.sizes) == (offsets, tuple(tensor.shape))]
        if saved:
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, key, saved[0].key))
    found: dict[str, str] = {}
    end, last = 0, ""
    for start, stop, key, saved_as in sorted(spans):
        if start < end:
            found.pop(last, None)
        else:
            found[key] = saved_as
        if stop > end:
            end, last = stop, key
    return found


def _batches(keys: list[str], specs: Mapping[str, TensorSpec]) -> Iterator[list[str]]:
    batch: list[str] = []
    size_bytes = 0
    for key in keys:
        if batch and size_bytes + specs[key].size_bytes > _BUFFER_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(key)
        size_bytes += specs[key].size_bytes
    if batch:
        yield batch


def _load(one: Any, tree: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    if isinstance(one, torch.nn.Module):
        tensors = _as_they_are(one, tensors)
    state = rebuild(tree, tensors, one.state_dict())
    with torch.no_grad():
        one.load_state_dict(state)
    if isinstance(one, torch.optim.Optimizer) and is_torchs(one):
        _keep_as_saved(one, state)


def _as_they_are(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors``, with the parameters and buffers of ``module`` themselves among them: any other view of their memory
    torch would copy onto itself, byte by byte."""
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
    """``now``, which torch made of ``saved``, with dtypes and texts as they were: but not a count of steps, whose dtype
    torch chooses."""
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        return now if key == "step" or now.dtype == saved.dtype else saved.to(now.device)
    if isinstance(saved, str) and isinstance(now, str) and now.startswith("<generator object "):
        return saved
    if isinstance(saved, dict) and isinstance(now, dict):
        now |= {key: _as_saved(one, now[key], key=key) for key, one in saved.items() if key in now}
    elif type(saved) is type(now) and isinstance(saved, (list, tuple)) and len(saved) == len(now):
        return type(now)(_as_saved(*pair) for pair in zip(saved, now, strict=True))
    return now

"""This module makes a run of a checkpoint that something else saved, so that training goes on in the run.

`read_trainer_folder` and `foreign_state` find the objects of such a checkpoint, and the optimizer steps done, in a
folder of transformers' Trainer, a file of Lightning or of ``torch.save``, or safetensors. `write_run` saves them as the
first checkpoint of a run. The run has no reader yet: its loader joins when it is restored. The module starts no threads
of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.arguments import checked_state
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.interop.safetensors_files import is_safetensors, read_safetensors
from lakeckpt.checkpoint.interop.torch_files import read_torch_file
from lakeckpt.checkpoint.opening import open_saves
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.checkpoint.restore.restorer import Restorer
from lakeckpt.checkpoint.state.names import canonical_names
from lakeckpt.checkpoint.state.random_states import capture_random, derive_random, restore_random
from lakeckpt.errors import CheckpointDamaged, ConfigError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import SystemWaiter

__all__ = ["TRAINER_STATE", "Foreign", "foreign_state", "read_trainer_folder", "write_run"]

TRAINER_STATE = "trainer_state.json"
"""The file that makes a folder a checkpoint of transformers' Trainer."""
_TRAINER_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_WEIGHTS = "pytorch_model.bin"
_LIGHTNING = "pytorch-lightning_version"
_LIGHTNING_LISTS = {"optimizer": "optimizer_states", "scheduler": "lr_schedulers"}
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint that something else saved."""

    kind: str
    """``"transformers"``, ``"lightning"``, ``"torch"`` or ``"safetensors"``."""
    objects: dict[str, Any]
    """name → the state of an object, such as a model's or an optimizer's state dict."""
    steps_done: int | None
    """Optimizer steps done; None if the checkpoint does not say it."""


def read_trainer_folder(storage: Storage) -> Foreign:
    """Return what a folder of transformers' Trainer holds. Raises `CheckpointDamaged`, `CheckpointNotFound`."""
    there = {one.path for one in storage.list()}
    try:
        steps_done = int(json.loads(storage.read(TRAINER_STATE))["global_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(
            f"{TRAINER_STATE} of {describe(storage)!r} has no global_step: {error!r:.200}"
        ) from None
    has_weights = any(map(is_safetensors, there))
    weights = read_safetensors(storage) if has_weights else read_torch_file(storage, _WEIGHTS)
    objects = {name: read_torch_file(storage, path) for name, path in _TRAINER_FILES.items() if path in there}
    return Foreign(kind="transformers", objects={"model": weights, **objects}, steps_done=steps_done)


def foreign_state(kind: str, state: Mapping[str, Any]) -> Foreign:
    """Return the objects in ``state``, which lay in a file of ``torch.save`` (of Lightning, too) or in safetensors."""
    if _LIGHTNING in state:
        objects = {"model": state["state_dict"]}
        for name, key in _LIGHTNING_LISTS.items():
            objects |= _numbered(name, state.get(key) or [])
        return Foreign(kind="lightning", objects=objects, steps_done=int(state["global_step"]))
    if all(isinstance(one, torch.Tensor) for one in state.values()):
        return Foreign(kind=kind, objects={"model": dict(state)}, steps_done=None)
    found = {str(name): one for name, one in state.items() if isinstance(one, Mapping)}
    return Foreign(kind=kind, objects=found, steps_done=None)


def _numbered(name: str, states: list[Any]) -> dict[str, Any]:
    """Return the states under ``name``, and several as ``name_0``, ``name_1``, …"""
    return {name if len(states) == 1 else f"{name}_{number}": one for number, one in enumerate(states)}


def write_run(storage: Storage, objects: Mapping[str, Any], steps_done: int) -> None:
    """Save ``objects`` as the first checkpoint of the run in ``storage``, of optimizer step ``steps_done``.

    The random states in it follow from the step alone. Raises `ConfigError` if names or the step are none,
    `UnsupportedValue` for a state that cannot be written, `SaveFailed`.
    """
    if type(steps_done) is not int or steps_done < 0:
        raise ConfigError(
            f"steps_done is how many optimizer steps the checkpoint had done, 0 or more, got {steps_done!r}"
        )
    held = checked_state({name: _held(name, one, objects) for name, one in objects.items()})
    exchange = Exchange()
    before = capture_random()
    try:
        _, attempt, _ = Restorer(storage, exchange, held).restore()
        derive_random(0, steps_done, 0)
        saves = open_saves(
            held,
            storage,
            exchange,
            attempt,
            place=None,
            step=steps_done,
            tracks={},
            settings=Settings(keep=Keep(last=1), timeout_s=_TIMEOUT_S),
            waiter=SystemWaiter(),
        )
        saves.save(steps_done, None, patient=True)
        saves.close(well=True)
    finally:
        restore_random(before)


class _Held:
    """An object with this state. It is only saved."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


class _Weights(torch.nn.Module):
    """A module with this state, whose names may have the marks of wrappers."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self._state = dict(state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._state


def _held(name: str, state: Mapping[Any, Any], objects: Mapping[str, Any]) -> Any:
    if _is_optimizers(state):
        return _Held(_renamed(state, "model" if "model" in objects else next(iter(objects))))
    if state and all(isinstance(one, torch.Tensor) for one in state.values()):
        return _Weights(state)
    return _Held(state)


def _is_optimizers(state: Mapping[Any, Any]) -> bool:
    return {"state", "param_groups"} <= state.keys()


def _renamed(state: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return an optimizer's state as a run has it: a parameter is a number, or ``model/`` and its name."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    short = canonical_names([key for key in keys if isinstance(key, str) and not key.isdigit()])
    names = {key: f"{model}/{short[key]}" if key in short else int(key) for key in keys}
    return {
        **state,
        "state": {names.get(key, key): one for key, one in _by_key(state["state"], keys).items()},
        "param_groups": [{**one, "params": [names[key] for key in one["params"]]} for one in state["param_groups"]],
    }


def _by_key(states: Mapping[Any, Any], keys: list[Any]) -> dict[Any, Any]:
    """Return the states of parameters by their ``keys``: DCP makes texts of numbers, in one place and not in others."""
    known = {str(key): key for key in keys}
    return {known.get(str(key), key): one for key, one in states.items()}

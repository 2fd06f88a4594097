"""This module reads a state in any of the supported formats, and writes it in the formats of others.

`read_state` finds the format of a place: a run of `CheckpointManager`, a file of ``torch.save``, or safetensors.
`convert_checkpoint` writes such a state in one of the last two formats, or makes a run of a state that something else
saved. It holds the state in host memory once. torch itself converts between its files and folders of DCP. The module
starts no threads of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lakeckpt.checkpoint.interop.into_run import TRAINER_STATE, Foreign, foreign_state, read_trainer_folder, write_run
from lakeckpt.checkpoint.interop.item import named_leaves, part_of
from lakeckpt.checkpoint.interop.run_state import RunState, with_checkpoint
from lakeckpt.checkpoint.interop.safetensors_files import (
    SAFETENSORS,
    is_safetensors,
    read_safetensors,
    tensors_of,
    write_safetensors,
)
from lakeckpt.checkpoint.interop.torch_files import SUFFIXES, read_torch_file, write_torch_file
from lakeckpt.checkpoint.persist.log import LOG
from lakeckpt.checkpoint.restore.run_log import Step
from lakeckpt.errors import CheckpointNotFound, ConfigError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.storage.open import open_storage

__all__ = ["Converted", "convert_checkpoint", "read_state"]

_DCP = ".metadata"
"""The file that makes a folder a checkpoint of DCP."""
_FROM_DCP = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER state.pt"
_TO_DCP = "python -m torch.distributed.checkpoint.format_utils torch_to_dcp state.pt FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of `convert_checkpoint`."""

    source: str
    """The format of the source: ``"run"``, ``"torch"`` or ``"safetensors"``; for a run as the target also
    ``"lightning"`` or ``"transformers"``."""
    target: str
    tensors: int
    size_bytes: int
    """The size of all tensors."""
    values: int
    """The number of values that are not tensors."""
    objects: tuple[str, ...] = ()
    """Of a run that was made: the names of its objects."""
    steps_done: int | None = None
    """Of a run that was made: the optimizer steps done."""


def read_state(
    uri: str | os.PathLike[str] | Storage,
    *,
    item: str | None = None,
    step: Step = None,
    rank: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state at ``uri``, whole, in host memory, for the ``load_state_dict`` of any object.

    Args:
        uri: a run of `CheckpointManager`, a file of ``torch.save`` (named ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``),
            or a folder or file of safetensors (tensors by name).
        item: the part of the state to read, such as ``"model"`` or ``"optimizer.state.0"``. From a run, only this part
            is read.
        step: for a run, the optimizer step whose checkpoint is read; ``"best"``: the checkpoint with the best metric;
            None: the newest checkpoint.
        rank: for a run, the rank whose state is read. None: the state of all ranks together; if ranks had different
            values under one name, `CheckpointMismatch` names one of these values.
        storage_options: for the store of ``uri``.

    The state of a run has the readers' states under their names, and no random states.

    Raises `CheckpointNotFound`, `CheckpointDamaged`, `CheckpointMismatch`, `UnsupportedValue`, `NewerFormat`,
    `ConfigError`.
    """
    return _read(uri, item, step=step, rank=rank, storage_options=storage_options)[1]


def convert_checkpoint(
    source: str | os.PathLike[str] | Storage,
    target: str | os.PathLike[str],
    *,
    to: Literal["torch", "safetensors", "run"],
    item: str | None = None,
    step: Step = None,
    rank: int | None = None,
    objects: Mapping[str, str] | None = None,
    steps_done: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> Converted:
    """Read the state at ``source`` (see `read_state`) and write it at ``target``: an empty folder, or a new file.

    ``to="torch"``: a local file (named ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``) that
    ``torch.load(weights_only=True)`` loads: tensors and plain values. ``to="safetensors"``: ``model.safetensors``, or
    several files and an index, in a folder or store. It holds only tensors, so choose the part to write, for example
    with ``item="model"``.

    ``to="run"``: the first checkpoint of a run, from which `CheckpointManager.restore` goes on. The source is a folder
    of transformers' Trainer, a file of Lightning or of ``torch.save``, or safetensors. The objects are called
    ``model``, ``optimizer``, ``scheduler`` and ``scaler``, and those of another file of ``torch.save`` as in the file.

    * ``objects``: name of an object in the run → name of its state in the source, in place of all names.
    * ``steps_done``: the optimizer steps done, if the source does not say it (torch, safetensors).

    Raises as `read_state` does; `ConfigError` if the target is not empty or there is no such item; `SaveFailed`.
    """
    if to == "run":
        run = _empty_folder(target, target_options)
        foreign = _with_objects(_foreign(source, storage_options), objects or {})
        return _make_run(run, foreign, steps_done)
    if to not in ("torch", "safetensors"):
        raise ConfigError(f"to is 'torch', 'safetensors' or 'run', got {to!r}. torch makes a folder of DCP: {_TO_DCP}")
    if objects or steps_done is not None:
        raise ConfigError("objects and steps_done are for to='run'")
    storage = None if to == "torch" else _empty_folder(target, target_options)
    kind, state = _read(source, item, step=step, rank=rank, storage_options=storage_options)
    if storage is None:
        write_torch_file(_local_path(target), state)
    else:
        write_safetensors(storage, tensors_of(state))
    return _converted(kind, to, state)


def _foreign(source: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None) -> Foreign:
    """Return the objects of a checkpoint that something else saved."""
    storage, name = _opened(source, options)
    if name is None and storage.list(LOG):
        raise ConfigError(f"{describe(storage)!r} is a run already: copy its folder, or restore it")
    if name is None and any(one.path == TRAINER_STATE for one in storage.list(TRAINER_STATE)):
        return read_trainer_folder(storage)
    return foreign_state(*_of_others(storage, name))


def _with_objects(foreign: Foreign, objects: Mapping[str, str]) -> Foreign:
    """Return ``foreign`` with the objects that the user has named."""
    named = {name: part_of(foreign.objects, item) for name, item in objects.items()}
    return replace(foreign, objects=named or foreign.objects)


def _make_run(storage: Storage, foreign: Foreign, steps_done: int | None) -> Converted:
    if not foreign.objects:
        raise ConfigError("the source holds no state of an object: name parts of it by objects=")
    steps = foreign.steps_done if steps_done is None else steps_done
    if steps is None:
        raise ConfigError(
            f"a {foreign.kind} checkpoint does not say how many optimizer steps it had done: give steps_done"
        )
    write_run(storage, foreign.objects, steps)
    done = _converted(foreign.kind, "run", foreign.objects)
    return replace(done, objects=tuple(foreign.objects), steps_done=steps)


def _empty_folder(target: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Storage:
    storage = open_storage(target, storage_options=options)
    if storage.list():
        raise ConfigError(f"{describe(storage)!r} is not empty: convert into a new folder")
    return storage


def _local_path(target: str | os.PathLike[str]) -> str:
    text = os.fspath(target)
    if "://" in text and not text.startswith("file://"):
        raise ConfigError(f"torch writes local files: write one, then copy it to {text!r}")
    return text.removeprefix("file://")


def _read(
    uri: str | os.PathLike[str] | Storage,
    item: str | None,
    *,
    step: Step,
    rank: int | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[str, dict[str, Any]]:
    """Return the format of a place, and its state or the part ``item`` of it."""
    storage, name = _opened(uri, storage_options)
    if name is None and storage.list(LOG):
        return "run", _of_run(storage, item, step, rank)
    if step is not None or rank is not None:
        raise ConfigError(f"{describe(storage)!r} is not a run: it has no steps and no ranks to choose")
    kind, state = _of_others(storage, name)
    return kind, part_of(state, item) if item else state


def _of_run(storage: Storage, item: str | None, step: Step, rank: int | None) -> dict[str, Any]:
    def read(manifest: Any) -> dict[str, Any]:
        state = RunState(storage, manifest, rank)
        found: dict[str, Any] = state.read(part_of(state.tree, item) if item else state.tree)
        return found

    return with_checkpoint(storage, step, read)


def _opened(uri: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None) -> tuple[Storage, str | None]:
    """Return the storage at ``uri``, and the name of the file in it if ``uri`` names a file."""
    if isinstance(uri, Storage):
        return uri, None
    place = os.fspath(uri)
    if place.endswith((SAFETENSORS, *SUFFIXES)):
        folder, slash, name = place.rpartition("/")
        beside = open_storage(folder or slash or ".", storage_options=options)
        if any(one.path == name for one in beside.list(name)):  # else it is the name of a folder
            return beside, name
    return open_storage(place, storage_options=options), None


def _of_others(storage: Storage, name: str | None) -> tuple[str, dict[str, Any]]:
    if name is not None and name.endswith(SUFFIXES):
        return "torch", read_torch_file(storage, name)
    if name is not None:
        return "safetensors", dict(read_safetensors(storage, name))
    if storage.list(_DCP):
        raise ConfigError(f"{describe(storage)!r} is a folder of DCP. torch makes a file of it: {_FROM_DCP}")
    there = [one.path for one in storage.list()]
    if any(map(is_safetensors, there)):
        return "safetensors", dict(read_safetensors(storage))
    raise CheckpointNotFound(
        f"there is no checkpoint in {describe(storage)!r}: no {LOG} and no *{SAFETENSORS}, but {_instead(there)}"
    )


def _instead(there: list[str]) -> str:
    """Return a text about the contents of a folder that is not a checkpoint itself."""
    for path in there:
        if f"/{LOG}/" in f"/{path}":
            return f"a run in {path.partition(f'/{LOG}/')[0]}: name that folder"
    files = [path for path in there if path.endswith((*SUFFIXES, SAFETENSORS))]
    return f"{files[0]}: name that file" if files else f"{len(there)} other files"


def _converted(source: str, target: str, state: Mapping[str, Any]) -> Converted:
    every = [one for _, one in named_leaves(state)]
    sizes = [one.nbytes for one in every if isinstance(one, torch.Tensor)]
    return Converted(
        source=source, target=target, tensors=len(sizes), size_bytes=sum(sizes), values=len(every) - len(sizes)
    )

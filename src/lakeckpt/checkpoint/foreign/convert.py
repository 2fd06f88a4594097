"""How does a checkpoint of one form become one of another?  Its state is read, by whoever wrote it, and written anew.

`read_state` tells by looking what lies at a place: a run of `CheckpointManager`, a checkpoint of `LakeStorageWriter`,
one of torch's own DCP, a file of ``torch.save``, or safetensors. `convert_checkpoint` writes what it read as any of
these but the first. The whole state is held in host memory once. Nothing is unpickled on the way in; on the way out,
torch's own writers write torch's own forms, pickle and all.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lakeckpt.checkpoint.dcp.metadata import CHECKPOINT, DATA, is_data_name
from lakeckpt.checkpoint.dcp.planners import OF_RANK, UNTOLD, LakeLoadPlanner, LakeSavePlanner
from lakeckpt.checkpoint.dcp.reader import LakeStorageReader
from lakeckpt.checkpoint.dcp.value import encode_value
from lakeckpt.checkpoint.dcp.writer import LakeStorageWriter
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.foreign.dcp_folder import nested, read_dcp_folder
from lakeckpt.checkpoint.foreign.dcp_metadata import METADATA
from lakeckpt.checkpoint.foreign.item import part_of
from lakeckpt.checkpoint.foreign.safetensors import (
    SAFETENSORS,
    is_safetensors,
    read_safetensors,
    tensors_of,
    write_safetensors,
)
from lakeckpt.checkpoint.foreign.torch_file import SUFFIXES, read_torch_file
from lakeckpt.checkpoint.foreign.torch_writer import write_torch_file
from lakeckpt.checkpoint.load import load
from lakeckpt.checkpoint.log import LOG, list_slots, read_entry
from lakeckpt.checkpoint.manifest import Manifest, Restored
from lakeckpt.checkpoint.parts import PARTS
from lakeckpt.checkpoint.tensors import empty_for
from lakeckpt.checkpoint.tree import rebuild
from lakeckpt.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    NewerFormat,
    ObjectMissing,
    UnsupportedValue,
    WireDamaged,
    WireError,
)
from lakeckpt.lake.storage import Storage, describe, open_storage

__all__ = ["Converted", "Form", "convert_checkpoint", "read_state"]

Form = Literal["lakeckpt", "dcp", "torch", "safetensors"]

_MOST_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was converted."""

    source: str
    """What the source was: ``"run"``, ``"lakeckpt"``, ``"dcp"``, ``"torch"`` or ``"safetensors"``."""
    target: Form
    tensors: int
    size_bytes: int
    """Of the tensors."""
    values: int
    """Leaves that are no tensors."""


def read_state(
    uri: str | os.PathLike[str],
    *,
    slot: int | None = None,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state that lies at ``uri``, whole, in host memory, for ``load_state_dict`` of anything.

    A run of `CheckpointManager` (its newest checkpoint, or that in ``slot``; what ``rank`` had; readers' states under
    their names, random states left out), a checkpoint of `LakeStorageWriter`, a folder of torch's own DCP, a file of
    ``torch.save`` (named ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``), or a folder or file of safetensors (tensors by
    name). Nothing that is read is unpickled: a value that only a pickle can make is refused by its name.

    Raises `CheckpointNotFound`, `CheckpointDamaged`, `UnsupportedValue`, `NewerFormat`.
    """
    return _read(uri, slot=slot, rank=rank, storage_options=storage_options)[1]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Form,
    item: str | None = None,
    slot: int | None = None,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> Converted:
    """Read the state at ``source`` (see `read_state`) and write it at ``target``: an empty folder, or a new file.

    ``to="dcp"``: a folder that plain ``torch.distributed.checkpoint`` loads; local folders only. ``to="lakeckpt"``: one
    for `LakeStorageReader`. ``to="safetensors"``: ``model.safetensors``, or several and an index; tensors only, so
    that ``item="model"`` chooses the part to write, with names as in its own state dict. ``to="torch"``: one local file
    (named ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``) that ``torch.load(weights_only=True)`` takes: tensors and plain
    values. ``item`` may have dots for parts inside of parts, and names that are numbers.

    Raises as `read_state`, and `ConfigError` where the target is not empty or the item is not there.
    """
    kind, state = _read(source, slot=slot, rank=rank, storage_options=storage_options)
    state = part_of(state, item) if item else state
    if to == "torch":
        write_torch_file(_local(target, "files of torch.save are"), state)
        return _converted(kind, to, state)
    storage = open_storage(target, storage_options=target_options)
    if storage.list():
        raise ConfigError(f"{describe(storage)!r} is not empty: convert into a new folder")
    if to == "safetensors":
        write_safetensors(storage, tensors_of(state))
    elif to == "lakeckpt":
        for name, leaf in _told_apart(state):
            if not isinstance(leaf, torch.Tensor):
                encode_value(name, leaf)  # refuses what cannot be written, before anything is
        writer = LakeStorageWriter(target, storage_options=target_options)
        _alone(dcp_save, state, storage_writer=writer, planner=LakeSavePlanner())
    elif to == "dcp":
        _told_apart(state)
        _alone(dcp_save, state, storage_writer=FileSystemWriter(_local(target, "torch's own DCP is")))
    else:
        raise ConfigError(f"to is 'lakeckpt', 'dcp', 'torch' or 'safetensors', got {to!r}")
    return _converted(kind, to, state)


def _converted(source: str, target: Form, state: dict[str, Any]) -> Converted:
    leaves = _leaves(state)
    sizes = [one.nbytes for _, one in leaves if isinstance(one, torch.Tensor)]
    values = len(leaves) - len(sizes)
    return Converted(source=source, target=target, tensors=len(sizes), size_bytes=sum(sizes), values=values)


def _leaves(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """What DCP stores each by itself, under the names that it gives."""
    found: list[tuple[str, Any]] = []
    traverse_state_dict(state, lambda path, one: found.append((".".join(map(str, path)), one)))
    return found


def _told_apart(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """The same, where no two have one name."""
    leaves = _leaves(state)
    twice = [name for name, times in Counter(name for name, _ in leaves).items() if times > 1]
    if twice:
        raise UnsupportedValue(f"DCP would call several values of this state {twice[0]!r:.120}: rename one of them")
    return leaves


def _read(
    uri: str | os.PathLike[str], *, slot: int | None, rank: int, storage_options: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    place, name = os.fspath(uri), None
    if place.endswith((SAFETENSORS, *SUFFIXES)):
        folder, slash, last = place.rpartition("/")
        folder = folder or slash or "."
        beside = open_storage(folder, storage_options=storage_options)
        if place.endswith(SAFETENSORS) or any(one.path == last for one in beside.list(last)):  # else a folder's name
            place, name = folder, last
    storage = open_storage(place, storage_options=storage_options)
    if name is None and storage.list(LOG):
        return "run", _state_of_run(storage, slot, rank)
    if slot is not None or rank:
        raise ConfigError(f"{describe(storage)!r} is not a run: it has no slots and no ranks to choose")
    if name is not None:
        if name.endswith(SUFFIXES):
            return "torch", read_torch_file(storage, name)
        return "safetensors", dict(read_safetensors(storage, name))
    if storage.list(CHECKPOINT):
        return "lakeckpt", _state_of_lake(place, storage_options)
    if storage.list(METADATA):
        return "dcp", read_dcp_folder(storage)
    there = [one.path for one in storage.list()]
    if any(is_safetensors(path) and not is_data_name(path) for path in there):
        return "safetensors", dict(read_safetensors(storage))
    raise CheckpointNotFound(
        f"there is no checkpoint in {describe(storage)!r}: no {LOG}, no {CHECKPOINT}, no {METADATA} and no "
        f"*{SAFETENSORS}, but {_instead(there)}"
    )


def _instead(there: Sequence[str]) -> str:
    """What lies in a folder (``there``: its objects) that is no checkpoint itself."""
    if any(is_data_name(path.removeprefix(f"{DATA}/")) for path in there):
        if any(map(is_data_name, there)):
            return "the data of a checkpoint of LakeStorageWriter: name the folder above"
        return "data that LakeStorageWriter wrote in a save that was cut off: nothing was saved"
    files = [path for path in there if path.endswith((*SUFFIXES, SAFETENSORS))]
    whole = [path for path in there if path.endswith((f"/{CHECKPOINT}", f"/{METADATA}")) or f"/{LOG}/" in path]
    if whole:
        path = whole[0]
        folder = path.partition(f"/{LOG}/")[0] if f"/{LOG}/" in path else path.rpartition("/")[0]
        return f"one in {folder}: name that folder"
    return f"{files[0]}: name that file" if files else f"{len(there)} other files"


def _state_of_run(storage: Storage, slot: int | None, rank: int) -> dict[str, Any]:
    """The state in ``slot``, or the newest one; a newer one where the run goes on and removes what was begun with."""
    for _ in range(_MOST_TRIES):
        manifest = _manifest(storage, slot)
        try:
            return _state_in(storage, manifest, rank)
        except CheckpointDamaged as error:
            if slot is None and _manifest(storage, None).slot != manifest.slot:
                continue
            if not storage.list(f"{PARTS}/{manifest.save.folder}"):
                raise CheckpointNotFound(
                    f"nothing is left of the checkpoint in slot {manifest.slot} of {describe(storage)!r} but its "
                    "record: its data were removed behind newer ones. Choose a newer slot, and keep more (keep=)"
                ) from error
            raise
    raise CheckpointNotFound(
        f"{describe(storage)!r} removes its checkpoints faster than they are read: keep more (keep=)"
    )


def _state_in(storage: Storage, manifest: Manifest, rank: int) -> dict[str, Any]:
    if not 0 <= rank < manifest.world_size:
        raise ConfigError(
            f"the checkpoint in slot {manifest.slot} has ranks 0 to {manifest.world_size - 1}, not {rank}"
        )
    loaded = load(storage, manifest, rank=rank, world_size=manifest.world_size)
    loaded.check()
    tensors = loaded.read_as_saved(loaded.specs)
    state = {name: rebuild(tree, tensors) for name, tree in loaded.trees.items()}
    return state | {name: dict(reader.state) for name, reader in manifest.readers.items()}


def _manifest(storage: Storage, slot: int | None) -> Manifest:
    for at in reversed(list_slots(storage)) if slot is None else [slot]:
        try:
            entry = read_entry(storage, at)
        except NewerFormat:
            raise
        except ObjectMissing:
            raise CheckpointNotFound(f"there is no slot {at} in {describe(storage)!r}") from None
        except WireError as error:
            raise CheckpointDamaged(f"slot {at} of {describe(storage)!r}: {error}: choose an older one") from error
        if isinstance(entry, Manifest):
            return entry
        if slot is not None:
            raise ConfigError(f"slot {slot} of {describe(storage)!r} is an entry of an attempt, no checkpoint")
        if isinstance(entry, Restored) and entry.restored is not None:
            return _manifest(storage, entry.restored)  # the run was rolled back to it, or has gone on from there
    raise CheckpointNotFound(f"{describe(storage)!r} is a run without a checkpoint yet")


def _state_of_lake(place: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """All that a checkpoint of ours holds; values of single ranks under the names that they have there."""
    reader = LakeStorageReader(place, storage_options=options)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            flat[name] = None
        else:
            dtype = str(found.properties.dtype).removeprefix("torch.")
            flat[name] = empty_for(TensorSpec(key=name, dtype=dtype, shape=tuple(found.size)))[0]
    _alone(dcp_load, flat, storage_reader=reader, planner=LakeLoadPlanner())
    planned = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    paths = {name: _path(name, path) for name, path in planned.items() if name in flat}
    try:
        untold = [one for name, one in planned.items() if name.startswith(UNTOLD)]
        return nested(flat, paths, untold=untold or None)  # of an older lakeckpt there are none
    except WireDamaged as error:
        raise CheckpointDamaged(f"{CHECKPOINT} in {place!r}: {error}") from error


def _path(name: str, path: Sequence[str | int]) -> tuple[str | int, ...]:
    """Where the value saved as ``name`` lies: those of single ranks lie beside each other, in a list in one place."""
    _, mark, rank = name.rpartition(OF_RANK)
    if mark and type(path[-1]) is int:
        return (*path, f"{mark}{rank}")
    return (*path[:-1], f"{path[-1]}{mark}{rank}") if mark else tuple(path)


def _local(target: str | os.PathLike[str], what: str) -> str:
    text = os.fspath(target)
    if "://" in text and not text.startswith("file://"):
        raise ConfigError(f"{what} written into local folders: write it to one, then copy it to {text!r}")
    return text.removeprefix("file://")


def _alone(call: Any, state: dict[str, Any], **how: Any) -> None:
    """Let DCP save or load ``state`` in this process alone. What goes wrong is raised as it is: DCP wraps it, also an
    interrupt, into what is no `Exception`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            call(state, no_dist=True, **how)
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None

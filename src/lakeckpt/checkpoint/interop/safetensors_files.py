"""This module reads and writes plain safetensors: one file, or several files with an index, as model hubs have them.

The library ``safetensors`` reads and writes the files. A file holds only tensors. The index is written after all files.
The module starts no threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import safetensors
import torch
from safetensors.torch import load, load_file, save

from lakeckpt.checkpoint.interop.item import named_leaves
from lakeckpt.checkpoint.state.tensors import batches_of
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, UnsupportedValue
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.storage.local import LocalStorage

__all__ = ["SAFETENSORS", "is_safetensors", "read_safetensors", "tensors_of", "write_safetensors"]

SAFETENSORS = ".safetensors"
"""The suffix of safetensors files."""
_INDEX = "model.safetensors.index.json"
_FILE_BYTES = 5 * 10**9
_SHARDED = b'"DCP_SHARDING_INFO"'
_HEAD_BYTES = 2**20


def is_safetensors(path: str) -> bool:
    """Return whether this is a safetensors file in the folder itself; files in subfolders do not count."""
    return "/" not in path and path.endswith(SAFETENSORS)


def read_safetensors(storage: Storage, file: str | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of ``file``, or of all files of safetensors in the folder itself, by name.

    Raises `CheckpointNotFound`, `CheckpointDamaged` naming the file, `UnsupportedValue` for files that hold parts of
    tensors.
    """
    paths = [one.path for one in storage.list() if is_safetensors(one.path) and file in (None, one.path)]
    if not paths:
        raise CheckpointNotFound(f"there is no {file or f'file named *{SAFETENSORS}'} in {describe(storage)!r}")
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        for name, tensor in _tensors_in(storage, path).items():
            if name in found:
                raise CheckpointDamaged(f"{path} and another file of {describe(storage)!r} both hold {name!r:.200}")
            found[name] = tensor
    if file is None:
        _check_index(storage, found)
    return found


def _tensors_in(storage: Storage, path: str) -> dict[str, torch.Tensor]:
    if _SHARDED in storage.read(path, 0, _HEAD_BYTES):
        raise UnsupportedValue(
            f"{path}: it holds parts of tensors (written by DCP on several ranks): consolidate it first"
        )
    try:
        if isinstance(storage, LocalStorage):
            return load_file(os.path.join(storage.name, path))
        return load(storage.read(path))
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointDamaged(f"{path}: safetensors cannot read it: {error}") from error
    except (KeyError, AttributeError) as error:
        raise UnsupportedValue(
            f"{path}: safetensors {safetensors.__version__} with torch {torch.__version__} has no dtype for it: {error}"
        ) from error


def _check_index(storage: Storage, found: Mapping[str, torch.Tensor]) -> None:
    """Compare the tensors with those that an index names: if a file is missing, the model would lack weights."""
    for info in storage.list():
        if "/" in info.path or not info.path.endswith(f"{SAFETENSORS}.index.json"):
            continue
        try:
            missing = sorted(set(json.loads(storage.read(info.path))["weight_map"]) - set(found))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(f"{info.path}: this is no index of safetensors: {error!r:.200}") from None
        if missing:
            raise CheckpointDamaged(
                f"{info.path} names {missing[0]!r:.120}, which no file holds ({len(missing)} names in all): copy the "
                "files that are missing"
            )


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by their names, joined with dots.

    Raises `UnsupportedValue` naming values that are no tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for name, leaf in named_leaves(state):
        if not isinstance(leaf, torch.Tensor):
            others.append(f"{name} ({type(leaf).__name__})")
        elif name in tensors:
            raise UnsupportedValue(f"two tensors would be called {name!r} in safetensors: rename one of them")
        else:
            tensors[name] = leaf
    if others:
        more = f" and {len(others) - 10} more" if len(others) > 10 else ""
        raise UnsupportedValue(
            f"safetensors hold tensors alone, and this state holds {', '.join(others[:10])}{more}: choose a part of "
            "it, such as item='model'"
        )
    return tensors


def write_safetensors(
    storage: Storage, tensors: Mapping[str, torch.Tensor], *, file_bytes: int = _FILE_BYTES
) -> list[str]:
    """Write one file, or several of about ``file_bytes`` and an index, and return the paths.

    Memory for one file is taken beside the tensors. `UnsupportedValue` if safetensors cannot hold a tensor.
    """
    batches = batches_of(tensors.items(), lambda one: one[1].nbytes, file_bytes)
    packs = [dict(batch) for batch in batches] or [{}]
    if len(packs) == 1:
        return [_write(storage, f"model{SAFETENSORS}", packs[0])]
    names = [f"model-{number:05d}-of-{len(packs):05d}{SAFETENSORS}" for number in range(1, len(packs) + 1)]
    for name, pack in zip(names, packs, strict=True):
        _write(storage, name, pack)
    weights = {key: name for name, pack in zip(names, packs, strict=True) for key in pack}
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors.values())}, "weight_map": weights}
    storage.put(_INDEX, [json.dumps(index, indent=2, ensure_ascii=False).encode()])
    return [*names, _INDEX]


def _write(storage: Storage, path: str, pack: Mapping[str, torch.Tensor]) -> str:
    storages: set[int] = set()
    alone = {}
    for name, tensor in pack.items():
        where = tensor.untyped_storage().data_ptr()
        plain = tensor.detach().cpu().contiguous()
        alone[name] = plain.clone() if where in storages else plain  # the library refuses tied tensors
        storages.add(where)
    try:
        data = save(alone)
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise UnsupportedValue(
            f"{path}: safetensors cannot hold this state: {error}: convert the tensor first"
        ) from error
    storage.put(path, [data])
    return path

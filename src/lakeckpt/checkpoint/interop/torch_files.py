"""This module reads and writes the formats of torch itself: files of ``torch.save``, and folders of DCP.

torch reads and writes the files. Files of ``torch.save`` are read with ``weights_only=True``, so that no code in them
runs. A folder of DCP consists of pickles, and torch runs them: read only folders that you trust. The module starts no
threads.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lakeckpt.errors import CheckpointDamaged, ConfigError, LakeckptError, SaveFailed, UnsupportedValue
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.local import LocalStorage

__all__ = ["METADATA", "SUFFIXES", "read_dcp_folder", "read_torch_file", "write_dcp_folder", "write_torch_file"]

METADATA = ".metadata"
"""The file that makes a folder a checkpoint of DCP."""
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of files of ``torch.save``."""


def read_torch_file(storage: Storage, path: str) -> dict[str, Any]:
    """Return the state in a file of ``torch.save``; a local file is mapped into memory.

    Raises `UnsupportedValue` with torch's text where the file holds what only running code could make, or no dict;
    `CheckpointDamaged` where torch cannot read it.
    """
    source: Any = None
    if isinstance(storage, LocalStorage):
        source = os.path.join(storage.name, path)
    try:
        found = torch.load(
            source or io.BytesIO(storage.read(path)),
            weights_only=True,
            mmap=source is not None,
            map_location="cpu",
        )
    except pickle.UnpicklingError as error:
        raise UnsupportedValue(f"{path}: torch.load(weights_only=True) refuses it: {_reason(error)}") from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointDamaged(f"{path}: torch.load cannot read it: {error!s:.400}") from error
    if not isinstance(found, dict):
        raise UnsupportedValue(f"{path}: it holds a {type(found).__name__}, not a state: save a dict of states")
    return found


def write_torch_file(path: str, state: Mapping[str, Any]) -> None:
    """Write ``state`` into the new local file ``path``, durably, and load it again before it gets its name.

    Raises `UnsupportedValue` where ``torch.load(weights_only=True)`` would refuse the file, `ConfigError` where the
    file exists or is not called as such files are, `SaveFailed` where the disk fails.
    """
    if not path.endswith(SUFFIXES):
        raise ConfigError(f"a file of torch.save is called *{', *'.join(SUFFIXES)}: {path!r} could not be read again")
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    unfinished = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(8)}")
    try:
        _save(state, unfinished)
        os.link(unfinished, path)  # unlike a rename, a link replaces no file
    except FileExistsError:
        raise ConfigError(f"{path!r} exists already: choose a new name") from None
    except pickle.UnpicklingError as error:
        raise UnsupportedValue(
            f"torch.load(weights_only=True) would not load this state: {_reason(error)}: choose a part of it, such as "
            "item='model'"
        ) from error
    except OSError as error:
        raise SaveFailed(f"{path!r} could not be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
    _sync_folder(folder)


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the reason in torch's error, without its advice to run the code."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return text.partition(" Please use")[0][:400].rstrip(". ")


def _save(state: Mapping[str, Any], path: str) -> None:
    with open(path, "xb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(path, weights_only=True, mmap=True, map_location="cpu")


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_dcp_folder(folder: str) -> dict[str, Any]:
    """Return the state in a local folder of DCP, whole.

    DCP makes texts of all keys: an optimizer's state gets the numbers of its parameters back. Raises
    `CheckpointDamaged` where torch cannot read the folder.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
        flat = {name: _empty(one) for name, one in metadata.state_dict_metadata.items()}
        _alone(dcp_load, flat, storage_reader=FileSystemReader(folder))
        paths = metadata.planner_data or {}
        state = unflatten_state_dict(flat, {name: paths.get(name, (name,)) for name in flat})
    except Exception as error:  # torch unpickles the metadata: anything can come of damage
        raise CheckpointDamaged(f"torch cannot read the checkpoint in {folder!r}: {error!r:.400}") from error
    return {name: _with_numbers(one) for name, one in state.items()}


def write_dcp_folder(folder: str, state: dict[str, Any]) -> None:
    """Write ``state`` into a local folder as ``dcp.save`` does. `SaveFailed` with torch's text."""
    try:
        _alone(dcp_save, state, storage_writer=FileSystemWriter(folder))
    except LakeckptError:
        raise
    except Exception as error:
        raise SaveFailed(f"torch could not write {folder!r}: {error}") from error


def _empty(one: Any) -> torch.Tensor | None:
    if not isinstance(one, TensorStorageMetadata):
        return None
    return torch.empty(one.size, dtype=one.properties.dtype)


def _alone(call: Any, state: dict[str, Any], **how: Any) -> None:
    """Let DCP save or load in this process alone. Raises the original error, which DCP wraps into a `BaseException`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            call(state, no_dist=True, **how)
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None


def _with_numbers(state: Any) -> Any:
    """Return an optimizer's state with numbers for its parameters, if its groups have numbers; other values as they
    are."""
    if not isinstance(state, dict) or not {"param_groups"} <= set(state) <= {"state", "param_groups"}:
        return state
    groups = state["param_groups"]
    if type(groups) is not list or not all(isinstance(one, dict) and type(one.get("params")) is list for one in groups):
        return state
    known = {str(one): one for group in groups for one in group["params"] if type(one) is int}
    return {**state, "state": {known.get(key, key): value for key, value in state.get("state", {}).items()}}

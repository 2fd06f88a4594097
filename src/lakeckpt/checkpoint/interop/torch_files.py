"""This module reads and writes files of ``torch.save``.

torch reads and writes the files. They are read with ``weights_only=True``, so that no code in them runs. The module
starts no threads.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from lakeckpt.errors import CheckpointDamaged, ConfigError, SaveFailed, UnsupportedValue
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.local import LocalStorage

__all__ = ["SUFFIXES", "read_torch_file", "write_torch_file"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of files of ``torch.save``."""


def read_torch_file(storage: Storage, path: str) -> dict[str, Any]:
    """Return the state in a file of ``torch.save``; a local file is mapped into memory.

    Raises `UnsupportedValue` with torch's text if the file holds what only running code could make, or no dict;
    `CheckpointDamaged` if torch cannot read it.
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
    """Write ``state`` into the new local file ``path``, and load it again before it gets its name.

    Raises `UnsupportedValue` if ``torch.load(weights_only=True)`` would refuse the file, `ConfigError` if the
    file exists or is not called as such files are, `SaveFailed` if the disk fails.
    """
    if not path.endswith(SUFFIXES):
        raise ConfigError(f"a file of torch.save is called *{', *'.join(SUFFIXES)}: {path!r} could not be read again")
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".convert", dir=folder) as beside:
            unfinished = os.path.join(beside, "unfinished")
            torch.save(dict(state), unfinished)
            torch.load(unfinished, weights_only=True, mmap=True, map_location="cpu")
            os.link(unfinished, path)  # unlike a rename, a link replaces no file
    except FileExistsError:
        raise ConfigError(f"{path!r} exists already: choose a new name") from None
    except pickle.UnpicklingError as error:
        raise UnsupportedValue(
            f"torch.load(weights_only=True) would not load this state: {_reason(error)}: choose a part of it, such as "
            "item='model'"
        ) from error
    except (OSError, RuntimeError) as error:
        raise SaveFailed(f"{path!r} could not be written: {error}") from error


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the reason in torch's error, without its advice to run the code."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return text.partition(" Please use")[0][:400].rstrip(". ")

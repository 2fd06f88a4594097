"""This module opens the run that a command names.

`add_run_arguments` adds the arguments of every command that reads a run, and `open_run` opens the storage that these
arguments name. The module reads nothing from the storage.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.storage.open import open_storage

__all__ = ["add_run_arguments", "open_run", "options_of"]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that read a run."""
    parser.add_argument("place", metavar="RUN", help="where the run's checkpoints are: a folder, or a URL")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def open_run(args: argparse.Namespace) -> tuple[Storage, str]:
    """Return the storage of the run that ``args`` names, and its name for people."""
    storage = open_storage(args.place, storage_options=options_of(args.storage_options))
    return storage, describe(storage)


def options_of(text: str | None) -> dict[str, Any] | None:
    """Return the value of ``--storage-options``: a JSON object. `ConfigError` if it is anything else."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--storage-options must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--storage-options must be a JSON object, got {text!r}")
    return value

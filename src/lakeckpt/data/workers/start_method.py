"""This module chooses how a loader's worker processes are started, and refuses what cannot be started so.

Workers of a table in an object store are started by ``forkserver``: the client of an object store has threads, which a
forked process does not have. Otherwise torch's default holds. For a process that is not forked, the transform is
pickled, so it must be found again by its name there. The module starts no process itself.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.object_store import ObjectStorage

__all__ = ["GUARD", "check_picklable", "worker_context"]

GUARD = (
    "A worker process that is started by forkserver or spawn imports the script that started it: put what the script "
    "does into a function, and call the function below `if __name__ == '__main__':`"
)
_PRELOADED = ["__main__", "lakeckpt.data.workers.reader"]


def worker_context(given: Any, storage: Storage) -> Any:
    """Return the multiprocessing context for workers that read ``storage``; ``given`` is the user's choice, or None."""
    if given is not None or not isinstance(storage, ObjectStorage):
        return given
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # so that torch is imported once, and not by each worker
    return context


def check_picklable(context: Any, functions: dict[str, Callable[..., Any] | None]) -> None:
    """Raise `ConfigError` if one of ``functions`` (by the name of its argument) cannot reach a worker."""
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if method == "fork":
        return
    for name, function in functions.items():
        if function is not None:
            _check_picklable(name, function, method)


def _check_picklable(name: str, function: Callable[..., Any], method: str) -> None:
    begins = f"{name}= cannot reach a worker process that is started by {method}, which gets it pickled: "
    ends = "Define the function at the top of a module that can be imported, or read with num_workers=0"
    try:
        pickled = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"{begins}{error}. {ends}") from error
    if b"__main__" in pickled and not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(f"{begins}it is defined in a notebook or at a prompt. {ends}")

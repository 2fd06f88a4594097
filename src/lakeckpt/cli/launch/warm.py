"""This module is what the fork server of `lakeckpt run` imports first: it imports what training scripts import.

A process that is forked from the server has all of it at once. `LAKECKPT_PRELOAD` names more modules. The module starts
no threads of its own; `added` has those that the user's modules started, which a forked process would not have.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from lakeckpt.cli.launch.run import PRELOAD

__all__ = ["added"]

_IMPORTED = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed",
    "torch.optim",
    "numpy",
    "pyarrow.parquet",
    "lakeckpt.data.loader.loader",
    "lakeckpt.data.streams.mix",
    "lakeckpt.data.streams.pack",
    "lakeckpt.checkpoint.manager",
)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


for _name in _IMPORTED:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
_own = _threads()  # threads of OpenBLAS and jemalloc, which take care of forks themselves
for _name in filter(None, os.environ.get(PRELOAD, "").split(",")):
    importlib.import_module(_name)

added = _threads() - _own
"""How many threads the user's modules started."""
gc.collect()
gc.freeze()  # so that collections of the processes do not copy its pages

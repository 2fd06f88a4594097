"""Let every manager with captures watch with ``watch="restart"``, unless its script says something else; note each act.

`make test-watched` loads this module in every process of the suite: a suite that injects no fault must see no act. The
environment variable LAKECKPT_TEST_WATCH names the file that gets a line for each act; without it nothing is changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _of_manager(module: ModuleType) -> None:
    begins = module.CheckpointManager.__init__

    @wraps(begins)
    def begin(*given: Any, **options: Any) -> None:
        if options.get("capture_every") is not None:  # else there are no agents that watch
            options.setdefault("watch", "restart")
        begins(*given, **options)

    module.CheckpointManager.__init__ = begin


def _of_agent(module: ModuleType) -> None:
    acts = module._Node.act

    def act(node: Any, stall: Any) -> None:
        with open(os.environ["LAKECKPT_TEST_WATCH"], "a", encoding="utf-8") as file:
            test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
            file.write(f"{test}: {stall.verdict.kind}: {stall.verdict.reason}\n")
        acts(node, stall)

    module._Node.act = act


_CHANGES = {"lakeckpt.checkpoint.manager": _of_manager, "lakeckpt.checkpoint.faults.node_watch": _of_agent}


class _Finder(MetaPathFinder):
    """Changes modules once they are loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how a module that is to be changed is loaded; None for all others."""
        spec = PathFinder.find_spec(name, path) if name in _CHANGES else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then(spec.loader.exec_module, _CHANGES[name])  # type: ignore[assignment, method-assign]
        return spec


def _then(load: Callable[[ModuleType], None], change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def load_and_change(module: ModuleType) -> None:
        load(module)
        change(module)

    return load_and_change


if os.environ.get("LAKECKPT_TEST_WATCH"):
    sys.meta_path.insert(0, _Finder())

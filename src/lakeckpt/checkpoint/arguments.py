"""Can a manager be made of these arguments?  What cannot be right is refused by its name, before anything is opened."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

from lakeckpt.checkpoint.parts import RANDOM, SHARING
from lakeckpt.errors import ConfigError

__all__ = ["check_capturing", "check_settings", "checked_names", "checked_state"]


def checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """name → object, of a ``state`` that can be saved and restored; `ConfigError` for another one."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            'state is a mapping of names to objects, such as {"model": model, "reader": loader}, got '
            f"{type(state).__name__}"
        )
    for name, one in state.items():
        if not isinstance(name, str) or not name or "/" in name or name in (RANDOM, SHARING):
            raise ConfigError(
                f"names of state are non-empty strings without '/', neither {RANDOM!r} nor {SHARING!r}; got {name!r}"
            )
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise ConfigError(f"{name!r} is a {type(one).__name__} without state_dict and load_state_dict")
        if _is_divided(one):
            raise ConfigError(
                f"{name!r} is a {type(one).__name__}: each rank has the state of some parameters, and shows it only "
                "after a collective of its own. Shard the model with FSDP2 (fully_shard), whose optimizers are torch's "
                "plain ones, or give the optimizer itself, undivided"
            )
    return dict(state)


def checked_names(allow_missing: Collection[str], objects: Mapping[str, Any]) -> frozenset[str]:
    """The names in ``allow_missing``; `ConfigError` where one is not that of an object."""
    names = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
    unknown = [name for name in names if name not in objects]
    if unknown:
        raise ConfigError(
            f"allow_missing names {', '.join(map(repr, unknown))}, and the manager's objects are {sorted(objects)}: "
            "name some of these"
        )
    return frozenset(names)


def _is_divided(one: object) -> bool:
    """Whether it is torch's ``ZeroRedundancyOptimizer``, whose module warns when it is loaded: who has one has it."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(one, zero.ZeroRedundancyOptimizer)


def check_settings(verify: object, on_save_failure: object, timeout_s: object) -> None:
    """Raise `ConfigError` for one that cannot be."""
    if verify not in ("sizes", "bytes"):
        raise ConfigError(f"verify is 'sizes' or 'bytes', got {verify!r}")
    if on_save_failure not in ("raise", "warn", None):
        raise ConfigError(f"on_save_failure is 'raise' or 'warn', got {on_save_failure!r}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s is a positive number of seconds, got {timeout_s!r}")


def check_capturing(arenas: object, bubbles: object) -> None:
    """Raise `ConfigError` for one that cannot be."""
    if not isinstance(arenas, (str, PathLike, type(None))):
        raise ConfigError(f"arenas is the path of a folder, or None for one in memory, got {arenas!r}")
    if bubbles is not None and not (hasattr(bubbles, "gate") and callable(getattr(bubbles, "kept", None))):
        raise ConfigError(f"bubbles is a lakeckpt.Bubbles, or None, got {bubbles!r}")

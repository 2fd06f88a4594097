"""This module checks the arguments of a checkpoint manager before anything is opened, and names wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from os import PathLike
from typing import Any

from lakeckpt.checkpoint.consumed.steps_used import check_steps
from lakeckpt.checkpoint.copying.backups import Backup
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING
from lakeckpt.checkpoint.peers.grouping import Copying
from lakeckpt.errors import ConfigError
from lakeckpt.tracking.readers import reader_of

__all__ = [
    "check_capturing",
    "check_settings",
    "checked_backups",
    "checked_crash_loop",
    "checked_names",
    "checked_peers",
    "checked_state",
    "checked_steps",
    "shared_settings",
]


def checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → object of a ``state`` that can be saved, a loader as its reader; else raise `ConfigError`."""
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
            raise ConfigError(
                f"{name!r} in state is of type {type(one).__name__}, which lacks state_dict or load_state_dict. "
                "Give an object that has both: a LakeLoader in place of a torch DataLoader, a small class "
                "of your own around a number"
            )
        if _is_divided(one):
            raise ConfigError(
                f"{name!r} is a {type(one).__name__}: each rank has the state of some parameters, and shows it only "
                "after a collective of its own. Shard the model with FSDP2 (fully_shard), whose optimizers are torch's "
                "plain ones, or give the optimizer itself, undivided"
            )
    return {name: reader_of(one) for name, one in state.items()}


def checked_names(allow_missing: Collection[str], objects: Mapping[str, Any], step: object = None) -> frozenset[str]:
    """Return the names in ``allow_missing``. `ConfigError` if one of them names no object, or if ``step``, to which a
    restore goes back, is no optimizer step."""
    if step is not None and (type(step) is not int or step < 0):
        raise ConfigError(f"step is the optimizer step of a checkpoint to go back to, or None, got {step!r}")
    names = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
    unknown = [name for name in names if name not in objects]
    if unknown:
        raise ConfigError(
            f"allow_missing names {', '.join(map(repr, unknown))}, and the manager's objects are {sorted(objects)}: "
            "name some of these"
        )
    return frozenset(names)


def checked_backups(backups: Collection[Backup], capture_every: object) -> tuple[Backup, ...]:
    """Return the ``backups``. `ConfigError` for anything else, and without an agent to make them."""
    if isinstance(backups, (str, Mapping)) or not all(isinstance(one, Backup) for one in backups):
        raise ConfigError(f"backups is a list of lakeckpt.Backup, got {backups!r}")
    if backups and capture_every is None:
        raise ConfigError(
            "backups= needs capture_every=: the agent makes them. Without captures, let cron or the scheduler run "
            "`lakeckpt copy RUN DESTINATION` as often as you want"
        )
    return tuple(backups)


def checked_crash_loop(on_crash_loop: object, max_excluded: object) -> int:
    """Return how many micro-batches may be excluded: 0 unless ``on_crash_loop`` is ``"exclude"``. `ConfigError` for
    anything else."""
    if on_crash_loop not in ("stop", "exclude"):
        raise ConfigError(f'on_crash_loop is "stop" or "exclude", got {on_crash_loop!r}')
    if type(max_excluded) is not int or max_excluded < 1:
        raise ConfigError(f"max_excluded is a positive number of micro-batches, got {max_excluded!r}")
    return max_excluded if on_crash_loop == "exclude" else 0


def checked_steps(step: int | None, exclude_steps: object) -> tuple[int, int] | None:
    """Return the ``exclude_steps`` of a restore that goes back to ``step``. `ConfigError` if they do not come after it,
    or if there is no ``step``."""
    if exclude_steps is None:
        return None
    if step is None:
        raise ConfigError(
            f"exclude_steps={exclude_steps!r} goes with step=: restore(step=K, exclude_steps=(A, B)) goes back to step "
            "K and on without the batches that the steps A to B - 1 have used"
        )
    return check_steps(step, exclude_steps)


def _is_divided(one: object) -> bool:
    """Return whether ``one`` is torch's ``ZeroRedundancyOptimizer``. This does not import the optimizer's module, which
    warns when it is imported: an object of the class exists only if the module was imported before."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(one, zero.ZeroRedundancyOptimizer)


def check_settings(fail_after: object, timeout_s: object) -> float:
    """Return ``fail_after`` in seconds. Raise `ConfigError` for the first argument that is not valid."""
    seconds = fail_after.total_seconds() if isinstance(fail_after, timedelta) else fail_after
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ConfigError(f"fail_after is a number of seconds from 0 on, or a timedelta, got {fail_after!r}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s is a positive number of seconds, got {timeout_s!r}")
    return float(seconds)


def shared_settings(**settings: object) -> dict[str, str]:
    """Return the ``settings`` that must be equal on all ranks, as texts that ranks can compare."""
    return {name: one if isinstance(one, str) else repr(one) for name, one in settings.items()}


def check_capturing(
    capture_every: object, arenas: object, bubbles: object, perceive: object = True, watch: object = None
) -> None:
    """Raise `ConfigError` for the first argument that is not valid."""
    if capture_every is not None and (type(capture_every) is not int or capture_every < 1):
        raise ConfigError(f"capture_every is a positive number of optimizer steps, or None, got {capture_every!r}")
    if not isinstance(arenas, (str, PathLike, type(None))):
        raise ConfigError(f"arenas is the path of a folder, or None for one in memory, got {arenas!r}")
    if bubbles is not None and not hasattr(bubbles, "gate"):
        raise ConfigError(f"bubbles is a lakeckpt.bubbles.Bubbles, or None, got {bubbles!r}")
    if type(perceive) is not bool:
        raise ConfigError(f"perceive is True or False, got {perceive!r}")
    if watch not in (None, "report", "restart"):
        raise ConfigError(f"watch is 'report', 'restart' or None, got {watch!r}")
    if watch == "restart" and capture_every is None:
        raise ConfigError(
            "watch='restart' needs capture_every: agents watch the ranks, and a restart restores captures"
        )


def checked_peers(peers: object, peers_every_s: object, capture_every: object) -> Copying | None:
    """Return what nodes keep of each other's shares; None: nothing. `ConfigError` for the first argument that is not
    valid."""
    if isinstance(peers_every_s, bool) or not isinstance(peers_every_s, (int, float)) or not 0 <= peers_every_s < 1e9:
        raise ConfigError(f"peers_every_s is a number of seconds from 0 on, got {peers_every_s!r}")
    if peers is None or peers is False:
        return None
    if peers not in ("copy", "3+1"):
        raise ConfigError(
            f'peers is None (nodes read from each other\'s memory what they lack), "copy" or "3+1" (they also keep '
            f"copies or parity of each other's shares) or False (they open no socket), got {peers!r}"
        )
    if not isinstance(capture_every, int):
        raise ConfigError(
            f'peers="{peers}" needs capture_every=: agents copy what was captured. Without captures nothing is in '
            "memory that a lost node could take with it"
        )
    return Copying(mode="3+1" if peers == "3+1" else "copy", every_s=float(peers_every_s), capture_every=capture_every)

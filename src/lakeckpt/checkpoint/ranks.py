"""This module finds which ranks save together, and which of them this process is, and compares their settings.

torch.distributed says so, or the process is alone. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lakeckpt.errors import ConfigError, TrackingError
from lakeckpt.tracking.exchange import Exchange, exchange_of_group

__all__ = ["LAUNCH", "MIN_NODES", "check_shared", "check_topology", "exchange_of", "note_begun", "note_page"]

LAUNCH = "LAKECKPT_LAUNCH"
"""The environment variable with the folder of the launcher, `lakeckpt run`, for notes of its ranks."""
MIN_NODES = "LAKECKPT_MIN_NODES"
"""The environment variable with how many nodes are enough for the job, as `lakeckpt run` was told."""


def exchange_of(group: Any, timeout_s: float, *, alone: bool, node: str = "") -> Exchange:
    """Return the exchange of the ranks of ``group`` (a process group or one-dimensional DeviceMesh; None: all ranks).
    ``node``: what ranks of one machine have in common, to be neighbours.

    ``alone``: this process keeps a run of its own, whatever its environment says. Raises `ConfigError` if it cannot be
    known which ranks save together.
    """
    if dist.is_available() and dist.is_initialized():
        group = group.get_group() if hasattr(group, "get_group") else group
        size = dist.get_world_size(group)
        if size < 1:
            raise ConfigError("this process is not in the group= that was given: give one whose ranks save together")
        return exchange_of_group(group, timeout_s=timeout_s, node=node)
    if group is None and not alone and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError(
            f"this job has WORLD_SIZE={os.environ['WORLD_SIZE']} processes, but torch.distributed is not initialized: "
            "each would take itself for the whole job. Call torch.distributed.init_process_group() first, or pass "
            "rank=0 and world_size=1 if this process keeps a run of its own"
        )
    if group is not None:
        raise ConfigError("a group was given and torch.distributed is not initialized: call init_process_group first")
    return Exchange()


def check_topology(exchange: Exchange, rank: int | None, world_size: int | None) -> None:
    """Raise `ConfigError` if ``rank`` or ``world_size`` is given, and is another one than this process has."""
    found = (exchange.rank, exchange.world_size)
    asked = (found[0] if rank is None else rank, found[1] if world_size is None else world_size)
    if asked != found:
        raise ConfigError(
            f"rank {asked[0]} of {asked[1]} was asked for, and this process is rank {found[0]} of {found[1]}: "
            "initialize torch.distributed, or give the group of these ranks"
        )


def check_shared(exchange: Exchange, settings: Mapping[str, str]) -> None:
    """Raise `TrackingError`, on every rank, if the ranks were given different ``settings``: name → value.

    Collective. Ranks that save at different steps would wait for each other until their time is over.
    """
    tally = exchange.everyone(settings)
    differ = [name for name in settings if len(tally.facts[name]) > 1]
    if differ:
        raise TrackingError(
            f"the ranks were given different settings: {', and '.join(map(tally.describe, differ))}. "
            "Give all ranks of a CheckpointManager the same"
        )


def note_page(page: str) -> None:
    """Tell the launcher of this process, if it is `lakeckpt run`, where the ``page`` of this rank is about to lie."""
    _tell("page.", page)


def note_begun(step: int) -> None:
    """Tell the launcher of this process, if it is `lakeckpt run`, that an attempt began, and at which step."""
    _tell("", str(step))


def _tell(what: str, text: str) -> None:
    if folder := os.environ.get(LAUNCH):
        start, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0), os.environ.get("LOCAL_RANK", 0)
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder with it
            Path(folder, f"{start}.{what}{rank}").write_text(text)

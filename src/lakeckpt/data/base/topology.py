"""This module resolves the data-parallel rank of this process, and the number of ranks.

It takes them from the arguments, else from the group, else from torch.distributed. It never guesses: in a job of
several processes that says nothing, it raises. The main process resolves them once, and workers get them from it. The
module starts no threads.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from lakeckpt.data.base.options import integer
from lakeckpt.errors import ConfigError

__all__ = ["check_topology", "group_of", "resolve_topology"]


def check_topology(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return (rank, world size), or None if neither is given; refuse one alone, and a rank outside of the size."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ConfigError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
    rank, world_size = integer("rank", rank), integer("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, world_size), got rank={rank} and world_size={world_size}")
    return rank, world_size


def resolve_topology(explicit: tuple[int, int] | None, dp_group: Any) -> tuple[int, int]:
    """Return (data-parallel rank, number of data-parallel ranks).

    ``dp_group`` is a ProcessGroup or a one-dimensional DeviceMesh. Raises ConfigError if the environment says that
    there are several processes (WORLD_SIZE > 1) and nothing says which of them read the same rows.
    """
    if explicit is not None:
        return explicit
    if dp_group is not None:
        return _of_group(dp_group)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes not in ("", "1"):
        raise ConfigError(
            f"this job has WORLD_SIZE={processes} processes, but torch.distributed is not initialized: every process "
            "would read all rows. Call torch.distributed.init_process_group() before the first iteration, or pass "
            "rank= and world_size= (of the data-parallel group), or dp_group=."
        )
    return 0, 1


def group_of(dp_group: Any) -> Any:
    """Return the ProcessGroup of a ProcessGroup or a one-dimensional DeviceMesh; None for None."""
    return dp_group.get_group() if hasattr(dp_group, "get_group") else dp_group


def _of_group(dp_group: Any) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "dp_group= was given and torch.distributed is not initialized: call init_process_group() before the first "
            "iteration"
        )
    try:
        group = group_of(dp_group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"dp_group= is a ProcessGroup or a one-dimensional DeviceMesh (of a larger one, mesh['name']), got "
            f"{dp_group!r}: {error}"
        ) from error
    if rank < 0:
        raise ConfigError("this process is not in the group given as dp_group=: give the one that it reads for")
    return rank, world_size

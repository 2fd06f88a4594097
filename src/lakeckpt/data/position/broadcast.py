"""This module broadcasts what the first data-parallel rank found to all ranks, which must act alike.

There is one broadcast over the group that reads, so every rank calls at the same point. An error of the first rank is
raised on all ranks by its own name. A job of one rank broadcasts nothing. The module keeps nothing, and starts no
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lakeckpt.data.base.topology import group_of, resolve_topology
from lakeckpt.errors import ConfigError, LakeckptError, TableError, error_of

__all__ = ["found_by_first"]


def found_by_first(find: Callable[[], bytes], *, explicit: tuple[int, int] | None, dp_group: Any) -> bytes:
    """Return what ``find`` returns on the first data-parallel rank; it is called there alone.

    ``explicit`` and ``dp_group`` are the dataset's. Raises what ``find`` raised (on other ranks an error of the same
    kind, with its text), and ConfigError if several ranks have no group to broadcast over.
    """
    rank, world_size = resolve_topology(explicit, dp_group)
    if world_size == 1:
        return find()
    talks = dist.is_available() and dist.is_initialized()
    if dp_group is None and not (talks and (dist.get_rank(), dist.get_world_size()) == (rank, world_size)):
        raise ConfigError(
            f"rank {rank} of {world_size} got its place by rank= and world_size=, and has no group over which to learn "
            "which table version the others go on with: pass dp_group= instead"
        )
    failure: Exception | None = None
    found: list[Any] = [b"", "", ""]
    if rank == 0:
        try:
            found[0] = find()
        except Exception as error:
            failure = error
            found[1:] = error.kind if isinstance(error, LakeckptError) else TableError.kind, str(error)
    group = group_of(dp_group)
    dist.broadcast_object_list(found, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    data, kind, text = found
    if failure is not None:
        raise failure
    if kind:
        raise error_of(kind, f"on the first rank: {text}", otherwise=TableError)
    return bytes(data)

"""How do all data-parallel ranks hear what the first one found, where they must act alike?

One broadcast over the group that reads (the size, then the bytes), so every rank calls at the same point; what failed
on the first rank is raised on all of them by its own name. A job of one rank hears itself.

Never pickles; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from lakeckpt.errors import ConfigError, LakeckptError, TableError, error_of

__all__ = ["hear_first"]

_FOUND, _FAILED = 0, 1


def hear_first(find: Callable[[], bytes], *, explicit: tuple[int, int] | None, dp_group: Any) -> bytes:
    """Return what ``find`` returns on the first data-parallel rank; it is called there alone.

    ``explicit`` and ``dp_group`` are the dataset's. Raises what ``find`` raised (on other ranks an error of the same
    kind, with its text), and ConfigError where several ranks have no group to talk over.
    """
    group = dp_group.get_group() if hasattr(dp_group, "get_group") else dp_group
    talks = dist.is_available() and dist.is_initialized()
    if explicit is not None and dp_group is None:
        rank, world_size = explicit
        if world_size > 1 and not (talks and (dist.get_rank(), dist.get_world_size()) == explicit):
            raise ConfigError(
                f"rank {rank} of {world_size} was told its place by rank= and world_size=, and cannot hear which table "
                "version the others go on with: pass dp_group= instead"
            )
    elif talks:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    else:
        rank, world_size = 0, 1
    if world_size == 1:
        return find()
    failure, data, status = None, b"", _FOUND
    if rank == 0:
        try:
            data = find()
        except Exception as error:
            kind = error.kind if isinstance(error, LakeckptError) else TableError.kind
            failure, status, data = error, _FAILED, f"{kind}\0{error}".encode()
    status, data = _broadcast(status, data, group)
    if failure is not None:
        raise failure
    if status == _FAILED:
        kind, _, text = data.decode().partition("\0")
        raise error_of(kind, f"on the first rank: {text}", otherwise=TableError)
    return data


def _broadcast(status: int, data: bytes, group: Any) -> tuple[int, bytes]:
    first = 0 if group is None else dist.get_global_rank(group, 0)
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    head = torch.tensor([status, len(data)], dtype=torch.int64, device=device)
    dist.broadcast(head, src=first, group=group)
    status, size = cast("list[int]", head.tolist())
    body = torch.empty(size, dtype=torch.uint8, device=device)
    if data:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if size:
        dist.broadcast(body, src=first, group=group)
    return status, body.cpu().numpy().tobytes()

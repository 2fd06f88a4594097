"""This module computes how many micro-batches make one optimizer step, so that the global batch stays the same.

A job that goes on with fewer or more ranks keeps its global batch if each rank accumulates more or fewer micro-batches.
If the ranks divide the lanes, micro-batches are the same on every number of ranks, and so are the rows of each step.
The module is pure.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lakeckpt.errors import ConfigError, RestartWarning
from lakeckpt.tracking.readers import TrackedReader

__all__ = ["accumulation_of", "micro_batches"]


def micro_batches(global_batch: int, *, batch_size: int, world_size: int) -> int:
    """Return the fewest micro-batches of each of ``world_size`` ranks that together have ``global_batch`` rows.

    >>> [micro_batches(48, batch_size=4, world_size=world) for world in (12, 4, 3, 5)]
    [1, 3, 4, 3]
    """
    return -(-global_batch // (batch_size * world_size))


def accumulation_of(objects: Mapping[str, Any], global_batch: int, *, reader: str | None, exact: bool) -> int:
    """Return the micro-batches of one optimizer step of a reader among ``objects``; see
    `lakeckpt.CheckpointManager.accumulation`."""
    if type(global_batch) is not int or global_batch < 1:
        raise ConfigError(f"global_batch is the number of rows of an optimizer step on all ranks, got {global_batch!r}")
    name, batch_size, (rank, world_size) = _sizes_of(objects, reader)
    found = micro_batches(global_batch, batch_size=batch_size, world_size=world_size)
    rows = found * batch_size * world_size
    if rows == global_batch:
        return found
    text = (
        f"{world_size} ranks with batches of {batch_size} rows of {name!r} cannot make a global batch of "
        f"{global_batch:,} rows: {found} micro-batches each are {rows:,}"
    )
    if exact:
        raise ConfigError(
            f"{text}. Start a number of ranks that divides {global_batch:,} / {batch_size}, or change the batch_size"
        )
    if rank == 0:
        warnings.warn(f"{text}. Scale each loss by batch.receipt.weight, as always", RestartWarning, stacklevel=4)
    return found


def _sizes_of(objects: Mapping[str, Any], reader: str | None) -> tuple[str, int, tuple[int, int]]:
    """Return the name of the reader, its batch size, and (rank, number of ranks)."""
    known = {
        name: one for name, one in objects.items() if isinstance(one, TrackedReader) and hasattr(one, "batch_size")
    }
    names = list(known) if reader is None else [reader]
    if len(names) != 1 or names[0] not in known:
        raise ConfigError(
            f"reader= names the LakeLoader in the manager's state whose batches are accumulated, one of "
            f"{sorted(known)}; got {reader!r}"
        )
    one: Any = known[names[0]]
    if one.batch_size is None:
        raise ConfigError(f"{names[0]!r} gives single rows: accumulation needs a batch_size= of its LakeDataset")
    return names[0], one.batch_size, one.topology

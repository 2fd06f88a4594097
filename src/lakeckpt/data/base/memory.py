"""This module limits the memory that a dataset may read ahead into, and warns if its windows are larger than that.

The default limit is a quarter of the memory that this process may take (`lakeckpt.reading.memory`), shared by the ranks
of the machine (``LOCAL_WORLD_SIZE``) and by the worker processes of a rank. The sources of a mixture share one limit.
Sizes of windows are estimated from the index, and from one footer if only some columns are read. Decoded rows may
take more: dictionaries and run lengths are decoded. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from lakeckpt.errors import LakeckptError
from lakeckpt.lake.parquet.prefetch import AheadBytes
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.memory import machine_bytes
from lakeckpt.reading.windows.cache import windows_held_of
from lakeckpt.reading.windows.decode import DEFAULT_AHEAD_BYTES
from lakeckpt.reading.windows.room import Room

__all__ = ["Budget", "Reads", "budget_of", "default_limit_bytes"]

_SHARE = 4


class Budget(NamedTuple):
    """The memory that readers of one process share."""

    room: Room
    """For windows."""
    ahead: AheadBytes
    """For bytes that are fetched from stores."""


class Reads(NamedTuple):
    """The table, columns and window size that windows are read of."""

    table: Table
    columns: Sequence[str] | None
    window: int
    """The number of row groups in a window."""


def budget_of(given: int | None, every: Sequence[Reads], *, lanes: int) -> Budget:
    """Return the memory that the readers of ``every`` share in this process, which reads ``lanes`` lanes of each.

    ``given`` is the user's limit. A quarter of it, at most 256 MiB, is for bytes that are fetched ahead, if any of the
    tables lies in a store. Warns if the windows that are open at once do not fit.
    """
    limit, ahead = _limit_of(given, every, lanes=lanes), DEFAULT_AHEAD_BYTES
    if all(isinstance(one.table.storage, LocalStorage) for one in every):
        ahead = 0
    elif limit is not None:
        ahead = min(ahead, limit // 4)
        limit -= ahead
    return Budget(Room(limit), AheadBytes(ahead))


def _limit_of(given: int | None, every: Sequence[Reads], *, lanes: int) -> int | None:
    """Return the limit in bytes for all windows of a process that reads ``lanes`` lanes of each of ``every``, or None
    if all that it may hold fits.

    ``given`` is the user's limit. Warns if the windows that are open at once do not fit.
    """
    info = get_worker_info()
    workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
    limit = given if given is not None else default_limit_bytes(workers)
    size, opened = sum(_window_bytes(one, enough=limit) for one in every), -(-lanes // workers)
    if size * opened > limit and not worker:
        whose = "memory_limit_bytes=" if given is not None else "a quarter of the memory, shared by the processes"
        groups = " or ".join(map(str, sorted({one.window for one in every})))
        warnings.warn(
            f"{opened * len(every)} windows of {groups} row groups are open at once in each process that reads, and "
            f"take about {size * opened / 2**20:.1f} MiB; the limit is {limit / 2**20:.1f} MiB ({whose}). They are "
            "held all the same. Give a smaller shuffle_window=, fewer columns= or lanes (ReadOptions(num_lanes=…)), or "
            "write smaller row groups; or raise the limit, ReadOptions(memory_limit_bytes=…)",
            UserWarning,
            stacklevel=2,
        )
    return limit if given is not None or size * windows_held_of(lanes) > limit else None


def default_limit_bytes(workers: int) -> int:
    """Return the limit of one of ``workers`` processes of a rank, if the user gives none."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return machine_bytes() // (_SHARE * workers * (int(ranks) if ranks.isdecimal() and int(ranks) else 1))


def _window_bytes(reads: Reads, *, enough: int) -> int:
    """Return about how many bytes a window takes; of all columns, if that is not above ``enough``."""
    table, columns = reads.table, reads.columns
    sizes = table.index.group_bytes[table.index.stored_rows > 0]
    if not len(sizes):
        return 0
    size = int(sizes.mean()) * min(reads.window, len(sizes))
    if columns is None or size <= enough:
        return size
    with contextlib.suppress(LakeckptError, OSError):
        return int(size * _share_of(table, set(columns)))
    return 0  # reading will say what is wrong with the file


def _share_of(table: Table, columns: set[str]) -> float:
    """Return which share of the bytes of the first row group that has rows are those of ``columns``."""
    ordinal, inside = table.index.group(int(np.argmax(table.index.stored_rows > 0)))
    group = table.footer(ordinal).row_group(inside)
    chunks = [group.column(number) for number in range(group.num_columns)]
    sizes = [(one.path_in_schema.partition(".")[0], one.total_uncompressed_size) for one in chunks]
    wanted, every = sum(size for name, size in sizes if name in columns), sum(size for _, size in sizes)
    return float(wanted / max(1, every))
